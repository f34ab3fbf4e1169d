//! What service costs, and how much of it is expected.

use crate::error::{Error, Result};

/// What tokens cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Price {
    /// So much for each token of a prompt and each generated one. Finite and at least 0, not both
    /// 0.
    PerToken {
        /// A token of a prompt.
        input: f64,
        /// A generated token.
        output: f64,
    },
    /// Measured time of a request, which grows with the product of both lengths.
    ///
    /// # Source
    /// The paper's artifact: Llama-2-7B on an A10G.
    Profiled,
}

impl Default for Price {
    fn default() -> Self {
        Self::PerToken { input: 1.0, output: 2.0 }
    }
}

impl Price {
    /// What a request costs with `input` tokens of prompt after `output` generated tokens.
    pub fn total(&self, input: f64, output: f64) -> f64 {
        match *self {
            Self::PerToken { input: per_input, output: per_output } => {
                per_input * input + per_output * output
            }
            Self::Profiled => {
                let product = 0.003_986_8 * input * output;
                let square = 0.003_247_33 * output * output;
                0.210_018_91 * input + 0.100_753_95 * output + product + square + 1.146_014_54
            }
        }
    }

    pub(super) fn validate(&self) -> Result<()> {
        let Self::PerToken { input, output } = *self else { return Ok(()) };
        for (field, value) in [("input", input), ("output", output)] {
            if !(value.is_finite() && value >= 0.0) {
                return Err(Error::Config(format!(
                    "the price of {field} tokens must be finite and at least 0, got {value}"
                )));
            }
        }
        if input == 0.0 && output == 0.0 {
            return Err(Error::Config("the prices of input and output tokens are both 0".into()));
        }
        Ok(())
    }
}

/// How long a client's answers are, as a moving average.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Predictor {
    length: f64,
}

impl Predictor {
    /// Tokens that the next answer is expected to have; 0 before the first one.
    pub const fn length(&self) -> f64 {
        self.length
    }

    /// An answer had `length` tokens: the first one as it is, later ones with `1 / window` of the
    /// weight.
    pub fn learn(&mut self, length: f64, window: u32) {
        let window = f64::from(window.max(1));
        self.length = match self.length {
            0.0 => length,
            known => (known * (window - 1.0) + length) / window,
        };
    }
}
