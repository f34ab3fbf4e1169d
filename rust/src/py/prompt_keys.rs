//! Reads the keys that separate prompts with the same tokens from Python values.

use kvflash_core::hash::engine::{MediaItem, NameKeys};
use kvflash_core::hash::prompt_keys;
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBytes, PyMapping, PyString};

use super::error::{Raised, invalid};

/// Adapter, salt, multimodal items and embeddings of one prompt.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct PromptKeys {
    pub lora_name: Option<String>,
    pub lora_path: Option<String>,
    pub cache_salt: Option<String>,
    pub media: Vec<MediaItem>,
    pub embeds: Vec<Vec<u8>>,
}

impl PromptKeys {
    /// The same, borrowed.
    pub fn keys(&self) -> NameKeys<'_> {
        let path = self.lora_path.as_deref().unwrap_or("");
        NameKeys {
            lora: self.lora_name.as_deref().map(|name| (name, path)),
            cache_salt: self.cache_salt.as_deref(),
            media: &self.media,
            embeds: &self.embeds,
        }
    }
}

/// The argument `mm`: mappings with `identifier`, `offset` and `length`; `None` means an empty
/// list. Other keys of a mapping are ignored, as in POST /query.
///
/// # Errors
/// `InvalidArgumentError`, naming the item and its field.
pub(super) fn media(mm: Option<&Bound<'_, PyAny>>) -> Raised<Vec<MediaItem>> {
    let Some(mm) = mm.filter(|mm| !mm.is_none()) else { return Ok(Vec::new()) };
    let count = count(mm, "mm", "{identifier, offset, length}")?;
    prompt_keys::check_count("mm", "items", count)?;
    let items = mm.try_iter()?.enumerate().map(|(at, item)| item_of(at, &item?));
    Ok(prompt_keys::media(items.collect::<Raised<_>>()?)?)
}

fn item_of(at: usize, item: &Bound<'_, PyAny>) -> Raised<MediaItem> {
    let py = item.py();
    let Ok(fields) = item.cast::<PyMapping>() else {
        return Err(invalid(format!(
            "mm[{at}] must be a mapping with identifier, offset and length, got {item}"
        )));
    };
    let field = |name: &str| {
        fields.get_item(name).map_err(|error| match error.is_instance_of::<PyKeyError>(py) {
            true => invalid(format!("mm[{at}] is missing the field {name}")),
            false => error.into(),
        })
    };
    let tokens = |name: &str| {
        let value = field(name)?;
        value.extract::<u32>().map_err(|_| {
            invalid(format!(
                "mm[{at}].{name} must be a whole number in 0..=4294967295, got {value}"
            ))
        })
    };
    let identifier = field("identifier")?;
    let identifier = identifier
        .extract::<String>()
        .map_err(|_| invalid(format!("mm[{at}].identifier must be text, got {identifier}")))?;
    Ok(MediaItem { identifier, offset: tokens("offset")?, length: tokens("length")? })
}

/// The argument `embeds`: digests as `bytes`, or as strings of hexadecimal digits; `None` is empty.
///
/// # Errors
/// `InvalidArgumentError`, naming the digest by its index.
pub(super) fn digests(embeds: Option<&Bound<'_, PyAny>>) -> Raised<Vec<Vec<u8>>> {
    let Some(embeds) = embeds.filter(|embeds| !embeds.is_none()) else { return Ok(Vec::new()) };
    let count = count(embeds, "embeds", "digests")?;
    prompt_keys::check_count("embeds", "digests", count)?;
    embeds.try_iter()?.enumerate().map(|(at, digest)| digest_of(at, &digest?)).collect()
}

fn digest_of(at: usize, digest: &Bound<'_, PyAny>) -> Raised<Vec<u8>> {
    let Ok(bytes) = digest.cast::<PyBytes>() else {
        let text: PyBackedStr = digest.extract().map_err(|_| {
            invalid(format!(
                "embeds[{at}] must be bytes or text in hexadecimal digits, got {digest}"
            ))
        })?;
        return Ok(prompt_keys::digest(at, &text)?);
    };
    prompt_keys::check_digest(at, bytes.as_bytes())?;
    Ok(bytes.as_bytes().to_vec())
}

/// The length of a sequence; strings and mappings are refused.
fn count(list: &Bound<'_, PyAny>, field: &str, of: &str) -> Raised<usize> {
    let is_other = list.is_instance_of::<PyString>()
        || list.is_instance_of::<PyBytes>()
        || list.cast::<PyMapping>().is_ok();
    match list.len() {
        Ok(count) if !is_other => Ok(count),
        _ => Err(invalid(format!("{field} must be a list of {of}, got {list}"))),
    }
}
