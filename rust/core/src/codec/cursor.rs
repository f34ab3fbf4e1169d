//! A bounded reader of msgpack: every length is compared with the remaining bytes before it is
//! used.

use rmp::Marker;
use smallvec::SmallVec;

/// Why a value could not be read. The cursor's position at that time is the place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// The bytes are not msgpack, end too early or nest too deep: nothing after them can be read.
    Broken(&'static str),
    /// A value with another type or size than its field allows: only this event is lost.
    Malformed(&'static str),
    /// An event that this version does not support: skipped.
    Unsupported,
    /// A token id outside u32, by its index.
    TokenRange(usize),
}

const TRUNCATED: Fault = Fault::Broken("the frame ends within a value");
const OVERLONG: Fault = Fault::Broken("a length claims more bytes than remain");
const TOO_DEEP: Fault = Fault::Broken("values nest deeper than the limit");
const NOT_MSGPACK: Fault = Fault::Broken("0xc1 is not a valid first byte of a value");

/// A scalar, or the beginning of an array or a map whose elements follow.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Head<'a> {
    Nil,
    /// An integer that is not negative.
    Uint(u64),
    /// A negative integer.
    Int(i64),
    Float(f64),
    /// Bytes that claim to be UTF-8; unchecked.
    Text(&'a [u8]),
    Bytes(&'a [u8]),
    /// Number of elements, at most the bytes that remain.
    Array(usize),
    /// Number of entries, at most half the bytes that remain.
    Map(usize),
    /// Booleans and extensions, which no field uses.
    Other,
}

/// A position in a frame.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Bytes from the start of the frame.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    pub(super) fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The bytes read since `start`, a position this cursor has had.
    pub(super) fn since(&self, start: usize) -> &'a [u8] {
        &self.bytes[start..self.at]
    }

    /// Reads a scalar, or the beginning of an array or a map.
    #[inline]
    pub(super) fn head(&mut self) -> Result<Head<'a>, Fault> {
        let [byte] = self.fixed()?;
        Ok(match Marker::from_u8(byte) {
            Marker::FixPos(value) => Head::Uint(value.into()),
            Marker::U8 => Head::Uint(u8::from_be_bytes(self.fixed()?).into()),
            Marker::U16 => Head::Uint(u16::from_be_bytes(self.fixed()?).into()),
            Marker::U32 => Head::Uint(u32::from_be_bytes(self.fixed()?).into()),
            Marker::U64 => Head::Uint(u64::from_be_bytes(self.fixed()?)),
            Marker::FixNeg(value) => Head::Int(value.into()),
            Marker::I8 => integer(i8::from_be_bytes(self.fixed()?).into()),
            Marker::I16 => integer(i16::from_be_bytes(self.fixed()?).into()),
            Marker::I32 => integer(i32::from_be_bytes(self.fixed()?).into()),
            Marker::I64 => integer(i64::from_be_bytes(self.fixed()?)),
            Marker::F32 => Head::Float(f32::from_be_bytes(self.fixed()?).into()),
            Marker::F64 => Head::Float(f64::from_be_bytes(self.fixed()?)),
            Marker::Null => Head::Nil,
            Marker::True | Marker::False => Head::Other,
            Marker::FixStr(len) => Head::Text(self.run(len.into())?),
            Marker::Str8 => Head::Text(self.counted::<1>()?),
            Marker::Str16 => Head::Text(self.counted::<2>()?),
            Marker::Str32 => Head::Text(self.counted::<4>()?),
            Marker::Bin8 => Head::Bytes(self.counted::<1>()?),
            Marker::Bin16 => Head::Bytes(self.counted::<2>()?),
            Marker::Bin32 => Head::Bytes(self.counted::<4>()?),
            Marker::FixArray(count) => self.array(count.into())?,
            Marker::Array16 => self.length::<2>().and_then(|count| self.array(count))?,
            Marker::Array32 => self.length::<4>().and_then(|count| self.array(count))?,
            Marker::FixMap(count) => self.map(count.into())?,
            Marker::Map16 => self.length::<2>().and_then(|count| self.map(count))?,
            Marker::Map32 => self.length::<4>().and_then(|count| self.map(count))?,
            Marker::FixExt1 => self.extension(1)?,
            Marker::FixExt2 => self.extension(2)?,
            Marker::FixExt4 => self.extension(4)?,
            Marker::FixExt8 => self.extension(8)?,
            Marker::FixExt16 => self.extension(16)?,
            Marker::Ext8 => self.length::<1>().and_then(|len| self.extension(len))?,
            Marker::Ext16 => self.length::<2>().and_then(|len| self.extension(len))?,
            Marker::Ext32 => self.length::<4>().and_then(|len| self.extension(len))?,
            Marker::Reserved => return Err(NOT_MSGPACK),
        })
    }

    /// Reads the token id at `index` of its list. The three encodings of a vocabulary come first:
    /// this is called more often than everything else together.
    #[inline]
    pub(super) fn token(&mut self, index: usize) -> Result<u32, Fault> {
        match self.bytes[self.at..] {
            [value @ 0..=0x7f, ..] => {
                self.at += 1;
                Ok(value.into())
            }
            [0xcd, a, b, ..] => {
                self.at += 3;
                Ok(u16::from_be_bytes([a, b]).into())
            }
            [0xce, a, b, c, d, ..] => {
                self.at += 5;
                Ok(u32::from_be_bytes([a, b, c, d]))
            }
            _ => self.other_token(index),
        }
    }

    #[cold]
    fn other_token(&mut self, index: usize) -> Result<u32, Fault> {
        match self.head()? {
            Head::Uint(value) => u32::try_from(value).map_err(|_| Fault::TokenRange(index)),
            Head::Int(_) => Err(Fault::TokenRange(index)),
            // Pairs of tokens, as published under EAGLE speculation.
            Head::Array(_) => Err(Fault::Unsupported),
            _ => Err(Fault::Malformed("a token id must be an integer")),
        }
    }

    /// Skips one value of any kind, with at most `max_depth` levels of arrays and maps.
    ///
    /// A loop with its own stack: with recursion the sender would choose our stack depth.
    pub(super) fn skip(&mut self, max_depth: usize) -> Result<(), Fault> {
        // Number of remaining values, per open level.
        let mut open = SmallVec::<[usize; 16]>::new();
        loop {
            let children = match self.head()? {
                Head::Array(count) => count,
                // Can't overflow: a map's count is at most half the remaining bytes.
                Head::Map(count) => count * 2,
                _ => 0,
            };
            if children > 0 {
                if open.len() >= max_depth {
                    return Err(TOO_DEEP);
                }
                open.push(children);
                continue;
            }
            loop {
                let Some(left) = open.last_mut() else { return Ok(()) };
                *left -= 1;
                if *left > 0 {
                    break;
                }
                open.pop();
            }
        }
    }

    #[inline]
    fn fixed<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        let (fixed, _) = self.bytes[self.at..].split_first_chunk::<N>().ok_or(TRUNCATED)?;
        self.at += N;
        Ok(*fixed)
    }

    fn length<const N: usize>(&mut self) -> Result<usize, Fault> {
        let bytes = self.fixed::<N>()?;
        Ok(bytes.iter().fold(0, |length, &byte| length << 8 | usize::from(byte)))
    }

    fn run(&mut self, len: usize) -> Result<&'a [u8], Fault> {
        let (run, _) = self.bytes[self.at..].split_at_checked(len).ok_or(OVERLONG)?;
        self.at += len;
        Ok(run)
    }

    fn counted<const N: usize>(&mut self) -> Result<&'a [u8], Fault> {
        let len = self.length::<N>()?;
        self.run(len)
    }

    fn array(&self, count: usize) -> Result<Head<'a>, Fault> {
        // Every element takes at least one byte.
        if count > self.remaining() { Err(OVERLONG) } else { Ok(Head::Array(count)) }
    }

    fn map(&self, count: usize) -> Result<Head<'a>, Fault> {
        if count > self.remaining() / 2 { Err(OVERLONG) } else { Ok(Head::Map(count)) }
    }

    fn extension(&mut self, len: usize) -> Result<Head<'a>, Fault> {
        let [_kind] = self.fixed()?;
        self.run(len)?;
        Ok(Head::Other)
    }
}

/// Encoders may write small positive values as signed integers.
fn integer<'a>(value: i64) -> Head<'a> {
    u64::try_from(value).map_or(Head::Int(value), Head::Uint)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn head(bytes: &[u8]) -> Result<Head<'_>, Fault> {
        Cursor::new(bytes).head()
    }

    #[test]
    fn every_first_byte_is_understood_or_refused() {
        let mut seen = 0;
        for byte in 0..=u8::MAX {
            // Followed by zeros: every length is 0, every number is 0.
            let mut frame = [0; 32];
            frame[0] = byte;
            let mut cursor = Cursor::new(&frame);
            match cursor.skip(16) {
                Ok(()) => assert!(cursor.at() >= 1),
                Err(fault) => assert_eq!((byte, fault), (0xc1, NOT_MSGPACK)),
            }
            // Alone it is a whole value or a truncated one, never a panic.
            let _ = Cursor::new(&frame[..1]).skip(16);
            seen += 1;
        }
        assert_eq!(seen, 256);
    }

    #[test]
    fn integers_of_any_width_are_the_same_number() {
        for bytes in
            [&[5][..], &[0xcc, 5], &[0xcd, 0, 5], &[0xd0, 5], &[0xd3, 0, 0, 0, 0, 0, 0, 0, 5]]
        {
            assert_eq!(head(bytes), Ok(Head::Uint(5)));
            assert_eq!(Cursor::new(bytes).token(0), Ok(5));
        }
        assert_eq!(head(&[0xff]), Ok(Head::Int(-1)));
        assert_eq!(head(&[0xd0, 0xff]), Ok(Head::Int(-1)));
    }

    #[test]
    fn a_length_is_compared_with_what_remains() {
        assert_eq!(head(&[0xdd, 0xff, 0xff, 0xff, 0xff, 0]), Err(OVERLONG));
        assert_eq!(head(&[0xdf, 0, 0, 0, 1, 0]), Err(OVERLONG));
        assert_eq!(head(&[0xdf, 0, 0, 0, 1, 0, 0]), Ok(Head::Map(1)));
        assert_eq!(head(&[0xc6, 0xff, 0xff, 0xff, 0xff, 0]), Err(OVERLONG));
        assert_eq!(head(&[0xdb, 0, 0]), Err(TRUNCATED));
        assert_eq!(head(&[]), Err(TRUNCATED));
    }

    #[test]
    fn the_depth_of_what_is_skipped_is_bounded() {
        let nested = |levels: usize| [vec![0x91; levels], vec![0xc0]].concat();
        assert_eq!(Cursor::new(&nested(16)).skip(16), Ok(()));
        assert_eq!(Cursor::new(&nested(17)).skip(16), Err(TOO_DEEP));
        assert_eq!(Cursor::new(&nested(1_000_000)).skip(16), Err(TOO_DEEP));
        assert_eq!(Cursor::new(&[0x90]).skip(0), Ok(()), "an empty array has no inside");
    }

    #[test]
    fn skipping_stops_behind_the_value() {
        // {1: [2, {}], "a": bin(2)} and one byte more.
        let bytes = [0x82, 1, 0x92, 2, 0x80, 0xa1, b'a', 0xc4, 2, 9, 9, 7];
        let mut cursor = Cursor::new(&bytes);
        assert_eq!(cursor.skip(2), Ok(()));
        assert_eq!((cursor.at(), cursor.remaining()), (11, 1));
    }

    #[test]
    fn a_token_outside_of_32_bits_is_named_by_index() {
        assert_eq!(Cursor::new(&[0xce, 255, 255, 255, 255]).token(0), Ok(u32::MAX));
        let too_big = [0xcf, 0, 0, 0, 1, 0, 0, 0, 0];
        assert_eq!(Cursor::new(&too_big).token(3), Err(Fault::TokenRange(3)));
        assert_eq!(Cursor::new(&[0xff]).token(4), Err(Fault::TokenRange(4)));
        assert_eq!(Cursor::new(&[0x92, 1, 2]).token(0), Err(Fault::Unsupported));
        assert_eq!(Cursor::new(&[0xcd, 1]).token(0), Err(TRUNCATED));
    }
}
