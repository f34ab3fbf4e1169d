//! Snapshots of an index in files: I/O and clocks here, plain dictionaries for Python.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use kvflash_core::index::RadixIndex;
use kvflash_core::index::snapshot::{LoadError, Meta, load, save_to_path};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

use super::error::{Fault, Raised, invalid};

pub(super) fn save<'py>(
    py: Python<'py>,
    index: &RadixIndex,
    block_size: u32,
    path: &Path,
) -> Raised<Bound<'py, PyDict>> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let meta = Meta { block_size, created_ms: now.as_millis() as u64, key: Vec::new() };
    // No cursors: a caller that passes events itself knows its position.
    let saved = py
        .detach(|| save_to_path(index, &meta, |_| None, path))
        .map_err(|error| failed(&error, path))?;
    let entries =
        [("workers", saved.workers as u64), ("blocks", saved.blocks), ("bytes", saved.bytes)];
    Ok(entries.into_py_dict(py)?)
}

pub(super) fn restore<'py>(
    py: Python<'py>,
    index: &RadixIndex,
    block_size: u32,
    path: &Path,
) -> Raised<Bound<'py, PyDict>> {
    let loaded = py.detach(|| load(index, &mut File::open(path)?, Some(block_size)));
    let loaded = loaded.map_err(|error| match error {
        LoadError::Io(error) => failed(&error, path),
        other => invalid(format!("path {}: {other}", path.display())),
    })?;
    let blocks: usize = loaded.workers.iter().map(|restored| restored.blocks).sum();
    let lost: Vec<(u64, u32, String)> = loaded
        .lost
        .iter()
        .map(|lost| (lost.worker.instance_id, lost.worker.dp_rank, lost.cause.to_string()))
        .collect();
    let dict = PyDict::new(py);
    dict.set_item("workers", loaded.workers.len())?;
    dict.set_item("blocks", blocks)?;
    dict.set_item("lost", lost)?;
    dict.set_item("cut", loaded.cut)?;
    dict.set_item("created_ms", loaded.meta.created_ms)?;
    Ok(dict)
}

/// File system errors as Python's `OSError`; refused arguments as argument errors.
fn failed(error: &io::Error, path: &Path) -> Fault {
    let mut text = error.to_string();
    let Some(code) = error.raw_os_error() else {
        return invalid(format!("path {}: {text}", path.display()));
    };
    // Python adds the number itself, and picks the subclass, such as FileNotFoundError.
    if let Some(said) = text.strip_suffix(&format!(" (os error {code})")) {
        text = said.to_owned();
    }
    PyOSError::new_err((code, text, path.as_os_str().to_owned())).into()
}
