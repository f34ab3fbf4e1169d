//! Limits and order of a prompt's content besides its tokens: `mm` and `embeds`.

use super::engine::MediaItem;
use crate::error::{Error, Result};

/// Maximum items or digests of one request.
pub const MAX_ITEMS: usize = 65_536;
/// Longest identifier of an item, and longest digest, in bytes.
pub const MAX_BYTES: usize = 1_024;

/// Checks the field `mm` and sorts its items by offset; shape `[items]`.
///
/// # Errors
/// `InvalidArgument`, naming the item, the limit and what came.
pub fn media(mut items: Vec<MediaItem>) -> Result<Vec<MediaItem>> {
    check_count("mm", "items", items.len())?;
    for (at, item) in items.iter().enumerate() {
        let bytes = item.identifier.len();
        if bytes == 0 || bytes > MAX_BYTES {
            return Err(Error::invalid(format!(
                "mm[{at}].identifier must have 1 to {MAX_BYTES} bytes, got {bytes}"
            )));
        }
        if item.offset.checked_add(item.length).is_none() {
            return Err(Error::invalid(format!(
                "mm[{at}] must end within 4294967295 tokens, got offset {} and length {}",
                item.offset, item.length
            )));
        }
    }
    items.sort_by_key(|item| item.offset);
    Ok(items)
}

/// Checks the number of elements of `field`, at most [`MAX_ITEMS`] `things`.
///
/// # Errors
/// `InvalidArgument` above the limit.
pub fn check_count(field: &str, things: &str, count: usize) -> Result<()> {
    if count > MAX_ITEMS {
        return Err(Error::invalid(format!(
            "{field} may have at most {MAX_ITEMS} {things}, got {count}"
        )));
    }
    Ok(())
}

/// The bytes of `embeds[at]`, given in hexadecimal digits.
///
/// # Errors
/// `InvalidArgument` for other characters, an odd number of digits, or a length out of bounds.
pub fn digest(at: usize, hexadecimal: &str) -> Result<Vec<u8>> {
    bytes_of_hex(hexadecimal).ok_or_else(|| {
        Error::invalid(format!(
            "embeds[{at}] must be 1 to {MAX_BYTES} bytes in hexadecimal digits, got {hexadecimal:?}"
        ))
    })
}

/// Checks the length of `embeds[at]`, given as bytes.
///
/// # Errors
/// `InvalidArgument` for a length out of bounds.
pub fn check_digest(at: usize, bytes: &[u8]) -> Result<()> {
    match bytes.len() {
        1..=MAX_BYTES => Ok(()),
        len => {
            Err(Error::invalid(format!("embeds[{at}] must have 1 to {MAX_BYTES} bytes, got {len}")))
        }
    }
}

/// The 1 to [`MAX_BYTES`] bytes that hexadecimal digits write; `None` for another text.
pub fn bytes_of_hex(hexadecimal: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let (pairs, rest) = hexadecimal.as_bytes().as_chunks::<2>();
    let is_legal = rest.is_empty() && !pairs.is_empty() && pairs.len() <= MAX_BYTES;
    let byte = |[high, low]: &[u8; 2]| Some((digit(*high)? << 4 | digit(*low)?) as u8);
    if is_legal { pairs.iter().map(byte).collect() } else { None }
}
