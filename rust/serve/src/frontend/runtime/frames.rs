//! Frames of the request plane: a length, a kind, a payload.

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Largest frame: what follows its length.
pub(super) const MAX_FRAME_BYTES: usize = 32 * 1024 * 1024;

/// Bytes of a frame's length and kind.
const HEAD_BYTES: usize = 5;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    Request = 1,
    Data = 2,
    End = 3,
    Error = 4,
    Ping = 5,
    Pong = 6,
}

impl Kind {
    fn of(byte: u8) -> Option<Self> {
        [Self::Request, Self::Data, Self::End, Self::Error, Self::Ping, Self::Pong]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }
}

/// One frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frame {
    pub kind: Kind,
    pub payload: Bytes,
}

/// A frame as it travels.
///
/// # Errors
/// A payload beyond the limit, in words.
pub(super) fn encode(kind: Kind, payload: &[u8]) -> Result<Bytes, String> {
    let bytes = payload.len() + 1;
    if bytes > MAX_FRAME_BYTES {
        return Err(format!("a frame of {bytes} bytes exceeds the limit of {MAX_FRAME_BYTES}"));
    }
    let mut out = BytesMut::with_capacity(HEAD_BYTES + payload.len());
    out.put_u32(bytes as u32);
    out.put_u8(kind as u8);
    out.put_slice(payload);
    Ok(out.freeze())
}

/// Does it begin with a complete frame, or with what is none?
pub(super) fn is_complete(received: &BytesMut) -> bool {
    received.first_chunk::<4>().is_some_and(|head| {
        let bytes = u32::from_be_bytes(*head) as usize;
        bytes > MAX_FRAME_BYTES || received.len() >= 4 + bytes
    })
}

/// Take the first frame out of what has been received; `None` while it is not complete.
///
/// # Errors
/// What is no frame, in words; nothing behind it can be read.
pub(super) fn take(received: &mut BytesMut) -> Result<Option<Frame>, String> {
    let Some(head) = received.first_chunk::<4>() else { return Ok(None) };
    let bytes = u32::from_be_bytes(*head) as usize;
    if !(1..=MAX_FRAME_BYTES).contains(&bytes) {
        return Err(format!("a frame's length must be in 1..={MAX_FRAME_BYTES}, got {bytes}"));
    }
    // Told from the fifth byte, before the rest is waited for.
    let Some(byte) = received.get(4).copied() else { return Ok(None) };
    let kind = Kind::of(byte).ok_or_else(|| format!("unknown kind of frame: {byte}"))?;
    if received.len() < 4 + bytes {
        // No more than the limit, and only as the bytes come: a length alone reserves nothing.
        return Ok(None);
    }
    received.advance(HEAD_BYTES);
    Ok(Some(Frame { kind, payload: received.split_to(bytes - 1).freeze() }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    #[test]
    fn frames_come_out_as_they_went_in_however_they_are_cut() {
        let frames = [
            (Kind::Data, &b"abc"[..]),
            (Kind::Ping, b""),
            (Kind::Error, b"\0\0"),
            (Kind::End, b""),
        ];
        let bytes: Vec<u8> =
            frames.iter().flat_map(|(kind, data)| encode(*kind, data).unwrap()).collect();
        for size in 1..=bytes.len() {
            let (mut received, mut found) = (BytesMut::new(), Vec::new());
            for chunk in bytes.chunks(size) {
                received.extend_from_slice(chunk);
                while let Some(frame) = take(&mut received).unwrap() {
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
        let refused = |bytes: &[u8]| take(&mut BytesMut::from(bytes)).unwrap_err();
        assert!(refused(&[0, 0, 0, 0]).contains("1..=33554432, got 0"));
        assert!(refused(&[2, 0, 0, 1, 2]).contains("got 33554433"));
        assert!(refused(&[0, 0, 0, 9, 77]).contains("unknown kind of frame: 77"));
        assert!(refused(b"HTTP/1.1 400 Bad Request").contains("got 1213486160"));
        assert!(encode(Kind::Data, &vec![0; MAX_FRAME_BYTES]).unwrap_err().contains("33554433"));
        assert!(encode(Kind::Data, &vec![0; MAX_FRAME_BYTES - 1]).is_ok());
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
                match take(&mut received) {
                    Ok(Some(_)) => taken += 1,
                    other => break other,
                }
            };
            if outcome.is_err() { refused += 1 } else { waiting += 1 }
        }
        assert!(refused > 1_000 && waiting > 1_000 && taken > 50, "{refused} {waiting} {taken}");
    }
}
