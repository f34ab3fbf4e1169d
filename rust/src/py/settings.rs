//! Settings from Python: keyword arguments, and the table from which all flags are created.

use std::path::PathBuf;

use kvflash_core::error::Error;
use kvflash_core::policy::VARIABLES;
use kvflash_core::settings::Given;
use kvflash_serve::settings_tables;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use serde_json::{Map, Value, json};

use super::error::raise;

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
pub(super) fn given(settings: Option<&Bound<'_, PyDict>>) -> PyResult<Given> {
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

fn plain(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Value> {
    let each = |items: Vec<Bound<'_, PyAny>>| -> PyResult<Value> {
        items.iter().map(|item| plain(name, item)).collect::<PyResult<Vec<_>>>().map(Value::from)
    };
    Ok(if value.is_none() {
        Value::Null
    } else if value.is_instance_of::<PyBool>() {
        value.extract::<bool>()?.into()
    } else if value.is_instance_of::<PyInt>() {
        match value.extract::<u64>() {
            Ok(number) => number.into(),
            Err(_) => value.extract::<i64>()?.into(),
        }
    } else if value.is_instance_of::<PyFloat>() {
        let number: f64 = value.extract()?;
        if !number.is_finite() {
            let error = Error::Config(format!("{name} must be finite, got {number}"));
            return Err(raise(value.py(), &error));
        }
        number.into()
    } else if value.is_instance_of::<PyString>() {
        value.extract::<String>()?.into()
    } else if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        each(value.try_iter()?.collect::<PyResult<_>>()?)?
    } else if let Ok(path) = value.extract::<PathBuf>() {
        path.to_string_lossy().into()
    } else {
        let kind = value.get_type().name()?;
        return Err(PyTypeError::new_err(format!("argument '{name}' can't be a {kind}")));
    })
}
