//! What the index occupies. Exact: the same figures an allocator that counts would give.

use std::hash::{BuildHasher, Hash};

use hashbrown::{HashMap, HashSet};

use super::Shared;
use super::holder::{Slot, WorkerState};
use super::writer::Writer;
use crate::index::arena::runs::Runs;

/// A map of more entries' room than this is made smaller when it is mostly empty.
const ROOM_KEPT: usize = 56;

/// Entries that a table of these bytes has room for.
fn room<T>(allocation: usize) -> usize {
    allocation / (size_of::<T>() + 1) / 8 * 7
}

/// Bytes that a map asks for when it takes `more` entries; it has both its tables for a moment.
pub(super) fn map_growth<K: Eq + Hash, V, S: BuildHasher>(
    map: &HashMap<K, V, S>,
    more: usize,
) -> usize {
    let (len, allocation) = (map.len() + more, map.allocation_size());
    if len <= map.capacity() || len * 2 <= room::<(K, V)>(allocation) {
        return 0;
    }
    let needed = (len * 8 / 7 + 1).next_power_of_two() * (size_of::<(K, V)>() + 1) + 16;
    needed.max(allocation * 2)
}

/// Gives back what a map that lost most of its entries does not need.
pub(super) fn shrink_map<K: Eq + Hash, V, S: BuildHasher>(map: &mut HashMap<K, V, S>) {
    let room = room::<(K, V)>(map.allocation_size());
    if room > ROOM_KEPT && map.len() * 8 < room {
        map.shrink_to(map.len() * 2);
    }
}

/// As [`shrink_map`].
pub(super) fn shrink_set<K: Eq + Hash, S: BuildHasher>(set: &mut HashSet<K, S>) {
    let room = room::<K>(set.allocation_size());
    if room > ROOM_KEPT && set.len() * 8 < room {
        set.shrink_to(set.len() * 2);
    }
}

impl Writer {
    /// Bytes of everything but workers.
    pub(super) fn shared_bytes(&self) -> usize {
        // The counts of an `Arc` lie before its value.
        let counts = (2 * size_of::<usize>()).next_multiple_of(align_of::<Shared>());
        let shared = size_of::<Shared>() + counts;
        shared
            + Runs::bytes(&self.runs)
            + self.shared.edges.bytes(&self.edges)
            + self.seat_bytes
            + self.filter.bytes()
            + self.metas.bytes()
            + self.members.bytes()
            + self.column_bytes
            + self.span_bytes
            + self.other_bytes()
    }

    /// Tables and lists that belong to no block and no worker alone.
    fn other_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<usize>()
            + self.workers.capacity() * size_of::<usize>()
            + self.numbers.allocation_size()
            + self.suspects.allocation_size()
            + self.seeds.allocation_size()
            + self.ages.bytes()
            + self.stamps.bytes()
            + self.order.bytes()
            + self.scattered.allocation_size()
            + self.scattered_bytes
            + self.list_bytes()
    }

    /// Bytes of one worker's own records.
    fn bytes_of(&self, worker: &WorkerState) -> usize {
        let slots =
            worker.slots.iter().filter_map(|slot| self.slots.get(usize::from(*slot))?.as_deref());
        let slots = slots.map(|slot| size_of::<Slot>() + slot.bytes());
        size_of::<WorkerState>() + worker.bytes() + slots.sum::<usize>()
    }

    /// Counts a worker again, whose records may have changed, and tidies them.
    pub(super) fn recount(&mut self, number: u32) {
        for slot in self.worker(number).slots {
            if let Some(Some(slot)) = self.slots.get_mut(usize::from(slot)) {
                slot.tidy();
            }
        }
        self.worker_mut(number).tidy();
        let worker = self.worker(number);
        let bytes = self.bytes_of(worker);
        self.worker_bytes = self.worker_bytes + bytes - worker.counted;
        self.worker_mut(number).counted = bytes;
    }

    /// Bytes in O(1); exact when all workers are counted, as they are where there is a budget.
    pub(super) fn bytes_now(&self) -> usize {
        self.shared_bytes() + self.worker_bytes
    }

    /// Bytes asked of the allocator and not given back.
    pub(super) fn bytes(&self) -> usize {
        let workers = self.workers.iter().flatten();
        self.shared_bytes() + workers.map(|worker| self.bytes_of(worker)).sum::<usize>()
    }
}
