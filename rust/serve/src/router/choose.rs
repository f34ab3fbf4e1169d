//! Chooses the worker for a request.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use kvflash_core::catalog::TrustState;
use kvflash_core::error::{Error, Result};
use kvflash_core::fair::Wish;
use kvflash_core::hash::engine::NameKeys;
use kvflash_core::ids::{InstanceId, Worker};
use kvflash_core::policy::session::{read_session_id, session_id};
use kvflash_core::policy::{Advice, Terms};
use kvflash_core::select::{Ask, Pin, Prompt, Request, RouteOverride, Selection};
use serde::Serialize;
use serde_json::{Value, json};

use super::super::frontend::engine_spec::address_of;
use super::super::{outside, queue};
use super::app::App;
use super::fleet::Pool;
use super::request::{Choose, MAX_ISL_TOKENS};
use crate::metrics::OutcomeLabel;

/// A parsed request for a worker.
pub(super) struct Chosen {
    pub pool: Arc<Pool>,
    request: Request,
    /// The name of its booking.
    request_id: Option<String>,
    /// The client's address.
    caller: Option<IpAddr>,
    /// Advice of a policy outside the core.
    advice: Option<Advice>,
}

/// Response of POST /select and /reserve.
#[derive(Debug, Serialize)]
pub(super) struct Answer {
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<String>,
    model_name: String,
    tenant_id: String,
    pub worker_id: InstanceId,
    pub dp_rank: u32,
    url: Option<String>,
    pub overlap_blocks: u32,
    predicted_blocks: u32,
    best_blocks: u32,
    block_size: Option<u32>,
    isl_tokens: u64,
    expected_cached_tokens: u64,
    reason: &'static str,
    ties: usize,
    margin: Option<f64>,
    pub seed: u64,
    /// The value that returns a session to the same worker, with `session-affinity`.
    #[serde(skip_serializing_if = "Option::is_none")]
    session_id: Option<String>,
}

impl Chosen {
    /// Finds the model, hashes the prompt, and queries the remote indexer, if there is one.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the field; `NotFound` for a model without workers.
    pub async fn understand(app: &App, choose: Choose) -> Result<Self> {
        let Choose { model_name, tenant_id, worker_id, .. } = &choose;
        let pool = app.fleet.meant(model_name.as_deref(), tenant_id.as_deref(), *worker_id)?;
        let (request_id, caller) = (choose.request_id.clone(), choose.caller);
        let mut request = choose.request(&pool)?;
        if let Some(remote) = &app.remote {
            remote.look_up(&pool.selector, &mut request).await;
        }
        Ok(Self { pool, request, request_id, caller, advice: None })
    }

    /// A request for a worker, understood, and with the advice of a policy outside the core, if one
    /// decides. Counts a refusal.
    ///
    /// # Errors
    /// As [`understand`](Self::understand).
    pub async fn advised(app: &App, choose: Choose) -> Result<Self> {
        let understood = Self::understand(app, choose).await;
        let mut chosen = understood.inspect_err(|error| app.note_refusal(error))?;
        let selector = &chosen.pool.selector;
        if selector.desk().is_some() {
            let question = chosen.ask(|ask| selector.question(ask));
            chosen.advice = outside::advice(selector, question).await;
        }
        Ok(chosen)
    }

    fn ask<T>(&self, act: impl FnOnce(&Ask<'_>) -> T) -> T {
        let waits = self.pool.queue.is_some();
        self.request.ask(None, self.advice.as_ref(), |ask| act(&Ask { waits, ..*ask }))
    }

    /// A worker for it, with a new random draw; changes nothing.
    ///
    /// # Errors
    /// As [`kvflash_core::select::Selector::query`]; `NoWorker` while the start gate waits for
    /// workers.
    pub fn query(&self, app: &App) -> Result<Answer> {
        let outcome = app.started().and_then(|()| self.ask(|ask| self.pool.selector.query(ask)));
        app.note("previewed", outcome.as_ref());
        Ok(self.answer(app, &outcome?, None))
    }

    /// The worker for it, booked under its name; with a queue, once a worker has room to prefill.
    ///
    /// # Errors
    /// As [`kvflash_core::select::Selector::reserve`]; `InvalidArgument` without a name; those of
    /// the queue; `NoWorker` while the start gate waits for workers.
    pub async fn reserve(&self, app: &App) -> Result<Answer> {
        let outcome = self.book(app).await;
        app.note_booking(&self.request, outcome.as_ref());
        Ok(self.answer(app, &outcome?, self.request_id.clone()))
    }

    async fn book(&self, app: &App) -> Result<Selection> {
        let Some(request_id) = self.request_id.as_deref() else {
            return Err(Error::invalid("missing field `request_id`: a reservation needs one"));
        };
        app.started()?;
        let selector = &self.pool.selector;
        let reserve = || self.ask(|ask| selector.reserve_for(self.caller, request_id, ask));
        match &self.pool.queue {
            None => reserve(),
            Some(line) => {
                let cached = || self.ask(|ask| selector.most_held_tokens(ask));
                let Request { wish, prompt, .. } = &self.request;
                let is_open = || self.request.is_open();
                let began = Instant::now();
                let outcome =
                    queue::pass(line, wish, prompt.isl_tokens, cached, is_open, reserve).await;
                app.metrics.queue_seconds.observe(began.elapsed().as_secs_f64());
                outcome
            }
        }
    }

    /// Why that worker would be chosen: every candidate's terms.
    pub fn explain(&self, app: &App) -> Result<Value> {
        let outcome = self.ask(|ask| self.pool.selector.preview(ask));
        app.note("explained", outcome.as_ref().map(|(selection, _)| selection));
        let (selection, record) = outcome?;
        let mut value = record.decision();
        let answer = serde_json::to_value(self.answer(app, &selection, None))
            .map_err(|error| Error::invalid(error.to_string()))?;
        if let (Value::Object(to), Value::Object(from)) = (&mut value, answer) {
            to.extend(from);
        }
        let trust = self.trust(app);
        if let Some(candidates) = value["candidates"].as_array_mut() {
            for (entry, candidate) in candidates.iter_mut().zip(record.candidates()) {
                let worker = candidate.terms.worker;
                entry["worker_id"] = json!(worker.instance_id);
                entry["dp_rank"] = json!(worker.dp_rank);
                entry["trust"] = json!(trust.get(&worker));
            }
        }
        Ok(value)
    }

    /// Every worker's load if it took the request.
    pub fn potential_loads(&self) -> Result<Vec<Value>> {
        let loads = self.ask(|ask| self.pool.selector.potential_loads(ask))?;
        let entry = |load: Terms| {
            json!({
                "worker_id": load.worker.instance_id,
                "dp_rank": load.worker.dp_rank,
                "potential_prefill_tokens": load.prefill_tokens,
                "potential_decode_blocks": load.decode_blocks,
                "active_requests": load.active_requests,
                "overlap_blocks": load.overlap_blocks,
            })
        };
        Ok(loads.into_iter().map(entry).collect())
    }

    /// Queued requests of its model, and the tokens of their prompts.
    pub fn pending(&self) -> (usize, u64) {
        let stats = self.pool.queue.as_ref().map(|queue| queue.stats()).unwrap_or_default();
        (stats.pending, stats.pending_isl_tokens)
    }

    fn answer(&self, app: &App, selection: &Selection, request_id: Option<String>) -> Answer {
        let Worker { instance_id, dp_rank } = selection.worker;
        let prompt = &self.request.prompt;
        let url = self.pool.member(instance_id).and_then(|member| member.url.clone());
        let keeps_sessions = app.options.routing.policy_name() == "session-affinity";
        let address = url.as_deref().filter(|_| keeps_sessions).map(address_of);
        Answer {
            request_id,
            model_name: self.pool.key.model_name.clone(),
            tenant_id: self.pool.key.tenant_id.clone(),
            worker_id: instance_id,
            dp_rank,
            session_id: address.map(|address| session_id(address, dp_rank)),
            url,
            overlap_blocks: selection.overlap_blocks,
            predicted_blocks: selection.predicted_blocks,
            best_blocks: selection.best_blocks,
            block_size: Some(prompt.block_size).filter(|size| *size > 0),
            isl_tokens: prompt.isl_tokens,
            expected_cached_tokens: prompt.reusable_tokens(selection.expected_blocks()),
            reason: selection.reason.name(),
            ties: selection.ties,
            margin: selection.margin,
            seed: selection.seed,
        }
    }

    fn trust(&self, app: &App) -> HashMap<Worker, TrustState> {
        let is_its = |model: &kvflash_core::catalog::ModelIndex| model.key == self.pool.key;
        let reports = app.catalog.reports(is_its);
        reports.into_iter().map(|report| (report.view.worker, report.trust.state)).collect()
    }
}

impl Choose {
    /// Converts it to a selector's request.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the field.
    fn request(self, pool: &Pool) -> Result<Request> {
        if let Some(isl_tokens) = self.isl_tokens.filter(|tokens| *tokens > MAX_ISL_TOKENS) {
            return Err(Error::invalid(format!(
                "isl_tokens may be at most {MAX_ISL_TOKENS}, got {isl_tokens}"
            )));
        }
        let (pin, allowed) = (Pin::of(self.worker_id, self.dp_rank)?, self.allowed()?);
        let prompt = prompt(pool, &self)?;
        let wish = Wish::of(self.priority, self.strict_priority)?;
        let given = self.router_config_override.unwrap_or_default();
        let named = self.session_id.as_deref().and_then(read_session_id);
        let mut request = Request {
            prompt: prompt.into(),
            user: self.user.map(Into::into),
            session_worker: named.and_then(|(address, rank)| pool.named(&address, rank)),
            session_key: self.session_key.map(Into::into),
            overrides: RouteOverride { seed: self.seed, ..given },
            pin,
            allowed,
            wish,
            expected_output_tokens: self.expected_output_tokens,
            ..Request::default()
        };
        request.check_client()?;
        if pool.selector.needs_text() {
            let tokens = self.token_ids.map(|tokens| tokens.0).unwrap_or_default();
            request.tell_prompt(tokens, self.prompt);
        }
        Ok(request)
    }
}

fn prompt(pool: &Pool, request: &Choose) -> Result<Prompt> {
    let selector = &pool.selector;
    let (lora_name, cache_salt) = (request.lora_name.as_deref(), request.cache_salt.as_deref());
    match (&request.token_ids, &request.block_hashes, request.isl_tokens) {
        (Some(_), Some(_), _) => {
            Err(Error::invalid("token_ids and block_hashes exclude each other: give one of them"))
        }
        (Some(tokens), None, isl_tokens) => {
            let count = tokens.0.len() as u64;
            if isl_tokens.is_some_and(|isl_tokens| isl_tokens != count) {
                let isl_tokens = isl_tokens.unwrap_or_default();
                return Err(Error::invalid(format!(
                    "isl_tokens is {isl_tokens}, but token_ids has {count}: leave isl_tokens out"
                )));
            }
            let path = request.lora_path.as_deref().unwrap_or("");
            let keys = NameKeys {
                lora: lora_name.map(|name| (name, path)),
                cache_salt,
                media: &request.mm,
                embeds: &request.embeds,
            };
            Ok(selector.prompt(&tokens.0, &keys))
        }
        (None, Some(hashes), isl_tokens) => {
            let block_size = selector.block_size();
            if block_size == 0 && isl_tokens.is_none() {
                return Err(Error::invalid(
                    "block_hashes: no worker has reported the block size yet; register one with block_size, or \
                     give isl_tokens",
                ));
            }
            // The hashes already include salt and adapter; the seed is for local predictions.
            let seed = selector.model().seed(lora_name, cache_salt);
            let mut prompt = Prompt::of_hashes(hashes.0.clone(), block_size, seed);
            let full = prompt.isl_tokens;
            if let Some(isl_tokens) = isl_tokens {
                let is_legal = block_size == 0
                    || (full.max(1)..full + u64::from(block_size)).contains(&isl_tokens);
                if !is_legal {
                    return Err(Error::invalid(format!(
                        "isl_tokens must be in {}..={} with {} block_hashes of {block_size} tokens, got \
                         {isl_tokens}",
                        full.max(1),
                        full + u64::from(block_size) - 1,
                        hashes.0.len(),
                    )));
                }
                prompt.isl_tokens = isl_tokens;
            }
            Ok(prompt)
        }
        (None, None, Some(isl_tokens)) if isl_tokens > 0 => Ok(Prompt::unknown(isl_tokens)),
        (None, None, Some(_)) => Err(Error::invalid("isl_tokens must be at least 1, got 0")),
        // English text has about four bytes per token.
        (None, None, None) if request.prompt.is_some() => {
            let bytes = request.prompt.as_ref().map_or(0, String::len) as u64;
            Ok(Prompt::unknown(bytes / 4))
        }
        (None, None, None) => Err(Error::invalid(
            "missing field `token_ids`: give token_ids, block_hashes, or isl_tokens or prompt alone",
        )),
    }
}

impl App {
    /// Counts the outcome of a request for a worker.
    pub fn note(&self, done: &'static str, outcome: Result<&Selection, &Error>) {
        match outcome {
            Ok(_) => self.count(done),
            Err(error) => self.note_refusal(error),
        }
    }

    /// Counts a request that got no worker.
    fn note_refusal(&self, error: &Error) {
        self.count(match error {
            Error::AllBusy(_) => "all_busy",
            Error::NoWorker(_) | Error::NotFound(_) => "no_worker",
            Error::Overloaded(_) => "overloaded",
            Error::Conflict(_) => "duplicate",
            _ => "invalid",
        });
    }

    fn count(&self, outcome: &'static str) {
        self.metrics.selections.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// Counts a successful booking and the tokens of its prompt.
    pub fn note_booking(&self, request: &Request, outcome: Result<&Selection, &Error>) {
        self.note("reserved", outcome);
        if let Ok(selection) = outcome {
            let (metrics, prompt) = (&self.metrics, &request.prompt);
            metrics.input.inc_by(prompt.isl_tokens);
            metrics.available.inc_by(prompt.reusable_tokens(selection.best_blocks));
            metrics.selected.inc_by(prompt.reusable_tokens(selection.overlap_blocks));
        }
    }
}
