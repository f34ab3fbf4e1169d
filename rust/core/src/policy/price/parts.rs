//! The parts of a cost of `auto`.

use std::fmt;

/// The cost of a request on one worker, in prefill tokens, by cause.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Price {
    /// Prefill queued before it.
    pub queue: f32,
    /// Its own uncached tokens, and the answers that their prefill stalls.
    pub prefill: f32,
    /// The decode steps of its answer, and the time that they add to the steps of others.
    pub decode: f32,
    /// Evictions that its blocks cause in a full cache.
    pub eviction: f32,
}

impl Price {
    /// The price of policies without one.
    pub(crate) const NOTHING: Self = Self { queue: 0.0, prefill: 0.0, decode: 0.0, eviction: 0.0 };

    /// The parts by name.
    pub fn parts(&self) -> [(&'static str, f64); 4] {
        [
            ("queue", f64::from(self.queue)),
            ("prefill", f64::from(self.prefill)),
            ("decode", f64::from(self.decode)),
            ("eviction", f64::from(self.eviction)),
        ]
    }

    /// The sum of all parts.
    pub fn total(&self) -> f64 {
        self.parts().into_iter().map(|(_, part)| part).sum()
    }
}

impl fmt::Display for Price {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} tokens", self.total())?;
        for (at, (name, part)) in self.parts().into_iter().enumerate() {
            write!(f, "{} {name} {part:.1}", if at == 0 { " =" } else { " +" })?;
        }
        Ok(())
    }
}
