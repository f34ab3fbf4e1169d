//! The workers that a block was sent to, as small integers.

use hashbrown::HashMap;

use crate::ids::Worker;

/// A worker in the context of a model.
pub(super) type Place = (u64, Worker);

/// Small integers for models' workers that hold blocks.
#[derive(Debug, Default)]
pub(super) struct Slots {
    by_place: HashMap<Place, u32>,
    /// By slot; free slots hold nothing.
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Incremented whenever a slot is reassigned.
    generation: u64,
    /// Slots of the workers in the last query, in its order; [`NOBODY`] for a worker without
    /// blocks.
    asked: Vec<(Worker, u32)>,
    asked_as: (u64, u64),
}

#[derive(Debug)]
struct Slot {
    place: Place,
    /// Blocks that it holds.
    blocks: u64,
}

/// Marks the absence of a slot.
const NOBODY: u32 = u32::MAX;

/// Memory of a slot in the list, the map (filled to 7/8 at most) and the free list.
const SLOT_BYTES: usize = size_of::<Slot>() + (size_of::<(Place, u32)>() + 1) * 8 / 7 + 4;

impl Slots {
    /// The number of slots, including free ones.
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.slots.len() * SLOT_BYTES + self.asked.capacity() * size_of::<(Worker, u32)>()
    }

    /// The worker's slot; assigns one if it holds nothing yet.
    pub(super) fn of(&mut self, place: Place) -> u32 {
        if let Some(&slot) = self.by_place.get(&place) {
            return slot;
        }
        self.generation += 1;
        let new = Slot { place, blocks: 0 };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize] = new;
                slot
            }
            None => {
                self.slots.push(new);
                self.slots.len() as u32 - 1
            }
        };
        self.by_place.insert(place, slot);
        slot
    }

    pub(super) fn is_of(&self, slot: u32, worker: Worker) -> bool {
        self.slots[slot as usize].place.1 == worker
    }

    fn holds(&mut self, slot: u32) {
        self.slots[slot as usize].blocks += 1;
    }

    fn drops(&mut self, slot: u32) {
        let held = &mut self.slots[slot as usize];
        held.blocks -= 1;
        if held.blocks == 0 {
            self.by_place.remove(&held.place);
            self.free.push(slot);
            self.generation += 1;
        }
    }

    /// The slots of `workers`, in their order.
    ///
    /// # Cost
    /// One comparison per worker if the last query was the same.
    pub(super) fn ask(
        &mut self,
        model: u64,
        workers: impl Iterator<Item = Worker>,
    ) -> &[(Worker, u32)] {
        let mut workers = workers.peekable();
        let mut same = 0;
        if self.asked_as == (model, self.generation) {
            let mut asked = self.asked.iter();
            while asked.next().is_some_and(|(known, _)| workers.next_if_eq(known).is_some()) {
                same += 1;
            }
        }
        self.asked_as = (model, self.generation);
        self.asked.truncate(same);
        let slot_of = |worker| self.by_place.get(&(model, worker)).copied().unwrap_or(NOBODY);
        self.asked.extend(workers.map(|worker| (worker, slot_of(worker))));
        &self.asked
    }
}

/// The workers that one block was sent to, and when last. Two parallel lists, because most look-ups
/// need only one.
#[derive(Debug, Default)]
pub(super) struct Holders {
    /// Sorted.
    slots: Vec<u32>,
    used_ms: Vec<u64>,
    /// No use was earlier than this.
    oldest_ms: u64,
}

impl Holders {
    pub(super) fn slots(&self) -> &[u32] {
        &self.slots
    }

    pub(super) fn bytes(&self) -> usize {
        self.slots.capacity() * size_of::<u32>() + self.used_ms.capacity() * size_of::<u64>()
    }

    /// Records that the block was sent to the worker of `slot`.
    pub(super) fn put(&mut self, slots: &mut Slots, slot: u32, now_ms: u64) {
        match self.slots.binary_search(&slot) {
            Ok(at) => self.used_ms[at] = now_ms,
            Err(at) => {
                if self.slots.is_empty() {
                    // Most blocks have one holder.
                    self.slots.reserve_exact(1);
                    self.used_ms.reserve_exact(1);
                    self.oldest_ms = now_ms;
                }
                self.slots.insert(at, slot);
                self.used_ms.insert(at, now_ms);
                slots.holds(slot);
            }
        }
    }

    /// Drops workers that last used it more than `ttl_ms` ago.
    pub(super) fn prune(&mut self, slots: &mut Slots, now_ms: u64, ttl_ms: u64) {
        if self.oldest_ms.saturating_add(ttl_ms) < now_ms {
            let mut used_ms = std::mem::take(&mut self.used_ms).into_iter();
            let is_stale = |used_ms: u64| now_ms.saturating_sub(used_ms) > ttl_ms;
            let mut kept = Vec::with_capacity(used_ms.len());
            self.slots.retain(|&slot| {
                let Some(used_ms) = used_ms.next() else { return false };
                if is_stale(used_ms) {
                    slots.drops(slot);
                    return false;
                }
                kept.push(used_ms);
                true
            });
            self.oldest_ms = kept.iter().copied().min().unwrap_or(now_ms);
            self.used_ms = kept;
        }
    }

    /// Drops `worker`, in all models.
    pub(super) fn forget(&mut self, slots: &mut Slots, worker: Worker) {
        for at in (0..self.slots.len()).rev() {
            if slots.is_of(self.slots[at], worker) {
                slots.drops(self.slots.remove(at));
                self.used_ms.remove(at);
            }
        }
    }

    /// Drops all workers.
    pub(super) fn clear(&mut self, slots: &mut Slots) {
        self.slots.iter().for_each(|&slot| slots.drops(slot));
        *self = Self::default();
    }
}
