//! Admission of a request, and its client while it waits for the answer.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::body::Body;
use axum::http::HeaderMap;
use kvflash_core::error::Error;
use kvflash_core::select::Usage;
use tokio::time::Instant;

use super::api::{Row, Weight};
use super::turn::Turn;
use super::upload::names_model;
use crate::Reject;
use crate::body::{self, Received};
use crate::frontend::app::App;
use crate::tenant::limit::Running;

/// A request's slot among those in flight, freed when dropped.
pub(crate) struct InFlight {
    app: Arc<App>,
    /// Its turn, with fair queueing.
    pub turn: Option<Turn>,
    /// Its client's limits, if it has a key.
    pub running: Option<Running>,
}

impl InFlight {
    /// Records usage so far, at the end of an answer.
    pub fn used(&self, usage: Usage) {
        if let Some(turn) = &self.turn {
            turn.used(usage);
        }
        if let Some(running) = &self.running {
            running.used(usage);
        }
    }

    /// Sets the number of tokens generated so far.
    pub fn generated(&self, tokens: u64) {
        if let Some(turn) = &self.turn {
            turn.generated(tokens);
        }
    }

    /// A worker answers, and computes this many tokens of the prompt.
    pub fn answered(&self, uncached_tokens: u64) {
        if let Some(running) = &self.running {
            running.computes(uncached_tokens);
        }
        if let Some(turn) = &self.turn {
            turn.answered();
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let limit = self.app.options.max_concurrent_requests;
        if self.app.in_flight.fetch_sub(1, Ordering::Relaxed) == limit {
            *self.app.full_since.lock() = None;
        }
    }
}

/// Reads a request's body, then takes a slot among those in flight, so that slow uploads occupy
/// none; of a large upload only its beginning. The body of a refused request is read and discarded: otherwise a client that is still
/// sending might see a connection reset instead of the response.
///
/// # Errors
/// 503 while the start gate waits for workers; 429 at the limit; those of the body.
pub(super) async fn admit(
    app: &Arc<App>,
    row: &Row,
    headers: &HeaderMap,
    mut body: Body,
) -> Result<(InFlight, Received), Reject> {
    let limit = app.options.max_concurrent_requests;
    let full = || {
        let what = format!("{limit} requests are in flight, the limit (--max-concurrent-requests)");
        (Error::Overloaded(what), "concurrency")
    };
    let started = app.started().map_err(|error| (error, "no_worker"));
    let begun = started.and_then(|()| if app.in_flight() < limit { Ok(()) } else { Err(full()) });
    if let Err((error, cause)) = begun {
        app.refused(cause);
        body::discard(&mut body).await;
        return Err(error.into());
    }
    let received = match row.weight {
        Weight::Sound => {
            app.uploads.beginning(body, |beginning| names_model(headers, beginning)).await?
        }
        Weight::Text | Weight::Nothing => app.intake.whole(body).await?,
    };
    let before = app.in_flight.fetch_add(1, Ordering::Relaxed);
    if before < limit {
        if before + 1 == limit {
            *app.full_since.lock() = Some(Instant::now());
        }
        return Ok((InFlight { app: Arc::clone(app), turn: None, running: None }, received));
    }
    app.in_flight.fetch_sub(1, Ordering::Relaxed);
    let (error, cause) = full();
    app.refused(cause);
    Err(error.into())
}

/// Counts a client that leaves before its answer begins, which drops its request wherever it waits.
pub(super) struct Waiting {
    app: Arc<App>,
    is_over: bool,
}

impl Waiting {
    pub fn new(app: &Arc<App>) -> Self {
        Self { app: Arc::clone(app), is_over: false }
    }

    /// Ends the counting here: the answer does it from now on.
    pub fn over(&mut self) {
        self.is_over = true;
    }

    /// The client waits for another worker.
    pub fn again(&mut self) {
        self.is_over = false;
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if !self.is_over {
            self.app.metrics.clients_gone.inc();
        }
    }
}
