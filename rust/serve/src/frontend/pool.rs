//! The engines of one model, as requests find them.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvflash_core::catalog::ModelIndex;
use kvflash_core::error::Result;
use kvflash_core::ids::{InstanceId, Worker};
use kvflash_core::select::{Queue, Selector};
use parking_lot::{Mutex, RwLock};

use super::engine::Engine;
use super::served::Served;
use crate::gateway::turn::WaitingRoom;

/// All engines that serve one base model: one index, one load table.
pub(crate) struct Pool {
    pub name: String,
    pub selector: Selector,
    members: RwLock<Arc<Members>>,
    /// What they serve; prefill workers serve nobody by themselves.
    pub served: Mutex<Served>,
    /// Where requests wait for their turn.
    pub waiting: Option<Arc<WaitingRoom>>,
    /// Where they wait for a worker with room to prefill.
    pub queue: Option<Arc<Queue>>,
}

/// The engines of a pool at one moment.
#[derive(Default)]
pub(crate) struct Members {
    by_id: BTreeMap<InstanceId, Arc<Engine>>,
}

impl Members {
    pub fn get(&self, id: InstanceId) -> Option<&Arc<Engine>> {
        self.by_id.get(&id)
    }

    pub fn all(&self) -> impl Iterator<Item = &Arc<Engine>> {
        self.by_id.values()
    }

    /// May `worker` take a request that has been at the `tried` engines already?
    pub fn is_eligible(&self, worker: Worker, tried: &[InstanceId]) -> bool {
        !tried.contains(&worker.instance_id)
            && self.get(worker.instance_id).is_some_and(|engine| engine.is_healthy())
    }

    pub fn healthy(&self) -> usize {
        self.all().filter(|engine| engine.is_healthy()).count()
    }

    pub fn are_all_healthy(&self) -> bool {
        self.all().all(|engine| engine.is_healthy())
    }

    fn workers(&self) -> Vec<Worker> {
        self.all()
            .flat_map(|engine| (0..engine.spec.dp_size).map(|rank| Worker::new(engine.id, rank)))
            .collect()
    }
}

impl Pool {
    /// One without engines.
    pub fn new(
        name: &str,
        selector: Selector,
        waiting: Option<Arc<WaitingRoom>>,
        queue: Option<Arc<Queue>>,
    ) -> Self {
        let (name, members, served) = (name.to_owned(), RwLock::default(), Mutex::default());
        Self { name, selector, members, served, waiting, queue }
    }

    pub fn index(&self) -> &Arc<ModelIndex> {
        self.selector.model()
    }

    pub fn members(&self) -> Arc<Members> {
        Arc::clone(&self.members.read())
    }

    /// Whether requests may wait, be it for their turn or for a worker with room.
    pub fn is_queued(&self) -> bool {
        self.waiting.is_some() || self.queue.is_some()
    }

    /// Change who its engines are, for requests and for the selector alike.
    ///
    /// # Errors
    /// `Overloaded` when they have more ranks together than the selector takes; nothing changes then.
    pub fn change(&self, edit: impl FnOnce(&mut BTreeMap<InstanceId, Arc<Engine>>)) -> Result<()> {
        let mut members = self.members.write();
        let mut by_id = members.by_id.clone();
        edit(&mut by_id);
        let changed = Members { by_id };
        // Readers wait meanwhile: whoever is given a new worker finds it among the members.
        self.selector.set_workers(&changed.workers())?;
        *members = Arc::new(changed);
        Ok(())
    }
}

/// Where requests for a served name go.
#[derive(Clone)]
pub(crate) struct Route {
    pub pool: Arc<Pool>,
    /// The adapter, where the name is one.
    pub lora_name: Option<String>,
}
