//! How long a step of an engine takes.

/// Times of one kind of accelerator with one model, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// Any step: reading the weights, starting the kernels.
    pub step_us: f64,
    /// A prompt token that is computed.
    pub prefill_us: f64,
    /// A prompt token that is computed, for each token in front of it.
    pub attention_us: f64,
    /// A sequence that gets a token.
    pub sequence_us: f64,
    /// A token of context of a sequence that gets a token.
    pub context_us: f64,
}

impl Timing {
    /// About what an 8B model in 16 bits takes on one H100: 25,000 tokens of prefill a second, steps of 6 ms.
    pub const H100_8B: Self = Self {
        step_us: 6_000.0,
        prefill_us: 40.0,
        attention_us: 0.000_8,
        sequence_us: 12.0,
        context_us: 0.05,
    };

    /// About what a 70B model takes on four A100: 5,000 tokens of prefill a second, steps of 25 ms.
    pub const A100_70B: Self = Self {
        step_us: 25_000.0,
        prefill_us: 200.0,
        attention_us: 0.003,
        sequence_us: 30.0,
        context_us: 0.12,
    };
}

/// What a step computes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Step {
    /// Prompt tokens.
    pub prefill: f64,
    /// Of these, pairs of a token and one in front of it.
    pub pairs: f64,
    /// Sequences that get a token.
    pub sequences: f64,
    /// Their context, in tokens.
    pub context: f64,
}

impl Step {
    /// `count` prompt tokens behind `computed` ones.
    pub fn prefill(&mut self, computed: u64, count: u64) {
        let (computed, count) = (computed as f64, count as f64);
        self.prefill += count;
        self.pairs += count * (computed + count / 2.0);
    }

    /// One token of an answer behind `context` tokens.
    pub fn decode(&mut self, context: u64) {
        self.sequences += 1.0;
        self.context += context as f64;
    }

    /// How long it takes on an engine that is `slowness` times as slow as `timing` says, in microseconds.
    pub fn us(&self, timing: &Timing, slowness: f64) -> u64 {
        let us = timing.step_us
            + timing.prefill_us * self.prefill
            + timing.attention_us * self.pairs
            + timing.sequence_us * self.sequences
            + timing.context_us * self.context;
        (slowness * us).round() as u64
    }
}
