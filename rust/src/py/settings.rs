//! Settings from Python: keyword arguments, the table from which all flags are created, and key
//! files.

use std::path::PathBuf;

use kvflash_core::error::{Error, Result};
use kvflash_core::policy::VARIABLES;
use kvflash_core::settings::{Concern, Given};
use kvflash_serve::{Face, Http, HttpSettings, TlsSettings, settings_tables};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use serde_json::{Map, Value, json};

use super::error::Raised;

/// Every setting of every service, and the variables of policies, as JSON.
///
/// Returns:
///     ``{"services": {NAME: {"own": [SETTING], "routing": [SETTING]}}, "policies": [VARIABLE]}``:
///     the service's own settings, and those that a routing file may also set. Each setting has
///     ``key``, ``section``, ``kind``, ``is_optional``, ``legal``, ``spelled``, ``default`` and
///     ``help``.
#[pyfunction]
pub(super) fn settings_table() -> String {
    let services: Map<String, Value> = settings_tables()
        .into_iter()
        .map(|(name, own, routing)| (name.to_owned(), json!({"own": own, "routing": routing})))
        .collect();
    json!({"services": services, "policies": VARIABLES.map(|one| one.name)}).to_string()
}

/// The `**settings` of a call.
///
/// # Errors
/// `TypeError` for an unsupported type of value, `Config` for a number that is not finite.
pub(super) fn given(settings: Option<&Bound<'_, PyDict>>) -> Raised<Given> {
    let mut given = Given::default();
    for (name, value) in settings.iter().flat_map(|settings| settings.iter()) {
        let name: String = name.extract()?;
        let value = plain(&name, &value)?;
        given.0.insert(name, value);
    }
    Ok(given)
}

/// Refuse settings that were not used.
///
/// # Errors
/// `TypeError`, as for any unknown keyword argument.
pub(super) fn finish(given: Given) -> PyResult<()> {
    given.finish().map_err(|error| PyTypeError::new_err(error.to_string()))
}

/// What a service's listeners need: its rules and limits, and its encryption.
///
/// # Errors
/// `Config`, by the setting's flag.
pub(super) fn http(given: &mut Given, face: Face) -> Result<Http> {
    let settings = HttpSettings::take(given)?;
    let http = Http::of(settings, face)?;
    let tls = TlsSettings::take(given)?;
    http.over(&tls)
}

/// Check the content of a key file, as a service reads it.
///
/// Args:
///     text: All lines.
///     blamed: The beginning of the error, such as the file's name.
///
/// Raises:
///     ConfigError: The file is invalid; names line, field, what came and what is legal.
#[pyfunction]
pub(super) fn check_keys(text: &str, blamed: &str) -> Raised<()> {
    Ok(kvflash_serve::check_keys(text, blamed)?)
}

/// Check one key's line of such a file.
///
/// Args:
///     line: The line.
///     blamed: The beginning of the error, such as the argument that the line was made from.
///
/// Raises:
///     ConfigError: The line is invalid; names field, what came and what is legal.
#[pyfunction]
pub(super) fn check_key(line: &str, blamed: &str) -> Raised<()> {
    Ok(kvflash_serve::check_key(line, blamed)?)
}

fn plain(name: &str, value: &Bound<'_, PyAny>) -> Raised<Value> {
    Ok(if value.is_none() {
        Value::Null
    } else if value.is_instance_of::<PyBool>() {
        value.extract::<bool>()?.into()
    } else if value.is_instance_of::<PyInt>() {
        if let Ok(number) = value.extract::<u64>() {
            number.into()
        } else if let Ok(number) = value.extract::<i64>() {
            number.into()
        } else {
            // Only settings that are floats take more than 64 bits.
            finite(name, value)?
        }
    } else if value.is_instance_of::<PyFloat>() {
        finite(name, value)?
    } else if value.is_instance_of::<PyString>() {
        value.extract::<String>()?.into()
    } else if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        value.try_iter()?.map(|item| plain(name, &item?)).collect::<Raised<Vec<_>>>()?.into()
    } else if let Ok(path) = value.extract::<PathBuf>() {
        path.to_string_lossy().into()
    } else {
        let kind = value.get_type().name()?;
        return Err(PyTypeError::new_err(format!("argument '{name}' can't be a {kind}")).into());
    })
}

/// A number as a float; one that no float can hold counts as infinite.
fn finite(name: &str, value: &Bound<'_, PyAny>) -> Raised<Value> {
    let number = value.extract().unwrap_or(f64::INFINITY);
    if number.is_finite() {
        return Ok(number.into());
    }
    Err(Error::Config(format!("{name} must be finite, got {number}")).into())
}
