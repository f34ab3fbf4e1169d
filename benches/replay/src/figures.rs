//! Figures of a trial.

use serde_json::{Map, Value, json};

/// Named figures, in the order they were noted. The unit is the end of the name.
#[derive(Debug, Clone, Default)]
pub struct Figures(pub Map<String, Value>);

impl Figures {
    /// Notes a figure.
    pub fn note(&mut self, name: &str, figure: f64) {
        // Four digits are more than a shared machine can tell apart.
        let rounded = if figure.abs() >= 1_000.0 {
            figure.round()
        } else {
            (figure * 1_000.0).round() / 1_000.0
        };
        self.0.insert(name.to_owned(), json!(rounded));
    }

    /// Notes median, p99, p99.9 and maximum of `samples` under `name` + `_p50_UNIT` and so on.
    pub fn note_spread(&mut self, name: &str, unit: &str, samples: &mut [u64], divisor: f64) {
        if samples.is_empty() {
            return;
        }
        samples.sort_unstable();
        let parts = [("p50", 0.5), ("p99", 0.99), ("p999", 0.999), ("max", 1.0)];
        for (part, share) in parts {
            let at = ((samples.len() - 1) as f64 * share).round() as usize;
            self.note(&format!("{name}_{part}_{unit}"), samples[at] as f64 / divisor);
        }
    }
}

/// The middle one.
pub fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_unstable_by(f64::total_cmp);
    samples.get(samples.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Nanoseconds that this process, with all its threads, has spent on a processor.
pub fn process_ns() -> f64 {
    clock(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// Nanoseconds that the calling thread has spent on a processor: what others do on the machine meanwhile
/// does not count.
pub fn thread_ns() -> f64 {
    clock(libc::CLOCK_THREAD_CPUTIME_ID)
}

#[allow(unsafe_code, reason = "clock_gettime is a C function")]
fn clock(which: libc::clockid_t) -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place for the answer.
    let done = unsafe { libc::clock_gettime(which, &raw mut time) };
    assert_eq!(done, 0, "the machine has this clock");
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Resident bytes of this process.
pub fn resident_bytes() -> f64 {
    let pages = std::fs::read_to_string("/proc/self/statm").ok();
    let pages = pages.and_then(|text| text.split(' ').nth(1)?.parse::<f64>().ok());
    pages.unwrap_or(f64::NAN) * 4096.0
}
