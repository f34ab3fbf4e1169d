//! From a request to a choice: tokens, hashes, overlaps, then the router's decision.

use std::cell::RefCell;
use std::sync::Arc;

use serde_json::json;
use serde_json::value::RawValue;

use super::super::Reject;
use super::app::App;
use super::engine::Engine;
use super::fleet::{Members, Pool, Route};
use super::metrics::{CauseLabel, FrontendMetrics};
use super::request::{Envelope, Prompt};
use super::runtime::prompt;
use crate::error::{Error, Result};
use crate::hash;
use crate::ids::{InstanceId, Worker};
use crate::index::Matches;
use crate::policy::{Policy, Terms};
use crate::router::{Booking, RouteOverride, RouteRequest};
use crate::text::{self, Tokens};

thread_local! {
    // Buffers of the walk and of the decision, reused by every request of the thread.
    static MATCHES: RefCell<Matches> = RefCell::default();
    static TERMS: RefCell<Vec<Terms>> = const { RefCell::new(Vec::new()) };
}

/// Text longer than this is tokenized off the reactor's turn: it may take milliseconds.
const LONG_TEXT_BYTES: usize = 64 * 1024;
/// Without tokens a prompt's length is guessed from its bytes: English text has about four a token.
const BYTES_PER_TOKEN: usize = 4;
/// A chosen worker that left is replaced by another choice; so many in a row mean trouble.
const MAX_CHOICES: usize = 8;

/// Which OpenAI endpoint a request came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Api {
    Chat,
    Completions,
}

impl Api {
    pub fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
        }
    }
}

/// All that routing knows of a request.
pub(super) struct Plan {
    pub route: Route,
    /// The prompt's tokens, where they are known.
    pub tokens: Option<Arc<Tokens>>,
    cache_salt: Option<String>,
    /// The only worker that may take it.
    pinned: Option<InstanceId>,
    /// Its prompt is prefilled elsewhere.
    is_decode_only: bool,
    are_tokens_known: bool,
    isl_tokens: u64,
    block_size: u32,
    sequence_hashes: Vec<u64>,
    overlaps: Vec<(Worker, u32)>,
}

/// The worker that takes a request, its load booked.
pub(super) struct Choice {
    pub engine: Arc<Engine>,
    pub booking: Booking,
    pub overlap_blocks: u32,
}

impl Plan {
    /// # Errors
    /// 400 for a prompt that no engine would take, 404 for a model that is not served.
    pub async fn make(
        app: &App,
        api: Api,
        envelope: &Envelope<'_>,
        body_bytes: usize,
        needs_tokens: bool,
    ) -> Result<Self, Reject> {
        let route = match envelope.model.as_deref() {
            Some(name) => {
                app.fleet.route(name).map_err(|error| Reject::from(error).param("model"))?
            }
            None => app.fleet.only_route().map_err(|error| Reject::from(error).param("model"))?,
        };
        let mut plan = Self {
            route,
            tokens: None,
            cache_salt: envelope.cache_salt.as_deref().map(str::to_owned),
            pinned: None,
            is_decode_only: false,
            are_tokens_known: false,
            isl_tokens: (body_bytes / BYTES_PER_TOKEN).max(1) as u64,
            block_size: 0,
            sequence_hashes: Vec::new(),
            overlaps: Vec::new(),
        };
        if let Some(tokens) = prompt::tokens(&plan.route.pool, api, envelope, body_bytes)? {
            plan.look_up(Arc::new(tokens));
            return Ok(plan);
        }
        if app.options.router.policy != Policy::Kv && !needs_tokens {
            return Ok(plan);
        }
        match tokens(app, api, envelope, &plan, body_bytes).await {
            Ok(tokens) => plan.look_up(Arc::new(tokens)),
            Err(Untokenized::Refused(error)) => return Err(error.into()),
            Err(Untokenized::Unknown(cause)) => {
                app.metrics.untokenized.get_or_create(&CauseLabel { cause }).inc();
            }
        }
        Ok(plan)
    }

    /// The same request for the workers of another pool.
    pub fn on(&self, pool: Arc<Pool>, pinned: Option<InstanceId>) -> Self {
        let mut plan = Self {
            route: Route { pool, lora_name: self.route.lora_name.clone() },
            tokens: None,
            cache_salt: self.cache_salt.clone(),
            pinned,
            is_decode_only: false,
            are_tokens_known: false,
            isl_tokens: self.isl_tokens,
            block_size: 0,
            sequence_hashes: Vec::new(),
            overlaps: Vec::new(),
        };
        if let Some(tokens) = &self.tokens {
            plan.look_up(Arc::clone(tokens));
        }
        plan
    }

    /// Only this worker may take it.
    ///
    /// # Errors
    /// 404 when it is not there.
    pub fn pin(&mut self, pinned: Option<InstanceId>) -> Result<(), Reject> {
        if let Some(id) = pinned
            && self.route.pool.members().get(id).is_none()
        {
            let message = format!("worker {id} is none of model {:?}", self.route.pool.name);
            return Err(Error::NotFound(message).into());
        }
        self.pinned = pinned;
        Ok(())
    }

    /// The prompt is prefilled elsewhere, or not after all.
    pub fn decode_only(&mut self, is_decode_only: bool) {
        self.is_decode_only = is_decode_only;
    }

    /// Who would take it now; changes nothing.
    ///
    /// # Errors
    /// As [`Plan::book`].
    pub fn peek(&self) -> Result<Worker> {
        let members = self.route.pool.members();
        let is_eligible = |worker: Worker| self.is_eligible(&members, worker, &[]);
        let request = RouteRequest { allowed: Some(&is_eligible), ..self.request() };
        TERMS.with_borrow_mut(|terms| {
            let decision = self.route.pool.router.preview(&request, terms);
            decision.map(|decision| decision.worker).map_err(|error| self.explain_absence(error))
        })
    }

    fn look_up(&mut self, tokens: Arc<Tokens>) {
        self.are_tokens_known = true;
        self.isl_tokens = tokens.len().max(1) as u64;
        self.tokens = Some(Arc::clone(&tokens));
        let pool = &self.route.pool;
        if pool.router.config().policy != Policy::Kv {
            return;
        }
        let Some(block_size) = pool.index.block_size() else { return };
        self.block_size = block_size;
        if pool.router.block_size() == 0 {
            // Conflict means that another request was first, with the same index's size.
            let _ = pool.router.set_block_size(block_size);
        }
        let seed = hash::identity_seed(self.route.lora_name.as_deref(), self.cache_salt.as_deref());
        let locals = hash::local_hashes(&tokens, block_size, seed);
        hash::sequence_hashes_into(&locals, &mut self.sequence_hashes);
        MATCHES.with_borrow_mut(|matches| {
            pool.index.index.find_matches(&locals, matches);
            let on_device = matches.as_slice().iter().filter(|found| found.device > 0);
            self.overlaps.extend(on_device.map(|found| (found.worker, found.device)));
        });
    }

    /// Choose a worker that was not tried yet and book the request there, in one step.
    ///
    /// # Errors
    /// `NoWorker`, saying what there is and why it can't serve.
    pub fn book(&self, tried: &[InstanceId]) -> Result<Choice> {
        for _ in 0..MAX_CHOICES {
            if let Some(choice) = self.book_once(tried)? {
                return Ok(choice);
            }
        }
        Err(Error::NoWorker("every chosen worker left while the request was routed".to_owned()))
    }

    /// `None` when the chosen worker has left meanwhile.
    fn book_once(&self, tried: &[InstanceId]) -> Result<Option<Choice>> {
        let pool = &self.route.pool;
        // Read anew each time: workers come and go while a prompt is tokenized or an attempt runs.
        let members = pool.members();
        let is_eligible = |worker: Worker| self.is_eligible(&members, worker, tried);
        let is_open = tried.is_empty()
            && self.pinned.is_none()
            && self.route.lora_name.is_none()
            && members.are_all_healthy();
        let request = RouteRequest {
            allowed: (!is_open).then_some(&is_eligible as &dyn Fn(Worker) -> bool),
            ..self.request()
        };
        let (booking, overlap_blocks) = TERMS.with_borrow_mut(|terms| {
            let (booking, decision) =
                pool.router.route(&request, terms).map_err(|error| self.explain_absence(error))?;
            tracing::debug!(
                model = pool.name, worker = %decision.worker,
                overlap_blocks = decision.overlap_blocks, reason = %decision.reason,
                ties = decision.ties, margin = decision.margin, "routed"
            );
            Ok::<_, Error>((booking, decision.overlap_blocks))
        })?;
        // Once more: members change before the router's workers do, so that a worker which joined
        // between the two readings is found.
        let engine = pool.members().get(booking.worker().instance_id).cloned();
        Ok(engine.map(|engine| Choice { engine, booking, overlap_blocks }))
    }

    fn is_eligible(&self, members: &Members, worker: Worker, tried: &[InstanceId]) -> bool {
        members.is_eligible(worker, tried)
            && self.pinned.is_none_or(|id| id == worker.instance_id)
            && self.route.lora_name.as_deref().is_none_or(|name| {
                members.get(worker.instance_id).is_some_and(|engine| engine.serves(name))
            })
    }

    fn request(&self) -> RouteRequest<'_> {
        RouteRequest {
            isl_tokens: self.isl_tokens,
            sequence_hashes: &self.sequence_hashes,
            overlaps: if self.is_decode_only { &[] } else { &self.overlaps },
            overrides: if self.is_decode_only {
                // Its blocks come from the prefill worker, whatever it holds itself.
                RouteOverride {
                    overlap_score_weight: Some(0.0),
                    assume_kv_reuse: Some(false),
                    ..RouteOverride::default()
                }
            } else {
                RouteOverride::default()
            },
            ..RouteRequest::default()
        }
    }

    fn explain_absence(&self, error: Error) -> Error {
        if !matches!(error, Error::NoWorker(_)) {
            return error;
        }
        let members = self.route.pool.members();
        let all: Vec<_> = members.all().collect();
        let down: Vec<String> = all
            .iter()
            .filter(|engine| !engine.is_healthy())
            .map(|engine| {
                let why = engine.notes.lock().last_error.clone();
                format!("{}: {}", engine.id, why.as_deref().unwrap_or("not checked yet"))
            })
            .take(5)
            .collect();
        Error::NoWorker(format!(
            "no worker can take requests for model {:?}: {} registered, {} healthy{}{}",
            self.route.pool.name,
            all.len(),
            all.iter().filter(|engine| engine.is_healthy()).count(),
            if down.is_empty() { "" } else { "; unhealthy: " },
            down.join("; "),
        ))
    }

    /// Blocks of an overlap that the engine can reuse: the last token is always computed anew.
    ///
    /// # Source
    /// vLLM v1 caps its hit at `prompt_tokens - 1`.
    pub fn reusable_blocks(&self, overlap_blocks: u32) -> u64 {
        match self.block_size {
            0 => 0,
            size => u64::from(overlap_blocks).min((self.isl_tokens - 1) / u64::from(size)),
        }
    }

    /// Tokens of the prompt, where they are known rather than guessed.
    pub fn prompt_tokens(&self) -> Option<u64> {
        self.are_tokens_known.then_some(self.isl_tokens)
    }

    /// Count the stages of the prompt's tokens.
    pub fn count(&self, metrics: &FrontendMetrics, choice: &Choice) {
        if !self.are_tokens_known {
            return;
        }
        let tokens = |blocks| self.reusable_blocks(blocks) * u64::from(self.block_size);
        let best = self.overlaps.iter().map(|(_, blocks)| *blocks).max().unwrap_or(0);
        metrics.input.inc_by(self.isl_tokens);
        metrics.available.inc_by(tokens(best));
        metrics.selected.inc_by(tokens(choice.overlap_blocks));
    }

    /// What would be decided now, with every candidate's terms; nothing is booked.
    ///
    /// # Errors
    /// As [`Plan::book`].
    pub fn explain(&self) -> Result<serde_json::Value> {
        let members = self.route.pool.members();
        let is_eligible = |worker: Worker| self.is_eligible(&members, worker, &[]);
        let request = RouteRequest { allowed: Some(&is_eligible), ..self.request() };
        let pool = &self.route.pool;
        let mut terms = Vec::new();
        let decision = pool
            .router
            .preview(&request, &mut terms)
            .map_err(|error| self.explain_absence(error))?;
        let candidates: Vec<_> = decision
            .candidates
            .iter()
            .map(|terms| {
                json!({
                    "worker": terms.worker.to_string(),
                    "overlap_blocks": terms.overlap_blocks,
                    "prefill_tokens": terms.prefill_tokens,
                    "prefill_blocks": terms.prefill_blocks,
                    "decode_blocks": terms.decode_blocks,
                    "active_requests": terms.active_requests,
                    "cost": terms.cost,
                    "formula": terms.formula(&decision.request).to_string(),
                })
            })
            .collect();
        let expected = self.reusable_blocks(decision.overlap_blocks) * u64::from(self.block_size);
        Ok(json!({
            "model": pool.name,
            "lora_name": self.route.lora_name,
            "policy": decision.policy.name(),
            "worker": decision.worker.to_string(),
            "reason": decision.reason.name(),
            "ties": decision.ties,
            "margin": decision.margin,
            "prompt_tokens": self.are_tokens_known.then_some(self.isl_tokens),
            "block_size": (self.block_size > 0).then_some(self.block_size),
            "request_blocks": self.sequence_hashes.len(),
            "overlap_blocks": decision.overlap_blocks,
            "expected_cached_tokens": expected,
            "candidates": candidates,
        }))
    }
}

/// Why there are no tokens.
enum Untokenized {
    /// The request is wrong; no engine would take it either.
    Refused(Error),
    /// The request may be fine, but its tokens are not known here.
    Unknown(&'static str),
}

async fn tokens(
    app: &App,
    api: Api,
    envelope: &Envelope<'_>,
    plan: &Plan,
    body_bytes: usize,
) -> std::result::Result<Tokens, Untokenized> {
    let prompt = match api {
        Api::Chat => {
            if envelope.messages.is_none() {
                let why = "messages: a list of messages is required";
                return Err(Untokenized::Refused(Error::invalid(why)));
            }
            None
        }
        Api::Completions => {
            let Some(raw) = envelope.prompt else {
                return Err(Untokenized::Refused(Error::invalid("prompt: is required")));
            };
            match Prompt::parse(raw).map_err(Untokenized::Refused)? {
                Prompt::Tokens(tokens) => return Ok(tokens),
                Prompt::Batch => return Err(Untokenized::Unknown("batch")),
                Prompt::Text(text) => Some(text),
            }
        }
    };
    match &app.text {
        Some(text) => {
            let local = || match &prompt {
                Some(prompt) => text
                    .completion_tokens(prompt, envelope.add_special_tokens.unwrap_or(true))
                    .map(text::Prompt::Tokens),
                None => text.chat_tokens(&envelope.chat()),
            };
            let outcome = if body_bytes > LONG_TEXT_BYTES {
                tokio::task::block_in_place(local)
            } else {
                local()
            };
            match outcome {
                Ok(text::Prompt::Tokens(tokens)) => Ok(tokens),
                Ok(text::Prompt::Unsupported(why)) => {
                    tracing::debug!(why, "routed without tokens");
                    Err(Untokenized::Unknown("not_text"))
                }
                // The engine has the last word on what it takes: it may know more than this template.
                Err(error) => {
                    tracing::warn!(%error, "could not tokenize; routed without tokens");
                    Err(Untokenized::Unknown("template"))
                }
            }
        }
        None => remote_tokens(app, envelope, plan, prompt).await.map_err(Untokenized::Unknown),
    }
}

/// Ask an engine, in turn, for its own tokens.
async fn remote_tokens(
    app: &App,
    envelope: &Envelope<'_>,
    plan: &Plan,
    prompt: Option<String>,
) -> std::result::Result<Tokens, &'static str> {
    #[derive(serde::Deserialize)]
    struct Answer {
        tokens: Vec<u32>,
    }
    // What /tokenize has no field for would make other tokens than the request does.
    let is_set = |raw: Option<&RawValue>| raw.is_some_and(|raw| raw.get() != "null");
    if [envelope.documents, envelope.reasoning_effort, envelope.truncate_prompt_tokens]
        .into_iter()
        .any(is_set)
    {
        return Err("not_tokenizable");
    }
    let name = envelope.model.as_deref().unwrap_or(&plan.route.pool.name);
    let members = plan.route.pool.members();
    let healthy: Vec<_> = members
        .all()
        .filter(|one| one.member.is_none() && one.is_healthy() && one.serves(name))
        .collect();
    let Some(engine) = healthy.get(app.in_flight() % healthy.len().max(1)) else {
        return Err("no_engine");
    };
    let mut body = serde_json::Map::new();
    let mut put = |name: &str, value| body.insert(name.to_owned(), value);
    put("model", json!(name));
    if let Some(prompt) = prompt {
        put("prompt", json!(prompt));
    }
    for (name, raw) in [
        ("messages", envelope.messages),
        ("tools", envelope.tools),
        ("chat_template", envelope.chat_template),
        ("chat_template_kwargs", envelope.chat_template_kwargs),
    ] {
        if let Some(raw) = raw {
            put(name, serde_json::from_str(raw.get()).map_err(|_| "not_text")?);
        }
    }
    for (name, flag) in [
        ("add_generation_prompt", envelope.add_generation_prompt),
        ("continue_final_message", envelope.continue_final_message),
        ("add_special_tokens", envelope.add_special_tokens),
    ] {
        if let Some(flag) = flag {
            put(name, json!(flag));
        }
    }
    let body = serde_json::Value::Object(body).to_string().into_bytes();
    let url = format!("{}/tokenize", engine.base);
    let call = app.upstream.post_json(&url, body, 64 * 1024 * 1024);
    match tokio::time::timeout(app.options.tokenize_timeout, call).await {
        Err(_) => Err("tokenize_timeout"),
        Ok(Err(_)) => Err("tokenize_failed"),
        Ok(Ok((status, _))) if !status.is_success() => Err("tokenize_refused"),
        Ok(Ok((_, body))) => serde_json::from_slice::<Answer>(&body)
            .map(|answer| answer.tokens)
            .map_err(|_| "tokenize_failed"),
    }
}
