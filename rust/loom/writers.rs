//! Writers hand the lock on: what one published is there for the next, and for readers.

use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use loom::sync::atomic::{AtomicBool, AtomicUsize};
use loom::sync::{Arc, Mutex};
use loom::thread;

use crate::arena::edges::{Edges, Writing};
use crate::arena::epoch::pin;
use crate::{Faults, NONE, explore};

const MISSED: &str = "missed what was published";
const LOST: &str = "a writer did not see the one before it";

fn insert(edges: &Edges, writing: &mut Writing, child: u32) {
    edges.insert(writing, child, child, u64::from(child), child);
    edges.collect(writing);
}

fn is_found(edges: &Edges, child: u32) -> bool {
    let pin = pin();
    edges.find(&pin, child, child, u64::from(child), |found| found == child).is_some()
}

/// Two publishers, whose children share a segment of the table, and a reader. Whose call returned finds
/// what it stored; who has the lock finds all that was stored before; a reader that finds the later child
/// finds the earlier one.
#[test]
fn what_one_publishes_the_next_and_readers_see() {
    let faults = explore(2, |faults| {
        let (edges, writing) = Edges::new(0);
        // The table, and which child was stored first.
        let shared = Arc::new((edges, Mutex::new((writing, 0))));
        let publish = |shared: &(Edges, Mutex<(Writing, u32)>), child: u32, faults: &Faults| {
            let (edges, writer) = shared;
            {
                let mut writer = writer.lock().unwrap();
                let (writing, first) = &mut *writer;
                faults.check(*first == 0 || is_found(edges, *first), MISSED);
                insert(edges, writing, child);
                if *first == 0 {
                    *first = child;
                }
            }
            faults.check(is_found(edges, child), MISSED);
        };
        let other = {
            let (shared, faults) = (shared.clone(), faults.clone());
            thread::spawn(move || publish(&shared, 1, &faults))
        };
        let reader = {
            let shared = shared.clone();
            thread::spawn(move || {
                let later = is_found(&shared.0, 2);
                (later, is_found(&shared.0, 1))
            })
        };
        publish(&shared, 2, &faults);
        other.join().unwrap();
        let (later, earlier) = reader.join().unwrap();
        let first = shared.1.lock().unwrap().1;
        faults.check(first == 2 || !later || earlier, MISSED);
        faults.check(is_found(&shared.0, 1) && is_found(&shared.0, 2), MISSED);
        shared.0.collect(&mut shared.1.lock().unwrap().0);
    });
    assert_eq!(faults, NONE);
}

/// A lock in small: who finds it taken gives up. Giving it back is what hands on.
struct Lock {
    is_taken: AtomicBool,
    is_handed_on: bool,
}

impl Lock {
    fn with(&self, work: impl FnOnce()) -> bool {
        if self.is_taken.compare_exchange(false, true, Acquire, Relaxed).is_err() {
            return false;
        }
        work();
        self.is_taken.store(false, if self.is_handed_on { Release } else { Relaxed });
        true
    }
}

fn count_behind_a_lock(is_handed_on: bool, faults: Faults) {
    let lock = Lock { is_taken: AtomicBool::new(false), is_handed_on };
    let shared = Arc::new((lock, AtomicUsize::new(0)));
    // What only the writer reads and writes: no order of its own.
    let call = |(lock, count): &(Lock, AtomicUsize)| {
        usize::from(lock.with(|| count.store(count.load(Relaxed) + 1, Relaxed)))
    };
    let other = {
        let shared = shared.clone();
        thread::spawn(move || call(&shared))
    };
    let own = call(&shared);
    let calls = own + other.join().unwrap();
    faults.check(shared.1.load(Relaxed) == calls, LOST);
}

#[test]
fn the_next_writer_sees_what_the_last_one_knew() {
    assert_eq!(explore(3, |faults| count_behind_a_lock(true, faults)), NONE);
}

#[test]
fn a_lock_that_hands_nothing_on_loses_it() {
    assert_eq!(explore(3, |faults| count_behind_a_lock(false, faults)), [LOST].into());
}
