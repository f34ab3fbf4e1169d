//! Hashes of token blocks.

use kvflash_core::error::Error;
use kvflash_core::hash;
use kvflash_core::hash::engine::MediaItem;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMemoryView, PySlice};

use super::buffer::{Room, hashes, tokens};
use super::error::raise;
use super::prompt_keys::{digests, media};
use super::query::{SHORT_TOKENS, detached};

#[pyfunction]
#[pyo3(signature = (
    tokens, kv_block_size, *, lora_name=None, cache_salt=None, is_eagle=false, mm=None, embeds=None
))]
#[allow(clippy::too_many_arguments)]
pub(super) fn compute_block_hash_for_seq(
    py: Python<'_>,
    #[pyo3(from_py_with = raw)] tokens: Bound<'_, PyAny>,
    kv_block_size: &Bound<'_, PyAny>,
    lora_name: Option<&str>,
    cache_salt: Option<&str>,
    is_eagle: bool,
    mm: Option<&Bound<'_, PyAny>>,
    embeds: Option<&Bound<'_, PyAny>>,
) -> PyResult<Vec<u64>> {
    let content = Content::of(py, mm, embeds, is_eagle)?;
    let block_size = block_size(py, kv_block_size)?;
    let ids = self::tokens("tokens", &tokens)?;
    let slice = ids.as_slice();
    let seed = hash::identity_seed(lora_name, cache_salt);
    let slice: &[u32] = &slice;
    Ok(py.detach(|| match content {
        Some(content) => content.hashes(slice, block_size, seed),
        None if is_eagle => hash::local_hashes_eagle(slice, block_size, seed),
        None => hash::local_hashes(slice, block_size, seed),
    }))
}

/// As above into memory: the caller's, or new bytes that numpy takes without a copy. Making a list
/// of Python integers takes several times as long as hashing.
#[pyfunction]
#[pyo3(signature = (
    tokens, kv_block_size, *, lora_name=None, cache_salt=None, is_eagle=false, out=None, mm=None,
    embeds=None
))]
#[allow(clippy::too_many_arguments)]
pub(super) fn compute_block_hash_array<'py>(
    py: Python<'py>,
    tokens: &Bound<'py, PyAny>,
    kv_block_size: &Bound<'py, PyAny>,
    lora_name: Option<&str>,
    cache_salt: Option<&str>,
    is_eagle: bool,
    out: Option<&Bound<'py, PyAny>>,
    mm: Option<&Bound<'py, PyAny>>,
    embeds: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let content = Content::of(py, mm, embeds, is_eagle)?;
    let block_size = block_size(py, kv_block_size)?;
    let ids = self::tokens("tokens", tokens)?;
    let ids: &[u32] = &ids.as_slice();
    let seed = hash::identity_seed(lora_name, cache_salt);
    let of_content = content.map(|content| {
        detached(py, ids.len() > SHORT_TOKENS, || content.hashes(ids, block_size, seed))
    });
    let blocks = match &of_content {
        Some(hashes) => hashes.len(),
        None => hash::block_count(ids.len(), block_size, is_eagle),
    };
    let fill = |slice: &mut [u64]| match &of_content {
        Some(hashes) => slice[..blocks].copy_from_slice(hashes),
        None => {
            hash::write_local_hashes(ids, block_size, is_eagle, seed, slice);
        }
    };
    if let Some(object) = out {
        let mut room = Room::<u64>::of("out", object)?;
        if room.len() < blocks {
            let message = format!("out must have room for {blocks} hashes, got {}", room.len());
            return Err(raise(py, &Error::invalid(message)));
        }
        let slice = room.as_mut_slice("out", ids, py)?;
        detached(py, ids.len() > SHORT_TOKENS, || fill(slice));
        let written = PySlice::new(py, 0, blocks as isize, 1);
        return PyMemoryView::from(object)?.get_item(written);
    }
    let bytes = PyBytes::new_with(py, blocks * size_of::<u64>(), |bytes| {
        detached(py, ids.len() > SHORT_TOKENS, || {
            match bytemuck::try_cast_slice_mut::<u8, u64>(bytes) {
                Ok(slice) => fill(slice),
                Err(_) => {
                    let mut hashes = vec![0; blocks];
                    fill(&mut hashes);
                    bytes.copy_from_slice(bytemuck::cast_slice(&hashes));
                }
            }
        });
        Ok(())
    })?;
    PyMemoryView::from(bytes.as_any())?.call_method1(intern!(py, "cast"), (intern!(py, "Q"),))
}

#[pyfunction]
pub(super) fn compute_sequence_hashes(block_hashes: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    let locals = hashes("block_hashes", block_hashes)?;
    let mut out = Vec::new();
    hash::sequence_hashes_into(locals.as_slice(), &mut out);
    Ok(out)
}

#[pyfunction]
pub(super) fn item_hash(identifier: &str) -> u64 {
    hash::item_hash(identifier)
}

/// Multimodal items and embeddings of a prompt that has any.
struct Content {
    media: Vec<MediaItem>,
    embeds: Vec<Vec<u8>>,
}

impl Content {
    fn of(
        py: Python<'_>,
        mm: Option<&Bound<'_, PyAny>>,
        embeds: Option<&Bound<'_, PyAny>>,
        is_eagle: bool,
    ) -> PyResult<Option<Self>> {
        let content = Self { media: media(mm)?, embeds: digests(embeds)? };
        if content.media.is_empty() && content.embeds.is_empty() {
            return Ok(None);
        }
        if is_eagle {
            let message = "mm and embeds have no EAGLE hashes; leave is_eagle out";
            return Err(raise(py, &Error::invalid(message)));
        }
        Ok(Some(content))
    }

    fn hashes(&self, tokens: &[u32], block_size: u32, seed: u64) -> Vec<u64> {
        hash::content_hashes(tokens, block_size, seed, &self.media, &self.embeds)
    }
}

fn block_size(py: Python<'_>, value: &Bound<'_, PyAny>) -> PyResult<u32> {
    value.extract::<u32>().ok().filter(|size| *size > 0).ok_or_else(|| {
        let message =
            format!("kv_block_size must be a whole number in 1..=4294967295, got {value}");
        raise(py, &Error::invalid(message))
    })
}

fn raw<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    Ok(object.clone())
}
