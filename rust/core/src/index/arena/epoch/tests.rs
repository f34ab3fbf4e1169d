//! One domain per test, so that tests do not hold back each other.

use std::sync::atomic::AtomicBool;
use std::sync::mpsc::channel;
use std::thread;

use super::*;

/// Typed, for other crates compare with `u32` too.
const NONE: [u32; 0] = [];

fn freed(retired: &mut Retired<u32>, epochs: &Epochs) -> Vec<u32> {
    let mut out = Vec::new();
    retired.collect(epochs, |item| out.push(item));
    out
}

fn slots_used(epochs: &Epochs) -> usize {
    let (mut count, mut page) = (0, epochs.first.load(Acquire));
    while !page.is_null() {
        // Safety: pages live as long as the domain.
        let (used, next) = unsafe { (&(*page).used, &(*page).next) };
        count += used.load(Relaxed);
        page = next.load(Acquire);
    }
    count
}

#[test]
fn frees_at_once_without_readers_and_in_order() {
    let (epochs, mut retired) = (Epochs::new(), Retired::new());
    assert_eq!(freed(&mut retired, &epochs), NONE);
    retired.push(1);
    retired.push(2);
    assert_eq!(retired.len(), 2);
    assert_eq!(freed(&mut retired, &epochs), [1, 2]);
    assert!(retired.is_empty());
}

#[test]
fn keeps_what_a_pin_may_see_and_nothing_else() {
    let (epochs, mut retired) = (Epochs::new(), Retired::new());
    let (early, late) = (epochs.enroll(), epochs.enroll());
    retired.push(1);
    let old = early.pin();
    assert_eq!(freed(&mut retired, &epochs), NONE);
    retired.push(2);
    assert_eq!(freed(&mut retired, &epochs), NONE);
    let young = late.pin();
    retired.push(3);
    assert_eq!(freed(&mut retired, &epochs), NONE);
    drop(old);
    assert_eq!(freed(&mut retired, &epochs), [1, 2], "a pin holds back later items only");
    drop(young);
    assert_eq!(freed(&mut retired, &epochs), [3]);
}

#[test]
fn nested_pins_stay_as_old_as_the_first() {
    let (epochs, mut retired) = (Epochs::new(), Retired::new());
    let reader = epochs.enroll();
    let outer = reader.pin();
    retired.push(1);
    assert_eq!(freed(&mut retired, &epochs), NONE);
    let inner = reader.pin();
    drop(outer);
    assert_eq!(freed(&mut retired, &epochs), NONE, "the pin that is left is as old as the outer");
    drop(inner);
    assert_eq!(freed(&mut retired, &epochs), [1]);
}

#[test]
fn slots_are_given_back_when_the_last_pin_ends() {
    let epochs = Epochs::new();
    drop(epochs.enroll());
    let reader = epochs.enroll();
    assert_eq!(slots_used(&epochs), 1);
    let pin = reader.pin();
    drop(reader);
    let other = epochs.enroll();
    assert_eq!(slots_used(&epochs), 2, "a pinned slot has an owner");
    drop(pin);
    let again = epochs.enroll();
    assert_eq!(slots_used(&epochs), 2);
    drop((other, again));
}

#[test]
fn pages_grow_and_every_slot_counts() {
    let (epochs, mut retired) = (Epochs::new(), Retired::new());
    let readers: Vec<_> = (0..3 * PAGE_SLOTS + 1).map(|_| epochs.enroll()).collect();
    assert_eq!(slots_used(&epochs), readers.len());
    for reader in &readers {
        let pin = reader.pin();
        retired.push(7);
        assert_eq!(freed(&mut retired, &epochs), NONE);
        drop(pin);
        assert_eq!(freed(&mut retired, &epochs), [7]);
    }
}

#[test]
fn threads_of_the_process_pin_in_one_domain() {
    let mut retired = Retired::new();
    let ((entered, wait_entered), (leave, wait_leave)) = (channel(), channel());
    let thread = thread::spawn(move || {
        let _pin = pin();
        entered.send(()).expect("the test waits");
        wait_leave.recv().expect("the test sends");
    });
    wait_entered.recv().expect("the thread sends");
    retired.push(1);
    assert_eq!(freed(&mut retired, epochs()), NONE);
    leave.send(()).expect("the thread waits");
    thread.join().expect("the thread does not panic");
    // Other tests pin in this domain too, but none for ever.
    while freed(&mut retired, epochs()).is_empty() {
        thread::yield_now();
    }
}

#[test]
fn an_emptied_queue_gives_its_memory_back() {
    let (epochs, mut retired) = (Epochs::new(), Retired::new());
    (0..10_000).for_each(|item| retired.push(item));
    assert!(retired.bytes() >= 40_000);
    assert_eq!(freed(&mut retired, &epochs).len(), 10_000);
    assert!(retired.bytes() < 2_000, "{}", retired.bytes());
    retired.push(1);
    let mut drained = 0;
    retired.drain_all(|_| drained += 1);
    assert_eq!((drained, retired.len()), (1, 0));
}

#[test]
fn readers_never_see_what_is_freed() {
    const DEAD: u64 = u64::MAX;
    let (epochs, over) = (Epochs::new(), AtomicBool::new(false));
    let cells: Vec<AtomicU64> = (0..64).map(AtomicU64::new).collect();
    let current = AtomicUsize::new(0);
    let looks = AtomicUsize::new(0);
    thread::scope(|scope| {
        let look = || {
            let reader = epochs.enroll();
            while !over.load(Relaxed) {
                let _pin = reader.pin();
                let at = current.load(Acquire);
                for _ in 0..4 {
                    assert_ne!(cells[at].load(Relaxed), DEAD, "freed under a pin");
                }
                looks.fetch_add(1, Relaxed);
            }
        };
        (0..3).for_each(|_| drop(scope.spawn(look)));
        let (mut retired, mut spare) = (Retired::new(), (1..64).collect::<VecDeque<usize>>());
        let mut round = 0;
        while round < 100_000 || (round < 10_000_000 && looks.load(Relaxed) < 10_000) {
            round += 1;
            let Some(next) = spare.pop_front() else {
                retired.collect(&epochs, |at: usize| {
                    cells[at].store(DEAD, Relaxed);
                    spare.push_back(at);
                });
                thread::yield_now();
                continue;
            };
            cells[next].store(1, Relaxed);
            retired.push(current.swap(next, AcqRel));
            retired.collect(&epochs, |at| {
                cells[at].store(DEAD, Relaxed);
                spare.push_back(at);
            });
        }
        over.store(true, Relaxed);
    });
    assert!(looks.load(Relaxed) > 0);
}
