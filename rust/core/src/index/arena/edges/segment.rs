//! One segment of the table: buckets of a cache line each.
//!
//! A slot is a tag and a child in one word, so it appears and disappears as a whole. An entry never
//! moves within its segment: it lies in the first bucket from its home on that had room when it came,
//! and each bucket it had to pass counts it. A reader goes on while that count is not 0, so it cannot
//! miss an entry that stays, whatever comes and goes around it.

use super::super::sync::atomic::AtomicU64;
use super::super::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// With the count, one cache line. Models have few entries and need small state.
pub const SLOTS: usize = if cfg!(loom) { 1 } else { 7 };

const VACANT: u64 = 0;

#[repr(align(64))]
pub struct Bucket {
    slots: [AtomicU64; SLOTS],
    /// Entries that lie behind this bucket and whose home is here or before.
    passed: AtomicU64,
}

impl Bucket {
    pub fn vacant() -> Self {
        Self { slots: std::array::from_fn(|_| AtomicU64::new(VACANT)), passed: AtomicU64::new(0) }
    }
}

/// Where an entry can go.
#[derive(Clone, Copy)]
pub struct Vacancy {
    slot: usize,
    /// Buckets between home and here.
    pub passed: usize,
}

fn word(tag: u32, child: u32) -> u64 {
    u64::from(tag) << 32 | u64::from(child)
}

/// The bucket that is `passed` behind the home of `tag`. Homes are the low bits of tags: the high ones
/// are equal within a segment.
#[inline]
pub fn bucket_of(buckets: &[Bucket], tag: u32, passed: usize) -> &Bucket {
    &buckets[(tag as usize).wrapping_add(passed) & (buckets.len() - 1)]
}

/// The first child under `tag` that `is_child` takes.
#[inline]
pub fn find(buckets: &[Bucket], tag: u32, mut is_child: impl FnMut(u32) -> bool) -> Option<u32> {
    for passed in 0..buckets.len() {
        let bucket = bucket_of(buckets, tag, passed);
        for slot in &bucket.slots {
            // Acquire: what was written of the child before it was entered here.
            let word = slot.load(Acquire);
            let child = word as u32;
            if (word >> 32) as u32 == tag && word != VACANT && is_child(child) {
                return Some(child);
            }
        }
        // Relaxed: an entry that was there before the reader came is counted by every value this word
        // has had since.
        if bucket.passed.load(Relaxed) == 0 {
            return None;
        }
    }
    None
}

/// Where an entry under `tag` would go; nowhere if all is full. Writer only, like all that follows.
pub fn vacancy(buckets: &[Bucket], tag: u32) -> Option<Vacancy> {
    (0..buckets.len()).find_map(|passed| {
        let slots = &bucket_of(buckets, tag, passed).slots;
        let slot = slots.iter().position(|slot| slot.load(Relaxed) == VACANT)?;
        Some(Vacancy { slot, passed })
    })
}

/// Enters what was found to have room.
pub fn fill(buckets: &[Bucket], tag: u32, child: u32, vacancy: Vacancy) {
    for before in 0..vacancy.passed {
        let passed = &bucket_of(buckets, tag, before).passed;
        // Before the entry, so that who knows of the entry goes on to it.
        passed.store(passed.load(Relaxed) + 1, Relaxed);
    }
    let slot = &bucket_of(buckets, tag, vacancy.passed).slots[vacancy.slot];
    debug_assert_eq!(slot.load(Relaxed), VACANT);
    // Release: the counts above, and what the caller wrote of the child.
    slot.store(word(tag, child), Release);
}

/// Takes an entry out. False if it is not there.
pub fn remove(buckets: &[Bucket], tag: u32, child: u32) -> bool {
    for at in 0..buckets.len() {
        let bucket = bucket_of(buckets, tag, at);
        if let Some(slot) = bucket.slots.iter().find(|slot| slot.load(Relaxed) == word(tag, child))
        {
            // Release: a slot that is used again continues in the same order.
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
