//! Hashes of token blocks.

use pyo3::prelude::*;

use super::buffer::{hashes, tokens};
use super::error::raise;
use crate::error::Error;
use crate::hash;

#[pyfunction]
#[pyo3(signature = (tokens, kv_block_size, *, lora_name=None, cache_salt=None, is_eagle=false))]
pub(super) fn compute_block_hash_for_seq(
    py: Python<'_>,
    #[pyo3(from_py_with = raw)] tokens: Bound<'_, PyAny>,
    kv_block_size: &Bound<'_, PyAny>,
    lora_name: Option<&str>,
    cache_salt: Option<&str>,
    is_eagle: bool,
) -> PyResult<Vec<u64>> {
    let block_size = block_size(py, kv_block_size)?;
    let ids = self::tokens("tokens", &tokens)?;
    let slice = ids.as_slice();
    let seed = hash::identity_seed(lora_name, cache_salt);
    let slice: &[u32] = &slice;
    Ok(py.detach(|| {
        if is_eagle {
            hash::local_hashes_eagle(slice, block_size, seed)
        } else {
            hash::local_hashes(slice, block_size, seed)
        }
    }))
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
