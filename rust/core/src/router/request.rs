//! What a router is asked.

use super::config::RouteOverride;
use super::gate::Gate;
use super::policies::Facts;
use crate::ids::Worker;

/// A request to be given to a worker.
#[derive(Clone, Copy, Default)]
pub struct RouteRequest<'a> {
    /// Prompt length in tokens; at least 1.
    pub isl_tokens: u64,
    /// Sequence hashes of the prompt's full blocks, in order.
    pub sequence_hashes: &'a [u64],
    /// Leading blocks of the prompt that workers hold; none for workers that are not named.
    /// Workers that are not registered here are passed over: the index may be behind or ahead.
    pub overlaps: &'a [(Worker, u32)],
    /// Leading blocks that workers are predicted to hold soon; what goes beyond `overlaps` counts as
    /// overlap too, and is told apart.
    pub predictions: &'a [(Worker, u32)],
    /// Leading blocks that workers reach with host memory, and with disks: each as many as on the device or
    /// more. What goes beyond the former saves a share, see [`TierWeights`](super::TierWeights).
    pub tiers: &'a [(Worker, [u32; 2])],
    /// Workers that may take the request; `None` for all. Called under the router's lock: it
    /// answers from what it holds and does not come back to the router.
    pub allowed: Option<&'a dyn Fn(Worker) -> bool>,
    /// Who is too busy for any request; `None` for nobody.
    pub gate: Option<&'a dyn Gate>,
    /// What this request wants otherwise.
    pub overrides: RouteOverride,
    /// What policies that are not built in want to know.
    pub facts: Facts<'a>,
}
