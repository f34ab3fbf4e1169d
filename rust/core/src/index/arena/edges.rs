//! The children of runs: (parent run, offset, first local hash) leads to the run that continues
//! there.
//!
//! The table stores only the children, eight bytes each: 32 bits of the key's hash, the *tag*, and
//! the child's number. The child itself, which the caller reads anyway, shows whether it is the
//! requested one.
//!
//! The table uses extendible hashing: the tag's leading bits select a directory entry, which leads
//! to a segment of cache-line buckets; the tag's last bits select the bucket. A full segment is
//! split by one more leading bit while all others stay in place, so no insert ever waits for a
//! complete rehash.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::array::AtomicArray;
use super::epoch::{Pin, epochs};
use super::sync::Padded;
use turn::{Books, Garbage, Segments, Turn, place_of};

mod segment;
mod turn;

#[cfg(not(loom))]
#[cfg(test)]
mod tests;

/// The table, for any number of readers and the holder of its [`Writing`].
///
/// # Consistency
/// A reader finds an entry that was inserted before it started and is not removed while it looks.
/// For an entry that is inserted or removed meanwhile it may see either state. It may also be
/// offered a child that was removed since, so it must check the child.
pub struct Edges {
    directory: AtomicArray<Segments>,
    keys: [u64; 3],
    /// Identifies the table's [`Writing`].
    id: u64,
    /// Accessed only with the matching [`Writing`]; kept apart from what readers read.
    books: Padded<UnsafeCell<Books>>,
}

// Safety: `books` is reached through `&mut Writing` (alone), or `&Writing` (reading), of which each
// table has one; the rest is atomic or never changes. Its parts can be freed on any thread.
unsafe impl Sync for Edges {}

/// The exclusive right to change one table, created with it.
pub struct Writing {
    id: u64,
}

fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

/// Derives three keys from a seed that may be 0: steps of a Weyl sequence, scrambled.
fn keys(hash_seed: u64) -> [u64; 3] {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
    [1, 2, 3].map(|step| {
        let mixed = fold(hash_seed ^ STEP, 0xa076_1d64_78bd_642f) ^ hash_seed;
        let state = mixed.wrapping_add(STEP.wrapping_mul(step));
        let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (state ^ (state >> 31)) | 1
    })
}

impl Edges {
    /// An empty table, and the right to change it. `hash_seed` keys the hash, so that clients can't
    /// aim entries at one bucket.
    pub fn new(hash_seed: u64) -> (Self, Writing) {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        // Relaxed: the ids only have to be unique.
        let id = NEXT_ID.fetch_add(1, Relaxed);
        let (directory, books) = Books::open();
        let books = Padded(UnsafeCell::new(books));
        (Self { directory, keys: keys(hash_seed), id, books }, Writing { id })
    }

    /// The child at (`parent`, `offset`, `local`): among children with its tag, the first that
    /// `is_child` accepts.
    ///
    /// # Consistency
    /// See [`Edges`].
    ///
    /// # Cost
    /// Two cache misses in a large table, besides those of `is_child`, which is called once for an
    /// existing child and rarely for a missing one.
    #[inline]
    pub fn find(
        &self,
        pin: &Pin<'_>,
        parent: u32,
        offset: u32,
        local: u64,
        is_child: impl FnMut(u32) -> bool,
    ) -> Option<u32> {
        let tag = self.tag(parent, offset, local);
        segment::find(self.segment(pin, tag), tag, is_child)
    }

    /// Inserts `child`, which must not be 0. The caller has checked that there is no equal key.
    ///
    /// # Cost
    /// O(1); occasionally a segment of 4 KiB is copied, rarely the directory.
    ///
    /// # Panics
    /// If `writing` is another table's.
    pub fn insert(&self, writing: &mut Writing, parent: u32, offset: u32, local: u64, child: u32) {
        assert!(child != 0, "child 0 means none");
        let tag = self.tag(parent, offset, local);
        self.turn(writing).insert(tag, child);
    }

    /// Removes `child`. False if it does not exist.
    ///
    /// # Cost
    /// As [`Edges::insert`].
    ///
    /// # Panics
    /// If `writing` is another table's.
    pub fn remove(
        &self,
        writing: &mut Writing,
        parent: u32,
        offset: u32,
        local: u64,
        child: u32,
    ) -> bool {
        let tag = self.tag(parent, offset, local);
        self.turn(writing).remove(tag, child)
    }

    /// Frees replaced parts that no reader can see any more. Call it occasionally.
    ///
    /// # Cost
    /// As [`super::epoch::Retired::collect`].
    pub fn collect(&self, writing: &mut Writing) {
        let Books { retired, allocated, waiting, .. } = self.turn(writing).books;
        retired.collect(epochs(), |garbage: Garbage| {
            // Safety: it was replaced before it was retired, by a turn, and once; readers pin in this
            // domain, so none is left that came before.
            let bytes = unsafe { garbage.free() };
            *allocated -= bytes;
            *waiting -= bytes;
        });
    }

    /// Number of entries.
    pub fn len(&self, writing: &Writing) -> usize {
        self.read_books(writing).len
    }

    /// Bytes requested from the allocator, including replaced parts that still wait for readers.
    pub fn bytes(&self, writing: &Writing) -> usize {
        self.read_books(writing).bytes()
    }

    /// Of those, bytes that wait for readers, including their queue.
    pub fn waiting_bytes(&self, writing: &Writing) -> usize {
        let books = self.read_books(writing);
        books.waiting + books.retired.bytes()
    }

    #[inline]
    fn tag(&self, parent: u32, offset: u32, local: u64) -> u32 {
        let [first, second, third] = self.keys;
        let place = u64::from(parent) << 32 | u64::from(offset);
        (fold(fold(local ^ first, place ^ second), third) >> 32) as u32
    }

    #[inline]
    fn segment<'p>(&self, pin: &'p Pin<'_>, tag: u32) -> &'p [segment::Bucket] {
        let directory = self.directory.load(pin);
        directory[place_of(directory, tag)].load(pin)
    }

    fn turn<'w>(&'w self, writing: &'w mut Writing) -> Turn<'w> {
        assert_eq!(writing.id, self.id, "the right to write to another table");
        // Safety: there is one `Writing` with this id, and `'w` borrows it alone.
        Turn { directory: &self.directory, books: unsafe { &mut *self.books.0.get() } }
    }

    fn read_books<'w>(&'w self, writing: &'w Writing) -> &'w Books {
        assert_eq!(writing.id, self.id, "the right to write to another table");
        // Safety: there is one `Writing` with this id, so no thread has it exclusively while `'w`
        // shares it.
        unsafe { &*self.books.0.get() }
    }
}

impl Drop for Edges {
    fn drop(&mut self) {
        let books = self.books.0.get_mut();
        let turn = Turn { directory: &self.directory, books };
        let mut all = turn.everything();
        turn.books.retired.drain_all(|garbage| all.push(garbage));
        for garbage in all {
            // Safety: `&mut self` proves that no reader is in the table. `everything` returns the
            // current parts and the others were replaced, so no part is freed twice.
            turn.books.allocated -= unsafe { garbage.free() };
        }
        debug_assert_eq!(turn.books.allocated, 0);
    }
}
