//! Sends the core's log lines to stderr, beside Python's.

use kvflash_core::error::Error;
use pyo3::prelude::*;
use tracing_subscriber::EnvFilter;

use super::error::raise;

/// Send the core's log lines to stderr.
///
/// Args:
///     level: error, warn, info, debug or trace.
///     json: Write one JSON object per line instead of text.
///
/// Returns:
///     False if the process already has a log, which is kept.
///
/// Raises:
///     ConfigError: An unknown level.
#[pyfunction]
#[pyo3(signature = (level="info", *, json=false))]
pub(super) fn init_logging(py: Python<'_>, level: &str, json: bool) -> PyResult<bool> {
    let directives = match level {
        "error" | "warn" | "info" | "debug" | "trace" => format!("warn,kvflash={level}"),
        other => {
            let message = format!("level must be error, warn, info, debug or trace, got {other:?}");
            return Err(raise(py, &Error::Config(message)));
        }
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(directives))
        .with_target(false)
        .with_writer(std::io::stderr);
    // A process has one log; the first one is kept.
    Ok(if json { builder.json().try_init() } else { builder.with_ansi(false).try_init() }.is_ok())
}
