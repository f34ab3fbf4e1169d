//! Excludes workers from a decision.

use crate::error::{Error, Result};
use crate::ids::{InstanceId, Worker};
use crate::load::WorkerLoad;
use crate::policy::{Candidate, Terms};

/// Decides which workers are too busy, from the load at the moment of a decision.
///
/// Called under the router's lock, so it must use only its own data and not call the router.
pub trait Gate {
    /// Adds the instances that take no requests now to `shut`, ascending. `loads` are those of all
    /// registered workers, in worker order.
    fn shut(&self, loads: &mut dyn Iterator<Item = WorkerLoad>, shut: &mut Vec<InstanceId>);

    /// Whether none of `candidates`, each with its prompt tokens still to be prefilled, has room
    /// for more. Only called if the request can wait.
    fn must_wait(&self, candidates: &mut dyn Iterator<Item = (Worker, u64)>) -> bool;

    /// Reports an allowed worker that is skipped because its instance is shut, with the request's
    /// cost there.
    fn passed_over(&self, terms: Terms);
}

/// Checks that one of `candidates` has room to prefill, if `gate` demands it.
///
/// # Errors
/// [`Error::MustWait`] if none has.
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
