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
    /// No worker received it: it may be retried without limit.
    Never,
    /// The worker received it and refused it.
    Refused,
    /// The worker received it and did not answer: it may have processed all of it, or died from it.
    Lost {
        /// Whether the worker appears to have ended or to answer no requests at all.
        is_death: bool,
    },
}

/// An attempt that ended before the first byte.
#[derive(Debug)]
pub(crate) struct Failed {
    pub cause: &'static str,
    pub reach: Reach,
    pub message: String,
    /// The client's status if no other worker succeeds.
    pub status: StatusCode,
    /// The request's field at fault.
    pub param: Option<Cow<'static, str>>,
    pub is_engine_at_fault: bool,
    /// The request itself is invalid, so no other worker would succeed.
    pub is_final: bool,
}

impl Failed {
    /// A failure that is not the engine's fault: it refused the request.
    pub fn new(cause: &'static str, message: impl Into<String>, status: StatusCode) -> Self {
        let (message, reach) = (message.into(), Reach::Refused);
        let (param, is_engine_at_fault, is_final) = (None, false, false);
        Self { cause, reach, message, status, param, is_engine_at_fault, is_final }
    }

    /// The worker never received the request.
    pub fn unsent(self) -> Self {
        Self { reach: Reach::Never, ..self }
    }

    /// The worker received the request and is not known to have ended.
    pub fn lost(self) -> Self {
        Self { reach: Reach::Lost { is_death: false }, ..self }
    }

    /// The worker received the request and appears to have ended.
    pub fn died(self) -> Self {
        Self { reach: Reach::Lost { is_death: true }, ..self }
    }

    /// The request itself is invalid.
    pub fn invalid(reject: Reject) -> Self {
        let Reject { status, message, param, .. } = reject;
        Self { param, is_final: true, ..Self::new("invalid", message, status) }
    }

    /// Counts it, and marks the engine as suspect if it is at fault.
    pub fn note(&self, app: &App, engine: &Engine, what: &'static str) {
        let Self { cause, message, .. } = self;
        app.metrics.attempts_failed.get_or_create(&CauseLabel { cause }).inc();
        if self.is_engine_at_fault {
            engine.failed(message);
        }
        tracing::warn!(worker = engine.id, cause, why = message, "{what}");
    }

    /// Marks it as the engine's fault.
    pub fn fault(self) -> Self {
        Self { is_engine_at_fault: true, ..self }
    }
}

impl From<Failed> for Reject {
    fn from(failed: Failed) -> Self {
        Self { param: failed.param, ..Self::new(failed.status, failed.message) }
    }
}
