//! Books workers for a request, one after the other, until one of them answers, and compares the
//! answer with the worker's events; for operators, what answers tell of these events.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;

use axum::http::StatusCode;
use kvflash_core::catalog::Unheard;
use kvflash_core::error::{Error, Result};
use kvflash_core::ids::{InstanceId, Worker};
use kvflash_core::policy::Advice;
use kvflash_core::select::{
    Ask, EventSource, Outcome, Prompt, Reservation, ReuseChange, ReuseView, Selection, WorkerReason,
};
use serde_json::{Value, json};

use super::attempts::{Attempts, Failed, PREFILL_FAILED};
use super::plan::{Part, Plan};
use crate::frontend::app::App;
use crate::frontend::engine::{Engine, Pool};
use crate::{Reject, queue};

/// A chosen worker that has left is replaced by another choice; this many in a row indicate an
/// error.
const MAX_CHOICES: usize = 8;

/// The worker that takes a request, with its booking.
pub(crate) struct Choice {
    pub engine: Arc<Engine>,
    pub booking: Reservation,
    pub selection: Selection,
}

impl Choice {
    /// Waits for the worker; if the client leaves meanwhile, the journal records that.
    pub async fn watched<T>(&self, attempt: impl Future<Output = T>) -> T {
        struct Watch<'a>(Option<&'a Reservation>);
        impl Drop for Watch<'_> {
            fn drop(&mut self) {
                if let Some(booking) = self.0 {
                    booking.ended(Outcome::ClientGone);
                }
            }
        }
        let mut watch = Watch(Some(&self.booking));
        let outcome = kept_alive(&self.booking, attempt).await;
        watch.0 = None;
        outcome
    }
}

/// Waits for `work` of the request that is booked, which does not expire meanwhile.
pub(super) async fn kept_alive<T>(booking: &Reservation, work: impl Future<Output = T>) -> T {
    let (mut work, interval) = (pin!(work), booking.touch_interval());
    loop {
        match tokio::time::timeout(interval, work.as_mut()).await {
            Ok(outcome) => return outcome,
            Err(_) => booking.touch(),
        }
    }
}

/// The announced reuse for one request, to compare with its answer.
pub(crate) struct Expectation {
    pub pool: Arc<Pool>,
    pub prompt: Arc<Prompt>,
    pub selection: Selection,
}

impl Expectation {
    /// For the answer of the chosen worker; `None` unless the overlap came from events alone.
    pub fn of(app: &App, plan: &Plan, selection: Selection) -> Option<Self> {
        let (pool, prompt) = (&plan.route.pool, &plan.request.prompt);
        let is_comparable = app.uses_events && pool.selector.is_comparable(prompt);
        is_comparable.then(|| Self {
            pool: Arc::clone(pool),
            prompt: Arc::clone(prompt),
            selection,
        })
    }

    /// The answer is complete: the engine counted `prompt_tokens`, and reused `cached_tokens` of
    /// them. If it counted another prompt than the one looked up, the answer is no evidence.
    pub fn compare(self, app: &App, prompt_tokens: Option<u64>, cached_tokens: Option<u64>) {
        let Self { pool, prompt, selection } = self;
        if prompt_tokens.is_some_and(|tokens| tokens != prompt.isl_tokens) {
            return;
        }
        let worker = selection.worker;
        match pool.selector.compare(&prompt, &selection, cached_tokens) {
            None => {}
            Some(ReuseChange::Recovered) => tracing::info!(
                %worker, model = pool.name,
                "the engine's reported reuse agrees with its events again; its overlap earns credit"
            ),
            Some(ReuseChange::Distrusted(finding)) => {
                let WorkerReason { code, message, fix, .. } =
                    finding.explain(worker, source_of(app, worker));
                tracing::warn!(%worker, model = pool.name, code, fix, "{message}");
            }
        }
    }
}

/// The workers tried for a request, and the outcomes.
pub(crate) struct Tries {
    app: Arc<App>,
    pub plan: Arc<Plan>,
    tried: Vec<InstanceId>,
    last: Option<Failed>,
    attempts: Attempts,
    /// Why no other worker is tried.
    is_over: Option<&'static str>,
    /// The prompt is prefilled elsewhere.
    pub is_decode_only: bool,
    /// A worker was chosen before, even one that may be tried again.
    is_retry: bool,
}

impl Tries {
    pub fn new(app: &Arc<App>, plan: Arc<Plan>) -> Self {
        let (app, tried) = (Arc::clone(app), Vec::new());
        let attempts = app.retries.begin();
        let (is_decode_only, is_retry) = (false, false);
        Self { app, plan, tried, last: None, attempts, is_over: None, is_decode_only, is_retry }
    }

    /// The part of the request to choose a worker for.
    pub fn part(&self) -> Part<'_> {
        let Self { is_decode_only, is_retry, .. } = *self;
        Part { tried: &self.tried, is_decode_only, is_retry }
    }

    /// Whether another worker may be tried.
    pub fn may_go_on(&self) -> bool {
        self.is_over.is_none() && self.tried.len() < self.limit()
    }

    /// Maximum workers to try.
    fn limit(&self) -> usize {
        let limit = self.app.options.max_attempts;
        self.plan.call.max_attempts.map_or(limit, |own| own.min(limit))
    }

    /// Whether an untried worker could take the request now.
    pub fn has_untried(&self) -> bool {
        let selector = &self.plan.route.pool.selector;
        self.plan.ask(self.part(), None, |ask| selector.query(ask)).is_ok()
    }

    /// Records that a worker answers.
    pub fn answered(&self) {
        self.attempts.answered(self.plan.call.body.bytes());
    }

    /// Whether no worker has failed.
    pub fn is_first(&self) -> bool {
        self.tried.len() <= 1
    }

    /// Whether no worker was tried.
    pub fn is_empty(&self) -> bool {
        self.tried.is_empty()
    }

    /// Chooses an untried worker and books the request there; with a queue, once a worker has room
    /// to prefill.
    ///
    /// # Errors
    /// `NoWorker`, with the existing workers and why they can't serve it; those of the queue.
    pub async fn next(&mut self) -> Result<Choice> {
        let choice = self.book().await?;
        self.tried.push(choice.engine.id);
        self.is_retry = true;
        Ok(choice)
    }

    /// How the last attempt failed.
    pub fn last(&self) -> Option<&Failed> {
        self.last.as_ref()
    }

    /// Records that the last worker failed, and marks it as suspect if it is at fault. It may be
    /// tried again if the prefill beside it is.
    ///
    /// # Errors
    /// As [`Tries::lost`].
    pub fn failed(&mut self, engine: &Engine, failed: Failed) -> Result<(), Reject> {
        if failed.cause == PREFILL_FAILED {
            self.app.attempt_failed(&failed, engine, "the prefill beside this attempt failed");
            self.spare(engine.id);
            return Ok(());
        }
        self.lost(failed.clone())?;
        let what = if self.may_go_on() && self.has_untried() {
            "attempt failed before the first byte; trying another worker"
        } else {
            "attempt failed before the first byte; no other worker is tried"
        };
        self.app.attempt_failed(&failed, engine, what);
        Ok(())
    }

    /// Records that the last worker failed, which is counted elsewhere.
    ///
    /// # Errors
    /// The request itself is invalid, so no other worker would succeed.
    pub fn lost(&mut self, failed: Failed) -> Result<(), Reject> {
        if failed.is_final {
            return Err(failed.into());
        }
        let body = &self.plan.call.body;
        if let Some(reject) = body.rest().and_then(|rest| rest.refused()) {
            // The client broke off its upload: the worker is not at fault.
            return Err(reject);
        }
        self.is_over = if body.rest().is_some_and(|rest| rest.has_begun()) {
            Some("it had received part of an upload, which can't be sent twice")
        } else {
            self.attempts.failed(&failed, body.bytes(), self.app.in_flight())
        };
        self.last = Some(failed);
        Ok(())
    }

    /// This worker may be tried again.
    pub fn spare(&mut self, id: InstanceId) {
        self.tried.retain(|tried| *tried != id);
    }

    /// The client's error if no worker may take the request, as `error` says, or all were tried.
    pub fn refusal(self, error: Option<Error>) -> Reject {
        let limit = self.limit();
        match (self.last, error) {
            (None, Some(error)) => {
                self.app.refused(match error {
                    Error::AllBusy(_) => "all_busy",
                    Error::InvalidArgument(_) => "invalid",
                    Error::Overloaded(_) => "overloaded",
                    _ => "no_worker",
                });
                error.into()
            }
            // All eligible workers were tried: report the failures, not the lack of workers.
            (last, _) => {
                self.app.refused("all_failed");
                let failed =
                    last.unwrap_or_else(|| Failed::new("none", "", StatusCode::BAD_GATEWAY));
                let (tried, why) = (self.tried, failed.message);
                let message = if failed.status == StatusCode::NOT_IMPLEMENTED {
                    format!("{why} (tried {tried:?})")
                } else {
                    let others = self.plan.route.pool.members().all().count();
                    let end = match (self.is_over, others.saturating_sub(tried.len())) {
                        (Some(why), _) => format!("; {why}"),
                        (None, 0) => String::new(),
                        (None, _) if tried.len() >= limit => format!(
                            "; the limit of attempts is {limit} (--max-attempts, x-kvflash-max-attempts)"
                        ),
                        (None, 1) => {
                            "; the model's other worker is unhealthy, draining or busy".to_owned()
                        }
                        (None, others) => format!(
                            "; the model's {others} other workers are unhealthy, draining or busy"
                        ),
                    };
                    format!(
                        "no worker answered; tried {tried:?}, the last one failed with: {why}{end}"
                    )
                };
                Reject::momentary(failed.status, message)
            }
        }
    }

    async fn book(&self) -> Result<Choice> {
        let (pool, request) = (&self.plan.route.pool, &self.plan.request);
        let advice = self.plan.advice(self.part()).await;
        let book = || self.book_now(advice.as_ref());
        let Some(line) = &pool.queue else { return book() };
        let began = Instant::now();
        let cached_tokens =
            || self.plan.ask(self.part(), None, |ask| pool.selector.most_held_tokens(ask));
        // Unhealthy workers are excluded for all requests, so they do not make this one special.
        let is_open =
            || request.is_open() && self.tried.is_empty() && self.plan.suits_all(&pool.members());
        let isl_tokens = request.prompt.isl_tokens;
        let outcome =
            queue::pass(line, &request.wish, isl_tokens, cached_tokens, is_open, book).await;
        let metrics = &self.app.metrics;
        let waits =
            if pool.prefills() { &metrics.prefill_queue_seconds } else { &metrics.queue_seconds };
        waits.observe(began.elapsed().as_secs_f64());
        outcome
    }

    fn book_now(&self, advice: Option<&Advice>) -> Result<Choice> {
        let pool = &self.plan.route.pool;
        for _ in 0..MAX_CHOICES {
            let booked = self.plan.ask(self.part(), advice, |ask| {
                pool.selector.select(&Ask { waits: pool.queue.is_some(), ..*ask })
            });
            let (booking, selection) = booked.map_err(|error| self.plan.explain_absence(error))?;
            // Look again: a worker may have joined between the two reads. Members and the router's
            // workers change under one lock, so it is found.
            if let Some(engine) = pool.members().get(booking.worker().instance_id).cloned() {
                return Ok(Choice { engine, booking, selection });
            }
        }
        Err(Error::NoWorker("every chosen worker left while the request was routed".to_owned()))
    }
}

/// State of a worker's event source.
fn source_of(app: &App, worker: Worker) -> EventSource {
    let publishers = app.catalog.publishers();
    let own = publishers.iter().find(|publisher| publisher.worker == worker);
    match own.map(|publisher| publisher.view().counts.batches) {
        None => EventSource::None,
        Some(0) => EventSource::Silent,
        Some(_) => {
            let engine = app.fleet.engine(worker.instance_id);
            let is_announced = engine.is_some_and(|engine| engine.member.is_some());
            if is_announced { EventSource::Announced } else { EventSource::Heard }
        }
    }
}

/// Workers that are distrusted or misconfigured, with cause and fix.
pub(crate) fn reasons(app: &App) -> Vec<WorkerReason> {
    let engines = app.fleet.engines();
    let faults = engines.iter().flat_map(|engine| engine.inspection.lock().faults.clone());
    let pools = app.fleet.pools();
    let views = pools.iter().flat_map(|pool| pool.selector.reuse.views());
    let found = views
        .filter_map(|(worker, view)| Some(view.finding?.explain(worker, source_of(app, worker))));
    faults.chain(found).collect()
}

/// Workers with incomplete index data, and the reasons.
pub(crate) fn unheard(app: &App) -> BTreeMap<Worker, Unheard> {
    let pools = app.fleet.pools();
    pools.iter().flat_map(|pool| pool.selector.model().all_unheard()).collect()
}

/// A worker's reuse; empty for a worker that has not answered yet.
pub(crate) fn reuse_json(view: Option<ReuseView>) -> Value {
    let is_reported = view.and_then(|view| view.is_reported);
    json!({
        "reported": is_reported,
        "note": match is_reported {
            Some(true) => None,
            Some(false) => Some(
                "the engine reports no reuse, so its events cannot be checked; vLLM reports it with \
                 --enable-prompt-tokens-details, SGLang with --enable-cache-report, and both in streams only with \
                 \"stream_options\": {\"include_usage\": true}",
            ),
            None => Some("reuse is not reported yet"),
        },
        "requests": view.map_or(0, |view| view.samples),
        "predicted_tokens": view.map_or(0, |view| view.predicted_tokens),
        "reported_tokens": view.map_or(0, |view| view.reported_tokens),
        "trust": view.map_or(1.0, |view| view.credit),
    })
}
