//! What one worker's answers say of its events.
//!
//! A pure state machine: samples in, a score per direction and a credit factor out; no clock, no chance.
//!
//! Single differences are honest: a block is evicted between decision and prefill, or an event arrives late. So each
//! direction, and both together, have a bounded CUSUM score. An answer that contradicts the events adds up to 1, one
//! that agrees takes [`AGREEMENT`] away, and the score stays in `0..=`[`SCORE_MAX`]. Where one answer in five
//! contradicts, the score drifts back to 0 and needs some 10⁵ answers to reach [`DISTRUST_SCORE`] by chance; a worker
//! that contradicts every time gets there within nine.

use super::finding::ReuseFinding;

/// What an answer that agrees takes off a score.
const AGREEMENT: f64 = 0.7;
/// A contradiction counts in full from this share of the prompt's reuse on.
const FULL_SHARE: f64 = 0.5;
/// The score at which a worker is distrusted.
pub(super) const DISTRUST_SCORE: f64 = 9.0;
/// The score at which it is trusted again.
pub(super) const TRUST_SCORE: f64 = 4.0;
/// Up to this score its overlap counts in full.
const FULL_CREDIT_SCORE: f64 = 6.0;
/// From this score on its overlap counts nothing.
const NO_CREDIT_SCORE: f64 = 15.0;
/// Scores stop here, so that a bounded number of agreeing answers brings trust back.
pub(super) const SCORE_MAX: f64 = 20.0;
/// Both directions are found together where each of them has at least this score.
const BOTH_SCORE: f64 = 4.0;
/// An engine that was promised to reuse something so many times, and never said that it did, does not report.
pub(super) const SILENT_SAMPLES: u64 = 20;

/// The first report proves that earlier zeros meant what they said; so many of them count.
const EARLY_ZEROS_MAX: u64 = 5;

/// One answered request. Unit: tokens of its prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReuseSample {
    /// What the worker's events promised at the decision: whole blocks, at most the prompt without its last token.
    pub predicted_tokens: u64,
    /// The most that anything known of the worker explains, lower tiers and later events included; at least
    /// `predicted_tokens`.
    pub explained_tokens: u64,
    /// What the engine says it reused; `None` where it does not say.
    pub reported_tokens: Option<u64>,
    /// Tokens in a block; differences of up to one block are rounding.
    pub block_size: u32,
}

/// How the judgement of a worker changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReuseChange {
    /// It is distrusted, for this reason, which is new.
    Distrusted(ReuseFinding),
    /// Its answers agree with its events again.
    Recovered,
}

/// What is known of a worker's reuse, for people.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReuseView {
    /// Whether the engine reports its reuse; `None` while that cannot be told yet.
    pub is_reported: Option<bool>,
    /// Answers that were compared.
    pub samples: u64,
    /// Tokens that events promised in these.
    pub predicted_tokens: u64,
    /// Tokens that the engine reported in these.
    pub reported_tokens: u64,
    /// What its overlap counts, 0 to 1.
    pub credit: f64,
    /// Why it is distrusted.
    pub finding: Option<ReuseFinding>,
}

/// Evidence about one worker.
///
/// # Cost
/// O(1) in time and memory.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ReuseTrust {
    /// The engine has reported reuse at least once.
    has_reported: bool,
    /// Promises without a report, while it has reported none.
    silent_samples: u64,
    /// Promises to which it said 0 before its first report, up to [`EARLY_ZEROS_MAX`].
    early_zeros: u64,
    samples: u64,
    predicted_tokens: u64,
    reported_tokens: u64,
    /// Promises that were broken: less reuse than the events said.
    unreused: Score,
    /// Reuse that the events do not mention.
    unannounced: Score,
    /// Both.
    either: Score,
    finding: Option<ReuseFinding>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Score {
    value: f64,
    is_bad: bool,
}

impl Score {
    /// Take an answer in of which `share`, 0 to 1, contradicts the events.
    fn take(&mut self, share: f64) {
        let step = (share / FULL_SHARE * (1.0 + AGREEMENT)).min(1.0 + AGREEMENT) - AGREEMENT;
        self.value = (self.value + step).clamp(0.0, SCORE_MAX);
        self.is_bad = match self.is_bad {
            true => self.value > TRUST_SCORE,
            false => self.value >= DISTRUST_SCORE,
        };
    }
}

/// Which share of `whole` the `part` lacks; 0 within a block, `None` where `whole` is no more than that.
fn lacking(whole: u64, part: u64, block_size: u64) -> Option<f64> {
    let missing = whole.saturating_sub(part);
    (whole > block_size).then(|| match missing > block_size {
        true => missing as f64 / whole as f64,
        false => 0.0,
    })
}

impl ReuseTrust {
    /// Take an answer in. Returns how the judgement changed, where it did.
    ///
    /// Nothing is judged before the engine has reported reuse once: until then 0 or nothing may be all that it ever
    /// says.
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

    /// The finding that follows from the scores. One that stands only grows until all scores are low again, so that
    /// it does not change with every answer.
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

    /// Why the worker is distrusted; `None` while it is not.
    pub fn finding(&self) -> Option<ReuseFinding> {
        self.finding
    }

    /// What the worker's overlap counts, 0 to 1: less the more its answers contradict its events, in either direction.
    /// Events that leave out what the engine holds are no better than those that promise too much: most likely they are
    /// another engine's.
    pub fn credit(&self) -> f64 {
        let scores = [self.unreused, self.unannounced, self.either];
        let score = scores.iter().map(|score| score.value).fold(0.0, f64::max);
        ((NO_CREDIT_SCORE - score) / (NO_CREDIT_SCORE - FULL_CREDIT_SCORE)).clamp(0.0, 1.0)
    }

    /// What is known, for people.
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
