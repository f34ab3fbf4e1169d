//! Memory of the index, exact: equal to what a counting allocator reports.

use super::holder::{Slot, WorkerState};
use super::shared::Shared;
use super::writer::Writer;
use crate::index::arena::runs::Runs;

impl Writer {
    /// Bytes of everything but workers.
    pub(super) fn shared_bytes(&self) -> usize {
        // The counts of an `Arc` lie before its value.
        let counts = (2 * size_of::<usize>()).next_multiple_of(align_of::<Shared>());
        let shared = size_of::<Shared>() + counts;
        shared
            + Runs::bytes(&self.tree.runs)
            + self.shared.edges.bytes(&self.tree.edges)
            + self.sizes.seats
            + self.names.filter.bytes()
            + self.tree.metas.bytes()
            + self.members.bytes()
            + self.sizes.columns
            + self.sizes.spans
            + self.other_bytes()
    }

    /// Tables and lists that are shared by blocks and workers.
    fn other_bytes(&self) -> usize {
        self.owners.slots.capacity() * size_of::<usize>()
            + self.owners.workers.capacity() * size_of::<usize>()
            + self.owners.numbers.allocation_size()
            + self.names.suspects.allocation_size()
            + self.tree.seeds.allocation_size()
            + self.times.ages.bytes()
            + self.times.held.bytes()
            + self.order.bytes()
            + self.tree.scattered.allocation_size()
            + self.sizes.scattered
            + self.list_bytes()
    }

    /// Bytes of one worker's own records.
    fn bytes_of(&self, worker: &WorkerState) -> usize {
        let slots = worker
            .slots
            .iter()
            .filter_map(|slot| self.owners.slots.get(usize::from(*slot))?.as_deref());
        let slots = slots.map(|slot| size_of::<Slot>() + slot.bytes());
        size_of::<WorkerState>() + worker.bytes() + slots.sum::<usize>()
    }

    /// Recounts a worker whose records may have changed, and trims them.
    pub(super) fn recount(&mut self, number: u32) {
        for slot in self.worker(number).slots {
            if let Some(Some(slot)) = self.owners.slots.get_mut(usize::from(slot)) {
                slot.tidy();
            }
        }
        self.worker_mut(number).tidy();
        let worker = self.worker(number);
        let bytes = self.bytes_of(worker);
        self.sizes.workers = self.sizes.workers + bytes - worker.counted;
        self.worker_mut(number).counted = bytes;
    }

    /// Total bytes in O(1); exact if all workers are counted, which is the case with a budget.
    pub(super) fn bytes_now(&self) -> usize {
        self.shared_bytes() + self.sizes.workers
    }

    /// Bytes requested from the allocator and not returned.
    pub(super) fn bytes(&self) -> usize {
        let workers = self.owners.workers.iter().flatten();
        self.shared_bytes() + workers.map(|worker| self.bytes_of(worker)).sum::<usize>()
    }
}
