//! A byte source with lookahead, to find the next section after damage.

use std::io::{self, Read};

use super::format::{SECTION_BYTES, SECTION_MAGIC, Section};

/// Bytes read at once during a search.
const SEARCH_BYTES: usize = 1 << 20;

pub(super) struct Source<R> {
    inner: R,
    ahead: Vec<u8>,
    /// Consumed bytes of `ahead`.
    done: usize,
}

impl<R: Read> Source<R> {
    pub fn new(inner: R) -> Self {
        Self { inner, ahead: Vec::new(), done: 0 }
    }

    /// The next `len` bytes, or all remaining ones if there are fewer. Memory grows with received
    /// data, not with announced sizes.
    pub fn peek(&mut self, len: u64) -> io::Result<&[u8]> {
        let have = (self.ahead.len() - self.done) as u64;
        if have < len {
            self.ahead.drain(..self.done);
            self.done = 0;
            (&mut self.inner).take(len - have).read_to_end(&mut self.ahead)?;
        }
        let left = &self.ahead[self.done..];
        Ok(&left[..left.len().min(usize::try_from(len).unwrap_or(usize::MAX))])
    }

    /// Consumes bytes.
    pub fn advance(&mut self, len: usize) {
        self.done = (self.done + len).min(self.ahead.len());
    }

    /// Skips to the next complete section header accepted by `is_fit`, starting at the next byte.
    /// False if there is none; then everything was read.
    pub fn find(&mut self, is_fit: impl Fn(&Section) -> bool) -> io::Result<bool> {
        loop {
            let bytes = self.peek(SEARCH_BYTES as u64)?;
            let is_last = bytes.len() < SEARCH_BYTES;
            let is_header = |bytes: &[u8]| {
                bytes.starts_with(&SECTION_MAGIC)
                    && bytes.first_chunk().and_then(Section::decode).is_some_and(|s| is_fit(&s))
            };
            let places = (bytes.len() + 1).saturating_sub(SECTION_BYTES);
            let found = (0..places).find(|at| is_header(&bytes[*at..]));
            // The rest may be the beginning of a header.
            self.advance(found.unwrap_or(places));
            if found.is_some() || is_last {
                return Ok(found.is_some());
            }
        }
    }
}
