//! Hashes of token blocks.

use kvflash_core::hash;
use kvflash_core::hash::engine::MediaItem;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMemoryView, PySlice};

use super::buffer::{Room, hashes, tokens};
use super::error::{Raised, invalid};
use super::prompt_keys::{digests, media};
use super::query::{SHORT_TOKENS, detached};

/// Hash the full blocks of a prompt, each independently.
///
/// Args:
///     tokens: Token ids, u32: a list, or any contiguous buffer (array, numpy uint32 or int64,
///         memoryview). Buffers of unsigned 32-bit integers are not copied.
///     kv_block_size: Tokens in a block.
///     lora_name: LoRA adapter of the prompt; part of the hash.
///     cache_salt: Cache salt of the prompt; part of the hash.
///     is_eagle: Each block also covers the token after it, as EAGLE engines hash.
///     mm: Multimodal items, mappings with ``identifier`` (string, 1 to 1,024 bytes), ``offset`` and
///         ``length`` (tokens of the prompt, u32); shape [items], 65,536 at most, in any order.
///     embeds: Digests of the prompt's embeddings, as bytes or in hexadecimal digits, 1 to 1,024
///         bytes each; shape [blocks], 65,536 at most. Hashing stops at the first block without one.
///
/// Returns:
///     Local block hashes, u64, in prompt order. An incomplete last block has no hash.
///
/// Raises:
///     InvalidArgumentError: A token outside u32, by index and value; a block size below 1; an
///         invalid item or digest, by index and field; or either of these with is_eagle.
///
/// Cost: O(tokens); releases the GIL while hashing. Building the list takes longer than hashing: see
///     compute_block_hash_array.
/// Source: XXH3-64, seed 1337, over little-endian u32 tokens, as NVIDIA Dynamo's router hashes.
#[pyfunction]
#[pyo3(signature = (
    tokens, kv_block_size, *, lora_name=None, cache_salt=None, is_eagle=false, mm=None, embeds=None
))]
#[allow(clippy::too_many_arguments)]
pub(super) fn compute_block_hash_for_seq(
    py: Python<'_>,
    tokens: &Bound<'_, PyAny>,
    kv_block_size: &Bound<'_, PyAny>,
    lora_name: Option<&str>,
    cache_salt: Option<&str>,
    is_eagle: bool,
    mm: Option<&Bound<'_, PyAny>>,
    embeds: Option<&Bound<'_, PyAny>>,
) -> Raised<Vec<u64>> {
    let content = content(mm, embeds, is_eagle)?;
    let block_size = block_size(kv_block_size)?;
    let ids = self::tokens("tokens", tokens)?;
    let slice = ids.as_slice();
    let seed = hash::identity_seed(lora_name, cache_salt);
    Ok(py.detach(|| match content {
        Some((media, embeds)) => hash::content_hashes(slice, block_size, seed, &media, &embeds),
        None if is_eagle => hash::local_hashes_eagle(slice, block_size, seed),
        None => hash::local_hashes(slice, block_size, seed),
    }))
}

/// Hash the full blocks of a prompt into memory instead of a list.
///
/// Args:
///     tokens: As for compute_block_hash_for_seq, like the other arguments.
///     kv_block_size: Tokens in a block.
///     lora_name: LoRA adapter of the prompt; part of the hash.
///     cache_salt: Cache salt of the prompt; part of the hash.
///     is_eagle: Each block also covers the token after it, as EAGLE engines hash.
///     out: Writable, contiguous buffer of u64 (numpy uint64, array "Q") with room for all hashes,
///         which can be reused between calls; default: new memory.
///     mm: Multimodal items of the prompt, as for compute_block_hash_for_seq; shape [items].
///     embeds: Digests of its embeddings, likewise; shape [blocks].
///
/// Returns:
///     Local block hashes as a view of u64: the beginning of ``out``, or new read-only bytes.
///         ``numpy.asarray`` and all functions here accept it without a copy.
///
/// Raises:
///     InvalidArgumentError: A token outside u32; a block size below 1; an invalid item or digest,
///         or either of these with is_eagle; or an ``out`` that is too short, of another type,
///         read-only, or in the same memory as the tokens.
///
/// Cost: O(tokens), some gigatokens per second from a buffer of u32; releases the GIL for long
/// prompts.
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
) -> Raised<Bound<'py, PyAny>> {
    let content = content(mm, embeds, is_eagle)?;
    let block_size = block_size(kv_block_size)?;
    let ids = self::tokens("tokens", tokens)?;
    let ids = ids.as_slice();
    let seed = hash::identity_seed(lora_name, cache_salt);
    let of_content = content.map(|(media, embeds)| {
        detached(py, ids.len() > SHORT_TOKENS, || {
            hash::content_hashes(ids, block_size, seed, &media, &embeds)
        })
    });
    let blocks = match &of_content {
        Some(hashes) => hashes.len(),
        None => hash::block_count(ids.len(), block_size, is_eagle),
    };
    let fill = |slice: &mut [u64]| match &of_content {
        Some(hashes) => slice[..blocks].copy_from_slice(hashes),
        None => hash::write_local_hashes(ids, block_size, is_eagle, seed, slice),
    };
    if let Some(object) = out {
        let mut room = Room::<u64>::of("out", object)?;
        if room.len() < blocks {
            return Err(invalid(format!(
                "out must have room for {blocks} hashes, got {}",
                room.len()
            )));
        }
        let slice = room.as_mut_slice("out", ids)?;
        detached(py, ids.len() > SHORT_TOKENS, || fill(slice));
        let written = PySlice::new(py, 0, blocks as isize, 1);
        return Ok(PyMemoryView::from(object)?.get_item(written)?);
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
    let view = PyMemoryView::from(bytes.as_any())?;
    Ok(view.call_method1(intern!(py, "cast"), (intern!(py, "Q"),))?)
}

/// Chain local block hashes, so that each one identifies its whole prefix.
///
/// Args:
///     block_hashes: Local block hashes in prompt order; 64 bits, signed or unsigned.
///
/// Returns:
///     Sequence hashes, u64, one per block.
///
/// Raises:
///     InvalidArgumentError: A hash outside 64 bits, by index and value.
#[pyfunction]
pub(super) fn compute_sequence_hashes(block_hashes: &Bound<'_, PyAny>) -> Raised<Vec<u64>> {
    let locals = hashes("block_hashes", block_hashes)?;
    let mut out = Vec::new();
    hash::sequence_hashes_into(locals.as_slice(), &mut out);
    Ok(out)
}

/// Multimodal items and embeddings.
type Content = (Vec<MediaItem>, Vec<Vec<u8>>);

/// That of a prompt that has any.
fn content(
    mm: Option<&Bound<'_, PyAny>>,
    embeds: Option<&Bound<'_, PyAny>>,
    is_eagle: bool,
) -> Raised<Option<Content>> {
    let (media, embeds) = (media(mm)?, digests(embeds)?);
    if media.is_empty() && embeds.is_empty() {
        return Ok(None);
    }
    if is_eagle {
        return Err(invalid("mm and embeds have no EAGLE hashes; leave is_eagle out"));
    }
    Ok(Some((media, embeds)))
}

fn block_size(value: &Bound<'_, PyAny>) -> Raised<u32> {
    value.extract::<u32>().ok().filter(|size| *size > 0).ok_or_else(|| {
        invalid(format!("kv_block_size must be a whole number in 1..=4294967295, got {value}"))
    })
}
