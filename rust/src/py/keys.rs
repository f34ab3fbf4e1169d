//! Key files.

use pyo3::prelude::*;

use super::error::OrRaise;

/// Check the content of a key file, as a service reads it.
///
/// Raises:
///     ConfigError: The file is invalid; names line, field, what came and what is legal.
#[pyfunction]
pub(super) fn check_keys(py: Python<'_>, text: &str) -> PyResult<()> {
    kvflash_serve::check_keys(text).or_raise(py)
}
