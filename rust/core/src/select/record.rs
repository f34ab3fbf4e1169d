//! A decision as it is kept: all that went into it, and what became of the request.

use std::sync::Arc;

use super::draining::Diverted;
use crate::ids::Worker;
use crate::policy::{Reason, RequestTerms, Terms};

named! {
    /// What became of a request.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Outcome {
        /// It has not ended.
        Running = "running",
        /// Its answer came to its end.
        Complete = "complete",
        /// It ended before its first token.
        Failed = "failed",
        /// Its answer broke off.
        Broken = "broken",
        /// The client left.
        ClientGone = "client_gone",
        /// Its caller gave the load back.
        Freed = "freed",
        /// Nothing was heard of it for too long.
        Expired = "expired",
    }
}

/// One worker that could have taken the request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CandidateRecord {
    /// What the request would have cost there.
    pub terms: Terms,
    /// Leading blocks that are told as its overlap: those held on the device; without events, those
    /// predicted.
    pub overlap_blocks: u32,
    /// Leading blocks held on the device.
    pub device_blocks: u32,
    /// Reached when host memory goes on where the device ends.
    pub host_blocks: u32,
    /// Reached when disks, local or shared, go on where host memory ends.
    pub disk_blocks: u32,
    /// Leading blocks that it was predicted to hold.
    pub predicted_blocks: u32,
    /// What its blocks counted, 0 to 1, where that was less than 1.
    pub credit: Option<f64>,
    /// Passed over because it was busy.
    pub is_busy: bool,
    /// Passed over because it is being drained.
    pub is_draining: bool,
}

/// One decision.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// The request's name.
    pub request_id: Arc<str>,
    /// The model.
    pub model: Arc<str>,
    /// What the client calls it, where that is another name.
    pub alias: Option<Arc<str>>,
    /// When it was decided, milliseconds of the selector's clock.
    pub decided_at_ms: u64,
    /// The policy that chose.
    pub policy: Arc<str>,
    /// The chosen worker.
    pub worker: Worker,
    /// Why this one.
    pub reason: Reason,
    /// How many candidates were equally good.
    pub ties: usize,
    /// By how much the next one is dearer.
    pub margin: Option<f64>,
    /// The number that chance was drawn from.
    pub seed: u64,
    /// What the chosen one was judged by, where that is no cost.
    pub score: Option<f64>,
    /// The request as the policy saw it.
    pub request: RequestTerms,
    /// Full blocks of the prompt.
    pub request_blocks: u32,
    /// Leading blocks that the chosen worker was credited with.
    pub overlap_blocks: u32,
    /// The worker that it should have gone to and that is being drained.
    pub diverted: Option<Diverted>,
    /// All candidates, those passed over last.
    pub candidates: Box<[CandidateRecord]>,
    /// Milliseconds from the decision to the first token.
    pub first_token_ms: Option<u64>,
    /// Milliseconds from the decision to the end.
    pub ended_ms: Option<u64>,
    /// Tokens that the engine says it reused.
    pub cached_tokens: Option<u64>,
    /// What became of it.
    pub outcome: Outcome,
}

impl Record {
    pub(super) fn bytes(&self) -> usize {
        // Twice the name: the table of names has it too, and some words for a place there.
        size_of::<Self>()
            + 2 * self.request_id.len()
            + self.alias.as_deref().map_or(0, str::len)
            + size_of_val(&*self.candidates)
            + 64
    }
}
