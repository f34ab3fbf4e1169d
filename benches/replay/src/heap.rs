//! Counts what is asked of the allocator. Requested bytes: the same whatever the allocator rounds to.

#![allow(unsafe_code, reason = "an allocator that counts, in front of the system's")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicIsize, Ordering::Relaxed};

static COUNTS: AtomicBool = AtomicBool::new(false);
static LIVE: AtomicIsize = AtomicIsize::new(0);
static PEAK: AtomicIsize = AtomicIsize::new(0);

/// The system's allocator with a counter. Make it a binary's `#[global_allocator]`.
pub struct Counting;

/// Counts from now on. Modes that measure time leave it off: a shared counter is not free.
pub fn count() {
    COUNTS.store(true, Relaxed);
}

/// Bytes now in use, of those asked for since [`count`].
pub fn live() -> isize {
    LIVE.load(Relaxed)
}

/// The most that [`live`] was since [`restart_peak`].
pub fn peak() -> isize {
    PEAK.load(Relaxed)
}

/// Forgets the peak so far.
pub fn restart_peak() {
    PEAK.store(live(), Relaxed);
}

fn add(bytes: isize) {
    if COUNTS.load(Relaxed) {
        let live = LIVE.fetch_add(bytes, Relaxed) + bytes;
        if bytes > 0 {
            PEAK.fetch_max(live, Relaxed);
        }
    }
}

// SAFETY: every call is passed on to the system's allocator unchanged; counting touches no memory of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as isize);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        add(-(layout.size() as isize));
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        add(size as isize - layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }
}
