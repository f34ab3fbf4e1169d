//! Epochs: when the writer may free memory that readers could still see.
//!
//! A reader *pins* before it follows pointers: it copies the global epoch to its own slot, passes a
//! fence, and only then reads. The writer *retires* what it has unlinked, and frees it when no slot
//! shows an epoch that old.
//!
//! # Why it is safe
//! The writer unlinks X, later advances the global epoch from t to t + 1, which makes t the tag of X,
//! passes its fence W, and reads all slots. X is freed only if each slot is idle or shows an epoch > t.
//! Take a reader that pinned at epoch e and passed its fence R. Fences have one order:
//!
//! - W before R: whatever the reader reads after R is as new as what was written before W. X was
//!   unlinked by then, so the reader cannot reach it, whatever its slot says.
//! - R before W: the writer sees the reader's slot as it was set, or later.
//!   - It sees e <= t: X stays.
//!   - It sees e > t: the reader's `Acquire` load of the global epoch saw the writer's advance, or one
//!     that follows it (advances are read-modify-writes, they continue its release sequence). X was
//!     unlinked before that advance, so the reader cannot reach it.
//!   - It sees idle, or a later pin: both are `Release` stores made after the reader's last look, and the
//!     writer's `Acquire` load of them puts that look before the free.
//!
//! The same holds for a slot or page of slots that is new: it is taken before R. Tags are given by the
//! writer's own advance, not read from the global epoch when X is retired: another index's writer could
//! advance between the two, and a reader that saw only that advance need not have seen X unlinked.

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::ptr;

use super::sync::Padded;
use super::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use super::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, fence};

/// Value of a slot without a pin. Epochs count from 1.
const IDLE: u64 = 0;

/// Slots are allocated in pages; models use few threads to keep their state small.
const PAGE_SLOTS: usize = if cfg!(loom) { 1 } else { 64 };

/// Set in [`Slot::pins`] when the owner is gone: the end of its last pin returns the slot.
const LEAVING: usize = 1 << (usize::BITS - 1);

/// A group of readers and writers that share one epoch.
///
/// A pin protects only from writers of its own domain. Production has one domain, [`epochs`]; only
/// tests and models can create others, so domains can't be mixed up where it would matter.
pub struct Epochs {
    /// Read by every pin, written by every [`Retired::collect`] with new items.
    global: Padded<AtomicU64>,
    /// Pages are added at the end and live as long as the domain.
    first: AtomicPtr<Page>,
    /// False only in the model that shows why the readers' fence is needed.
    #[cfg(loom)]
    is_fenced: bool,
}

struct Page {
    slots: [Padded<Slot>; PAGE_SLOTS],
    /// Slots from here on were never taken, so the writer need not read them.
    used: AtomicUsize,
    next: AtomicPtr<Page>,
}

/// One thread's state, as shown to the writers.
struct Slot {
    /// The epoch of its pin, or [`IDLE`]. Written only by the owning thread.
    epoch: AtomicU64,
    is_taken: AtomicBool,
    /// Number of live pins, and [`LEAVING`]. Private to the owning thread, hence not modelled;
    /// atomic only because owners change, which `is_taken` orders.
    pins: std::sync::atomic::AtomicUsize,
}

impl Slot {
    fn new() -> Self {
        Self {
            epoch: AtomicU64::new(IDLE),
            is_taken: AtomicBool::new(false),
            pins: std::sync::atomic::AtomicUsize::new(0),
        }
    }

    fn give_back(&self) {
        debug_assert_eq!(self.epoch.load(Relaxed), IDLE);
        self.pins.store(0, Relaxed);
        // Release: the next owner's Acquire swap sees the slot as it was left.
        self.is_taken.store(false, Release);
    }
}

impl Page {
    fn new() -> Self {
        Self {
            slots: std::array::from_fn(|_| Padded(Slot::new())),
            used: AtomicUsize::new(0),
            next: AtomicPtr::new(ptr::null_mut()),
        }
    }
}

impl Epochs {
    #[cfg(not(loom))]
    const fn empty() -> Self {
        Self { global: Padded(AtomicU64::new(IDLE + 1)), first: AtomicPtr::new(ptr::null_mut()) }
    }

    #[cfg(loom)]
    fn empty() -> Self {
        Self {
            global: Padded(AtomicU64::new(IDLE + 1)),
            first: AtomicPtr::new(ptr::null_mut()),
            is_fenced: true,
        }
    }

    /// A separate domain.
    #[cfg(any(test, loom))]
    pub fn new() -> Self {
        Self::empty()
    }

    /// A domain whose readers omit their fence.
    #[cfg(loom)]
    pub fn without_fence() -> Self {
        let mut domain = Self::empty();
        domain.is_fenced = false;
        domain
    }

    /// Takes a slot for the current thread.
    ///
    /// # Cost
    /// O(slots taken before); allocates a page if all are taken.
    pub fn enroll(&self) -> Reader<'_> {
        Reader { epochs: self, slot: self.take_slot(), _thread_bound: PhantomData }
    }

    fn take_slot(&self) -> &Slot {
        let mut link = &self.first;
        loop {
            let page = Self::page_or_new(link);
            for (at, Padded(slot)) in page.slots.iter().enumerate() {
                // Acquire: pairs with the Release of the owner that gave it back.
                if !slot.is_taken.load(Relaxed) && !slot.is_taken.swap(true, Acquire) {
                    // Relaxed: made visible to the writer's scan by the fence of the first pin.
                    page.used.fetch_max(at + 1, Relaxed);
                    return slot;
                }
            }
            link = &page.next;
        }
    }

    fn page_or_new(link: &AtomicPtr<Page>) -> &Page {
        let mut page = link.load(Acquire);
        if page.is_null() {
            let fresh = Box::into_raw(Box::new(Page::new()));
            // Release: a thread that finds the page finds it filled.
            match link.compare_exchange(ptr::null_mut(), fresh, AcqRel, Acquire) {
                Ok(_) => page = fresh,
                Err(other) => {
                    // Safety: `fresh` was not published, so it is still ours alone.
                    drop(unsafe { Box::from_raw(fresh) });
                    page = other;
                }
            }
        }
        debug_assert!(!page.is_null());
        // Safety: a published page is freed by the domain's Drop only, and `link` borrows the domain.
        unsafe { &*page }
    }

    /// Ends the current epoch and returns it.
    fn advance(&self) -> u64 {
        // Release: a thread that sees the new epoch sees everything unlinked before. Acquire costs
        // nothing more.
        self.global.0.fetch_add(1, AcqRel)
    }

    /// The oldest epoch of any pinned reader, `u64::MAX` if there is none. Stops at the first one
    /// that is not younger than `enough`.
    fn oldest_pinned(&self, enough: u64) -> u64 {
        // The writer's fence W of the proof above.
        fence(SeqCst);
        let mut oldest = u64::MAX;
        let mut page = self.first.load(Acquire);
        while !page.is_null() {
            // Safety: as in `page_or_new`.
            let Page { slots, used, next } = unsafe { &*page };
            for Padded(slot) in &slots[..used.load(Relaxed)] {
                // Acquire: a reader's last look happened before it showed this.
                let epoch = slot.epoch.load(Acquire);
                if epoch != IDLE && epoch < oldest {
                    oldest = epoch;
                    if oldest <= enough {
                        return oldest;
                    }
                }
            }
            page = next.load(Acquire);
        }
        oldest
    }
}

impl Drop for Epochs {
    fn drop(&mut self) {
        if cfg!(loom) {
            // Loom drops statics before thread-locals, which then return their slots.
            return;
        }
        // Relaxed: `&mut self` proves that readers, which borrow the domain, are gone.
        let mut page = self.first.load(Relaxed);
        while !page.is_null() {
            // Safety: made by `Box::into_raw`, in the list once, and out of reach of all threads.
            let owned = unsafe { Box::from_raw(page) };
            page = owned.next.load(Relaxed);
        }
    }
}

/// A thread's slot in a domain. Not `Send`, because its pins count without atomic operations.
pub struct Reader<'e> {
    epochs: &'e Epochs,
    slot: &'e Slot,
    _thread_bound: PhantomData<*const ()>,
}

impl<'e> Reader<'e> {
    /// Protects everything that is reachable from now on from being freed, until the pin is
    /// dropped.
    ///
    /// Pins of one thread nest; all are as old as the outermost one.
    ///
    /// # Cost
    /// One full fence; only a count when nested.
    #[inline]
    pub fn pin(&self) -> Pin<'e> {
        let pins = self.slot.pins.load(Relaxed);
        self.slot.pins.store(pins + 1, Relaxed);
        if pins & !LEAVING == 0 {
            self.publish();
        }
        Pin { slot: self.slot, _thread_bound: PhantomData }
    }

    #[inline]
    fn publish(&self) {
        // Acquire: see the proof, "It sees e > t".
        let epoch = self.epochs.global.0.load(Acquire);
        // Release: a writer that sees this pin sees the end of the one before.
        self.slot.epoch.store(epoch, Release);
        #[cfg(loom)]
        if !self.epochs.is_fenced {
            return;
        }
        // The reader's fence R of the proof above.
        fence(SeqCst);
    }
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        match self.slot.pins.load(Relaxed) {
            0 => self.slot.give_back(),
            pins => self.slot.pins.store(pins | LEAVING, Relaxed),
        }
    }
}

/// While it lives, nothing that its thread can reach is freed. Keep it for one walk only: it delays
/// the freeing of everything retired meanwhile, in all indexes.
pub struct Pin<'e> {
    slot: &'e Slot,
    _thread_bound: PhantomData<*const ()>,
}

impl Drop for Pin<'_> {
    #[inline]
    fn drop(&mut self) {
        let pins = self.slot.pins.load(Relaxed) - 1;
        self.slot.pins.store(pins, Relaxed);
        if pins & !LEAVING == 0 {
            // Release: all looks of this pin happened before the writer sees it ended.
            self.slot.epoch.store(IDLE, Release);
            if pins == LEAVING {
                self.slot.give_back();
            }
        }
    }
}

#[cfg(not(loom))]
mod process {
    use super::{Epochs, Pin, Reader};

    static EPOCHS: Epochs = Epochs::empty();

    thread_local! {
        static READER: Reader<'static> = EPOCHS.enroll();
    }

    /// The domain of all indexes of this process.
    #[inline]
    pub fn epochs() -> &'static Epochs {
        &EPOCHS
    }

    /// Pins the current thread in [`epochs`]. See [`Reader::pin`].
    #[inline]
    pub fn pin() -> Pin<'static> {
        // During thread shutdown the reader may be gone; then this pin takes its own slot.
        READER.try_with(Reader::pin).unwrap_or_else(|_| EPOCHS.enroll().pin())
    }
}

#[cfg(loom)]
mod process {
    use super::{Epochs, Pin, Reader};

    loom::lazy_static! {
        static ref EPOCHS: Epochs = Epochs::empty();
    }

    loom::thread_local! {
        static READER: Reader<'static> = epochs().enroll();
    }

    pub fn epochs() -> &'static Epochs {
        &EPOCHS
    }

    pub fn pin() -> Pin<'static> {
        READER.with(Reader::pin)
    }
}

pub use process::{epochs, pin};

/// Unlinked items that are not freed yet, oldest first. Writer only.
///
/// Dropping it drops the remaining items; use [`Retired::drain_all`] if they need more than that.
pub struct Retired<T> {
    items: VecDeque<T>,
    /// Tag and size of the leading groups; items after them have no tag yet.
    groups: VecDeque<(u64, usize)>,
    tagged: usize,
}

impl<T> Retired<T> {
    /// Capacity that an empty queue keeps.
    const KEPT: usize = 16;

    /// Nothing retired, nothing allocated.
    pub const fn new() -> Self {
        Self { items: VecDeque::new(), groups: VecDeque::new(), tagged: 0 }
    }

    /// Adds an item that was unlinked before, so that no later pin can reach it.
    #[inline]
    pub fn push(&mut self, item: T) {
        self.items.push_back(item);
    }

    /// Passes items that no reader can see any more to `free`, oldest first.
    ///
    /// Always call it with the domain in which the readers pin.
    ///
    /// # Cost
    /// Nothing if empty. Otherwise a fence, a read of the slot of every thread that ever read
    /// concurrently, and, after new items, a cache miss for each reader at its next pin. Collect
    /// occasionally, not after every push.
    #[inline]
    pub fn collect(&mut self, epochs: &Epochs, free: impl FnMut(T)) {
        if !self.items.is_empty() {
            self.collect_some(epochs, free);
        }
    }

    fn collect_some(&mut self, epochs: &Epochs, mut free: impl FnMut(T)) {
        let untagged = self.items.len() - self.tagged;
        if untagged > 0 {
            self.groups.push_back((epochs.advance(), untagged));
            self.tagged += untagged;
        }
        let Some(&(first, _)) = self.groups.front() else { return };
        let oldest = epochs.oldest_pinned(first);
        while let Some(&(tag, count)) = self.groups.front() {
            if tag >= oldest {
                return;
            }
            self.groups.pop_front();
            self.tagged -= count;
            self.items.drain(..count).for_each(&mut free);
        }
        if self.items.capacity() > Self::KEPT {
            self.items.shrink_to(Self::KEPT);
            self.groups.shrink_to(Self::KEPT);
        }
    }

    /// Passes all items to `free` at once: for a Drop, where `&mut` on the readers' structure
    /// proves that there are no readers.
    pub fn drain_all(&mut self, free: impl FnMut(T)) {
        self.groups.clear();
        self.tagged = 0;
        self.items.drain(..).for_each(free);
    }

    /// Number of items not yet freed.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether all items are freed.
    #[cfg(any(test, loom))]
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Bytes of the queue itself, without what its items own.
    pub fn bytes(&self) -> usize {
        self.items.capacity() * size_of::<T>() + self.groups.capacity() * size_of::<(u64, usize)>()
    }
}

impl<T> Default for Retired<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests;
