//! What is retired is not freed under a reader.

// Not modelled: what a look finds is what was there at that step.
use std::sync::atomic::AtomicU32;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicUsize;
use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use loom::thread;

use crate::arena::epoch::{Epochs, Retired, epochs, pin};
use crate::{Faults, NONE, explore};

const ALIVE: u32 = 1;
const DEAD: u32 = 2;

const FREED: &str = "freed under a pin";

/// Nodes of which one is current. Freeing writes to it: loom sees a look at the same time, the look
/// itself one that comes later.
struct Shared {
    nodes: [UnsafeCell<()>; 3],
    values: [AtomicU32; 3],
    current: AtomicUsize,
    is_watched: bool,
    faults: Faults,
}

// Safety: that nodes are not written while they are read is what the models check.
unsafe impl Sync for Shared {}

impl Shared {
    fn new(faults: Faults) -> Arc<Self> {
        Self::watched(faults, true)
    }

    /// `is_watched`: whether loom panics if a node is freed at the same time as it is looked at.
    fn watched(faults: Faults, is_watched: bool) -> Arc<Self> {
        Arc::new(Self {
            nodes: std::array::from_fn(|_| UnsafeCell::new(())),
            values: std::array::from_fn(|_| AtomicU32::new(ALIVE)),
            current: AtomicUsize::new(0),
            is_watched,
            faults,
        })
    }

    fn look(&self) {
        let at = self.current.load(Acquire);
        if self.is_watched {
            self.nodes[at].with(|_| ());
        }
        self.faults.check(self.values[at].load(Relaxed) == ALIVE, FREED);
    }

    fn replace(&self, next: usize, retired: &mut Retired<usize>) {
        retired.push(next - 1);
        self.current.store(next, Release);
    }

    fn free(&self, at: usize) {
        if self.is_watched {
            self.nodes[at].with_mut(|_| ());
        }
        self.values[at].store(DEAD, Relaxed);
    }
}

fn swap_and_retire(epochs: Epochs, shared: Arc<Shared>, looks: usize) {
    let epochs = Arc::new(epochs);
    let reader = {
        let (epochs, shared) = (epochs.clone(), shared.clone());
        thread::spawn(move || {
            let reader = epochs.enroll();
            for _ in 0..looks {
                let _pin = reader.pin();
                shared.look();
            }
        })
    };
    let mut retired = Retired::new();
    for next in 1..=2 {
        shared.replace(next, &mut retired);
        retired.collect(&epochs, |at| shared.free(at));
    }
    reader.join().unwrap();
    retired.collect(&epochs, |at| shared.free(at));
    assert!(retired.is_empty(), "without readers everything goes");
}

#[test]
fn nothing_is_freed_under_a_pin() {
    let faults = explore(3, |faults| swap_and_retire(Epochs::new(), Shared::new(faults), 1));
    assert_eq!(faults, NONE);
}

#[test]
fn nothing_is_freed_under_the_next_pin() {
    let faults = explore(3, |faults| swap_and_retire(Epochs::new(), Shared::new(faults), 2));
    assert_eq!(faults, NONE);
}

#[test]
fn without_the_readers_fence_it_is() {
    let faults = explore(3, |faults| {
        swap_and_retire(Epochs::without_fence(), Shared::watched(faults, false), 1);
    });
    assert_eq!(faults, [FREED].into());
}

/// A writer of another index ends an epoch between unlinking and freeing.
#[test]
fn writers_of_one_domain_do_not_free_for_each_other() {
    let faults = explore(2, |faults| {
        let (epochs, shared) = (Arc::new(Epochs::new()), Shared::new(faults));
        let other = {
            let epochs = epochs.clone();
            thread::spawn(move || {
                let mut retired = Retired::new();
                retired.push(());
                retired.collect(&epochs, |()| ());
            })
        };
        let reader = {
            let (epochs, shared) = (epochs.clone(), shared.clone());
            thread::spawn(move || {
                let reader = epochs.enroll();
                let _pin = reader.pin();
                shared.look();
            })
        };
        let mut retired = Retired::new();
        shared.replace(1, &mut retired);
        retired.collect(&epochs, |at| shared.free(at));
        reader.join().unwrap();
        other.join().unwrap();
    });
    assert_eq!(faults, NONE);
}

/// The way the index uses it: the process's domain, a slot per thread, given back at its end.
#[test]
fn threads_hand_over_their_slots() {
    let faults = explore(2, |faults| {
        let shared = Shared::new(faults);
        let read = |shared: Arc<Shared>| {
            move || {
                let _pin = pin();
                let _nested = pin();
                shared.look();
            }
        };
        let first = thread::spawn(read(shared.clone()));
        let mut retired = Retired::new();
        shared.replace(1, &mut retired);
        retired.collect(epochs(), |at| shared.free(at));
        first.join().unwrap();
        let second = thread::spawn(read(shared.clone()));
        shared.replace(2, &mut retired);
        retired.collect(epochs(), |at| shared.free(at));
        second.join().unwrap();
        retired.collect(epochs(), |at| shared.free(at));
        assert!(retired.is_empty());
    });
    assert_eq!(faults, NONE);
}
