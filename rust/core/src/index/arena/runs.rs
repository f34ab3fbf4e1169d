//! Runs as readers see them: labels, place in the tree, cover.
//!
//! There is one writer (the owner of [`RunsWriting`]), and any number of readers under a pin. Data
//! that a reader sees changes in only three ways: labels are appended after the published length,
//! an array of labels is replaced by a longer copy of itself, and the cover word is replaced.
//! Removed runs and arrays are freed once every pin that could have seen them is gone.
//!
//! # Consistency
//! A reader loads the length, then the labels, then the cover. The writer appends labels and
//! narrows the cover of other workers before it raises the length. *Whole* in a cover that was
//! loaded after a length therefore covers at least that length; lengths never shrink.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering::*};

use super::cover::{self, Cover, Entries};
use super::epoch::{Epochs, Pin, Retired};

/// Number of a run; [`ROOT`] is the empty run where all prompts begin.
pub(in crate::index) type RunId = u32;

/// The run without blocks above all others.
pub(in crate::index) const ROOT: RunId = 0;

/// Maximum blocks of a run; longer chains continue in a child.
pub(in crate::index) const MAX_RUN: usize = 16_384;

const PAGE_BITS: u32 = 9;
const PAGE: usize = 1 << PAGE_BITS;

/// One run. Its parent and offset are set before any reader can find it.
#[repr(C, align(32))]
struct Header {
    labels: AtomicPtr<u64>,
    cover: AtomicU64,
    len: AtomicU32,
    /// Capacity of the array of labels; writer only.
    room: AtomicU32,
    parent: AtomicU32,
    attach: AtomicU32,
}

type Page = [Header; PAGE];

struct Table(Box<[AtomicPtr<Page>]>);

/// All runs.
pub(in crate::index) struct Runs {
    table: AtomicPtr<Table>,
}

enum Garbage {
    Labels(*mut u64, u32),
    Cover(u64),
    Run(RunId),
    Table(*mut Table),
}

/// The writer's side of [`Runs`].
pub(in crate::index) struct RunsWriting {
    free: Vec<RunId>,
    next: RunId,
    retired: Retired<Garbage>,
    parts: Parts,
}

/// Bytes by purpose; see [`Runs::report`].
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::index) struct Parts {
    pub labels: usize,
    pub covers: usize,
    /// Pages of headers, and the table of pages.
    pub headers: usize,
    /// Of the above, replaced or removed memory that readers may still see, and the queue it waits
    /// in.
    pub waiting: usize,
}

// Safety: the pointers in the garbage are owned by it, and what they point to is plain words.
unsafe impl Send for RunsWriting {}
// Safety: shared state is atomics; the arrays behind the pointers are shared as the room's doc says.
unsafe impl Sync for Runs {}
// Safety: as above; nothing belongs to a thread.
unsafe impl Send for Runs {}

fn new_labels(room: u32) -> *mut u64 {
    Box::into_raw(Box::<[u64]>::new_uninit_slice(room as usize)).cast()
}

/// # Safety
/// `labels` came from [`new_labels`] with this `room`, and no thread reads it any more.
unsafe fn free_labels(labels: *mut u64, room: u32) {
    let whole =
        std::ptr::slice_from_raw_parts_mut(labels.cast::<MaybeUninit<u64>>(), room as usize);
    // Safety: the caller's promise.
    drop(unsafe { Box::from_raw(whole) });
}

/// A run under a pin.
#[derive(Clone, Copy)]
pub(in crate::index) struct Run<'a>(&'a Header);

impl<'a> Run<'a> {
    /// Labels published so far. Load them before [`Run::cover`].
    #[inline]
    pub fn labels(self) -> &'a [u64] {
        let len = self.0.len.load(Acquire) as usize;
        let labels = self.0.labels.load(Acquire);
        if len == 0 {
            return &[];
        }
        debug_assert!(!labels.is_null());
        // Safety: the array was published before the length that was loaded, or is a longer copy of that
        // one; its first `len` words never change; it lives as long as the pin behind `'a`.
        unsafe { std::slice::from_raw_parts(labels, len) }
    }

    /// Which workers cover how much.
    #[inline]
    pub fn cover(self) -> Cover<'a> {
        // Safety: `encode` made the word; its block lives as long as the pin behind `'a`.
        unsafe { Cover::read(self.0.cover.load(Acquire), PhantomData) }
    }

    /// The parent run, and the number of its blocks before this run.
    #[inline]
    pub fn place(self) -> (RunId, u32) {
        (self.0.parent.load(Relaxed), self.0.attach.load(Relaxed))
    }

    /// Whether this run continues `(parent, attach)` with `first`.
    #[inline]
    pub fn is_at(self, parent: RunId, attach: u32, first: u64) -> bool {
        self.place() == (parent, attach) && self.labels().first() == Some(&first)
    }

    /// Prefetches the data that a walk needs.
    #[inline]
    pub fn prefetch(self) {
        prefetch(self.0.labels.load(Relaxed).cast_const());
    }
}

/// Prefetches the cache line at any address.
#[inline]
pub(in crate::index) fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // Safety: a prefetch of any address is harmless.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

impl Runs {
    pub fn new() -> (Self, RunsWriting) {
        let table = Box::into_raw(Box::new(Table(Box::default())));
        let retired = Retired::new();
        let parts = Parts { headers: size_of::<Table>(), ..Parts::default() };
        let writing = RunsWriting { free: Vec::new(), next: ROOT + 1, retired, parts };
        (Self { table: AtomicPtr::new(table) }, writing)
    }

    /// The run `id`, as seen under `pin`.
    #[inline]
    pub fn get<'a>(&'a self, _pin: &'a Pin<'_>, id: RunId) -> Run<'a> {
        Run(self.header(id))
    }

    /// For the writer, which needs no pin because only it frees.
    #[inline]
    pub fn peek<'a>(&'a self, _writing: &'a RunsWriting, id: RunId) -> Run<'a> {
        Run(self.header(id))
    }

    #[inline]
    fn header(&self, id: RunId) -> &Header {
        // Safety: the table and its pages live until they are retired, which for pages is never before
        // `self` is dropped and for the table not before the pin is gone.
        let table = unsafe { &(*self.table.load(Acquire)).0 };
        let page = table[(id >> PAGE_BITS) as usize].load(Acquire);
        debug_assert!(!page.is_null(), "run {id} has a page");
        // Safety: ids are given out after their page was published.
        unsafe { &(*page)[id as usize % PAGE] }
    }

    /// Creates a run that no reader can find yet.
    pub fn add(
        &self,
        writing: &mut RunsWriting,
        (parent, attach): (RunId, u32),
        labels: impl ExactSizeIterator<Item = u64>,
    ) -> RunId {
        let id = writing.free.pop().unwrap_or_else(|| {
            let id = writing.next;
            writing.next = id.checked_add(1).expect("fewer than 2^32 runs fit into memory");
            id
        });
        self.make_page(writing, id);
        let header = self.header(id);
        debug_assert!(labels.len() <= MAX_RUN && header.len.load(Relaxed) == 0);
        header.parent.store(parent, Relaxed);
        header.attach.store(attach, Relaxed);
        self.append(writing, id, labels);
        id
    }

    /// Appends labels to a run.
    pub fn append(
        &self,
        writing: &mut RunsWriting,
        id: RunId,
        more: impl ExactSizeIterator<Item = u64>,
    ) {
        let header = self.header(id);
        let len = header.len.load(Relaxed) as usize;
        let mut room = header.room.load(Relaxed);
        let new_len = len + more.len();
        assert!(new_len <= MAX_RUN, "a run of {new_len} blocks");
        let mut labels = header.labels.load(Relaxed);
        if new_len > room as usize {
            // A first array fits exactly; arrays that grow block by block get an eighth more.
            let spare = if room == 0 { 0 } else { (len / 8).clamp(4, 512) };
            let larger = (new_len + spare).min(MAX_RUN) as u32;
            let fresh = new_labels(larger);
            if room > 0 {
                // Safety: no thread writes the `len` words of the old array; the new one is larger.
                unsafe { std::ptr::copy_nonoverlapping(labels, fresh, len) };
                writing.retired.push(Garbage::Labels(labels, room));
                writing.parts.labels -= room as usize * 8;
                writing.parts.waiting += room as usize * 8;
            }
            writing.parts.labels += larger as usize * 8;
            (labels, room) = (fresh, larger);
        }
        for (at, label) in (len..).zip(more) {
            // Safety: `at` is below the room of the array and not below the published length, so no
            // reader looks there.
            unsafe { labels.add(at).write(label) };
        }
        if labels != header.labels.load(Relaxed) {
            header.room.store(room, Relaxed);
            header.labels.store(labels, Release);
        }
        header.len.store(new_len as u32, Release);
    }

    /// Changes the cover of a run; `scratch` is working memory.
    pub fn cover(
        &self,
        writing: &mut RunsWriting,
        id: RunId,
        scratch: &mut Entries,
        change: impl FnOnce(&mut Entries),
    ) {
        let header = self.header(id);
        let old = header.cover.load(Relaxed);
        // Safety: the writer alone frees, and has not.
        unsafe { Cover::read(old, PhantomData) }.decode(scratch);
        change(scratch);
        let new = cover::encode(scratch);
        // Safety: as above; the new one was just made.
        writing.parts.covers += unsafe { cover::heap_bytes(new) };
        header.cover.store(new, Release);
        if old != 0 && old & 1 == 0 {
            // Safety: as above.
            writing.parts.retire_cover(unsafe { cover::heap_bytes(old) });
            writing.retired.push(Garbage::Cover(old));
        }
    }

    /// Removes a run that can't be found any more and is not covered.
    pub fn remove(&self, writing: &mut RunsWriting, id: RunId) {
        let header = self.header(id);
        let labels = header.room.load(Relaxed) as usize * 8;
        writing.parts.labels -= labels;
        writing.parts.waiting += labels;
        // Safety: the writer alone frees, and has not.
        writing.parts.retire_cover(unsafe { cover::heap_bytes(header.cover.load(Relaxed)) });
        writing.retired.push(Garbage::Run(id));
    }

    /// Frees memory that no reader can see any more.
    pub fn collect(&self, writing: &mut RunsWriting, epochs: &Epochs) {
        let RunsWriting { free, retired, parts, .. } = writing;
        let mut left = 0;
        retired.collect(epochs, |garbage| left += self.discard(garbage, free));
        parts.waiting -= left;
    }

    /// Number of items that wait for readers.
    pub fn waiting(writing: &RunsWriting) -> usize {
        writing.retired.len()
    }

    /// Bytes requested from the allocator and not returned.
    pub fn bytes(writing: &RunsWriting) -> usize {
        let Parts { labels, covers, headers, .. } = writing.parts;
        let free = writing.free.capacity() * size_of::<RunId>();
        labels + covers + headers + free + Self::waiting_bytes(writing)
    }

    /// Bytes that wait for readers, including their queue.
    pub fn waiting_bytes(writing: &RunsWriting) -> usize {
        writing.parts.waiting + writing.retired.bytes()
    }

    /// Upper bound of the bytes for `more` new runs.
    pub fn growth(writing: &RunsWriting, more: usize) -> usize {
        let fresh = more.saturating_sub(writing.free.len());
        let next = writing.next as usize;
        let pages = (next + fresh).div_ceil(PAGE) - (next.max(2) - 1).div_ceil(PAGE);
        // The table of pages grows by a quarter, and the old one waits for readers.
        let lists = next.div_ceil(PAGE) * 16 + writing.free.len() * size_of::<RunId>();
        if fresh > 0 { pages * size_of::<Page>() + 2 * lists + 64 } else { 0 }
    }

    /// Returns the freed bytes.
    fn discard(&self, garbage: Garbage, free: &mut Vec<RunId>) -> usize {
        match garbage {
            Garbage::Labels(labels, room) => {
                // Safety: replaced before it was retired, and no pin is left that saw it.
                unsafe { free_labels(labels, room) };
                room as usize * 8
            }
            Garbage::Cover(word) => {
                // Safety: as above.
                unsafe {
                    let bytes = cover::heap_bytes(word);
                    cover::free(word);
                    bytes
                }
            }
            Garbage::Run(id) => {
                let header = self.header(id);
                let room = header.room.swap(0, Relaxed);
                let labels = header.labels.swap(null_mut(), Relaxed);
                header.len.store(0, Relaxed);
                let word = header.cover.swap(0, Relaxed);
                free.push(id);
                self.discard(Garbage::Cover(word), free)
                    + if room > 0 { self.discard(Garbage::Labels(labels, room), free) } else { 0 }
            }
            Garbage::Table(table) => {
                // Safety: as above; its pages live on in the table that replaced it.
                let table = unsafe { Box::from_raw(table) };
                size_of::<Table>() + size_of_val(&*table.0)
            }
        }
    }

    fn make_page(&self, writing: &mut RunsWriting, id: RunId) {
        let page = (id >> PAGE_BITS) as usize;
        let old = self.table.load(Relaxed);
        // Safety: only the writer replaces the table, and it has not been freed.
        let pages = unsafe { &(*old).0 };
        if page >= pages.len() {
            let larger = (page + 1).max(pages.len() + pages.len() / 4).max(4);
            let copy = (0..larger).map(|at| {
                AtomicPtr::new(pages.get(at).map_or(null_mut(), |page| page.load(Relaxed)))
            });
            let table = Table(copy.collect());
            let old_bytes = size_of::<Table>() + size_of_val(&**pages);
            writing.parts.headers += size_of::<Table>() + size_of_val(&*table.0);
            writing.parts.headers -= old_bytes;
            writing.parts.waiting += old_bytes;
            self.table.store(Box::into_raw(Box::new(table)), Release);
            writing.retired.push(Garbage::Table(old));
        }
        // Safety: just checked or replaced.
        let place = unsafe { &(&(*self.table.load(Relaxed)).0)[page] };
        if place.load(Relaxed).is_null() {
            let header = || Header {
                labels: AtomicPtr::new(null_mut()),
                cover: AtomicU64::new(0),
                len: AtomicU32::new(0),
                room: AtomicU32::new(0),
                parent: AtomicU32::new(0),
                attach: AtomicU32::new(0),
            };
            let fresh: Box<Page> = Box::new(std::array::from_fn(|_| header()));
            writing.parts.headers += size_of::<Page>();
            place.store(Box::into_raw(fresh), Release);
        }
    }
}

impl Parts {
    fn retire_cover(&mut self, bytes: usize) {
        self.covers -= bytes;
        self.waiting += bytes;
    }
}

impl Drop for Runs {
    fn drop(&mut self) {
        // Safety: `&mut self`: no reader is left; made by `Box::into_raw`.
        let table = unsafe { Box::from_raw(*self.table.get_mut()) };
        for page in table.0.iter().map(|page| page.load(Relaxed)).filter(|page| !page.is_null()) {
            // Safety: as above; each page is in the last table once.
            for header in &mut *unsafe { Box::from_raw(page) } {
                // Safety: as above; whatever a header still has is in no garbage.
                unsafe {
                    cover::free(*header.cover.get_mut());
                    let room = *header.room.get_mut();
                    if room > 0 {
                        free_labels(*header.labels.get_mut(), room);
                    }
                }
            }
        }
    }
}

impl Drop for RunsWriting {
    /// Dropped with its [`Runs`], with the index: no reader is left.
    fn drop(&mut self) {
        self.retired.drain_all(|garbage| match garbage {
            // Safety: replaced before they were retired, so in no header; no thread reads them.
            Garbage::Labels(labels, room) => unsafe { free_labels(labels, room) },
            // Safety: as above.
            Garbage::Cover(word) => unsafe { cover::free(word) },
            // Safety: as above; its pages are in the table that replaced it.
            Garbage::Table(table) => drop(unsafe { Box::from_raw(table) }),
            // Its header still has its memory.
            Garbage::Run(_) => {}
        });
    }
}
