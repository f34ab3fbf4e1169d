//! The cost of service, and its estimate.

use crate::error::{Error, Result};

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

    pub(super) fn validate(&self) -> Result<()> {
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

/// Length of a client's answers, as a moving average.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Predictor {
    length: f64,
}

impl Predictor {
    /// Expected tokens of the next answer; 0 before the first one.
    pub const fn length(&self) -> f64 {
        self.length
    }

    /// Records an answer of `length` tokens: the first one counts in full, later ones with a weight
    /// of `1 / window`.
    pub fn learn(&mut self, length: f64, window: u32) {
        let window = f64::from(window.max(1));
        self.length = match self.length {
            0.0 => length,
            known => (known * (window - 1.0) + length) / window,
        };
    }
}
