//! Tests of frames.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::*;

#[test]
fn frames_come_out_as_they_went_in_however_they_are_cut() {
    let frames =
        [(Kind::Data, &b"abc"[..]), (Kind::Ping, b""), (Kind::Error, b"\0\0"), (Kind::End, b"")];
    let bytes: Vec<u8> =
        frames.iter().flat_map(|(kind, data)| encode_frame(*kind, data).unwrap()).collect();
    for size in 1..=bytes.len() {
        let (mut received, mut found) = (BytesMut::new(), Vec::new());
        for chunk in bytes.chunks(size) {
            received.extend_from_slice(chunk);
            while let Some(frame) = take_frame(&mut received, "w").unwrap() {
                found.push((frame.kind, frame.payload));
            }
        }
        let wanted: Vec<_> =
            frames.iter().map(|(kind, data)| (*kind, Bytes::from_static(data))).collect();
        assert_eq!(found, wanted, "chunks of {size}");
        assert!(received.is_empty());
    }
}

#[test]
fn what_is_no_frame_is_refused_with_what_came() {
    let refused = |bytes: &[u8]| take_frame(&mut BytesMut::from(bytes), "w").unwrap_err().message;
    assert!(refused(&[0, 0, 0, 0]).contains("1..=33554432, got 0"));
    assert!(refused(&[2, 0, 0, 1, 2]).contains("got 33554433"));
    assert!(refused(&[0, 0, 0, 9, 77]).contains("unknown kind of frame: 77"));
    assert!(refused(b"HTTP/1.1 400 Bad Request").contains("got 1213486160"));
    assert!(encode_frame(Kind::Data, &vec![0; MAX_FRAME_BYTES]).unwrap_err().contains("33554433"));
    assert!(encode_frame(Kind::Data, &vec![0; MAX_FRAME_BYTES - 1]).is_ok());
}

#[test]
fn garbage_ends_or_waits_and_never_panics() {
    let mut rng = SmallRng::seed_from_u64(5);
    let (mut refused, mut waiting, mut taken) = (0, 0, 0);
    for _ in 0..20_000 {
        let length = rng.random_range(0..24);
        let mut received: BytesMut = (0..length).map(|_| rng.random::<u8>()).collect();
        if rng.random() && received.len() > 4 {
            received[..3].fill(0);
            received[4] = rng.random_range(0..8);
        }
        let outcome = loop {
            match take_frame(&mut received, "w") {
                Ok(Some(_)) => taken += 1,
                other => break other,
            }
        };
        if outcome.is_err() { refused += 1 } else { waiting += 1 }
    }
    assert!(refused > 1_000 && waiting > 1_000 && taken > 50, "{refused} {waiting} {taken}");
}
