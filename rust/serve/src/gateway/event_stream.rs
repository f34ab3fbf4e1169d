//! Passes an event stream through in whole lines.

use bytes::{Bytes, BytesMut};

/// Maximum bytes of an incomplete line that are held back; longer ones are passed on as they
/// arrive.
const MAX_HELD_BYTES: usize = 1 << 18;

/// Holds back a line until it is complete: a client can't use part of an event's data, and if the
/// engine is lost after it, would take the part for the whole.
///
/// # Cost
/// A check of the last byte of a chunk that ends with an event, which nearly all do; a copy of an
/// incomplete line.
#[derive(Debug, Default)]
pub(crate) struct WholeLines {
    held: BytesMut,
    /// Part of the current line was already sent.
    is_cut: bool,
}

impl WholeLines {
    /// Whether nothing is held back.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// The data to send after `chunk` has arrived.
    pub fn take(&mut self, chunk: Bytes) -> Bytes {
        // A CR alone also ends a line; an LF after it belongs to it.
        let end = memchr::memrchr2(b'\n', b'\r', &chunk).map_or(0, |at| at + 1);
        if self.held.is_empty() {
            let goes_on = self.is_cut && end == 0;
            if goes_on || end == chunk.len() {
                self.is_cut = goes_on;
                return chunk;
            }
        }
        self.is_cut = false;
        let whole = match (self.held.is_empty(), end) {
            (_, 0) => Bytes::new(),
            (true, end) => chunk.slice(..end),
            (false, end) => {
                self.held.extend_from_slice(&chunk[..end]);
                self.held.split().freeze()
            }
        };
        self.held.extend_from_slice(&chunk[end..]);
        if self.held.len() > MAX_HELD_BYTES {
            self.is_cut = true;
            return self.end(whole);
        }
        whole
    }

    /// At the end of the stream: `last`, after the held data.
    pub fn end(&mut self, last: Bytes) -> Bytes {
        let held = std::mem::take(&mut self.held);
        match (last.is_empty(), held.is_empty()) {
            (_, true) => last,
            (true, false) => held.freeze(),
            (false, false) => Bytes::from([&last[..], &held[..]].concat()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_lines_go_out_however_they_are_cut() {
        for end in ["\n\n", "\r\n\r\n", "\n", "\r\r"] {
            let stream = ["data: {\"a\": 1}", ": ping", "event: x", "data: [DONE]", "data: half"];
            let stream = stream.join(end);
            for size in 1..=stream.len() {
                let mut lines = WholeLines::default();
                let mut out = Vec::new();
                for chunk in stream.as_bytes().chunks(size) {
                    let ready = lines.take(Bytes::copy_from_slice(chunk));
                    let is_whole = ready.last().is_none_or(|last| b"\r\n".contains(last));
                    assert!(is_whole, "{ready:?}");
                    out.extend_from_slice(&ready);
                }
                assert_eq!(out.len(), stream.len() - "data: half".len(), "chunks of {size}");
                assert!(!lines.is_empty());
                out.extend_from_slice(&lines.end(Bytes::new()));
                assert_eq!(out, stream.as_bytes());
            }
        }
    }

    #[test]
    fn a_whole_event_is_not_copied() {
        let chunk = Bytes::from_static(b"data: 1\n\ndata: 2\n\n");
        assert_eq!(WholeLines::default().take(chunk.clone()).as_ptr(), chunk.as_ptr());
    }

    #[test]
    fn a_line_that_is_too_long_goes_out_as_it_comes() {
        let mut lines = WholeLines::default();
        let long = vec![b'x'; MAX_HELD_BYTES];
        assert_eq!(lines.take(Bytes::from_static(b"data: 1\n\ndata: ")), "data: 1\n\n");
        assert_eq!(lines.take(long.clone().into()).len(), "data: ".len() + long.len());
        assert!(lines.is_empty());
        assert_eq!(lines.take(Bytes::from_static(b"more")), "more");
        assert_eq!(lines.take(Bytes::from_static(b"end\n\nnext")), "end\n\n");
        assert_eq!(lines.take(Bytes::from_static(b"one")), "");
        assert_eq!(lines.take(Bytes::from_static(b"\n\n")), "nextone\n\n");
    }
}
