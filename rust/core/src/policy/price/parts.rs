//! What `auto` says of a cost: its parts.

use std::fmt;

/// What a request costs on one worker, in tokens of prefill, by cause.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Price {
    /// Prefill queued before it.
    pub queue: f32,
    /// Its own uncached tokens, and the answers that their prefill stalls.
    pub prefill: f32,
    /// Its answer's steps, and what they add to the others' steps.
    pub decode: f32,
    /// What its blocks push out of a full cache.
    pub eviction: f32,
}

impl Price {
    /// Of a policy that has no price.
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

    /// All of it.
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
