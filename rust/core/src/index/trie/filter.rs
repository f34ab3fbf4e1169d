//! An approximate multiset of names: it may report a name that is absent, but never misses a
//! present one.
//!
//! Hash bits 63..54 choose one of [`SEGMENTS`] segments, bits 53..22 are the *fingerprint*, the
//! only part of a name that is kept. A segment is a ring of cache-line buckets. A fingerprint is
//! stored in the first bucket with room from its *home* on. The home follows from the fingerprint
//! alone, so a segment is resized without the names, and no other segment is touched.

use crate::index::arena::runs::prefetch;

/// Segments of the directory; a resize moves one segment, so it costs 1/1024 of the whole.
const SEGMENTS: usize = 1 << SEGMENT_BITS;
const SEGMENT_BITS: u32 = 10;
const FINGERPRINT_BITS: u32 = 32;

/// Fingerprints in a bucket: one cache line.
const ENTRIES: usize = 16;
/// An `overflow` at this value has lost its count, and stays until the next resize.
const OVERFLOW_MAX: u8 = u8::MAX;

/// Load in percent above which a segment grows. Fuller rings overflow across several buckets.
const LOAD_MAX: usize = 88;
/// Load in percent below which it shrinks: half, so that growing and shrinking never alternate.
const LOAD_MIN: usize = LOAD_MAX / 2;
/// Load in percent after shrinking: a third away from either limit.
const LOAD_SHRUNK: usize = 66;
/// A segment of at most this many buckets keeps them until its last name is removed.
const BUCKETS_KEPT: usize = 4;

/// Up to [`ENTRIES`] fingerprints, packed at the front; 0, which is not a valid fingerprint, marks
/// a free place.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Bucket([u32; ENTRIES]);

/// A bucket's counters, stored separately: small enough to stay in the cache.
#[derive(Clone, Copy, Default)]
struct Count {
    len: u8,
    /// Number of entries with their home here or earlier that are stored after this bucket: 0 ends
    /// every search.
    overflow: u8,
}

impl Bucket {
    const EMPTY: Self = Self([0; ENTRIES]);

    /// Whether an entry equals `fingerprint`; without an early exit the loop compiles to four
    /// vector comparisons.
    #[inline]
    fn has(&self, fingerprint: u32) -> bool {
        self.0.iter().fold(false, |found, entry| found | (*entry == fingerprint))
    }
}

impl Count {
    #[inline]
    fn is_full(self) -> bool {
        usize::from(self.len) == ENTRIES
    }

    /// Counts one more entry stored after this bucket; true if this loses the count.
    #[inline]
    fn raise_overflow(&mut self) -> bool {
        let overflow = self.overflow;
        self.overflow = overflow.saturating_add(1);
        overflow == OVERFLOW_MAX - 1
    }

    fn lower_overflow(&mut self) {
        debug_assert!(self.overflow > 0, "an entry was found beyond a bucket that let none pass");
        if self.overflow != OVERFLOW_MAX {
            self.overflow = self.overflow.saturating_sub(1);
        }
    }
}

/// A ring of buckets for the names of one directory slot.
#[derive(Clone, Default)]
struct Segment {
    buckets: Box<[Bucket]>,
    /// One per bucket.
    counts: Box<[Count]>,
    /// Entries in all buckets.
    len: u32,
}

impl Segment {
    #[inline]
    fn home(&self, fingerprint: u32) -> usize {
        ((u64::from(fingerprint) * self.buckets.len() as u64) >> FINGERPRINT_BITS) as usize
    }

    #[inline]
    fn next(&self, bucket: usize) -> usize {
        if bucket + 1 == self.buckets.len() { 0 } else { bucket + 1 }
    }

    /// The bucket with an entry equal to `fingerprint`.
    #[inline]
    fn find(&self, fingerprint: u32) -> Option<usize> {
        let mut at = self.home(fingerprint);
        // Once around at most: buckets that lost their count never end a search.
        for _ in 0..self.buckets.len() {
            if self.buckets[at].has(fingerprint) {
                return Some(at);
            }
            if self.counts[at].overflow == 0 {
                return None;
            }
            at = self.next(at);
        }
        None
    }

    /// Whether two entries equal `fingerprint`.
    fn has_two(&self, fingerprint: u32) -> bool {
        let mut at = self.home(fingerprint);
        let mut found = 0;
        for _ in 0..self.buckets.len() {
            let Bucket(entries) = &self.buckets[at];
            found += entries.iter().filter(|entry| **entry == fingerprint).count();
            if found > 1 {
                return true;
            }
            if self.counts[at].overflow == 0 {
                return false;
            }
            at = self.next(at);
        }
        false
    }

    /// Inserts an entry; there must be room. True if a bucket lost its count.
    #[inline]
    fn place(&mut self, fingerprint: u32) -> bool {
        let mut at = self.home(fingerprint);
        let mut is_count_lost = false;
        while self.counts[at].is_full() {
            is_count_lost |= self.counts[at].raise_overflow();
            at = self.next(at);
        }
        let count = &mut self.counts[at];
        self.buckets[at].0[usize::from(count.len)] = fingerprint;
        count.len += 1;
        is_count_lost
    }

    /// Removes one entry equal to `fingerprint`: any of them, since equal ones share their home.
    fn take(&mut self, fingerprint: u32) -> bool {
        let Some(found) = self.find(fingerprint) else { return false };
        let mut at = self.home(fingerprint);
        while at != found {
            self.counts[at].lower_overflow();
            at = self.next(at);
        }
        let Bucket(entries) = &mut self.buckets[found];
        let entry = entries.iter().position(|entry| *entry == fingerprint).unwrap_or(0);
        let count = &mut self.counts[found];
        count.len -= 1;
        let last = usize::from(count.len);
        entries[entry] = entries[last];
        entries[last] = 0;
        self.len -= 1;
        true
    }

    #[inline]
    fn is_load_above(&self, len: usize, percent: usize) -> bool {
        len * 100 > self.buckets.len() * ENTRIES * percent
    }

    /// Number of buckets after the next growth, an eighth to a quarter more. The directory slot
    /// decides how much, so that segments of equal load do not all grow within the same few
    /// inserts.
    fn grown(&self, slot: usize) -> usize {
        let len = self.buckets.len();
        len + (len * (SEGMENTS + slot) / (8 * SEGMENTS)).max(1)
    }

    #[cold]
    #[inline(never)]
    fn resize(&mut self, buckets: usize) {
        let old = std::mem::replace(&mut self.buckets, vec![Bucket::EMPTY; buckets].into());
        let counts = vec![Count::default(); buckets];
        let counts = std::mem::replace(&mut self.counts, counts.into());
        for (Bucket(entries), count) in old.iter().zip(&counts) {
            for fingerprint in &entries[..usize::from(count.len)] {
                // Counts are lost here only to many equal names, which no size spreads.
                self.place(*fingerprint);
            }
        }
    }
}

/// An approximate multiset of 64-bit names, for one writer.
///
/// # Consistency
/// A name inserted more often than removed is always found, provided that every removed name had
/// been inserted. Any other name is reported with a probability of about `len / 2^42`.
///
/// # Cost
/// About 5.2 bytes per name (up to 9 after removals) and 24 KiB; nothing when empty. A call touches
/// one or two cache lines besides the directory. An insert or a remove may also resize one segment:
/// 1/1024 of the names move. Hundreds of copies of one name fill adjacent buckets, and slow down
/// the names with their home there.
pub(super) struct NameFilter {
    /// Empty, or [`SEGMENTS`] long.
    segments: Vec<Segment>,
    len: usize,
    /// Buckets of all segments.
    buckets: usize,
    key: u64,
    multiplier: u64,
}

impl NameFilter {
    /// An empty filter, without an allocation; `hash_seed` keys the hash, so that clients can't aim
    /// names at one bucket.
    pub(super) fn new(hash_seed: u64) -> Self {
        let key = fold(hash_seed ^ 0x6a09_e667_f3bc_c908, 0xbb67_ae85_84ca_a73b);
        // Odd, so that no low bits of the name are lost.
        let multiplier = fold(key ^ 0x3c6e_f372_fe94_f82b, 0xa54f_f53a_5f1d_36f1) | 1;
        Self { segments: Vec::new(), len: 0, buckets: 0, key, multiplier }
    }

    /// Whether `name` may be in the filter.
    #[inline]
    pub(super) fn contains(&self, name: u64) -> bool {
        let (slot, fingerprint) = self.locate(name);
        self.segments.get(slot).is_some_and(|it| it.find(fingerprint).is_some())
    }

    /// Whether `name` may have been inserted twice more often than removed.
    pub(super) fn contains_twice(&self, name: u64) -> bool {
        let (slot, fingerprint) = self.locate(name);
        self.segments.get(slot).is_some_and(|it| it.has_two(fingerprint))
    }

    /// Prefetches the data that a later call with `name` reads first.
    #[inline]
    pub(super) fn prefetch(&self, name: u64) {
        let (slot, fingerprint) = self.locate(name);
        if let Some(segment) = self.segments.get(slot)
            && let Some(bucket) = segment.buckets.get(segment.home(fingerprint))
        {
            prefetch(bucket);
        }
    }

    /// Adds one copy of `name`.
    pub(super) fn insert(&mut self, name: u64) {
        let (slot, fingerprint) = self.locate(name);
        self.add(slot, fingerprint);
    }

    /// Adds one copy of `name`; returns whether the filter may have held one before. Combines
    /// `contains` and `insert` at the cost of one memory access.
    pub(super) fn insert_new(&mut self, name: u64) -> bool {
        let (slot, fingerprint) = self.locate(name);
        let was_held = self.segments.get(slot).is_some_and(|it| it.find(fingerprint).is_some());
        self.add(slot, fingerprint);
        was_held
    }

    /// Removes one copy of `name`. False if there was none: then nothing has changed, and the
    /// caller's state is inconsistent.
    pub(super) fn remove(&mut self, name: u64) -> bool {
        let (slot, fingerprint) = self.locate(name);
        let Some(segment) = self.segments.get_mut(slot) else { return false };
        if !segment.take(fingerprint) {
            return false;
        }
        self.len -= 1;
        let (len, before) = (segment.len as usize, segment.buckets.len());
        if self.len == 0 {
            self.segments = Vec::new();
            self.buckets = 0;
        } else if len == 0 || before > BUCKETS_KEPT && !segment.is_load_above(len, LOAD_MIN) {
            segment.resize((len * 100).div_ceil(ENTRIES * LOAD_SHRUNK));
            self.buckets -= before - segment.buckets.len();
        }
        true
    }

    /// Names in the filter, including copies.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Bytes allocated.
    pub(super) fn bytes(&self) -> usize {
        self.segments.capacity() * size_of::<Segment>()
            + self.buckets * (size_of::<Bucket>() + size_of::<Count>())
    }

    fn add(&mut self, slot: usize, fingerprint: u32) {
        if self.segments.is_empty() {
            self.segments = vec![Segment::default(); SEGMENTS];
        }
        let segment = &mut self.segments[slot];
        let before = segment.buckets.len();
        let len = segment.len as usize + 1;
        if segment.is_load_above(len, LOAD_MAX) {
            segment.resize(segment.grown(slot));
        }
        // More room prevents lost counts, except with equal names. Below this load it would be
        // wasted, and the segment would soon shrink again.
        if segment.place(fingerprint) && segment.is_load_above(len, LOAD_SHRUNK) {
            segment.resize(segment.grown(slot));
        }
        segment.len += 1;
        self.len += 1;
        self.buckets += segment.buckets.len() - before;
    }

    /// Directory slot and fingerprint of a name.
    #[inline]
    fn locate(&self, name: u64) -> (usize, u32) {
        // The second round improves the top bits, which after the first depend little on the names'
        // own top bits.
        let hash = fold(fold(name ^ self.key, self.multiplier), 0x9e37_79b9_7f4a_7c15);
        let slot = hash >> (u64::BITS - SEGMENT_BITS);
        let bits = (hash << SEGMENT_BITS >> (u64::BITS - FINGERPRINT_BITS)) as u32;
        // 0 marks a free place.
        (slot as usize, bits.max(1))
    }
}

/// Both halves of the 128-bit product, combined.
#[inline]
fn fold(value: u64, multiplier: u64) -> u64 {
    let wide = u128::from(value) * u128::from(multiplier);
    wide as u64 ^ (wide >> 64) as u64
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// A fixed sequence of random numbers.
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^ mixed >> 31
        }

        fn below(&mut self, bound: usize) -> usize {
            (self.next() % bound as u64) as usize
        }
    }

    /// Checks every bucket: counters match the content, and every overflow count is exact unless it
    /// was lost.
    fn check(filter: &NameFilter) {
        assert!(filter.segments.is_empty() || filter.segments.len() == SEGMENTS);
        assert_eq!(filter.segments.is_empty(), filter.len == 0);
        let (mut entries, mut bytes) = (0, filter.segments.len() * size_of::<Segment>());
        for segment in &filter.segments {
            bytes += std::mem::size_of_val(&*segment.buckets);
            bytes += std::mem::size_of_val(&*segment.counts);
            let mut passed = vec![0_usize; segment.buckets.len()];
            let mut len = 0;
            for (at, bucket) in segment.buckets.iter().enumerate() {
                let own = usize::from(segment.counts[at].len);
                assert!(bucket.0[..own].iter().all(|&entry| entry != 0));
                assert!(bucket.0[own..].iter().all(|&entry| entry == 0));
                len += own;
                for entry in &bucket.0[..own] {
                    let mut home = segment.home(*entry);
                    while home != at {
                        passed[home] += 1;
                        home = segment.next(home);
                    }
                }
            }
            for (count, passed) in segment.counts.iter().zip(passed) {
                let overflow = usize::from(count.overflow);
                assert!(overflow == passed || count.overflow == OVERFLOW_MAX);
            }
            assert_eq!(segment.len as usize, len);
            assert!(!segment.is_load_above(len, LOAD_MAX));
            entries += len;
        }
        assert_eq!(filter.len(), entries);
        assert_eq!(filter.bytes(), bytes);
    }

    #[test]
    fn answers_like_a_multiset_through_growth_and_shrinking() {
        for seed in 0..4 {
            let mut random = Random(seed);
            let mut filter = NameFilter::new(seed);
            let mut model: HashMap<u64, usize> = HashMap::new();
            let mut held: Vec<u64> = Vec::new();
            let (mut steps, mut peak) = (0, 0);
            // Phases: each inserts with another probability, in sixteenths.
            for chance in [15, 2, 12, 1, 14, 8, 0] {
                for _ in 0..60_000 {
                    steps += 1;
                    if held.is_empty() || random.below(16) < chance {
                        // One in four is a copy of a name already held.
                        let copy = !held.is_empty() && random.below(4) == 0;
                        let at = if copy { random.below(held.len()) } else { 0 };
                        let name = if copy { held[at] } else { random.next() };
                        let is_member = model.contains_key(&name);
                        if random.below(2) == 0 {
                            filter.insert(name);
                        } else {
                            assert!(filter.insert_new(name) || !is_member);
                        }
                        *model.entry(name).or_default() += 1;
                        held.push(name);
                    } else {
                        let at = random.below(held.len());
                        let name = held.swap_remove(at);
                        assert!(filter.remove(name));
                        let copies = model.get_mut(&name).expect("held names are in the model");
                        *copies -= 1;
                        if *copies == 0 {
                            model.remove(&name);
                        }
                    }
                    assert_eq!(filter.len(), held.len());
                    if let Some(&name) = held.last() {
                        assert!(filter.contains(name));
                    }
                    peak = peak.max(filter.len());
                }
                check(&filter);
                assert!(model.keys().all(|&name| filter.contains(name)));
            }
            assert!(steps == 420_000 && peak > 50_000, "too little was tried: {steps}, {peak}");
            for name in held {
                assert!(filter.remove(name));
            }
            check(&filter);
            assert_eq!((filter.len(), filter.bytes()), (0, 0));
        }
    }

    #[test]
    fn takes_few_strangers_for_members() {
        // Random, consecutive and high-bits-only names must spread alike.
        let spreads: [fn(u64) -> u64; 3] = [|i| Random(i).next(), |i| i, |i| i << 40];
        for spread in spreads {
            let mut filter = NameFilter::new(7);
            let count = 1_000_000;
            (0..count).for_each(|i| filter.insert(spread(i)));
            assert!((0..count).all(|i| filter.contains(spread(i))));
            let taken = (count..3 * count).filter(|&i| filter.contains(spread(i))).count();
            // 2 million x 1 million / 2^42 expected: less than one.
            assert!(taken < 6, "{taken} of 2 million");
            check(&filter);
            let bytes = filter.bytes() as f64 / count as f64;
            assert!((4.8..5.6).contains(&bytes), "{bytes} bytes a name");
        }
    }

    #[test]
    fn survives_thousands_of_copies_of_one_name() {
        let mut filter = NameFilter::new(1);
        let mut random = Random(1);
        let others: Vec<u64> = (0..100_000).map(|_| random.next()).collect();
        others.iter().for_each(|&name| filter.insert(name));
        for _ in 0..20_000 {
            filter.insert(42);
        }
        check(&filter);
        assert!(filter.bytes() < 7 * filter.len(), "copies must not grow the filter without end");
        assert!(others.iter().all(|&name| filter.contains(name)));
        for _ in 0..20_000 {
            assert!(filter.remove(42));
        }
        assert!(!filter.remove(42) && !filter.contains(42));
        assert!(others.iter().all(|&name| filter.remove(name)));
        assert_eq!((filter.len(), filter.bytes()), (0, 0));
    }

    #[test]
    fn costs_nothing_while_empty() {
        let mut filter = NameFilter::new(0);
        assert!(!filter.contains(1) && !filter.remove(1));
        assert_eq!(filter.bytes(), 0);
        assert!(!filter.insert_new(1) && filter.insert_new(1));
        let one = size_of::<Bucket>() + size_of::<Count>();
        assert_eq!(filter.bytes(), SEGMENTS * size_of::<Segment>() + one);
        assert!(filter.remove(1) && filter.remove(1) && !filter.remove(1));
        assert_eq!(filter.bytes(), 0);
    }
}
