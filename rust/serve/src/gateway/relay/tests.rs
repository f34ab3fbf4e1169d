//! Tests of the lines of an event stream.

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
