//! Files of keys.

use pyo3::prelude::*;

use super::error::OrRaise;

/// Check the text of a file of keys, as a service reads it.
///
/// Raises:
///     ConfigError: It could not be used; names line, field, what came and what is legal.
#[pyfunction]
pub(super) fn check_keys(py: Python<'_>, text: &str) -> PyResult<()> {
    kvflash_serve::check_keys(text).or_raise(py)
}
