//! Workers with a state shared between replicas: a broker's stream, a snapshot, a worker's own
//! dump.

use super::registry::{Catalog, Seat, seats_of};
use crate::error::Error;
use crate::ids::{InstanceId, Worker};

impl Catalog {
    /// Workers that may hold blocks: registered ones, and those known only from a dump.
    pub fn known_workers(&self) -> Vec<Worker> {
        let tables = self.tables.read();
        let seats = tables.workers.keys().chain(tables.recovered.keys());
        let mut workers: Vec<Worker> = seats.map(|(worker, _)| *worker).collect();
        workers.sort_unstable();
        workers.dedup();
        workers
    }

    /// Drops a worker's blocks and stream positions, so that a dump can replace them, in every
    /// model and tenant, for all ranks of its publishers. False if it is unknown.
    ///
    /// # Consistency
    /// Until the dump is loaded the worker holds nothing.
    pub fn forget_worker(&self, worker: Worker) -> bool {
        let publishers = self.publishers_of(worker);
        publishers.iter().for_each(|publisher| publisher.start_over());
        let mut tables = self.tables.write();
        // The positions of unregistered workers do not matter for shared state.
        let recovered: Vec<Seat> = seats_of(&tables.recovered, worker.instance_id)
            .filter(|((held, _), _)| *held == worker)
            .map(|(seat, _)| seat.clone())
            .collect();
        for past in recovered.iter().filter_map(|seat| tables.recovered.remove(seat)) {
            past.drop_blocks(worker.instance_id);
        }
        !publishers.is_empty() || !recovered.is_empty()
    }

    /// Unregisters an instance, or one rank of it, in any model. Returns whether it existed.
    pub fn expel(&self, instance_id: InstanceId, dp_rank: Option<u32>) -> bool {
        let models: Vec<_> = {
            let tables = self.tables.read();
            let past = seats_of(&tables.recovered, instance_id);
            let mut models: Vec<_> = past.map(|((_, key), _)| key.clone()).collect();
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
