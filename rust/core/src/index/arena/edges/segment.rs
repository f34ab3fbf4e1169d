//! One segment of the table: buckets of a cache line each.
//!
//! A slot is a tag and a child in one word, so it appears and disappears atomically. An entry never
//! moves within its segment: it is stored in the first bucket from its home on that had room at
//! insertion, and each bucket that it had to pass counts it. A reader continues while that count is
//! not 0, so it can't miss an entry that stays, whatever changes around it.

use super::super::sync::atomic::AtomicU64;
use super::super::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// With the count, one cache line. Models use few entries to keep their state small.
pub const SLOTS: usize = if cfg!(loom) { 1 } else { 7 };

const VACANT: u64 = 0;

#[repr(align(64))]
pub struct Bucket {
    slots: [AtomicU64; SLOTS],
    /// Entries stored after this bucket with their home here or before.
    passed: AtomicU64,
}

impl Bucket {
    pub fn vacant() -> Self {
        Self { slots: std::array::from_fn(|_| AtomicU64::new(VACANT)), passed: AtomicU64::new(0) }
    }
}

/// A free slot for an entry.
#[derive(Clone, Copy)]
pub struct Vacancy {
    slot: usize,
    /// Buckets between its home and this one.
    pub passed: usize,
}

fn word(tag: u32, child: u32) -> u64 {
    u64::from(tag) << 32 | u64::from(child)
}

/// The bucket `passed` places after the home of `tag`. Homes are the low bits of tags, because the
/// high ones are equal within a segment.
#[inline]
pub fn bucket_of(buckets: &[Bucket], tag: u32, passed: usize) -> &Bucket {
    &buckets[(tag as usize).wrapping_add(passed) & (buckets.len() - 1)]
}

/// The first child under `tag` that `is_child` accepts.
#[inline]
pub fn find(buckets: &[Bucket], tag: u32, mut is_child: impl FnMut(u32) -> bool) -> Option<u32> {
    for passed in 0..buckets.len() {
        let bucket = bucket_of(buckets, tag, passed);
        for slot in &bucket.slots {
            // Acquire: everything written about the child before its insertion.
            let word = slot.load(Acquire);
            let child = word as u32;
            if (word >> 32) as u32 == tag && word != VACANT && is_child(child) {
                return Some(child);
            }
        }
        // Relaxed: every value of this word since the reader started counts the entries from
        // before.
        if bucket.passed.load(Relaxed) == 0 {
            return None;
        }
    }
    None
}

/// The slot for an entry under `tag`; `None` if all are full. Writer only, like all functions
/// below.
pub fn vacancy(buckets: &[Bucket], tag: u32) -> Option<Vacancy> {
    (0..buckets.len()).find_map(|passed| {
        let slots = &bucket_of(buckets, tag, passed).slots;
        let slot = slots.iter().position(|slot| slot.load(Relaxed) == VACANT)?;
        Some(Vacancy { slot, passed })
    })
}

/// Fills a free slot.
pub fn fill(buckets: &[Bucket], tag: u32, child: u32, vacancy: Vacancy) {
    for before in 0..vacancy.passed {
        let passed = &bucket_of(buckets, tag, before).passed;
        // Before the entry, so that a reader that knows the entry searches on to it.
        passed.store(passed.load(Relaxed) + 1, Relaxed);
    }
    let slot = &bucket_of(buckets, tag, vacancy.passed).slots[vacancy.slot];
    debug_assert_eq!(slot.load(Relaxed), VACANT);
    // Release: the counts above, and the caller's writes to the child.
    slot.store(word(tag, child), Release);
}

/// Removes an entry. False if it does not exist.
pub fn remove(buckets: &[Bucket], tag: u32, child: u32) -> bool {
    for at in 0..buckets.len() {
        let bucket = bucket_of(buckets, tag, at);
        if let Some(slot) = bucket.slots.iter().find(|slot| slot.load(Relaxed) == word(tag, child))
        {
            // Release: a reused slot continues the same order.
            slot.store(VACANT, Release);
            for before in 0..at {
                let passed = &bucket_of(buckets, tag, before).passed;
                debug_assert!(passed.load(Relaxed) > 0);
                passed.store(passed.load(Relaxed) - 1, Relaxed);
            }
            return true;
        }
        if bucket.passed.load(Relaxed) == 0 {
            return false;
        }
    }
    false
}

/// All entries: tags and children.
pub fn entries(buckets: &[Bucket]) -> impl Iterator<Item = (u32, u32)> {
    let words = buckets.iter().flat_map(|bucket| &bucket.slots).map(|slot| slot.load(Relaxed));
    words.filter(|&word| word != VACANT).map(|word| ((word >> 32) as u32, word as u32))
}
