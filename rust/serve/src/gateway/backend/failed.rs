//! Attempts that ended before the first byte.

use std::borrow::Cow;

use axum::http::StatusCode;

use crate::Reject;
use crate::frontend::app::App;
use crate::frontend::engine::Engine;
use crate::metrics::CauseLabel;

/// How far a request came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// No worker had it: another one may, as often as it takes.
    Never,
    /// The worker had it, and said that it does nothing for it.
    Refused,
    /// The worker had it and said nothing more: it may have done all of it, or died of it.
    Lost {
        /// It ended or stopped answering anybody, as far as can be seen.
        is_death: bool,
    },
}

/// An attempt that ended before the first byte.
#[derive(Debug)]
pub(crate) struct Failed {
    pub cause: &'static str,
    pub reach: Reach,
    pub message: String,
    /// What the client gets when no other worker does better.
    pub status: StatusCode,
    /// The request's field at fault.
    pub param: Option<Cow<'static, str>>,
    pub is_engine_at_fault: bool,
    /// The request itself is wrong: no other worker would do better.
    pub is_final: bool,
}

impl Failed {
    /// A failure that says nothing of the engine, which refused the request.
    pub fn new(cause: &'static str, message: impl Into<String>, status: StatusCode) -> Self {
        let (message, reach) = (message.into(), Reach::Refused);
        let (param, is_engine_at_fault, is_final) = (None, false, false);
        Self { cause, reach, message, status, param, is_engine_at_fault, is_final }
    }

    /// The worker never had the request.
    pub fn unsent(self) -> Self {
        Self { reach: Reach::Never, ..self }
    }

    /// The worker had the request and is not known to have ended.
    pub fn lost(self) -> Self {
        Self { reach: Reach::Lost { is_death: false }, ..self }
    }

    /// The worker had the request and ended, as far as can be seen.
    pub fn died(self) -> Self {
        Self { reach: Reach::Lost { is_death: true }, ..self }
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
        Self { param: failed.param, ..Self::new(failed.status, failed.message) }
    }
}
