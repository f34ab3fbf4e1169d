//! Questions and news for a policy outside the core, and its answers.

use super::cost::{Candidate, Terms};
use super::engine::EngineMetrics;
use crate::ids::Worker;

/// A request, as a policy outside the core sees it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OutsideRequest {
    /// The requested model.
    pub model: Box<str>,
    /// Prompt length in tokens.
    pub isl_tokens: u64,
    /// Tokens in a block; 0 while unknown.
    pub block_size: u32,
    /// Text of the prompt, UTF-8.
    pub prompt: Box<[u8]>,
    /// The model's own token ids; empty while unknown.
    pub token_ids: Box<[u32]>,
    /// The request's user.
    pub user: Option<Box<str>>,
    /// The key of its session.
    pub session_key: Option<Box<str>>,
    /// The worker of its session, as named by the client.
    pub session_worker: Option<Worker>,
}

/// A candidate, as a policy outside the core sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OutsideCandidate {
    /// Overlap and load.
    pub candidate: Candidate,
    /// Its engine's report.
    pub metrics: EngineMetrics,
    /// The cost of the request there, by `kv`.
    pub terms: Terms,
}

/// A request to choose among candidates.
#[derive(Debug, Clone, PartialEq)]
pub struct Question {
    /// The request.
    pub request: OutsideRequest,
    /// At least two workers, in worker order.
    pub candidates: Vec<OutsideCandidate>,
}

/// Events for a policy outside the core, if it handles them.
#[derive(Debug, Clone, PartialEq)]
pub enum News {
    /// A request was routed to this candidate.
    Routed(Box<OutsideRequest>, Box<OutsideCandidate>),
    /// A request has ended: its model, user and usage.
    Finished(Ended),
    /// A worker has left.
    Removed(Worker),
}

/// As [`Finished`](super::Finished), owned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// The requested model.
    pub model: Box<str>,
    /// The request's user.
    pub user: Option<Box<str>>,
    /// The worker that served it.
    pub worker: Worker,
    /// Tokens of the prompt.
    pub input_tokens: u64,
    /// Of these, tokens that the engine had cached.
    pub cached_tokens: u64,
    /// Tokens that were generated.
    pub output_tokens: u64,
    /// Time from the decision to the end.
    pub duration_ms: u64,
}

/// Scores of candidates; the highest wins.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Advice {
    /// Ascending by worker; without excluded candidates.
    scores: Vec<(Worker, f64)>,
}

impl Advice {
    /// One score for each candidate of the question; `None` excludes a candidate.
    pub fn new(question: &Question, scores: &[Option<f64>]) -> Self {
        let scored = question.candidates.iter().zip(scores);
        let scores = scored.filter_map(|(one, score)| Some((one.candidate.worker, (*score)?)));
        Self { scores: scores.collect() }
    }

    /// The score of `worker`.
    pub fn score(&self, worker: Worker) -> Option<f64> {
        let place = self.scores.binary_search_by_key(&worker, |(known, _)| *known).ok()?;
        Some(self.scores[place].1)
    }
}
