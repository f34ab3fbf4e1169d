//! The writer's changes: entries come and go, segments split, grow, merge and shrink.
//!
//! Structures that readers see are never modified in place: new segments and directories are
//! filled, then published, and the old ones are retired unchanged.

use super::super::array::{Array, AtomicArray};
use super::super::epoch::Retired;
use super::segment::{self, Bucket, SLOTS};

/// Segments of this size split; smaller ones double: 64 buckets, a page.
const SEGMENT_BITS: u32 = if cfg!(loom) { 1 } else { 6 };

/// A segment that is half full splits if an entry would have to pass more buckets than this.
const PASSED_MAX: usize = 6;

/// The directory is doubled for one segment only while it has at most this many places per segment;
/// otherwise clashing tags enlarge the segment.
const PLACES_PER_SEGMENT_MAX: usize = 8;

pub type Segments = AtomicArray<Bucket>;

/// The writer's data about a segment, by directory place.
#[derive(Clone, Copy)]
struct Place {
    /// Leading bits that the tags of its entries share.
    depth: u32,
    /// Entries; valid only at the first of a segment's places.
    count: u32,
}

/// Replaced memory.
pub enum Garbage {
    Segment(Array<Bucket>),
    Directory(Array<Segments>),
}

impl Garbage {
    /// Frees it; returns the number of bytes.
    ///
    /// # Safety
    /// As [`Array::free`].
    pub unsafe fn free(self) -> usize {
        match self {
            Self::Segment(array) => {
                let bytes = array.bytes();
                // Safety: the caller's promise.
                unsafe { array.free() };
                bytes
            }
            Self::Directory(array) => {
                let bytes = array.bytes();
                // Safety: the caller's promise.
                unsafe { array.free() };
                bytes
            }
        }
    }
}

/// State that only the writer uses.
pub struct Books {
    places: Vec<Place>,
    pub len: usize,
    segments: usize,
    /// Segments with a single place: while there are any, the directory can't be halved.
    deepest: usize,
    /// Bytes of all arrays, including retired ones.
    pub allocated: usize,
    /// Of these, bytes of retired arrays.
    pub waiting: usize,
    pub retired: Retired<Garbage>,
}

impl Books {
    /// A table with one bucket.
    pub fn open() -> (AtomicArray<Segments>, Self) {
        let segment = Array::allocate(0, |_| Bucket::vacant());
        let directory = Array::allocate(0, |_| AtomicArray::new(segment));
        let books = Self {
            places: vec![Place { depth: 0, count: 0 }],
            len: 0,
            segments: 1,
            deepest: 1,
            allocated: segment.bytes() + directory.bytes(),
            waiting: 0,
            retired: Retired::new(),
        };
        (AtomicArray::new(directory), books)
    }

    /// Bytes requested from the allocator.
    pub fn bytes(&self) -> usize {
        self.allocated + self.places.capacity() * size_of::<Place>() + self.retired.bytes()
    }

    fn retire(&mut self, garbage: Garbage) {
        self.waiting += match &garbage {
            Garbage::Segment(array) => array.bytes(),
            Garbage::Directory(array) => array.bytes(),
        };
        self.retired.push(garbage);
    }

    /// Logarithm of the directory's length.
    fn bits(&self) -> u32 {
        self.places.len().trailing_zeros()
    }

    /// First place of the segment at `at`, and its number of places.
    fn range(&self, at: usize) -> (usize, usize) {
        let width = 1 << (self.bits() - self.places[at].depth);
        (at & !(width - 1), width)
    }

    fn new_segment(
        &mut self,
        bits: u32,
        entries: impl Iterator<Item = (u32, u32)>,
    ) -> Array<Bucket> {
        let array = Array::allocate(bits, |_| Bucket::vacant());
        self.allocated += array.bytes();
        // Safety: it is not freed before it is published and retired.
        let buckets: &[Bucket] = unsafe { array.as_slice() };
        for (tag, child) in entries {
            let vacancy = segment::vacancy(buckets, tag).expect("sized for its entries");
            segment::fill(buckets, tag, child, vacancy);
        }
        array
    }
}

/// The place of `tag` in a directory: its leading bits.
#[inline]
pub fn place_of<T>(directory: &[T], tag: u32) -> usize {
    ((u64::from(tag) << directory.len().trailing_zeros()) >> 32) as usize
}

/// The tag's bit after the first `depth`, which selects the half of a split segment.
fn is_upper(tag: u32, depth: u32) -> bool {
    (u64::from(tag) << depth) >> 31 & 1 == 1
}

/// Exclusive use of a table's writing side. Nothing is freed during a turn, so everything it reads
/// stays valid.
pub struct Turn<'w> {
    pub directory: &'w AtomicArray<Segments>,
    pub books: &'w mut Books,
}

impl<'w> Turn<'w> {
    fn places(&self) -> &'w [Segments] {
        // Safety: only `Edges::collect` and its Drop free, which `'w` excludes.
        unsafe { self.directory.current().as_slice() }
    }

    fn segment(&self, at: usize) -> (Array<Bucket>, &'w [Bucket]) {
        let array = self.places()[at].current();
        // Safety: as in `places`.
        (array, unsafe { array.as_slice() })
    }

    /// All current memory, for the table's drop.
    pub fn everything(&self) -> Vec<Garbage> {
        let mut all = vec![Garbage::Directory(self.directory.current())];
        let mut at = 0;
        while at < self.books.places.len() {
            all.push(Garbage::Segment(self.segment(at).0));
            at += self.books.range(at).1;
        }
        all
    }

    /// Inserts `child` under `tag`.
    pub fn insert(&mut self, tag: u32, child: u32) {
        loop {
            let at = place_of(self.places(), tag);
            let (first, _) = self.books.range(at);
            let (_, buckets) = self.segment(at);
            let place = &mut self.books.places[first];
            if let Some(vacancy) = segment::vacancy(buckets, tag) {
                let (count, room) = (place.count as usize + 1, buckets.len() * SLOTS);
                let is_long = vacancy.passed > PASSED_MAX && count > room / 2;
                if count <= room - room / 6 && !is_long {
                    segment::fill(buckets, tag, child, vacancy);
                    place.count += 1;
                    self.books.len += 1;
                    return;
                }
            }
            self.make_room(first);
        }
    }

    /// Removes `child` under `tag`. False if it does not exist.
    pub fn remove(&mut self, tag: u32, child: u32) -> bool {
        let at = place_of(self.places(), tag);
        let is_removed = segment::remove(self.segment(at).1, tag, child);
        if is_removed {
            let (first, _) = self.books.range(at);
            self.books.places[first].count -= 1;
            self.books.len -= 1;
            while self.save_room(place_of(self.places(), tag)) {}
        }
        is_removed
    }

    /// Splits the segment at `first`, or doubles it if a split would not separate its entries.
    fn make_room(&mut self, first: usize) {
        let Place { depth, count } = self.books.places[first];
        let (array, buckets) = self.segment(first);
        let upper =
            segment::entries(buckets).filter(|&(tag, _)| is_upper(tag, depth)).count() as u32;
        let parts = upper.min(count - upper) * 8 >= count;
        let places = self.books.places.len();
        let is_payable =
            depth < self.books.bits() || places * 2 <= self.books.segments * PLACES_PER_SEGMENT_MAX;
        if array.bits() >= SEGMENT_BITS && depth < u32::BITS && parts && is_payable {
            self.split(first, upper);
        } else {
            self.resize(first, array.bits() + 1);
        }
    }

    /// Reverses growth that fewer entries no longer need. False if there is nothing to reverse.
    fn save_room(&mut self, at: usize) -> bool {
        let (first, width) = self.books.range(at);
        let Place { depth, count } = self.books.places[first];
        let bits = self.segment(first).0.bits();
        let room = SLOTS << bits;
        let bits_min = if depth == 0 { 0 } else { SEGMENT_BITS };
        if bits > bits_min {
            let is_sparse = count as usize * 5 <= room;
            if is_sparse {
                self.resize(first, bits - 1);
            }
            return is_sparse;
        }
        let buddy = first ^ width;
        if depth == 0 || self.books.places[buddy].depth != depth {
            return false;
        }
        let both = (count + self.books.places[buddy].count) as usize;
        let is_sparse = self.segment(buddy).0.bits() == bits && both * 2 <= room;
        if is_sparse {
            self.merge(first.min(buddy), both as u32);
        }
        is_sparse
    }

    /// Moves the segment at `first` to one of another size.
    fn resize(&mut self, first: usize, bits: u32) {
        let (old, buckets) = self.segment(first);
        let new = self.books.new_segment(bits, segment::entries(buckets));
        let (_, width) = self.books.range(first);
        self.replace(first, width, new, self.books.places[first]);
        self.books.retire(Garbage::Segment(old));
    }

    fn split(&mut self, first: usize, upper: u32) {
        let Place { depth, count } = self.books.places[first];
        let (old, buckets) = self.segment(first);
        let mut first = first;
        if depth == self.books.bits() {
            self.double_directory();
            first *= 2;
        }
        let half = self.books.range(first).1 / 2;
        for (is_upper_half, count) in [(false, count - upper), (true, upper)] {
            let entries =
                segment::entries(buckets).filter(|&(tag, _)| is_upper(tag, depth) == is_upper_half);
            let new = self.books.new_segment(segment_bits(count as usize), entries);
            let start = first + if is_upper_half { half } else { 0 };
            self.replace(start, half, new, Place { depth: depth + 1, count });
        }
        self.books.retire(Garbage::Segment(old));
        self.books.segments += 1;
        if half == 1 {
            self.books.deepest += 2;
        }
    }

    /// Merges the two segments that begin at `first`.
    fn merge(&mut self, first: usize, count: u32) {
        let (_, width) = self.books.range(first);
        let depth = self.books.places[first].depth;
        let ((lower, low), (upper, high)) = (self.segment(first), self.segment(first + width));
        let entries = segment::entries(low).chain(segment::entries(high));
        let new = self.books.new_segment(SEGMENT_BITS, entries);
        self.replace(first, width * 2, new, Place { depth: depth - 1, count });
        self.books.retire(Garbage::Segment(lower));
        self.books.retire(Garbage::Segment(upper));
        self.books.segments -= 1;
        if width == 1 {
            self.books.deepest -= 2;
            while self.books.deepest == 0 {
                self.halve_directory();
            }
        }
    }

    /// Publishes a segment at `width` places. Meanwhile readers may still see the old one at some
    /// of them, which is correct: it holds the same entries, and this turn's changes come later.
    fn replace(&mut self, first: usize, width: usize, new: Array<Bucket>, place: Place) {
        let places = self.places();
        self.books.places[first..first + width].fill(place);
        places[first..first + width].iter().for_each(|place| place.publish(new));
    }

    fn double_directory(&mut self) {
        self.resize_directory(self.books.bits() + 1, |at| at / 2);
        // No segment has a single place until the split that this prepares.
        self.books.deepest = 0;
    }

    fn halve_directory(&mut self) {
        self.resize_directory(self.books.bits() - 1, |at| at * 2);
        let bits = self.books.bits();
        self.books.deepest = self.books.places.iter().filter(|place| place.depth == bits).count();
    }

    fn resize_directory(&mut self, bits: u32, old_place: impl Fn(usize) -> usize) {
        let (old, places) = (self.directory.current(), self.places());
        let new = Array::allocate(bits, |at| AtomicArray::new(places[old_place(at)].current()));
        self.books.allocated += new.bytes();
        self.books.places = (0..1 << bits).map(|at| self.books.places[old_place(at)]).collect();
        self.directory.publish(new);
        self.books.retire(Garbage::Directory(old));
    }
}

/// Size of the segment for half of a split: at most three quarters full.
fn segment_bits(count: usize) -> u32 {
    let mut bits = SEGMENT_BITS;
    while count * 4 > (SLOTS << bits) * 3 {
        bits += 1;
    }
    bits
}
