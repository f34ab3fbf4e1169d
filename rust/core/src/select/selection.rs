//! What a selection tells.

use crate::ids::Worker;
use crate::policy::Reason;

/// Which worker was selected, and the least that callers want to know about why.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Selection {
    /// The worker.
    pub worker: Worker,
    /// Leading blocks of the prompt that it holds on its device; without events, those predicted.
    pub overlap_blocks: u32,
    /// Leading blocks beyond these that it was credited with because the prompt was sent there lately.
    pub predicted_blocks: u32,
    /// Blocks that what it holds in host memory and on disks saves beside these, rounded down.
    pub lower_blocks: u32,
    /// Leading blocks that its events say it holds on its device, whatever credit they got.
    pub held_blocks: u32,
    /// Leading blocks that it holds in any tier, as far as these go on one behind the other.
    pub reached_blocks: u32,
    /// Leading blocks that the best worker of all holds, whether it could take the request or not.
    pub best_blocks: u32,
    /// When, by the clock of the selector.
    pub at_ms: u64,
    /// Why this one.
    pub reason: Reason,
    /// How many were equally good.
    pub ties: usize,
    /// By how much the next one is dearer.
    pub margin: Option<f64>,
    /// The number that chance was drawn from; see [`RouteOverride::seed`](super::RouteOverride::seed).
    pub seed: u64,
}

/// What a request would make of a worker's load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PotentialLoad {
    /// The worker.
    pub worker: Worker,
    /// Prompt tokens to prefill there, the request's uncached ones included.
    pub potential_prefill_tokens: u64,
    /// Distinct blocks in use there, the request's included.
    pub potential_decode_blocks: u64,
    /// Requests there now.
    pub active_requests: u32,
    /// Leading blocks of the prompt that it was credited with.
    pub overlap_blocks: u32,
}
