//! Arrays that readers walk through while the writer replaces them.
//!
//! An array is a power of two of elements in one allocation, aligned to a cache line. The low six
//! bits of its address are therefore free for the logarithm of its length. One word holds both
//! address and length, so a reader never sees a new pointer with an old length.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::marker::PhantomData;
use std::ptr;

use super::epoch::Pin;
use super::sync::atomic::AtomicPtr;
use super::sync::atomic::Ordering::{Acquire, Relaxed, Release};

const ALIGN: usize = 64;

/// The name of an array: a copy of the word that leads to it. Only [`Array::free`] frees the array.
pub struct Array<T> {
    tagged: *mut T,
    _owns: PhantomData<T>,
}

impl<T> Clone for Array<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Array<T> {}

// Safety: a name gives access to `&T` and, once, to the freeing of `T`s, from any thread.
unsafe impl<T: Send + Sync> Send for Array<T> {}
// Safety: as above; a shared name can only be copied.
unsafe impl<T: Send + Sync> Sync for Array<T> {}

impl<T> Array<T> {
    /// `1 << bits` elements, made in order. At most `1 << 63` of them.
    pub fn allocate(bits: u32, mut element: impl FnMut(usize) -> T) -> Self {
        let layout = Self::layout(bits);
        const { assert!(size_of::<T>() > 0, "an allocation needs a size") };
        // Safety: at least one element, and elements have a size.
        let first = unsafe { alloc(layout) }.cast::<T>();
        if first.is_null() {
            handle_alloc_error(layout);
        }
        for at in 0..1 << bits {
            // Safety: `at` is below the length the memory was asked for; nothing was there before.
            unsafe { first.add(at).write(element(at)) };
        }
        debug_assert_eq!(first.addr() % ALIGN, 0);
        Self { tagged: first.map_addr(|address| address | bits as usize), _owns: PhantomData }
    }

    /// Logarithm of the length.
    pub fn bits(self) -> u32 {
        (self.tagged.addr() % ALIGN) as u32
    }

    /// Bytes requested from the allocator.
    pub fn bytes(self) -> usize {
        Self::layout(self.bits()).size()
    }

    /// # Safety
    /// The array is not freed during `'a`.
    pub unsafe fn as_slice<'a>(self) -> &'a [T] {
        let (first, bits) = (self.first(), self.bits());
        debug_assert!(!first.is_null());
        // Safety: made by `allocate` with this length, all elements written, only read since; alive by
        // the caller's promise.
        unsafe { std::slice::from_raw_parts(first, 1 << bits) }
    }

    /// # Safety
    /// No thread reads the array any more, through any copy of its name, and it is not freed twice.
    pub unsafe fn free(self) {
        let (first, bits) = (self.first(), self.bits());
        // Safety: made by `allocate` with this length and layout; the caller promises the rest.
        unsafe {
            ptr::drop_in_place(ptr::slice_from_raw_parts_mut(first, 1 << bits));
            dealloc(first.cast(), Self::layout(bits));
        }
    }

    fn first(self) -> *mut T {
        self.tagged.map_addr(|address| address & !(ALIGN - 1))
    }

    fn layout(bits: u32) -> Layout {
        let plain = Layout::array::<T>(1 << bits).expect("the length was limited by its owner");
        plain.align_to(ALIGN).expect("a cache line is a valid alignment")
    }
}

/// The word through which readers find an array. Never empty.
///
/// A published array must be freed only through `epoch::Retired`, after it was replaced, or
/// together with its owner. Callers of [`Array::free`] guarantee this, and [`AtomicArray::load`]
/// relies on it.
pub struct AtomicArray<T>(AtomicPtr<T>);

impl<T> AtomicArray<T> {
    pub fn new(array: Array<T>) -> Self {
        Self(AtomicPtr::new(array.tagged))
    }

    /// The current array, which stays readable until the pin ends.
    #[inline]
    pub fn load<'p>(&self, _pin: &'p Pin<'_>) -> &'p [T] {
        // Acquire: the elements were written before they were published.
        let array = Array { tagged: self.0.load(Acquire), _owns: PhantomData };
        // Safety: it was current after the pin began, so it is freed after the pin's end.
        unsafe { array.as_slice() }
    }

    /// The current array, for the writer, which published it.
    pub fn current(&self) -> Array<T> {
        Array { tagged: self.0.load(Relaxed), _owns: PhantomData }
    }

    /// Replaces the array that readers see. Writer only.
    pub fn publish(&self, array: Array<T>) {
        // Release: readers that find the array find it filled.
        self.0.store(array.tagged, Release);
    }
}
