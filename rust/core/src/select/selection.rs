//! The result of a selection.

use crate::ids::Worker;
use crate::policy::Reason;

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

/// A worker's load if it took a request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PotentialLoad {
    /// The worker.
    pub worker: Worker,
    /// Prompt tokens to prefill there, including the request's uncached ones.
    pub potential_prefill_tokens: u64,
    /// Distinct blocks in use there, including the request's.
    pub potential_decode_blocks: u64,
    /// Current requests there.
    pub active_requests: u32,
    /// Leading blocks of the prompt that it was credited with.
    pub overlap_blocks: u32,
}
