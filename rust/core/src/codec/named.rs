//! Events as maps: `{"type": "BlockStored", "block_hashes": [...], ...}`, absent keys defaulted.

use super::cursor::{Cursor, Fault, Head};
use super::field::{Kind, Reader, check_shape};
use crate::event::{Event, Removed, Stored};

/// Reads an event of `entries` keys and values.
pub(super) fn event(reader: &mut Reader<'_>, entries: usize) -> Result<Event, Fault> {
    match kind(reader.cursor, entries, reader.limits.max_depth)? {
        Kind::Stored => stored(reader, entries).map(Event::Stored),
        Kind::Removed => removed(reader, entries).map(Event::Removed),
        Kind::Cleared => {
            for _ in 0..entries {
                reader.skip()?;
                reader.skip()?;
            }
            Ok(Event::Cleared)
        }
    }
}

/// Finds the event's type with a copy of the cursor. The meaning of the fields depends on it, so it
/// must be known first; engines write it first, so nothing is read twice.
fn kind(mut cursor: Cursor<'_>, entries: usize, max_depth: usize) -> Result<Kind, Fault> {
    for _ in 0..entries {
        if key(&mut cursor, max_depth)? == b"type" {
            return Kind::from_tag(cursor.head()?);
        }
        cursor.skip(max_depth)?;
    }
    Err(Fault::Malformed("an event must have a type"))
}

/// Reads a key; one that is not a string is skipped and matches no field.
fn key<'a>(cursor: &mut Cursor<'a>, max_depth: usize) -> Result<&'a [u8], Fault> {
    let start = *cursor;
    if let Head::Text(key) = cursor.head()? {
        return Ok(key);
    }
    *cursor = start;
    cursor.skip(max_depth)?;
    Ok(b"")
}

fn stored(reader: &mut Reader<'_>, entries: usize) -> Result<Stored, Fault> {
    let mut stored = Stored::default();
    for _ in 0..entries {
        match key(&mut reader.cursor, reader.limits.max_depth)? {
            b"block_hashes" => stored.block_hashes = reader.block_hashes()?,
            b"parent_block_hash" => stored.parent = reader.parent()?,
            b"token_ids" => stored.token_ids = reader.token_ids()?,
            b"block_size" => stored.block_size = reader.number()?.unwrap_or(0),
            b"lora_id" => stored.lora_id = reader.lora_id()?,
            b"lora_name" => stored.lora_name = reader.text()?,
            b"medium" => stored.medium = reader.text()?,
            b"cache_salt" => stored.cache_salt = reader.text()?,
            b"extra_keys" => stored.extra_keys = reader.extra_keys()?,
            b"group_idx" => stored.group_idx = reader.number()?,
            b"kv_cache_spec_kind" => stored.spec_kind = reader.text()?,
            b"kv_cache_spec_sliding_window" => stored.sliding_window = reader.window()?,
            b"locality" => stored.locality = reader.text()?,
            b"ownership" => stored.ownership = reader.text()?,
            _ => reader.skip()?,
        }
    }
    check_shape(&stored)?;
    Ok(stored)
}

/// Reads the `entries` of a stored event's metadata, which must have a salt: without one, the
/// blocks would match every tenant.
pub(super) fn salt(reader: &mut Reader<'_>, entries: usize) -> Result<String, Fault> {
    let mut salt = None;
    for _ in 0..entries {
        match key(&mut reader.cursor, reader.limits.max_depth)? {
            b"cache_salt" => salt = reader.text()?,
            _ => reader.skip()?,
        }
    }
    salt.ok_or(Fault::Malformed("metadata must have a cache_salt"))
}

fn removed(reader: &mut Reader<'_>, entries: usize) -> Result<Removed, Fault> {
    let mut removed = Removed::default();
    for _ in 0..entries {
        match key(&mut reader.cursor, reader.limits.max_depth)? {
            b"block_hashes" => removed.block_hashes = reader.block_hashes()?,
            b"medium" => removed.medium = reader.text()?,
            b"group_idx" => removed.group_idx = reader.number()?,
            b"locality" => removed.locality = reader.text()?,
            b"ownership" => removed.ownership = reader.text()?,
            _ => reader.skip()?,
        }
    }
    Ok(removed)
}
