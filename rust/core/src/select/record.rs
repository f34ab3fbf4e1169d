//! A decision as it is reported: the selected worker, and a record of all inputs and the outcome.

use std::sync::Arc;

use super::ask::TokenSource;
use super::draining::Diverted;
use crate::ids::Worker;
use crate::policy::{Choice, Reason, RequestTerms, Terms};

named! {
    /// Outcome of a request.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Outcome {
        /// It has not ended.
        Running = "running",
        /// Its answer is complete.
        Complete = "complete",
        /// It ended before its first token.
        Failed = "failed",
        /// Its answer was interrupted.
        Broken = "broken",
        /// The client disconnected.
        ClientGone = "client_gone",
        /// Its caller freed the load.
        Freed = "freed",
        /// It had no activity for too long.
        Expired = "expired",
    }
}

/// The selected worker, with a summary of the reasons.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Selection {
    /// The worker.
    pub worker: Worker,
    /// Leading blocks of the prompt that it holds on its device; without events, those predicted.
    pub overlap_blocks: u32,
    /// Further leading blocks that it was credited with because the prompt was sent there recently.
    pub predicted_blocks: u32,
    /// Blocks saved by host memory and disks besides these, rounded down.
    pub lower_blocks: u32,
    /// Leading blocks on its device according to its events, whatever their credit.
    pub held_blocks: u32,
    /// Leading blocks that it holds contiguously across all tiers.
    pub reached_blocks: u32,
    /// Leading blocks that the best of all workers holds, even if it could not take the request.
    pub best_blocks: u32,
    /// Time of the selection, by the selector's clock.
    pub at_ms: u64,
    /// The reason.
    pub reason: Reason,
    /// How many were equally good.
    pub ties: usize,
    /// Cost difference to the next one.
    pub margin: Option<f64>,
    /// The seed of the random draw; see [`RouteOverride::seed`](super::RouteOverride::seed).
    pub seed: u64,
}

/// One worker that could have taken the request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CandidateRecord {
    /// The request's cost there.
    pub terms: Terms,
    /// Leading blocks reported as its overlap: those held on the device; without events, those
    /// predicted.
    pub overlap_blocks: u32,
    /// Leading blocks held on the device.
    pub device_blocks: u32,
    /// Blocks reached when host memory continues where the device ends.
    pub host_blocks: u32,
    /// Blocks reached when disks, local or shared, continue where host memory ends.
    pub disk_blocks: u32,
    /// Leading blocks that it was predicted to hold.
    pub predicted_blocks: u32,
    /// Weight of its blocks, 0 to 1, if below 1.
    pub credit: Option<f64>,
    /// Skipped because it was busy.
    pub is_busy: bool,
    /// Skipped because it was draining.
    pub is_draining: bool,
}

/// One decision.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// The request's name.
    pub request_id: Arc<str>,
    /// The model.
    pub model: Arc<str>,
    /// The client's name for it, if it is an alias.
    pub alias: Option<Arc<str>>,
    /// When it was decided, milliseconds of the selector's clock.
    pub decided_at_ms: u64,
    /// The policy that chose.
    pub policy: Arc<str>,
    /// The chosen worker.
    pub worker: Worker,
    /// The choice among the candidates that were neither busy nor draining, which come first.
    pub choice: Choice,
    /// The seed of the random draw.
    pub seed: u64,
    /// The request as the policy saw it.
    pub request: RequestTerms,
    /// How far the prompt's tokens were known.
    pub prompt_source: TokenSource,
    /// Full blocks of the prompt, as far as its tokens were known.
    pub request_blocks: u32,
    /// Leading blocks that the chosen worker was credited with.
    pub overlap_blocks: u32,
    /// The draining worker that it should have used.
    pub diverted: Option<Diverted>,
    /// All candidates, skipped ones last.
    pub candidates: Box<[CandidateRecord]>,
    /// Milliseconds from the decision to the first token.
    pub first_token_ms: Option<u64>,
    /// Milliseconds from the decision to the end.
    pub ended_ms: Option<u64>,
    /// Tokens that the engine reports as reused.
    pub cached_tokens: Option<u64>,
    /// The outcome.
    pub outcome: Outcome,
}

impl Record {
    pub(super) fn bytes(&self) -> usize {
        // Twice the name, because the table of names has it, too, and some words for the entry
        // there.
        size_of::<Self>()
            + 2 * self.request_id.len()
            + self.alias.as_deref().map_or(0, str::len)
            + size_of_val(&*self.candidates)
            + 64
    }
}
