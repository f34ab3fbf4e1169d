//! Values by number, in pages, so that growth moves nothing.

const PAGE: usize = 256;

/// A table of values by small numbers; freed numbers are reused.
#[derive(Default)]
pub(super) struct Slab<T> {
    pages: Vec<Box<[T]>>,
    free: Vec<u32>,
    next: u32,
}

impl<T: Default> Slab<T> {
    /// Adds a value; returns its number.
    pub fn add(&mut self, value: T) -> u32 {
        let at = self.free.pop().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        });
        *self.get_or_grow(at) = value;
        at
    }

    /// Removes the value and frees its number.
    pub fn take(&mut self, at: u32) -> T {
        self.free.push(at);
        std::mem::take(self.get_mut(at))
    }

    #[inline]
    pub fn get(&self, at: u32) -> &T {
        &self.pages[at as usize / PAGE][at as usize % PAGE]
    }

    #[inline]
    pub fn get_mut(&mut self, at: u32) -> &mut T {
        &mut self.pages[at as usize / PAGE][at as usize % PAGE]
    }

    /// The value of a number that the caller assigns.
    pub fn get_or_grow(&mut self, at: u32) -> &mut T {
        while self.pages.len() <= at as usize / PAGE {
            self.pages.push((0..PAGE).map(|_| T::default()).collect());
        }
        self.get_mut(at)
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.next as usize - self.free.len()
    }

    /// One more than the highest number with a place.
    pub fn end(&self) -> u32 {
        (self.pages.len() * PAGE) as u32
    }

    /// All places, including empty ones.
    pub fn all(&self) -> impl Iterator<Item = &T> {
        self.pages.iter().flatten()
    }

    /// Bytes of one page.
    pub fn page_bytes(&self) -> usize {
        PAGE * size_of::<T>()
    }

    /// Upper bound of the bytes for `more` values.
    pub fn growth(&self, more: usize) -> usize {
        let fresh = more.saturating_sub(self.free.len());
        let pages = (self.next as usize + fresh).div_ceil(PAGE).saturating_sub(self.pages.len());
        let lists = self.pages.len() * size_of::<Box<[T]>>() + self.free.len() * size_of::<u32>();
        pages * self.page_bytes() + if pages > 0 { 2 * lists } else { 0 }
    }

    /// Bytes requested from the allocator, without memory owned by the values.
    pub fn bytes(&self) -> usize {
        self.pages.len() * PAGE * size_of::<T>()
            + self.pages.capacity() * size_of::<Box<[T]>>()
            + self.free.capacity() * size_of::<u32>()
    }
}
