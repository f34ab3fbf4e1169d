//! Converts the core's errors to Python's, with the classes of `kvflash.errors`.

use kvflash_core::error::Error;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// An error of the core or of Python, as the exception that the caller gets.
#[derive(Debug)]
pub(super) struct Fault(PyErr);

/// The result of a call that may fail in the core or in Python.
pub(super) type Raised<T> = Result<T, Fault>;

/// The call's arguments are invalid; the message names the field, the limit and what came.
pub(super) fn invalid(message: impl Into<String>) -> Fault {
    Error::invalid(message).into()
}

/// The result of a call to the core, made without the GIL.
pub(super) fn released<T: Send>(
    py: Python<'_>,
    call: impl FnOnce() -> Result<T, Error> + Send,
) -> Raised<T> {
    Ok(py.detach(call)?)
}

impl From<Error> for Fault {
    /// In the class of `kvflash.errors` for its cause.
    fn from(error: Error) -> Self {
        static MODULE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        Python::attach(|py| {
            let found = MODULE
                .get_or_try_init(py, || py.import("kvflash.errors").map(|m| m.into_any().unbind()))
                .and_then(|module| module.bind(py).getattr(error.kind().1))
                .and_then(|class| class.cast_into::<PyType>().map_err(PyErr::from));
            Self(match found {
                Ok(class) => PyErr::from_type(class, error.to_string()),
                Err(_) => PyRuntimeError::new_err(error.to_string()),
            })
        })
    }
}

impl From<kvflash_publish::Error> for Fault {
    fn from(error: kvflash_publish::Error) -> Self {
        Self::from(match error {
            kvflash_publish::Error::InvalidArgument(text) => Error::InvalidArgument(text),
            kvflash_publish::Error::Io(text) => Error::Config(text),
            kvflash_publish::Error::Closed(text) => Error::Closed(text.to_owned()),
        })
    }
}

impl From<PyErr> for Fault {
    fn from(error: PyErr) -> Self {
        Self(error)
    }
}

impl From<Fault> for PyErr {
    fn from(fault: Fault) -> Self {
        fault.0
    }
}
