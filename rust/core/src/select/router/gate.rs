//! Who takes no request now.

use crate::error::{Error, Result};
use crate::ids::{InstanceId, Worker};
use crate::load::WorkerLoad;
use crate::policy::{Candidate, Terms};

/// Says who is too busy, from the load at the moment of a decision.
///
/// Called under the router's lock: it answers from what it holds and does not come back to the router.
pub trait Gate {
    /// Adds to `shut` the instances that take no request now, ascending. `loads` are those of all
    /// registered workers, in worker order.
    fn shut(&self, loads: &mut dyn Iterator<Item = WorkerLoad>, shut: &mut Vec<InstanceId>);

    /// Whether none of `candidates`, each with its prompt tokens still to be prefilled, has room for more
    /// of them. Only asked where the request can wait.
    fn must_wait(&self, candidates: &mut dyn Iterator<Item = (Worker, u64)>) -> bool;

    /// A worker that was allowed is passed over because its instance is shut; what the request would
    /// have cost there.
    fn passed_over(&self, terms: Terms);
}

/// Whether one of `candidates` has room to prefill, as far as `gate` asks for it.
///
/// # Errors
/// [`Error::MustWait`] when none has.
pub(super) fn check_room(gate: Option<&dyn Gate>, candidates: &[Candidate]) -> Result<()> {
    let queued = |one: &Candidate| (one.worker, one.load.map_or(0, |load| load.prefill_tokens));
    let count = candidates.len();
    if count > 0 && gate.is_some_and(|gate| gate.must_wait(&mut candidates.iter().map(queued))) {
        return Err(Error::MustWait(format!(
            "all {count} workers that may take this request have more to prefill than \
             router_queue_threshold allows"
        )));
    }
    Ok(())
}
