//! Dispatches to the kind of worker that was chosen.

use std::pin::pin;

use axum::http::StatusCode;

use super::Backend;
use super::failed::Failed;
use super::handoff::Handoff;
use super::openai::{self, OpenAi};
use super::plane::{self, Plane};
use crate::frontend::app::App;
use crate::gateway::book::Choice;
use crate::gateway::plan::Plan;

/// An answer that has begun.
pub(crate) enum Opened {
    OpenAi(openai::Opened),
    Plane(plane::Opened),
}

impl Opened {
    /// Whether the worker accepted the request, according to its response head.
    pub fn is_success(&self) -> bool {
        match self {
            Self::OpenAi(opened) => opened.status.is_success(),
            Self::Plane(_) => true,
        }
    }
}

/// As [`Backend::open`], for any kind of worker; until a check of the worker fails.
pub(in crate::gateway) async fn open(
    app: &App,
    plan: &Plan,
    choice: &Choice,
    handoff: &Handoff,
) -> Result<Opened, Failed> {
    let opened = pin!(async {
        let Some(plane) = Plane::of(choice) else {
            return OpenAi.open(app, plan, choice, handoff).await.map(Opened::OpenAi);
        };
        tokio::select! {
            biased;
            opened = plane.open(app, plan, choice, handoff) => opened.map(Opened::Plane),
            why = handoff.failure() => Err(Failed::new("prefill_failed", why, StatusCode::BAD_GATEWAY)),
        }
    });
    while_well(choice, opened).await
}

/// Waits for a worker until a check of it fails, which ends the wait for its answer.
async fn while_well<T>(
    choice: &Choice,
    work: impl Future<Output = Result<T, Failed>>,
) -> Result<T, Failed> {
    let engine = &choice.engine;
    engine.while_well(work).await.unwrap_or_else(|| {
        let message =
            format!("worker {} failed its health checks before its answer began", engine.id);
        Err(Failed::new("unwell", message, StatusCode::BAD_GATEWAY).died())
    })
}

/// As [`Backend::prefill`], for any kind of worker.
pub(in crate::gateway) async fn prefill(
    app: &App,
    plan: &Plan,
    choice: &Choice,
) -> Result<rmpv::Value, Failed> {
    let prefilled = pin!(async {
        match Plane::of(choice) {
            Some(plane) => plane.prefill(app, plan, choice).await,
            None => OpenAi.prefill(app, plan, choice).await,
        }
    });
    while_well(choice, prefilled).await
}
