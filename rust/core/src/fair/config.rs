//! Settings of a queue.

use std::str::FromStr;

use crate::error::{Error, Result};

named! {
    /// The order of clients, and when they are charged.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub enum Discipline {
        /// In order of arrival, without fairness between clients: for comparison.
        Fcfs = "fcfs",
        /// The client with the lowest counter. A client that returns from idleness is raised to the
        /// lowest counter of the waiting ones; if none waits, to that of the last one that did.
        #[default]
        VtcFair = "vtc-fair",
        /// As `VtcFair`, but all clients, waiting or not, are raised to where the service was when
        /// the last running request was admitted.
        VtcMaxFair = "vtc-max-fair",
        /// As `VtcFair`, but the expected output, the mean of the client's last answers, is charged
        /// in advance, and corrected afterwards.
        VtcPred = "vtc-pred",
    }
}

impl Discipline {
    /// Whether a client is raised when its first request waits.
    pub(super) const fn lifts_on_arrival(self) -> bool {
        matches!(self, Self::VtcFair | Self::VtcPred)
    }
}

impl FromStr for Discipline {
    type Err = Error;

    /// Parses a discipline's name; `-` and `_` are equivalent.
    fn from_str(name: &str) -> Result<Self, Error> {
        let wanted = name.replace('_', "-");
        Self::from_name(&wanted).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::Config(format!("fairness must be one of {names}; got {name:?}"))
        })
    }
}

/// Prices of a prompt token and of a generated one.
const PRICES: (f64, f64) = (1.0, 2.0);

/// The cost of a request with `input` prompt tokens after `output` generated tokens.
pub fn price(input: f64, output: f64) -> f64 {
    PRICES.0 * input + PRICES.1 * output
}

/// Settings of a [`FairQueue`](super::FairQueue).
#[derive(Debug, Clone, PartialEq)]
pub struct FairConfig {
    /// The order of clients.
    pub discipline: Discipline,
    /// Price of prompt tokens that the worker is expected to have cached, as a share of the full
    /// price: 0 is free, 1 is full.
    pub cached_share: f64,
    /// Maximum queued requests; at least 1.
    pub max_queued: usize,
    /// Of these, maximum per client; at least 1.
    pub max_queued_per_client: usize,
    /// Longest wait of a request, in milliseconds; at least 1.
    pub max_wait_ms: u64,
}

impl Default for FairConfig {
    fn default() -> Self {
        Self {
            discipline: Discipline::default(),
            cached_share: 0.0,
            max_queued: 4_096,
            max_queued_per_client: 1_024,
            max_wait_ms: 60_000,
        }
    }
}

impl FairConfig {
    /// Check every field.
    ///
    /// # Errors
    /// [`Error::Config`] with the name of the first field that is out of range, what is legal and
    /// what came.
    pub fn validate(&self) -> Result<()> {
        if !(0.0..=1.0).contains(&self.cached_share) {
            let got = self.cached_share;
            return Err(Error::Config(format!("cached_share must be in 0..=1, got {got}")));
        }
        let zero = [
            ("max_queued", self.max_queued == 0),
            ("max_queued_per_client", self.max_queued_per_client == 0),
            ("max_wait_ms", self.max_wait_ms == 0),
        ];
        if let Some((field, _)) = zero.into_iter().find(|&(_, is_zero)| is_zero) {
            return Err(Error::Config(format!("{field} must be at least 1, got 0")));
        }
        Ok(())
    }
}
