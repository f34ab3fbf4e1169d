//! A run grows at its end while readers compare it: what they read is complete, and nobody is credited
//! with blocks that came after.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use loom::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64};
use loom::thread;

use crate::arena::epoch::{Retired, epochs, pin};
use crate::{Faults, NONE, explore};

/// Holders by bit: who holds the whole run.
const BOTH: u64 = 0b11;
const APPENDING: u64 = 0b01;

const INCOMPLETE: &str = "read what was not written";
const TOO_WIDE: &str = "credited with a block that came later";

type Labels = Vec<UnsafeCell<u64>>;

/// What a run shows to readers.
struct Run {
    len: AtomicU32,
    cover: AtomicU64,
    labels: AtomicPtr<Labels>,
}

// Safety: that labels are not written while they are read is what the models check.
unsafe impl Sync for Run {}
// Safety: as above.
unsafe impl Send for Run {}

/// The rules of order, each of which a model can break.
#[derive(Clone, Copy)]
struct Rules {
    reader_loads_len_before_labels: bool,
    reader_loads_len_before_cover: bool,
    writer_narrows_before_it_raises: bool,
}

const KEPT: Rules = Rules {
    reader_loads_len_before_labels: true,
    reader_loads_len_before_cover: true,
    writer_narrows_before_it_raises: true,
};

fn label(at: usize) -> u64 {
    100 + at as u64
}

fn labels(filled: usize, capacity: usize) -> *mut Labels {
    let cells = (0..capacity).map(|at| UnsafeCell::new(if at < filled { label(at) } else { 0 }));
    Box::into_raw(Box::new(cells.collect()))
}

impl Run {
    /// One block that both hold, room for two.
    fn new() -> Self {
        Self {
            len: AtomicU32::new(1),
            cover: AtomicU64::new(BOTH),
            labels: AtomicPtr::new(labels(1, 2)),
        }
    }

    /// Appends a block that only one holds. The array is replaced when it is full.
    fn append(&self, rules: Rules, retired: &mut Retired<*mut Labels>) {
        let (at, mut array) = (self.len.load(Relaxed) as usize, self.labels.load(Relaxed));
        // Safety: only the writer frees arrays, and this one is current.
        if at == unsafe { &*array }.len() {
            retired.push(array);
            array = labels(at, at + 1);
            self.labels.store(array, Release);
        }
        // Safety: as above.
        let cells: &Labels = unsafe { &*array };
        // Safety: readers stay below `len`; loom checks that nobody reads meanwhile.
        cells[at].with_mut(|cell| unsafe { *cell = label(at) });
        if rules.writer_narrows_before_it_raises {
            self.cover.store(APPENDING, Relaxed);
        }
        self.len.store(at as u32 + 1, Release);
        if !rules.writer_narrows_before_it_raises {
            self.cover.store(APPENDING, Relaxed);
        }
    }

    fn read(&self, rules: Rules, faults: &Faults) {
        let _pin = pin();
        let mut early_labels = std::ptr::null_mut();
        if !rules.reader_loads_len_before_labels {
            early_labels = self.labels.load(Acquire);
        }
        let early_cover = self.cover.load(Acquire);
        let len = self.len.load(Acquire) as usize;
        let late_cover = self.cover.load(Acquire);
        let array = if early_labels.is_null() { self.labels.load(Acquire) } else { early_labels };
        // Safety: arrays are freed after the pin.
        let array: &Labels = unsafe { &*array };
        for at in 0..len {
            // Safety: loom checks that nobody writes meanwhile.
            let read = array.get(at).map(|cell| cell.with(|cell| unsafe { *cell }));
            faults.check(read == Some(label(at)), INCOMPLETE);
        }
        let cover = if rules.reader_loads_len_before_cover { late_cover } else { early_cover };
        faults.check(len == 1 || cover == APPENDING, TOO_WIDE);
    }
}

fn append_beside_a_reader(rules: Rules, appends: usize, faults: Faults) {
    let run = Arc::new(Run::new());
    let reader = {
        let run = run.clone();
        thread::spawn(move || run.read(rules, &faults))
    };
    let free = |array| {
        // Safety: made by `labels`, retired once.
        drop(unsafe { Box::from_raw(array) });
    };
    let mut retired = Retired::new();
    for _ in 0..appends {
        run.append(rules, &mut retired);
        retired.collect(epochs(), free);
    }
    reader.join().unwrap();
    retired.collect(epochs(), free);
    free(run.labels.load(Relaxed));
}

#[test]
fn what_is_read_is_complete() {
    assert_eq!(explore(3, |faults| append_beside_a_reader(KEPT, 1, faults)), NONE);
}

#[test]
fn what_is_read_is_complete_while_the_array_grows() {
    assert_eq!(explore(3, |faults| append_beside_a_reader(KEPT, 2, faults)), NONE);
}

#[test]
fn labels_loaded_before_the_length_are_too_short() {
    let rules = Rules { reader_loads_len_before_labels: false, ..KEPT };
    let faults = explore(3, move |faults| append_beside_a_reader(rules, 2, faults));
    assert_eq!(faults, [INCOMPLETE].into());
}

#[test]
fn cover_loaded_before_the_length_is_too_wide() {
    let rules = Rules { reader_loads_len_before_cover: false, ..KEPT };
    let faults = explore(3, move |faults| append_beside_a_reader(rules, 1, faults));
    assert_eq!(faults, [TOO_WIDE].into());
}

#[test]
fn cover_narrowed_after_the_length_is_too_wide() {
    let rules = Rules { writer_narrows_before_it_raises: false, ..KEPT };
    let faults = explore(3, move |faults| append_beside_a_reader(rules, 1, faults));
    assert_eq!(faults, [TOO_WIDE].into());
}
