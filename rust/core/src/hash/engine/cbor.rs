//! Canonical CBOR like Python's `cbor2`, without sharing: equal strings are written twice.
//!
//! # Source
//! RFC 8949, section 4.2.1; `cbor2.dumps(value, canonical=True)`.

use super::Key;

/// Major types, in the upper 3 bits of an item's first byte.
const UNSIGNED: u8 = 0;
const NEGATIVE: u8 = 1 << 5;
const BYTES: u8 = 2 << 5;
const TEXT: u8 = 3 << 5;
const ARRAY: u8 = 4 << 5;
const NULL: u8 = 0xf6;

/// Replaces `out` with the CBOR of `text`.
pub(super) fn text(text: &str, out: &mut Vec<u8>) {
    out.clear();
    append_text(text, out);
}

/// Replaces `out` with the CBOR of the tuple of one block.
pub(super) fn block(parent: &[u8], tokens: &[u32], keys: &[Key<'_>], out: &mut Vec<u8>) {
    out.clear();
    head(ARRAY, 3, out);
    append_bytes(parent, out);
    head(ARRAY, tokens.len() as u64, out);
    for &token in tokens {
        head(UNSIGNED, token.into(), out);
    }
    match keys {
        [] => out.push(NULL),
        _ => append_keys(keys, out),
    }
}

fn append_keys(keys: &[Key<'_>], out: &mut Vec<u8>) {
    head(ARRAY, keys.len() as u64, out);
    for key in keys {
        head(ARRAY, key.len() as u64, out);
        append_text(key.tag(), out);
        match *key {
            Key::Lora(name, path) => {
                append_text(name, out);
                append_text(path, out);
            }
            Key::Media(identifier, offset) => {
                append_text(identifier, out);
                match u64::try_from(offset) {
                    Ok(offset) => head(UNSIGNED, offset, out),
                    Err(_) => head(NEGATIVE, (-1 - offset).cast_unsigned(), out),
                }
            }
            Key::Salt(salt) => append_text(salt, out),
            Key::Embeds(digest) => append_bytes(digest, out),
        }
    }
}

fn append_bytes(bytes: &[u8], out: &mut Vec<u8>) {
    head(BYTES, bytes.len() as u64, out);
    out.extend_from_slice(bytes);
}

fn append_text(text: &str, out: &mut Vec<u8>) {
    head(TEXT, text.len() as u64, out);
    out.extend_from_slice(text.as_bytes());
}

/// A major type with its value or length, in the shortest encoding.
fn head(major: u8, value: u64, out: &mut Vec<u8>) {
    if value < 24 {
        out.push(major | value as u8);
    } else if let Ok(value) = u8::try_from(value) {
        out.extend_from_slice(&[major | 24, value]);
    } else if let Ok(value) = u16::try_from(value) {
        out.push(major | 25);
        out.extend_from_slice(&value.to_be_bytes());
    } else if let Ok(value) = u32::try_from(value) {
        out.push(major | 26);
        out.extend_from_slice(&value.to_be_bytes());
    } else {
        out.push(major | 27);
        out.extend_from_slice(&value.to_be_bytes());
    }
}
