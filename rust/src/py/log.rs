//! Sends the core's log lines to stderr, beside Python's.

use kvflash_core::error::Error;
use pyo3::prelude::*;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::fmt::format::debug_fn;

use super::error::{Fault, Raised};

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
pub(super) fn init_logging(level: &str, json: bool) -> Raised<bool> {
    let directives = match level {
        // `_core` is this crate's name: Python imports it by that.
        "error" | "warn" | "info" | "debug" | "trace" => {
            format!("warn,kvflash={level},_core={level}")
        }
        other => {
            return Err(Fault::from(Error::Config(format!(
                "level must be error, warn, info, debug or trace, got {other:?}"
            ))));
        }
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(directives))
        .with_target(false)
        // A line that can't be written is lost. To report that, tracing would panic.
        .log_internal_errors(false)
        .with_writer(std::io::stderr);
    // A process has one log; the first one is kept.
    let outcome = if json {
        builder.json().try_init()
    } else {
        let fields = debug_fn(|writer, field, value| match field.name() {
            "message" => writer.write_str(&in_one_line(format!("{value:?}"))),
            // Where a dependency's line was written.
            name if name.starts_with("log.") => Ok(()),
            name => write!(writer, "{name}={}", in_one_line(format!("{value:?}"))),
        });
        builder.with_ansi(false).fmt_fields(fields.delimited(" ")).try_init()
    };
    Ok(outcome.is_ok())
}

/// Names come from engines and clients: they must not write lines or commands to a terminal.
fn in_one_line(text: String) -> String {
    if !text.contains(char::is_control) {
        return text;
    }
    let escape =
        |c: char| if c.is_control() { c.escape_default().collect() } else { c.to_string() };
    text.chars().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::in_one_line;

    #[test]
    fn a_name_writes_no_line_of_its_own() {
        assert_eq!(in_one_line("a\n\u{1b}[31mWARN é".to_owned()), "a\\n\\u{1b}[31mWARN é");
    }
}
