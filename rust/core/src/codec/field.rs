//! The encoding of event fields, in both eras.

use xxhash_rust::xxh3::xxh3_64;

use super::Limits;
use super::cursor::{Cursor, Fault, Head};
use crate::event::{ExtraKey, Stored};
use crate::ids::Tier;

/// A frame being decoded, under its limits.
pub(super) struct Reader<'a> {
    pub(super) cursor: Cursor<'a>,
    pub(super) limits: Limits,
    /// The rest of the batch's allowance of extra keys. A key of one byte becomes one of 32, so
    /// their number is bounded across all events.
    extra_keys_left: usize,
}

/// The kinds of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Stored,
    Removed,
    Cleared,
}

impl Kind {
    /// The kind named by an event's tag.
    pub(super) fn from_tag(tag: Head<'_>) -> Result<Self, Fault> {
        match tag {
            Head::Text(b"BlockStored") => Ok(Self::Stored),
            Head::Text(b"BlockRemoved") => Ok(Self::Removed),
            Head::Text(b"AllBlocksCleared") => Ok(Self::Cleared),
            Head::Text(_) => Err(Fault::Unsupported),
            _ => Err(Fault::Malformed("an event's type must be text")),
        }
    }
}

/// Checks properties of the whole event.
pub(super) fn check_shape(stored: &Stored) -> Result<(), Fault> {
    let blocks = stored.block_hashes.len();
    let tokens = stored.token_ids.len();
    let is_shaped = tokens == 0 || Some(tokens) == blocks.checked_mul(stored.block_size as usize);
    let is_keyed = stored.extra_keys.is_empty() || stored.extra_keys.len() == blocks;
    if is_shaped && is_keyed {
        return Ok(());
    }
    // Groups that keep only part of a prompt omit the other blocks, and stores of slower tiers name
    // a chunk of several blocks by its last one.
    if !stored.is_full_attention() || stored.tier() != Some(Tier::Device) {
        return Ok(());
    }
    Err(Fault::Malformed("tokens or extra keys do not fit the number of blocks"))
}

impl<'a> Reader<'a> {
    pub(super) fn new(payload: &'a [u8], limits: Limits) -> Self {
        let extra_keys_left = limits.max_extra_keys;
        Self { cursor: Cursor::new(payload), limits, extra_keys_left }
    }

    pub(super) fn skip(&mut self) -> Result<(), Fault> {
        self.cursor.skip(self.limits.max_depth)
    }

    /// The head of the next value, without consuming it.
    pub(super) fn peek(&self) -> Result<Head<'a>, Fault> {
        let mut ahead = self.cursor;
        ahead.head()
    }

    pub(super) fn block_hashes(&mut self) -> Result<Vec<u64>, Fault> {
        let count = self.list(self.limits.max_blocks_per_event)?;
        let mut hashes = Vec::with_capacity(count);
        for _ in 0..count {
            let head = self.cursor.head()?;
            hashes.push(block_hash(head)?.ok_or(Fault::Malformed("a block hash must not be nil"))?);
        }
        Ok(hashes)
    }

    pub(super) fn parent(&mut self) -> Result<Option<u64>, Fault> {
        block_hash(self.cursor.head()?)
    }

    pub(super) fn token_ids(&mut self) -> Result<Vec<u32>, Fault> {
        let count = self.list(self.limits.max_tokens_per_event)?;
        let mut tokens = Vec::with_capacity(count);
        for index in 0..count {
            tokens.push(self.cursor.token(index)?);
        }
        Ok(tokens)
    }

    /// A number of 32 bits, or nil.
    pub(super) fn number(&mut self) -> Result<Option<u32>, Fault> {
        match self.cursor.head()? {
            Head::Nil => Ok(None),
            Head::Uint(value) => {
                let value = u32::try_from(value);
                value.map(Some).map_err(|_| Fault::Malformed("a number exceeds 32 bits"))
            }
            _ => Err(Fault::Malformed("a number must be an integer of at least 0")),
        }
    }

    /// Tokens of a sliding window. One that can't be read may be any: the group is known by its
    /// event, and must hold all of a prompt.
    pub(super) fn window(&mut self) -> Result<Option<u32>, Fault> {
        if let Head::Uint(tokens) = self.peek()? {
            self.cursor.head()?;
            return Ok(Some(u32::try_from(tokens).unwrap_or(u32::MAX)));
        }
        self.skip()?;
        Ok(None)
    }

    pub(super) fn lora_id(&mut self) -> Result<Option<i64>, Fault> {
        match self.cursor.head()? {
            Head::Nil => Ok(None),
            Head::Int(value) => Ok(Some(value)),
            Head::Uint(value) => {
                let value = i64::try_from(value);
                value.map(Some).map_err(|_| Fault::Malformed("lora_id exceeds 63 bits"))
            }
            _ => Err(Fault::Malformed("lora_id must be an integer")),
        }
    }

    pub(super) fn text(&mut self) -> Result<Option<String>, Fault> {
        match self.cursor.head()? {
            Head::Nil => Ok(None),
            Head::Text(bytes) => self.owned(bytes).map(Some),
            _ => Err(Fault::Malformed("a name must be text")),
        }
    }

    /// Checks and copies a string. Invalid UTF-8 is refused rather than repaired, so that two names
    /// never become one.
    fn owned(&self, bytes: &[u8]) -> Result<String, Fault> {
        if bytes.len() > self.limits.max_text_bytes {
            return Err(Fault::Malformed("text exceeds the limit"));
        }
        let text = std::str::from_utf8(bytes);
        text.map(str::to_owned).map_err(|_| Fault::Malformed("text is not UTF-8"))
    }

    pub(super) fn extra_keys(&mut self) -> Result<Vec<Option<Vec<ExtraKey>>>, Fault> {
        let count = self.list(self.limits.max_blocks_per_event)?;
        let mut blocks = Vec::with_capacity(count);
        for _ in 0..count {
            blocks.push(self.extra_keys_of_block()?);
        }
        Ok(blocks)
    }

    fn extra_keys_of_block(&mut self) -> Result<Option<Vec<ExtraKey>>, Fault> {
        let start = self.cursor;
        let count = match self.cursor.head()? {
            Head::Nil => return Ok(None),
            Head::Array(count) => count,
            // A single key without a list.
            _ => {
                self.cursor = start;
                1
            }
        };
        let left = self.extra_keys_left.checked_sub(count);
        self.extra_keys_left = left.ok_or(Fault::Malformed("extra keys exceed the limit"))?;
        let mut keys = Vec::with_capacity(count);
        for _ in 0..count {
            keys.push(self.extra_key()?);
        }
        Ok(Some(keys))
    }

    fn extra_key(&mut self) -> Result<ExtraKey, Fault> {
        let start = self.cursor;
        match self.cursor.head()? {
            Head::Text(bytes) => return self.owned(bytes).map(ExtraKey::Text),
            Head::Bytes(bytes) if bytes.len() <= self.limits.max_text_bytes => {
                return Ok(ExtraKey::Digest(bytes.to_vec()));
            }
            Head::Array(2) => {
                if let (Head::Text(bytes), Some(offset)) =
                    (self.cursor.head()?, self.item_offset()?)
                {
                    return Ok(ExtraKey::Item { identifier: self.owned(bytes)?, offset });
                }
            }
            _ => {}
        }
        self.cursor = start;
        self.skip()?;
        Ok(ExtraKey::Opaque(xxh3_64(self.cursor.since(start.at()))))
    }

    fn item_offset(&mut self) -> Result<Option<i64>, Fault> {
        Ok(match self.cursor.head()? {
            Head::Uint(offset) => i64::try_from(offset).ok(),
            Head::Int(offset) => Some(offset),
            _ => None,
        })
    }

    /// Reads the beginning of a list of at most `limit` elements; nil is an empty list.
    fn list(&mut self, limit: usize) -> Result<usize, Fault> {
        match self.cursor.head()? {
            Head::Nil => Ok(0),
            Head::Array(count) if count <= limit => Ok(count),
            Head::Array(_) => Err(Fault::Malformed("a list exceeds the limit")),
            _ => Err(Fault::Malformed("a list must be an array")),
        }
    }
}

/// A block's name as 64 bits: integers keep theirs, byte strings their last 8 bytes.
fn block_hash(head: Head<'_>) -> Result<Option<u64>, Fault> {
    match head {
        Head::Nil => Ok(None),
        Head::Uint(hash) => Ok(Some(hash)),
        Head::Int(hash) => Ok(Some(hash.cast_unsigned())),
        Head::Bytes([]) => Err(Fault::Malformed("a block hash must not be empty")),
        Head::Bytes(bytes) => {
            let last = &bytes[bytes.len().saturating_sub(8)..];
            Ok(Some(last.iter().fold(0, |hash, &byte| hash << 8 | u64::from(byte))))
        }
        _ => Err(Fault::Malformed("a block hash must be an integer or bytes")),
    }
}
