//! Disaggregated serving: one worker prefills, another one decodes.

use std::str::FromStr;
use std::sync::Arc;

use axum::http::StatusCode;
use kvflash_core::error::{Error, Result};
use kvflash_core::ids::{InstanceId, Worker};
use serde::Serialize;
use serde_json::Value;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::super::Reject;
use super::app::App;
use super::attempt::{Failed, watched};
use super::engine::Engine;
use super::metrics::{CauseLabel, OutcomeLabel};
use super::nvext::Nvext;
use super::openai_prefill;
use super::plan::{Choice, Plan};
use super::runtime::call::{self, Ask};

/// Whether a request may be answered without a prefill worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum EnforceDisagg {
    /// It may: whenever no prefill worker does its part, the decode worker does all.
    #[default]
    Off,
    /// It may while its model has had no prefill worker; from then on it may not.
    UntilFirstPrefill,
    /// It may not.
    Always,
}

impl FromStr for EnforceDisagg {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "off" => Ok(Self::Off),
            "until-first-prefill" => Ok(Self::UntilFirstPrefill),
            "always" => Ok(Self::Always),
            other => Err(Error::Config(format!(
                "--enforce-disagg must be off, until-first-prefill or always, got {other:?}"
            ))),
        }
    }
}

/// Where prefill and decode worker meet.
#[derive(Debug, Clone, Serialize)]
pub(super) struct BootstrapInfo {
    pub bootstrap_host: String,
    pub bootstrap_port: u16,
    pub bootstrap_room: u64,
}

/// What a prefill leaves to the decode worker.
#[derive(Debug)]
pub(super) enum Handoff {
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

    /// Who prefills.
    pub fn worker(&self) -> Option<Worker> {
        match self {
            Self::Alone => None,
            Self::Done { worker, .. } | Self::Beside { worker, .. } => Some(*worker),
        }
    }

    /// Wait until the prefill beside fails; for ever when it does not.
    pub async fn failure(&mut self) -> String {
        match self {
            Self::Beside { pending, .. } => pending.failure().await,
            _ => std::future::pending().await,
        }
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
pub(super) struct Pending {
    task: Option<JoinHandle<()>>,
    failed: Option<oneshot::Receiver<String>>,
}

impl Pending {
    async fn failure(&mut self) -> String {
        if let Some(failed) = &mut self.failed {
            let outcome = failed.await;
            self.failed = None;
            if let Ok(why) = outcome {
                return why;
            }
        }
        // It has done its part.
        std::future::pending().await
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// The prefill side of one request, over all of its attempts.
pub(super) struct Prefill {
    plan: Option<Plan>,
    tried: Vec<InstanceId>,
    is_enforced: bool,
}

impl Prefill {
    /// What there is to prefill on for a request with this plan.
    ///
    /// # Errors
    /// 404 for a pinned prefill worker that is not there.
    pub async fn of(app: &App, plan: &Plan, nvext: &Nvext) -> Result<Self, Reject> {
        let pool = app.fleet.prefill_pool(&plan.route.pool.name);
        if let Some(id) = nvext.prefill_pin()
            && pool.as_ref().is_none_or(|pool| pool.members().get(id).is_none())
        {
            let name = &plan.route.pool.name;
            let message = format!("nvext.prefill_worker_id: {id} is no prefill worker of {name:?}");
            return Err(Reject::new(StatusCode::NOT_FOUND, message));
        }
        let is_enforced = match app.options.enforce_disagg {
            EnforceDisagg::Off => false,
            EnforceDisagg::UntilFirstPrefill => app.fleet.had_prefill(&plan.route.pool.name),
            EnforceDisagg::Always => true,
        };
        let plan = match pool {
            Some(pool) => Some(plan.on(app, pool, nvext.prefill_pin()).await),
            None => None,
        };
        Ok(Self { plan, tried: Vec::new(), is_enforced })
    }

    /// Whether there is anything to do here at all.
    pub fn is_idle(&self) -> bool {
        self.plan.is_none() && !self.is_enforced
    }

    /// The worker that would prefill now, by a draw from `seed`, the request's own or a new one; changes
    /// nothing.
    pub async fn query(&self, seed: Option<u64>) -> Option<Worker> {
        self.plan.as_ref()?.query(seed).await.ok().map(|selection| selection.worker)
    }

    /// That, and why; changes nothing.
    pub async fn explain(&self, app: &App) -> Option<Value> {
        self.plan.as_ref()?.explain(app).await.ok()
    }

    /// The decode beside which a worker prefilled has failed: that worker may be asked again.
    pub fn spare(&mut self, worker: Worker) {
        self.tried.retain(|id| *id != worker.instance_id);
    }

    /// Have the prompt prefilled, or begun.
    ///
    /// # Errors
    /// Nobody did, and the decode worker may not do it alone; or the request itself is wrong.
    pub async fn hand_off(&mut self, app: &Arc<App>, ask: &Ask) -> Result<Handoff, Reject> {
        let none = if self.tried.is_empty() { "is there" } else { "is left to try" };
        let mut why = format!("no prefill worker {none}");
        let mut status = StatusCode::SERVICE_UNAVAILABLE;
        if let Some(plan) = &self.plan {
            while self.tried.len() < app.options.max_attempts {
                let choice = match plan.book(&app.metrics, &self.tried).await {
                    Ok(choice) => choice,
                    Err(error) => {
                        if self.tried.is_empty() {
                            why = error.to_string();
                        }
                        break;
                    }
                };
                let engine = Arc::clone(&choice.engine);
                self.tried.push(engine.id);
                match begin(app, choice, ask).await {
                    Ok(handoff) => {
                        count(app, "handed_off");
                        return Ok(handoff);
                    }
                    Err(failed) => {
                        note(app, &engine, &failed);
                        if failed.is_final {
                            return Err(Reject::new(failed.status, failed.message));
                        }
                        (why, status) = (failed.message, failed.status);
                    }
                }
            }
        }
        if self.is_enforced {
            count(app, "refused");
            let message = format!("no prefill: {why}; decode alone is off (--enforce-disagg)");
            return Err(Reject::last_failure(status, message));
        }
        if self.plan.is_some() {
            count(app, "fallback");
            tracing::warn!(why, "no prefill; the decode worker does it alone");
        }
        Ok(Handoff::Alone)
    }
}

fn count(app: &App, outcome: &'static str) {
    app.metrics.prefills.get_or_create(&OutcomeLabel { outcome }).inc();
}

fn note(app: &App, engine: &Engine, failed: &Failed) {
    count(app, "failed");
    app.metrics.attempts_failed.get_or_create(&CauseLabel { cause: failed.cause }).inc();
    if failed.is_engine_at_fault {
        engine.failed(&failed.message);
    }
    tracing::warn!(
        worker = engine.id,
        cause = failed.cause,
        why = failed.message,
        "prefill failed"
    );
}

/// Send the prefill copy of a request to a chosen worker.
async fn begin(app: &Arc<App>, choice: Choice, ask: &Ask) -> Result<Handoff, Failed> {
    let worker = choice.booking.worker();
    let Some(member) = choice.engine.member.clone() else {
        let prefill = openai_prefill::prefill(app, &choice, ask);
        let params = watched(&choice.booking, prefill).await?;
        return Ok(Handoff::Done { worker, params });
    };
    let Some(bootstrap) = &member.spec.card.bootstrap else {
        let prefill = async {
            let opened = call::open_prefill(app, &choice, ask, None).await?;
            choice.booking.first_token();
            opened.into_transfer(app).await
        };
        let params = watched(&choice.booking, prefill).await?;
        return Ok(Handoff::Done { worker, params });
    };
    let info = BootstrapInfo {
        bootstrap_host: bootstrap.host.clone(),
        bootstrap_port: bootstrap.port,
        // Python's and JSON's readers keep 63 bits everywhere.
        bootstrap_room: rand::random::<u64>() >> 1,
    };
    let (tell, failed) = oneshot::channel();
    let (app, ask, beside) = (Arc::clone(app), ask.clone(), info.clone());
    let task = tokio::spawn(async move {
        let outcome = async {
            let opened = call::open_prefill(&app, &choice, &ask, Some(&beside)).await?;
            choice.booking.first_token();
            opened.drain(&app).await
        };
        if let Err(error) = outcome.await {
            note(&app, &choice.engine, &error);
            // Nobody listens when the decode is over: then it was not needed.
            let _ = tell.send(format!("prefill at worker {worker} failed: {}", error.message));
        }
    });
    let pending = Pending { task: Some(task), failed: Some(failed) };
    Ok(Handoff::Beside { worker, info, pending })
}
