//! The engines of one model, as requests find them.

use std::collections::HashMap;
use std::sync::Arc;

use kvflash_core::ids::{InstanceId, Worker};

use super::engine::Engine;
use crate::fleet;
use crate::gateway::turn::WaitingRoom;

/// All engines that serve one base model, or all that prefill for it.
pub(crate) type Pool = fleet::Pool<Engine, Option<Arc<WaitingRoom>>>;
pub(crate) type Members = fleet::Members<Engine>;

impl Members {
    /// Whether `worker` may take a request that was already at the `tried` engines.
    pub fn is_eligible(&self, worker: Worker, tried: &[InstanceId]) -> bool {
        !tried.contains(&worker.instance_id)
            && self.get(worker.instance_id).is_some_and(|engine| engine.is_healthy())
    }

    pub fn healthy(&self) -> usize {
        self.all().filter(|engine| engine.is_healthy()).count()
    }

    /// The longest context that all of them accept; `None` if none has reported it.
    pub fn max_model_len(&self) -> Option<u64> {
        self.all().filter_map(|engine| engine.notes.lock().max_model_len).min()
    }

    pub fn are_all_healthy(&self) -> bool {
        self.all().all(|engine| engine.is_healthy())
    }
}

impl Pool {
    /// Number of its workers that may get requests.
    pub fn serving(&self) -> usize {
        let draining = self.selector.draining.all();
        let is_open = |id: &InstanceId| draining.binary_search(id).is_err();
        let members = self.members();
        members.all().filter(|engine| engine.is_healthy() && is_open(&engine.id)).count()
    }

    /// Whether requests may wait, for their turn or for a worker with room.
    pub fn is_queued(&self) -> bool {
        self.waiting.is_some() || self.queue.is_some()
    }

    /// Of the healthy HTTP engines accepted by `fits`, the one with the fewest requests; ties
    /// rotate with `turn`.
    ///
    /// # Cost
    /// Reads every worker's load.
    pub fn least_busy(&self, turn: usize, fits: impl Fn(&Engine) -> bool) -> Option<Arc<Engine>> {
        let mut requests = HashMap::<_, u32>::new();
        for load in self.selector.loads() {
            *requests.entry(load.worker.instance_id).or_default() += load.requests;
        }
        let members = self.members();
        let is_fit = |one: &&Arc<Engine>| one.member.is_none() && one.is_healthy() && fits(one);
        let mut fitting: Vec<_> = members.all().filter(is_fit).collect();
        let first = turn % fitting.len().max(1);
        fitting.rotate_left(first);
        let least = fitting
            .into_iter()
            .min_by_key(|one| requests.get(&one.id).copied().unwrap_or_default());
        least.cloned()
    }
}

/// The route of requests for a served name.
#[derive(Clone)]
pub(crate) struct Route {
    pub pool: Arc<Pool>,
    /// The adapter, if the name is one.
    pub lora_name: Option<String>,
}
