//! Requests in order of their last activity: moving one to the end costs the same at any size.

const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Link {
    before: u32,
    after: u32,
}

/// A doubly linked list over the places of a slab; the caller knows which places are linked.
#[derive(Debug)]
pub(crate) struct Recency {
    links: Vec<Link>,
    first: u32,
    last: u32,
}

impl Default for Recency {
    fn default() -> Self {
        Self { links: Vec::new(), first: NONE, last: NONE }
    }
}

impl Recency {
    /// The place that has been idle longest.
    pub(crate) fn first(&self) -> Option<u32> {
        (self.first != NONE).then_some(self.first)
    }

    /// Link `place`, which is not linked, as the most recent one.
    pub(crate) fn push(&mut self, place: u32) {
        let index = place as usize;
        if index >= self.links.len() {
            self.links.resize(index + 1, Link { before: NONE, after: NONE });
        }
        self.links[index] = Link { before: self.last, after: NONE };
        match self.last {
            NONE => self.first = place,
            last => self.links[last as usize].after = place,
        }
        self.last = place;
    }

    /// Unlink `place`, which is linked.
    pub(crate) fn remove(&mut self, place: u32) {
        let Link { before, after } = self.links[place as usize];
        match before {
            NONE => self.first = after,
            before => self.links[before as usize].after = after,
        }
        match after {
            NONE => self.last = before,
            after => self.links[after as usize].before = before,
        }
    }
}
