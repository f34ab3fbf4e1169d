//! Converts the core's errors to Python's, with the classes of `kvflash.errors`.

use kvflash_core::error::Error;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// The exception for `error`, in the class of `kvflash.errors` for its cause.
pub(super) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    let (_, class) = error.kind();
    static MODULE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let found = MODULE
        .get_or_try_init(py, || py.import("kvflash.errors").map(|m| m.into_any().unbind()))
        .and_then(|module| module.bind(py).getattr(class))
        .and_then(|class| class.cast_into::<PyType>().map_err(PyErr::from));
    match found {
        Ok(class) => PyErr::from_type(class, error.to_string()),
        Err(_) => PyRuntimeError::new_err(error.to_string()),
    }
}

/// Converts the core's results to Python's.
pub(super) trait OrRaise<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for kvflash_core::error::Result<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| raise(py, &error))
    }
}
