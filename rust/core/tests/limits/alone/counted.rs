//! An allocator that counts, per thread: what an index says it occupies, checked from outside.

#![allow(unsafe_code, reason = "an allocator that counts, in front of the system's")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

pub struct Counting;

fn add(bytes: isize) {
    let live = LIVE.get() + bytes;
    LIVE.set(live);
    PEAK.set(PEAK.get().max(live));
}

// Safety: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as isize);
        // Safety: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        add(-(layout.size() as isize));
        // Safety: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both may be there for a moment.
        add(size as isize);
        add(-(layout.size() as isize));
        // Safety: the caller's promise.
        unsafe { System.realloc(at, layout, size) }
    }
}

/// Bytes that calls on this thread left allocated, and how many they had at most.
#[derive(Debug, Default, Clone, Copy)]
pub struct Owned {
    pub bytes: isize,
    pub peak: isize,
}

impl Owned {
    pub fn call<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let before = LIVE.get();
        PEAK.set(before);
        let value = call();
        self.peak = self.peak.max(self.bytes + PEAK.get() - before);
        self.bytes += LIVE.get() - before;
        value
    }
}
