//! Worker <-> slot: the dense number by which holder sets know a worker.
//!
//! Slots are reused. A reader loads the seating before and after its walk and drops what it found
//! for slots whose turn changed in between: a slot passes to another worker only after its old
//! owner's last bit is gone, and the change is published before the new owner's first bit is set.

use std::collections::BTreeMap;
use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use parking_lot::RwLock;

use kvflash_core::ids::{InstanceId, Worker};

/// Seats in a page; a change copies one page and the list of pages.
const PAGE: usize = 256;

/// Who has a slot. The turn counts how often it was given or taken back: odd turns are owned.
#[derive(Debug, Clone, Copy)]
struct Seat {
    worker: Worker,
    turn: u32,
}

/// Who has which slot, at one moment.
#[derive(Debug, Clone, Default)]
pub(super) struct Seating {
    pages: Vec<Arc<[Seat; PAGE]>>,
}

impl Seating {
    /// The owner of `slot`, if it is the same one, without interruption, here and `later`.
    pub fn stable(&self, later: &Self, slot: u16) -> Option<Worker> {
        let (before, after) = (self.seat(slot)?, later.seat(slot)?);
        (before.turn % 2 == 1 && before.turn == after.turn).then_some(before.worker)
    }

    fn seat(&self, slot: u16) -> Option<&Seat> {
        self.pages.get(usize::from(slot) / PAGE).map(|page| &page[usize::from(slot) % PAGE])
    }

    /// Gives `slot` to `worker`, or takes it back from its owner.
    fn turn(&mut self, slot: u16, worker: Worker) {
        let page = usize::from(slot) / PAGE;
        let vacant = Seat { worker: Worker::new(0, 0), turn: 0 };
        while self.pages.len() <= page {
            self.pages.push(Arc::new([vacant; PAGE]));
        }
        let seat = &mut Arc::make_mut(&mut self.pages[page])[usize::from(slot) % PAGE];
        *seat = Seat { worker, turn: seat.turn.wrapping_add(1) };
    }
}

struct Registry<C> {
    cells: BTreeMap<Worker, (u16, Arc<C>)>,
    free: Vec<u16>,
    /// Slots ever given.
    opened: usize,
}

/// All slots; `C` is what the index keeps for each worker.
pub(super) struct Slots<C> {
    seating: ArcSwap<Seating>,
    registry: RwLock<Registry<C>>,
    max_workers: usize,
}

impl<C> Slots<C> {
    pub fn new(max_workers: usize) -> Self {
        let registry = Registry { cells: BTreeMap::new(), free: Vec::new(), opened: 0 };
        Self { seating: ArcSwap::default(), registry: RwLock::new(registry), max_workers }
    }

    /// Who has which slot now. Never waits.
    pub fn seating(&self) -> Guard<Arc<Seating>> {
        self.seating.load()
    }

    /// What is kept for `worker`.
    pub fn find(&self, worker: Worker) -> Option<Arc<C>> {
        self.registry.read().cells.get(&worker).map(|(_, cell)| Arc::clone(cell))
    }

    /// What is kept for `worker`, which gets a slot if it has none; `None` when there is none left.
    pub fn find_or_add(&self, worker: Worker, make: impl FnOnce(u16) -> C) -> Option<Arc<C>> {
        let mut registry = self.registry.write();
        if let Some((_, cell)) = registry.cells.get(&worker) {
            return Some(Arc::clone(cell));
        }
        let slot = match registry.free.pop() {
            Some(slot) => slot,
            // At most 65,535 slots are opened, so the number fits.
            None if registry.opened < self.max_workers => {
                registry.opened += 1;
                (registry.opened - 1) as u16
            }
            None => return None,
        };
        self.publish(slot, worker);
        let cell = Arc::new(make(slot));
        registry.cells.insert(worker, (slot, Arc::clone(&cell)));
        Some(cell)
    }

    /// Forgets `worker`. Readers stop crediting its slot at once; the slot itself stays taken until
    /// [`Slots::recycle`].
    pub fn remove(&self, worker: Worker) -> Option<Arc<C>> {
        let mut registry = self.registry.write();
        let (slot, cell) = registry.cells.remove(&worker)?;
        // Within the registry's lock, so that a worker that comes back never has two seats.
        self.publish(slot, worker);
        Some(cell)
    }

    /// Frees the slot of a removed worker. All its bits must be gone from the nodes.
    pub fn recycle(&self, slot: u16) {
        self.registry.write().free.push(slot);
    }

    /// The workers, ascending.
    pub fn workers(&self) -> Vec<Worker> {
        self.registry.read().cells.keys().copied().collect()
    }

    /// The workers of an instance, ascending.
    pub fn ranks(&self, instance_id: InstanceId) -> Vec<Worker> {
        let range = Worker::new(instance_id, 0)..=Worker::new(instance_id, u32::MAX);
        self.registry.read().cells.range(range).map(|(worker, _)| *worker).collect()
    }

    /// What is kept for each worker.
    pub fn cells(&self) -> Vec<Arc<C>> {
        self.registry.read().cells.values().map(|(_, cell)| Arc::clone(cell)).collect()
    }

    /// Only called under the registry's write lock.
    fn publish(&self, slot: u16, worker: Worker) {
        let mut next = Seating::clone(&self.seating.load());
        next.turn(slot, worker);
        self.seating.store(Arc::new(next));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_that_changed_hands_is_nobodys() {
        let slots = Slots::<u16>::new(MAX);
        let (a, b) = (Worker::new(1, 0), Worker::new(2, 0));
        let before = slots.seating();
        assert_eq!(slots.find_or_add(a, |s| s).as_deref(), Some(&0));
        let with_a = slots.seating();
        assert_eq!(before.stable(&with_a, 0), None, "came during the walk");
        assert_eq!(with_a.stable(&with_a, 0), Some(a));
        assert_eq!(slots.find_or_add(b, |s| s).as_deref(), Some(&1));
        assert_eq!(with_a.stable(&slots.seating(), 0), Some(a), "others may come");
        slots.remove(a);
        assert_eq!(with_a.stable(&slots.seating(), 0), None, "left during the walk");
        slots.recycle(0);
        assert_eq!(slots.find_or_add(a, |s| s).as_deref(), Some(&0));
        assert_eq!(with_a.stable(&slots.seating(), 0), None, "left and came back");
        assert_eq!(slots.seating().stable(&slots.seating(), 0), Some(a));
    }

    const MAX: usize = super::super::types::MAX_WORKERS;

    #[test]
    fn every_slot_can_be_given_and_no_more() {
        let slots = Slots::<u16>::new(MAX);
        for n in 0..MAX {
            let worker = Worker::new(n as u64, 0);
            assert_eq!(slots.find_or_add(worker, |s| s).map(|s| usize::from(*s)), Some(n));
        }
        assert!(slots.find_or_add(Worker::new(u64::MAX, 0), |s| s).is_none());
        let seating = slots.seating();
        assert_eq!(seating.stable(&seating, 65_534), Some(Worker::new(65_534, 0)));
        slots.remove(Worker::new(7, 0));
        assert!(slots.find_or_add(Worker::new(u64::MAX, 0), |s| s).is_none(), "not recycled yet");
        slots.recycle(7);
        assert_eq!(slots.find_or_add(Worker::new(u64::MAX, 0), |s| s).as_deref(), Some(&7));
    }
}
