//! A request at the worker that was chosen for it, of either kind; with disaggregation, what its prefill passes to it.

use std::pin::pin;

use axum::http::StatusCode;
use kvflash_core::ids::Worker;
use serde::Serialize;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::openai;
use super::plane::{self, Plane};
use crate::frontend::app::App;
use crate::gateway::attempts::Failed;
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

/// Sends `plan`'s request, with the prompt prefilled as `handoff` says, and waits for the answer to begin, until a
/// check of the worker fails.
pub(in crate::gateway) async fn open(
    app: &App,
    plan: &Plan,
    choice: &Choice,
    handoff: &Handoff,
) -> Result<Opened, Failed> {
    let opened = pin!(async {
        let Some(plane) = Plane::of(choice) else {
            return openai::open(app, plan, choice, handoff).await.map(Opened::OpenAi);
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

/// Prefills the prompt; returns what the decode worker needs.
pub(in crate::gateway) async fn prefill(
    app: &App,
    plan: &Plan,
    choice: &Choice,
) -> Result<rmpv::Value, Failed> {
    let prefilled = pin!(async {
        match Plane::of(choice) {
            Some(plane) => plane.prefill(app, plan, choice).await,
            None => openai::prefill(app, plan, choice).await,
        }
    });
    while_well(choice, prefilled).await
}

/// The rendezvous of prefill and decode worker.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct BootstrapInfo {
    pub bootstrap_host: String,
    pub bootstrap_port: u16,
    pub bootstrap_room: u64,
}

/// The result of a prefill for the decode worker.
#[derive(Debug)]
pub(crate) enum Handoff {
    /// The decode worker prefills by itself.
    Alone,
    /// The prefill is done; these are its transfer parameters.
    Done { worker: Worker, params: rmpv::Value },
    /// The prefill runs beside the decode.
    Beside { worker: Worker, info: BootstrapInfo, pending: Pending },
}

impl Handoff {
    pub fn is_alone(&self) -> bool {
        matches!(self, Self::Alone)
    }

    /// The prefill worker.
    pub fn worker(&self) -> Option<Worker> {
        match self {
            Self::Alone => None,
            Self::Done { worker, .. } | Self::Beside { worker, .. } => Some(*worker),
        }
    }

    /// Waits until the concurrent prefill fails; forever if it does not.
    pub fn failure(&self) -> impl Future<Output = String> + Send + 'static {
        let failed = match self {
            Self::Beside { pending, .. } => Some(pending.failed.clone()),
            _ => None,
        };
        failure(failed)
    }

    /// The decode is complete: the prefill may end by itself.
    pub fn complete(&mut self) {
        if let Self::Beside { pending, .. } = self {
            pending.task = None;
        }
    }
}

/// A prefill that runs beside its decode. Dropping it ends the prefill.
#[derive(Debug)]
pub(crate) struct Pending {
    task: Option<JoinHandle<()>>,
    failed: watch::Receiver<Option<String>>,
}

/// Why the prefill failed, once it has failed.
async fn failure(failed: Option<watch::Receiver<Option<String>>>) -> String {
    if let Some(mut failed) = failed
        && let Ok(why) = failed.wait_for(Option::is_some).await
        && let Some(why) = &*why
    {
        return why.clone();
    }
    // There is no prefill, or it is complete.
    std::future::pending().await
}

impl Pending {
    pub fn new(task: JoinHandle<()>, failed: watch::Receiver<Option<String>>) -> Self {
        Self { task: Some(task), failed }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}
