//! Attempts that ended before the first byte.

use axum::http::StatusCode;

use crate::Reject;
use crate::frontend::app::App;
use crate::frontend::engine::Engine;
use crate::frontend::metrics::CauseLabel;

/// An attempt that ended before the first byte.
#[derive(Debug)]
pub(crate) struct Failed {
    pub cause: &'static str,
    pub message: String,
    /// What the client gets when no other worker does better.
    pub status: StatusCode,
    pub is_engine_at_fault: bool,
    /// The request itself is wrong: no other worker would do better.
    pub is_final: bool,
}

impl Failed {
    /// A failure that says nothing of the engine.
    pub fn new(cause: &'static str, message: impl Into<String>, status: StatusCode) -> Self {
        let message = message.into();
        Self { cause, message, status, is_engine_at_fault: false, is_final: false }
    }

    /// Count it, and put the engine in doubt where it is at fault.
    pub fn note(&self, app: &App, engine: &Engine, what: &'static str) {
        let Self { cause, message, .. } = self;
        app.metrics.attempts_failed.get_or_create(&CauseLabel { cause }).inc();
        if self.is_engine_at_fault {
            engine.failed(message);
        }
        tracing::warn!(worker = engine.id, cause, why = message, "{what}");
    }

    /// It is the engine's.
    pub fn fault(self) -> Self {
        Self { is_engine_at_fault: true, ..self }
    }
}

impl From<Failed> for Reject {
    fn from(failed: Failed) -> Self {
        Self::new(failed.status, failed.message)
    }
}
