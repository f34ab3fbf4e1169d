//! Evaluates one worker's events by its answers.
//!
//! A pure state machine: samples in, a score per direction and a credit factor out; no clock, no
//! randomness.
//!
//! Single differences are normal: a block is evicted between decision and prefill, or an event
//! arrives late. Therefore each direction, and both together, have a bounded CUSUM score. An answer
//! that contradicts the events adds up to 1, one that agrees subtracts [`AGREEMENT`], and the score
//! stays in `0..=`[`SCORE_MAX`]. If one answer in five contradicts, the score drifts back to 0 and
//! needs some 10⁵ answers to reach [`DISTRUST_SCORE`] by chance; a worker that contradicts every
//! time reaches it within nine.

use super::finding::ReuseFinding;

/// Subtracted from a score by an answer that agrees.
const AGREEMENT: f64 = 0.7;
/// Share of the prompt's reuse from which on a contradiction counts in full.
const FULL_SHARE: f64 = 0.5;
/// The score at which a worker is distrusted.
pub(super) const DISTRUST_SCORE: f64 = 9.0;
/// The score at which it is trusted again.
pub(super) const TRUST_SCORE: f64 = 4.0;
/// Up to this score its overlap counts in full.
const FULL_CREDIT_SCORE: f64 = 6.0;
/// From this score on its overlap has no weight.
const NO_CREDIT_SCORE: f64 = 15.0;
/// Upper bound of scores, so that a bounded number of agreeing answers restores trust.
pub(super) const SCORE_MAX: f64 = 20.0;
/// Both directions are reported together if each has at least this score.
const BOTH_SCORE: f64 = 4.0;
/// An engine that never reported reuse after this many promises is assumed not to report it.
pub(super) const SILENT_SAMPLES: u64 = 20;

/// The first report proves that earlier zeros were real; at most this many of them count.
const EARLY_ZEROS_MAX: u64 = 5;

/// One answered request. Unit: tokens of its prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReuseSample {
    /// Reuse announced by the worker's events at the decision: whole blocks, at most the prompt
    /// without its last token.
    pub predicted_tokens: u64,
    /// The most that any known state of the worker explains, including lower tiers and later
    /// events; at least `predicted_tokens`.
    pub explained_tokens: u64,
    /// Reuse reported by the engine; `None` without a report.
    pub reported_tokens: Option<u64>,
    /// Tokens in a block; differences of up to one block are rounding.
    pub block_size: u32,
    /// Whether no event of the worker has ever arrived.
    pub is_silent: bool,
}

/// A change in the assessment of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReuseChange {
    /// It is distrusted, for this new reason.
    Distrusted(ReuseFinding),
    /// Its answers agree with its events again.
    Recovered,
}

/// A worker's reuse, for people.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReuseView {
    /// Whether the engine reports its reuse; `None` while unknown.
    pub is_reported: Option<bool>,
    /// Compared answers.
    pub samples: u64,
    /// Tokens that events announced for these.
    pub predicted_tokens: u64,
    /// Tokens that the engine reported for these.
    pub reported_tokens: u64,
    /// Weight of its overlap, 0 to 1.
    pub credit: f64,
    /// The reason for distrust.
    pub finding: Option<ReuseFinding>,
}

/// Evidence about one worker.
///
/// # Cost
/// O(1) in time and memory.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ReuseTrust {
    /// Whether the engine has reported reuse at least once.
    has_reported: bool,
    /// Promises without a report, until its first report.
    silent_samples: u64,
    /// Promises answered by a reported 0 before its first report, up to [`EARLY_ZEROS_MAX`].
    early_zeros: u64,
    samples: u64,
    predicted_tokens: u64,
    reported_tokens: u64,
    /// Less reuse than the events announced.
    unreused: Score,
    /// Reuse that the events did not announce.
    unannounced: Score,
    /// Both.
    either: Score,
    /// Whether no event had arrived at the last answer.
    was_silent: bool,
    pub(super) finding: Option<ReuseFinding>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Score {
    value: f64,
    is_bad: bool,
}

impl Score {
    /// Adds an answer of which `share`, 0 to 1, contradicts the events.
    fn take(&mut self, share: f64) {
        let step = (share / FULL_SHARE * (1.0 + AGREEMENT)).min(1.0 + AGREEMENT) - AGREEMENT;
        self.value = (self.value + step).clamp(0.0, SCORE_MAX);
        self.is_bad = match self.is_bad {
            true => self.value > TRUST_SCORE,
            false => self.value >= DISTRUST_SCORE,
        };
    }
}

/// The share of `whole` that `part` lacks; 0 within a block, `None` if `whole` is at most a block.
fn lacking(whole: u64, part: u64, block_size: u64) -> Option<f64> {
    let missing = whole.saturating_sub(part);
    (whole > block_size).then(|| match missing > block_size {
        true => missing as f64 / whole as f64,
        false => 0.0,
    })
}

impl ReuseTrust {
    /// Adds an answer. Returns the change in the assessment, if any.
    ///
    /// Nothing is assessed before the engine has reported reuse once: until then it may be unable
    /// to report anything but 0.
    pub fn take(&mut self, sample: &ReuseSample) -> Option<ReuseChange> {
        let block_size = u64::from(sample.block_size);
        let ReuseSample { predicted_tokens, explained_tokens, .. } = *sample;
        if !self.has_reported && sample.reported_tokens.is_none_or(|tokens| tokens == 0) {
            let is_promised = u64::from(predicted_tokens > block_size);
            self.silent_samples = self.silent_samples.saturating_add(is_promised);
            if sample.reported_tokens.is_some() {
                self.early_zeros = (self.early_zeros + is_promised).min(EARLY_ZEROS_MAX);
            }
            return None;
        }
        let was_silent = std::mem::replace(&mut self.was_silent, sample.is_silent);
        if was_silent && !sample.is_silent {
            // Blocks from before the first event looked like those of another engine's socket.
            (self.unreused, self.unannounced, self.either) = Default::default();
        }
        let reported = sample.reported_tokens?;
        if !std::mem::replace(&mut self.has_reported, true) {
            for _ in 0..std::mem::take(&mut self.early_zeros) {
                self.unreused.take(1.0);
                self.either.take(1.0);
            }
        }
        self.samples = self.samples.saturating_add(1);
        self.predicted_tokens = self.predicted_tokens.saturating_add(predicted_tokens);
        self.reported_tokens = self.reported_tokens.saturating_add(reported);
        let unreused = lacking(predicted_tokens, reported, block_size);
        let known_tokens = explained_tokens.max(predicted_tokens);
        let unannounced = lacking(reported, known_tokens, block_size);
        let either = unreused.into_iter().chain(unannounced).reduce(f64::max);
        for (score, share) in [
            (&mut self.unreused, unreused),
            (&mut self.unannounced, unannounced),
            (&mut self.either, either),
        ] {
            if let Some(share) = share {
                score.take(share);
            }
        }
        let after = self.judge();
        if after == std::mem::replace(&mut self.finding, after) {
            return None;
        }
        Some(after.map_or(ReuseChange::Recovered, ReuseChange::Distrusted))
    }

    /// The finding that follows from the scores. An existing finding only extends until all scores
    /// are low again, so that it does not change with every answer.
    fn judge(&self) -> Option<ReuseFinding> {
        let (unreused, unannounced) = (self.unreused.value, self.unannounced.value);
        if ![self.unreused, self.unannounced, self.either].iter().any(|score| score.is_bad) {
            return None;
        }
        if unreused >= BOTH_SCORE && unannounced >= BOTH_SCORE {
            return Some(ReuseFinding::EventsCrossed);
        }
        let alone = match unreused >= unannounced {
            true => ReuseFinding::EventsNotReused,
            false => ReuseFinding::ReuseNotInEvents,
        };
        Some(self.finding.unwrap_or(alone))
    }

    /// The weight of the worker's overlap, 0 to 1: the more its answers contradict its events, in
    /// either direction, the lower. Events that omit blocks are no better than those that announce
    /// too many: most likely they belong to another engine.
    pub fn credit(&self) -> f64 {
        let scores = [self.unreused, self.unannounced, self.either];
        let score = scores.iter().map(|score| score.value).fold(0.0, f64::max);
        ((NO_CREDIT_SCORE - score) / (NO_CREDIT_SCORE - FULL_CREDIT_SCORE)).clamp(0.0, 1.0)
    }

    /// The current state, for people.
    pub fn view(&self) -> ReuseView {
        let is_silent = self.silent_samples >= SILENT_SAMPLES;
        ReuseView {
            is_reported: match self.has_reported {
                true => Some(true),
                false => is_silent.then_some(false),
            },
            samples: self.samples,
            predicted_tokens: self.predicted_tokens,
            reported_tokens: self.reported_tokens,
            credit: self.credit(),
            finding: self.finding,
        }
    }
}
