//! Python's pickle, protocol 5, byte for byte as CPython's C pickler writes it.
//!
//! Two details go beyond the opcodes. An object that occurs twice is written once and then fetched
//! by its index in the memo; tags are constants, so each is one object, and in CPython so is every
//! string of one Latin-1 character. The stream is also split into frames of about 64 KiB.
//!
//! # Source
//! CPython 3.10 to 3.14, `Modules/_pickle.c`.

use smallvec::SmallVec;

use super::Key;

const PROTO_5: [u8; 2] = [0x80, 5];
const FRAME: u8 = 0x95;
const STOP: u8 = b'.';
const NONE: u8 = b'N';
const MARK: u8 = b'(';
const EMPTY_TUPLE: u8 = b')';
const TUPLE: u8 = b't';
/// Closes a tuple of 1; those for 2 and 3 elements follow.
const TUPLE1: u8 = 0x85;
const BININT: u8 = b'J';
const BININT1: u8 = b'K';
const BININT2: u8 = b'M';
const LONG1: u8 = 0x8a;
const MEMOIZE: u8 = 0x94;
const BINGET: u8 = b'h';
const LONG_BINGET: u8 = b'j';
/// Opcodes of bytes and of text, by the width of their length: 1, 4, 8 bytes.
const BYTES: [u8; 3] = [b'C', b'B', 0x8e];
const TEXT: [u8; 3] = [0x8c, b'X', 0x8d];

/// The opcode and the length of a frame.
const FRAME_HEADER_BYTES: usize = 9;
/// A smaller payload has no frame.
const FRAME_BYTES_MIN: usize = 4;
/// A frame ends before the first object at or after this size; longer data has no frame at all.
const FRAME_BYTES_TARGET: usize = 64 * 1024;

/// Bytes of the widest token: LONG1, above `i32::MAX`.
const TOKEN_BYTES_MAX: usize = 7;
/// Tokens that can't fill a frame, with room for the data before them.
const TOKENS_OF_ONE_FRAME: usize = (FRAME_BYTES_TARGET - 1024) / TOKEN_BYTES_MAX;

/// Replaces `out` with the pickle of `text`.
pub(super) fn text(text: &str, out: &mut Vec<u8>) {
    let mut pickle = Pickle::new(out);
    pickle.text(text);
    pickle.finish();
}

/// Replaces `out` with the pickle of the tuple of one block.
pub(super) fn block(parent: &[u8], tokens: &[u32], keys: &[Key<'_>], out: &mut Vec<u8>) {
    let mut pickle = Pickle::new(out);
    pickle.bytes(parent);
    pickle.tokens(tokens);
    match keys {
        [] => pickle.none(),
        _ => pickle.keys(keys),
    }
    pickle.close_tuple(3);
    pickle.finish();
}

/// Whether CPython has a single object for every string like `text`.
pub(super) fn is_singleton(text: &str) -> bool {
    let mut chars = text.chars();
    chars.next().is_none_or(|first| first <= '\u{ff}' && chars.next().is_none())
}

struct Pickle<'a> {
    out: &'a mut Vec<u8>,
    /// Start of the open frame's header.
    frame: Option<usize>,
    /// Objects in the memo.
    memoized: u32,
    /// Strings that are always a single object, with their indices in the memo.
    singletons: SmallVec<[(&'a str, u32); 8]>,
}

impl<'a> Pickle<'a> {
    fn new(out: &'a mut Vec<u8>) -> Self {
        out.clear();
        out.extend_from_slice(&PROTO_5);
        Self { out, frame: None, memoized: 0, singletons: SmallVec::new() }
    }

    fn finish(mut self) {
        self.write(&[STOP]);
        self.close_frame();
    }

    fn write(&mut self, bytes: &[u8]) {
        self.open_frame();
        self.out.extend_from_slice(bytes);
    }

    fn open_frame(&mut self) {
        if self.frame.is_none() {
            self.frame = Some(self.out.len());
            self.out.extend_from_slice(&[FRAME, 0, 0, 0, 0, 0, 0, 0, 0]);
        }
    }

    fn close_frame(&mut self) {
        let Some(start) = self.frame.take() else { return };
        let payload = start + FRAME_HEADER_BYTES;
        let len = self.out.len() - payload;
        if len < FRAME_BYTES_MIN {
            self.out.drain(start..payload);
        } else {
            self.out[start + 1..payload].copy_from_slice(&(len as u64).to_le_bytes());
        }
    }

    /// Called before every object: only there may a frame end.
    fn begin_object(&mut self) {
        let is_full = |start| self.out.len() - start >= FRAME_HEADER_BYTES + FRAME_BYTES_TARGET;
        if self.frame.is_some_and(is_full) {
            self.close_frame();
        }
    }

    fn memoize(&mut self) -> u32 {
        self.write(&[MEMOIZE]);
        self.memoized += 1;
        self.memoized - 1
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.begin_object();
        self.data(BYTES, bytes);
        self.memoize();
    }

    fn text(&mut self, text: &'a str) {
        if is_singleton(text) {
            return self.singleton(text);
        }
        self.begin_object();
        self.data(TEXT, text.as_bytes());
        self.memoize();
    }

    fn singleton(&mut self, text: &'a str) {
        self.begin_object();
        match self.singletons.iter().find(|(known, _)| *known == text) {
            Some(&(_, index)) => match u8::try_from(index) {
                Ok(index) => self.write(&[BINGET, index]),
                Err(_) => {
                    self.write(&[LONG_BINGET]);
                    self.write(&index.to_le_bytes());
                }
            },
            None => {
                self.data(TEXT, text.as_bytes());
                let index = self.memoize();
                self.singletons.push((text, index));
            }
        }
    }

    fn data(&mut self, [short, long, huge]: [u8; 3], data: &[u8]) {
        if data.len() >= FRAME_BYTES_TARGET {
            self.close_frame();
        } else {
            self.open_frame();
        }
        if let Ok(len) = u8::try_from(data.len()) {
            self.out.extend_from_slice(&[short, len]);
        } else if let Ok(len) = u32::try_from(data.len()) {
            self.out.push(long);
            self.out.extend_from_slice(&len.to_le_bytes());
        } else {
            self.out.push(huge);
            self.out.extend_from_slice(&(data.len() as u64).to_le_bytes());
        }
        self.out.extend_from_slice(data);
    }

    fn none(&mut self) {
        self.begin_object();
        self.write(&[NONE]);
    }

    fn int(&mut self, value: i64) {
        self.begin_object();
        let bytes = value.to_le_bytes();
        if let Ok(token) = u32::try_from(value) {
            self.open_frame();
            append_tokens(self.out, &[token]);
        } else if i32::try_from(value).is_ok() {
            self.write(&[BININT]);
            self.write(&bytes[..4]);
        } else {
            // The shortest encoding that holds the signed value.
            let is_held = |&len: &u32| value << (64 - 8 * len) >> (64 - 8 * len) == value;
            let len = (1..8).find(is_held).unwrap_or(8);
            self.write(&[LONG1, len as u8]);
            self.write(&bytes[..len as usize]);
        }
    }

    fn open_tuple(&mut self, len: usize) {
        self.begin_object();
        if len > 3 {
            self.write(&[MARK]);
        }
    }

    fn close_tuple(&mut self, len: usize) {
        match len {
            // No object is created, so nothing goes to the memo.
            0 => return self.write(&[EMPTY_TUPLE]),
            1..=3 => self.write(&[TUPLE1 + len as u8 - 1]),
            _ => self.write(&[TUPLE]),
        }
        self.memoize();
    }

    fn tokens(&mut self, tokens: &[u32]) {
        self.open_tuple(tokens.len());
        if tokens.len() <= TOKENS_OF_ONE_FRAME {
            self.open_frame();
            append_tokens(self.out, tokens);
        } else {
            for &token in tokens {
                self.begin_object();
                self.open_frame();
                append_tokens(self.out, &[token]);
            }
        }
        self.close_tuple(tokens.len());
    }

    fn keys(&mut self, keys: &[Key<'a>]) {
        self.open_tuple(keys.len());
        for key in keys {
            self.open_tuple(key.len());
            self.singleton(key.tag());
            match *key {
                Key::Lora(name, path) => {
                    self.text(name);
                    self.text(path);
                }
                Key::Media(identifier, offset) => {
                    self.text(identifier);
                    self.int(offset);
                }
                Key::Salt(salt) => self.text(salt),
                Key::Embeds(digest) => self.bytes(digest),
            }
            self.close_tuple(key.len());
        }
        self.close_tuple(keys.len());
    }
}

/// Appends the tokens' opcodes. The hot loop: it writes a word of 8 bytes and then advances by the
/// opcode's width, so that mixed widths cause no mispredicted branches.
fn append_tokens(out: &mut Vec<u8>, tokens: &[u32]) {
    let mut at = out.len();
    out.resize(at + tokens.len() * TOKEN_BYTES_MAX + 1, 0);
    for &token in tokens {
        let word = if token > i32::MAX as u32 {
            // A fifth byte of 0, because the value is signed.
            u64::from(LONG1) | 5 << 8 | u64::from(token) << 16
        } else {
            u64::from(opcode(token)) | u64::from(token) << 8
        };
        out[at..at + 8].copy_from_slice(&word.to_le_bytes());
        at += width(token);
    }
    out.truncate(at);
}

/// Opcode of a token up to `i32::MAX`, without branches.
fn opcode(token: u32) -> u8 {
    let (is_wide, is_wider) = (u8::from(token > 0xff), u8::from(token > 0xffff));
    BININT1 + (BININT2 - BININT1) * is_wide - (BININT2 - BININT) * is_wider
}

/// Bytes of a token with its opcode: 2, 3, 5 or 7.
fn width(token: u32) -> usize {
    let is_above = |limit: u32| usize::from(token > limit);
    2 + is_above(0xff) + 2 * is_above(0xffff) + 2 * is_above(i32::MAX as u32)
}
