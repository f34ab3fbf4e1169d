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
        /// As `VtcFair`, but the expected output is charged in advance, and corrected afterwards.
        VtcPred = "vtc-pred",
        /// As `VtcPred`, with lengths that are known in advance and never corrected: for
        /// comparison.
        VtcOracle = "vtc-oracle",
        /// The lowest counter without raising: a client that was idle makes all others wait. For
        /// comparison.
        Lcf = "lcf",
    }
}

impl Discipline {
    /// Whether a client is raised when its first request waits.
    pub(super) const fn lifts_on_arrival(self) -> bool {
        matches!(self, Self::VtcFair | Self::VtcPred | Self::VtcOracle)
    }

    /// Whether a client is lifted among those of its group when its first request waits.
    pub(super) const fn lifts_within_groups(self) -> bool {
        self.lifts_on_arrival() || matches!(self, Self::VtcMaxFair)
    }

    /// Whether output is charged at admission.
    pub(super) const fn is_predictive(self) -> bool {
        matches!(self, Self::VtcPred | Self::VtcOracle)
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

/// Prices of tokens: per prompt token and per generated one. Finite and at least 0, not both 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Price {
    /// A token of a prompt.
    pub input: f64,
    /// A generated token.
    pub output: f64,
}

impl Default for Price {
    fn default() -> Self {
        Self { input: 1.0, output: 2.0 }
    }
}

impl Price {
    /// The cost of a request with `input` prompt tokens after `output` generated tokens.
    pub fn total(&self, input: f64, output: f64) -> f64 {
        self.input * input + self.output * output
    }

    fn validate(&self) -> Result<()> {
        for (field, value) in [("input", self.input), ("output", self.output)] {
            if !(value.is_finite() && value >= 0.0) {
                return Err(Error::Config(format!(
                    "the price of {field} tokens must be finite and at least 0, got {value}"
                )));
            }
        }
        if self.input == 0.0 && self.output == 0.0 {
            return Err(Error::Config("the prices of input and output tokens are both 0".into()));
        }
        Ok(())
    }
}

/// Settings of a [`FairQueue`](super::FairQueue).
#[derive(Debug, Clone, PartialEq)]
pub struct FairConfig {
    /// The order of clients.
    pub discipline: Discipline,
    /// Prices of tokens.
    pub price: Price,
    /// Price of prompt tokens that the worker is expected to have cached, as a share of the full
    /// price: 0 is free, 1 is full.
    pub cached_share: f64,
    /// Number of requests over which the length of a client's answers is averaged; at least 1.
    pub prediction_window: u32,
    /// Maximum queued requests; at least 1.
    pub max_queued: usize,
    /// Of these, maximum per client; at least 1.
    pub max_queued_per_client: usize,
    /// Maximum remembered clients; at least 1. At the limit the idle one with the lowest counter is
    /// forgotten.
    pub max_clients: usize,
    /// Longest wait of a request, in milliseconds; at least 1.
    pub max_wait_ms: u64,
}

impl Default for FairConfig {
    fn default() -> Self {
        Self {
            discipline: Discipline::default(),
            price: Price::default(),
            cached_share: 0.0,
            prediction_window: 5,
            max_queued: 4_096,
            max_queued_per_client: 1_024,
            max_clients: 65_536,
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
        self.price.validate()?;
        if !(0.0..=1.0).contains(&self.cached_share) {
            let got = self.cached_share;
            return Err(Error::Config(format!("cached_share must be in 0..=1, got {got}")));
        }
        let zero = [
            ("prediction_window", self.prediction_window == 0),
            ("max_queued", self.max_queued == 0),
            ("max_queued_per_client", self.max_queued_per_client == 0),
            ("max_clients", self.max_clients == 0),
            ("max_wait_ms", self.max_wait_ms == 0),
        ];
        if let Some((field, _)) = zero.into_iter().find(|&(_, is_zero)| is_zero) {
            return Err(Error::Config(format!("{field} must be at least 1, got 0")));
        }
        let limit = u32::MAX as usize - 1;
        if self.max_clients > limit {
            let got = self.max_clients;
            return Err(Error::Config(format!("max_clients must be in 1..={limit}, got {got}")));
        }
        Ok(())
    }
}
