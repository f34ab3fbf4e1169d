//! Events as arrays: `["BlockStored", block_hashes, parent, token_ids, block_size, lora_id, ...]`.
//!
//! Every version has appended fields, and engines differ in the fields that they appended:
//!
//! | position after the tag | vLLM | SGLang |
//! |---|---|---|
//! | 0 to 5 | block_hashes, parent, token_ids, block_size, lora_id, medium | the same |
//! | 6 | lora_name | cache_salt |
//! | 7 | extra_keys (array) | session_id (text) |
//! | 8 | group_idx (integer) | lora_name (text) |
//! | 9 | kv_cache_spec_kind (text) | |
//! | 10 | kv_cache_spec_sliding_window (integer) | |
//!
//! The types at 7 and 8 distinguish the two. If both are nil, 6 is read as a LoRA name: under a
//! wrong name a block matches nothing, while without any it would match every tenant. SGLang 0.5.18
//! and 0.5.19 have a map at 6, `{"cache_salt": TEXT}`, in events with a salt only.

use super::cursor::{Fault, Head};
use super::field::{Kind, Reader, check_shape};
use super::named;
use crate::event::{Event, Removed, Stored};

/// Reads an event of `length` elements, of which the first is the tag.
pub(super) fn event(reader: &mut Reader<'_>, length: usize) -> Result<Event, Fault> {
    if length == 0 {
        return Err(Fault::Malformed("an event must have a type"));
    }
    let kind = Kind::from_tag(reader.cursor.head()?)?;
    match kind {
        Kind::Stored => stored(reader, length - 1).map(Event::Stored),
        Kind::Removed => removed(reader, length - 1).map(Event::Removed),
        Kind::Cleared => {
            for _ in 1..length {
                reader.skip()?;
            }
            Ok(Event::Cleared)
        }
    }
}

fn stored(reader: &mut Reader<'_>, fields: usize) -> Result<Stored, Fault> {
    let mut stored = Stored::default();
    let (mut sixth, mut eighth, mut is_sglang) = (None, None, false);
    for position in 0..fields {
        match position {
            0 => stored.block_hashes = reader.block_hashes()?,
            1 => stored.parent = reader.parent()?,
            2 => stored.token_ids = reader.token_ids()?,
            3 => stored.block_size = reader.number()?.unwrap_or(0),
            4 => stored.lora_id = reader.lora_id()?,
            5 => stored.medium = reader.text()?,
            6 => match reader.peek()? {
                Head::Map(entries) => {
                    reader.cursor.head()?;
                    sixth = Some(named::salt(reader, entries)?);
                    is_sglang = true;
                }
                _ => sixth = reader.text()?,
            },
            7 => match reader.peek()? {
                Head::Array(_) => stored.extra_keys = reader.extra_keys()?,
                head => {
                    is_sglang |= matches!(head, Head::Text(_));
                    reader.skip()?;
                }
            },
            8 => match reader.peek()? {
                Head::Uint(_) => stored.group_idx = reader.number()?,
                Head::Text(_) => {
                    is_sglang = true;
                    eighth = reader.text()?;
                }
                _ => reader.skip()?,
            },
            9 => match reader.peek()? {
                Head::Text(_) => stored.spec_kind = reader.text()?,
                _ => reader.skip()?,
            },
            10 => stored.sliding_window = reader.window()?,
            _ => reader.skip()?,
        }
    }
    (stored.lora_name, stored.cache_salt) = if is_sglang { (eighth, sixth) } else { (sixth, None) };
    check_shape(&stored)?;
    Ok(stored)
}

fn removed(reader: &mut Reader<'_>, fields: usize) -> Result<Removed, Fault> {
    let mut removed = Removed::default();
    for position in 0..fields {
        match position {
            0 => removed.block_hashes = reader.block_hashes()?,
            1 => removed.medium = reader.text()?,
            2 => match reader.peek()? {
                Head::Uint(_) => removed.group_idx = reader.number()?,
                _ => reader.skip()?,
            },
            _ => reader.skip()?,
        }
    }
    Ok(removed)
}
