//! A request at the worker that was chosen for it, of either kind; with disaggregation, another one
//! prefills, and this one decodes.

use std::pin::pin;
use std::sync::Arc;

use axum::http::StatusCode;
use kvflash_core::ids::Worker;
use serde::Serialize;
use serde_json::Value;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::openai;
use super::plane;
use crate::Reject;
use crate::frontend::EnforceDisagg;
use crate::frontend::app::App;
use crate::gateway::api::{Api, Form};
use crate::gateway::attempts::{Failed, PREFILL_FAILED};
use crate::gateway::book::{Choice, Tries, kept_alive};
use crate::gateway::plan::Plan;
use crate::gateway::stored;
use crate::gateway::usage::events_of_response;
use crate::metrics::OutcomeLabel;

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

    /// Whether the model's output may have begun: a stream of Responses has events that come before the prefill.
    pub fn has_output(&self, form: Form) -> bool {
        let Self::OpenAi(openai::Opened { is_event_stream: true, first: Some(first), .. }) = self
        else {
            return true;
        };
        form != Form::Responses || events_of_response(first) != (true, false)
    }
}

/// Sends `plan`'s request, with the prompt prefilled as `handoff` says, and waits for the answer to
/// begin, until a check of the worker fails.
pub(in crate::gateway) async fn open(
    app: &App,
    plan: &Plan,
    choice: &Choice,
    handoff: &Handoff,
) -> Result<Opened, Failed> {
    let opened = pin!(async {
        let Some(member) = &choice.engine.member else {
            return openai::open(app, plan, choice, handoff).await.map(Opened::OpenAi);
        };
        tokio::select! {
            biased;
            opened = plane::open(app, plan, choice, member, handoff) => opened.map(Opened::Plane),
            failed = handoff.failure() => Err(Failed { cause: PREFILL_FAILED, ..failed }),
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
        match &choice.engine.member {
            Some(member) => plane::prefill(app, plan, choice, member).await,
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

    /// Waits until the concurrent prefill fails, and returns how; forever if it does not.
    pub fn failure(&self) -> impl Future<Output = Failed> + Send + 'static {
        let failed = match self {
            Self::Beside { pending, .. } => Some(pending.failed.clone()),
            _ => None,
        };
        async move {
            if let Some(mut failed) = failed
                && let Ok(failed) = failed.wait_for(Option::is_some).await
                && let Some(failed) = &*failed
            {
                return failed.clone();
            }
            // There is no prefill, or it is complete.
            std::future::pending().await
        }
    }

    /// The decode is complete: the prefill may end by itself.
    pub fn complete(&mut self) {
        if let Self::Beside { pending, .. } = self {
            pending.task = None;
        }
    }

    /// How the concurrent prefill has failed, if it has.
    pub fn failed(&self) -> Option<Failed> {
        match self {
            Self::Beside { pending, .. } => pending.failed.borrow().clone(),
            _ => None,
        }
    }

    /// Ends a concurrent prefill; when this returns, its load is free.
    pub async fn end(&mut self) {
        if let Self::Beside { pending, .. } = self
            && let Some(task) = &mut pending.task
        {
            task.abort();
            let _ = task.await;
            pending.task = None;
        }
    }
}

/// A prefill that runs beside its decode. Dropping it ends the prefill.
#[derive(Debug)]
pub(crate) struct Pending {
    task: Option<JoinHandle<()>>,
    failed: watch::Receiver<Option<Failed>>,
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// The prefill side of one request, across all of its attempts.
pub(crate) struct Prefill {
    tries: Option<Tries>,
    is_enforced: bool,
    /// Prompt tokens that the worker of the last hand-off computes.
    pub uncached_tokens: u64,
}

impl Prefill {
    /// The prefill options for a request with this plan.
    ///
    /// # Errors
    /// 404 for a pinned prefill worker that does not exist.
    pub async fn of(app: &Arc<App>, plan: &Plan) -> Result<Self, Reject> {
        let name = &plan.route.pool.name;
        // The earlier part of a continued response is at a single worker.
        if plan.call.api().output_limit().is_none() || stored::is_continued(&plan.call.body) {
            return Self::of_whole(app, plan);
        }
        let (pool, pinned) = (app.fleet.prefill_pool(name), plan.call.nvext.prefill_worker_id);
        if let Some(id) = pinned
            && pool.as_ref().is_none_or(|pool| pool.members().get(id).is_none())
        {
            let field = "nvext.prefill_worker_id";
            let message = format!("{field}: worker {id} is not a prefill worker of model {name:?}");
            return Err(Reject::new(StatusCode::NOT_FOUND, message).param(field));
        }
        let is_enforced = app.enforces_prefill(name);
        let tries = match pool {
            Some(pool) => Some(Tries::new(app, Arc::new(plan.on(app, pool, pinned).await))),
            None => None,
        };
        Ok(Self { tries, is_enforced, uncached_tokens: 0 })
    }

    /// For an API that one worker serves as a whole.
    ///
    /// # Errors
    /// 501 if decode workers may not prefill and this would be needed.
    fn of_whole(app: &App, plan: &Plan) -> Result<Self, Reject> {
        let row = plan.call.row;
        if app.options.enforce_disagg == EnforceDisagg::Always && row.api != Api::Unmatched {
            let message = format!(
                "{}: this API cannot be split between a prefill and a decode worker, which \
                                   --enforce-disagg requires",
                row.path
            );
            return Err(Reject::new(StatusCode::NOT_IMPLEMENTED, message));
        }
        Ok(Self { tries: None, is_enforced: false, uncached_tokens: 0 })
    }

    /// The request as its prefill workers get it.
    pub fn plan(&self) -> Option<&Plan> {
        self.tries.as_ref().map(|tries| &*tries.plan)
    }

    /// Whether there is no prefill step.
    pub fn is_idle(&self) -> bool {
        self.tries.is_none() && !self.is_enforced
    }

    /// The worker that would prefill now, drawn with `seed`, which is given by the request or new;
    /// `None` if the decode worker would. Changes nothing.
    ///
    /// # Errors
    /// The request would be refused.
    pub async fn query(&self, seed: Option<u64>) -> Result<Option<Worker>, Reject> {
        let Some(tries) = &self.tries else { return self.unless_enforced(NONE_IS_REGISTERED) };
        match tries.plan.query(tries.part(), seed).await {
            Ok(selection) => Ok(Some(selection.worker)),
            Err(error) => self.unless_enforced(&error.to_string()),
        }
    }

    /// The same, with reasons.
    ///
    /// # Errors
    /// As [`Prefill::query`].
    pub async fn explain(&self, app: &App) -> Result<Option<Value>, Reject> {
        let Some(tries) = &self.tries else { return self.unless_enforced(NONE_IS_REGISTERED) };
        match tries.plan.explain(app, tries.part()).await {
            Ok(decision) => Ok(Some(decision)),
            Err(error) => self.unless_enforced(&error.to_string()),
        }
    }

    /// Nothing, where the decode worker may prefill what no prefill worker takes because of `why`.
    fn unless_enforced<T>(&self, why: &str) -> Result<Option<T>, Reject> {
        if self.is_enforced { Err(refusal(StatusCode::SERVICE_UNAVAILABLE, why)) } else { Ok(None) }
    }

    /// The decode of what `worker` prefilled has `failed`: the worker may be used again, unless
    /// its prefill is the cause.
    ///
    /// # Errors
    /// As [`Tries::lost`].
    pub fn decode_failed(&mut self, worker: Option<Worker>, failed: Failed) -> Result<(), Reject> {
        let Some(tries) = &mut self.tries else { return Ok(()) };
        match worker {
            _ if failed.cause == PREFILL_FAILED => tries.lost(failed)?,
            Some(worker) => tries.spare(worker.instance_id),
            None => {}
        }
        Ok(())
    }

    /// Prefills the prompt, or starts to. `charge` gets the tokens that a worker will compute, and
    /// `None` if it failed.
    ///
    /// # Errors
    /// No worker prefilled, and the decode worker may not do it alone; or the request is invalid.
    pub async fn hand_off(
        &mut self,
        app: &Arc<App>,
        charge: impl Fn(Option<u64>),
    ) -> Result<Handoff, Reject> {
        let last = self.tries.as_ref().and_then(Tries::last);
        let (mut why, mut status) = match last {
            Some(failed) => (failed.message.clone(), failed.status),
            None => (NONE_IS_REGISTERED.to_owned(), StatusCode::SERVICE_UNAVAILABLE),
        };
        while let Some(tries) = self.tries.as_mut().filter(|tries| tries.may_go_on()) {
            let choice = match tries.next().await {
                Ok(choice) => choice,
                Err(error) => {
                    if tries.is_empty() {
                        why = error.to_string();
                    }
                    break;
                }
            };
            let engine = Arc::clone(&choice.engine);
            self.uncached_tokens = tries.plan.uncached_at(&choice.selection);
            charge(Some(self.uncached_tokens));
            match begin(app, &tries.plan, choice).await {
                Ok(handoff) => {
                    // One that runs beside its decode counts at its end.
                    if matches!(handoff, Handoff::Done { .. }) {
                        count(app, "handed_off");
                    }
                    return Ok(handoff);
                }
                Err(failed) => {
                    charge(None);
                    count(app, "failed");
                    (why, status) = (failed.message.clone(), failed.status);
                    tries.failed(&engine, failed)?;
                }
            }
        }
        if self.is_enforced {
            count(app, "refused");
            app.refused("no_prefill");
            return Err(refusal(status, &why));
        }
        // Further attempts decode alone, too.
        if self.tries.take().is_some() {
            count(app, "fallback");
            tracing::warn!(
                why,
                "no prefill worker took the request; the decode worker prefills it"
            );
        }
        Ok(Handoff::Alone)
    }
}

/// Why no prefill worker takes a request.
const NONE_IS_REGISTERED: &str = "no prefill worker is registered";

/// The refusal of a request that decode workers may not prefill.
fn refusal(status: StatusCode, why: &str) -> Reject {
    let message =
        format!("no prefill worker took the request: {why}; --enforce-disagg requires one");
    Reject::momentary(status, message)
}

fn count(app: &App, outcome: &'static str) {
    app.metrics.prefills.get_or_create(&OutcomeLabel { outcome }).inc();
}

/// Sends the prefill copy of a request to a chosen worker.
async fn begin(app: &Arc<App>, plan: &Arc<Plan>, choice: Choice) -> Result<Handoff, Failed> {
    let worker = choice.booking.worker();
    let met = choice.engine.member.clone().and_then(|member| {
        let bootstrap = member.spec.card.bootstrap.clone()?;
        Some((member, bootstrap))
    });
    let Some((member, bootstrap)) = met else {
        let params = {
            let prefill = pin!(prefill(app, plan, &choice));
            choice.watched(prefill).await?
        };
        return Ok(Handoff::Done { worker, params });
    };
    let info = BootstrapInfo {
        bootstrap_host: bootstrap.host,
        bootstrap_port: bootstrap.port,
        // 63 bits are exact in Python and in all JSON readers.
        bootstrap_room: rand::random::<u64>() >> 1,
    };
    let (tell, failed) = watch::channel(None);
    let (app, plan, beside) = (Arc::clone(app), Arc::clone(plan), info.clone());
    let task = tokio::spawn(async move {
        let outcome = pin!(async {
            let begun = plane::begin_prefill(&app, &plan, &choice, &member, Some(&beside)).await?;
            begun.drain(&app).await
        });
        let Err(failed) = kept_alive(&choice.booking, while_well(&choice, outcome)).await else {
            return count(&app, "handed_off");
        };
        count(&app, "failed");
        app.attempt_failed(&failed, &choice.engine, "the prefill failed while its decode ran");
        // No receiver is left once the decode is complete, and then it is not needed.
        let message = format!("prefill at worker {worker} failed: {}", failed.message);
        let _ = tell.send(Some(Failed { message, is_engine_at_fault: false, ..failed }));
    });
    let pending = Pending { task: Some(task), failed };
    Ok(Handoff::Beside { worker, info, pending })
}
