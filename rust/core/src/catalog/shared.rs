//! Workers with a state shared between replicas: a broker's stream, a snapshot, a worker's own
//! dump.

use super::past::PastKind;
use super::registry::Catalog;
use crate::error::Error;
use crate::ids::{InstanceId, Worker};

impl Catalog {
    /// Workers that may hold blocks: registered ones, and those known only from a dump.
    pub fn known_workers(&self) -> Vec<Worker> {
        let tables = self.tables.read();
        let recovered = tables.past.iter().filter(|(_, past)| past.kind == PastKind::Recovered);
        let mut workers: Vec<Worker> =
            tables.workers.keys().copied().chain(recovered.map(|(worker, _)| *worker)).collect();
        workers.sort_unstable();
        workers
    }

    /// Drops a worker's blocks and stream position, so that a dump can replace them, for all ranks
    /// of its publisher. False if it is unknown.
    ///
    /// # Consistency
    /// Until the dump is loaded the worker holds nothing.
    pub fn forget_worker(&self, worker: Worker) -> bool {
        if let Some(publisher) = self.publisher_of(worker) {
            publisher.start_over();
            return true;
        }
        let mut tables = self.tables.write();
        match tables.past.remove(&worker) {
            Some(past) if past.kind == PastKind::Recovered => {
                past.drop_blocks(worker.instance_id);
                true
            }
            // Its last endpoint does not matter for shared state.
            Some(past) => {
                tables.past.insert(worker, past);
                false
            }
            None => false,
        }
    }

    /// Unregisters an instance, or one rank of it, in any model. Returns whether it existed.
    pub fn expel(&self, instance_id: InstanceId, dp_rank: Option<u32>) -> bool {
        let models: Vec<_> = {
            let tables = self.tables.read();
            let all = Worker::new(instance_id, 0)..=Worker::new(instance_id, u32::MAX);
            let mut models: Vec<_> =
                tables.past.range(all).map(|(_, past)| past.model.key.clone()).collect();
            let publishers = tables.of_instance(instance_id);
            models.extend(publishers.map(|publisher| publisher.model.key.clone()));
            models.sort();
            models.dedup();
            models
        };
        let mut is_gone = false;
        for key in models {
            let gone = self.unregister(instance_id, &key.model_name, Some(&key.tenant_id), dp_rank);
            is_gone |= !matches!(gone, Err(Error::NotFound(_)));
        }
        is_gone
    }
}
