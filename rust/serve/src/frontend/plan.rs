//! From a request to a choice: tokens, hashes, overlaps, then the router's decision.

use std::sync::Arc;
use std::time::Instant;

use axum::http::HeaderMap;
use kvflash_core::error::{Error, Result};
use kvflash_core::fair::{Cost, Wish};
use kvflash_core::hash::engine::{MediaItem, NameKeys};
use kvflash_core::ids::{InstanceId, Worker};
use kvflash_core::policy::Advice;
use kvflash_core::router::{Facts, RouteOverride};
use kvflash_core::select::{self, Ask, Pin, Reservation, Selection};
use kvflash_core::text::Tokens;
use serde_json::json;

use super::super::{Reject, outside, queue};
use super::app::App;
use super::client::Client;
use super::engine::Engine;
use super::evidence::Expectation;
use super::fleet::unhealthy;
use super::metrics::{CauseLabel, FrontendMetrics};
use super::pool::{Members, Pool, Route};
use super::request::Envelope;
use super::runtime::prompt;
use super::tokens::{Known, Untokenized, tokens};

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
    prompt: Arc<select::Prompt>,
    /// The name under which decisions are kept.
    pub request_id: Option<String>,
    /// What workers hold, as a remote indexer tells.
    remote: Option<Vec<(Worker, u32)>>,
    /// The prompt's tokens, where they are known.
    pub tokens: Option<Arc<Tokens>>,
    /// Whose request it is, and its text and session, for policies that ask.
    pub client: Client,
    /// What stands in the prompt beside text.
    media: Arc<[MediaItem]>,
    cache_salt: Option<String>,
    /// How urgent it is among those that wait.
    pub wish: Wish,
    /// Tokens that the answer is expected to have.
    pub expected_output_tokens: Option<u64>,
    /// The number that chance is drawn from, where the request names one.
    pub seed: Option<u64>,
    /// The only worker that may take it.
    pinned: Option<InstanceId>,
    /// Its prompt is prefilled elsewhere.
    is_decode_only: bool,
}

/// The worker that takes a request, its load booked.
pub(super) struct Choice {
    pub engine: Arc<Engine>,
    pub booking: Reservation,
    pub overlap_blocks: u32,
    selection: Selection,
}

impl Plan {
    /// # Errors
    /// 400 for a prompt that no engine would take, 404 for a model that is not served.
    pub async fn make(
        app: &App,
        api: Api,
        envelope: &Envelope<'_>,
        headers: &HeaderMap,
        body_bytes: usize,
        needs_tokens: bool,
    ) -> Result<Self, Reject> {
        let route = match envelope.model.as_deref() {
            Some(name) => {
                app.fleet.route(name).map_err(|error| Reject::from(error).param("model"))?
            }
            None => app.fleet.only_route().map_err(|error| Reject::from(error).param("model"))?,
        };
        let needs_text = route.pool.selector.needs_facts();
        let members = route.pool.members();
        let mut plan = Self {
            route,
            prompt: Arc::new(select::Prompt::unknown((body_bytes / BYTES_PER_TOKEN) as u64)),
            client: Client::read(headers, envelope, api, &members, needs_text),
            request_id: None,
            remote: None,
            tokens: None,
            media: Arc::default(),
            cache_salt: envelope.cache_salt.as_deref().map(str::to_owned),
            wish: Wish::default(),
            expected_output_tokens: None,
            seed: None,
            pinned: None,
            is_decode_only: false,
        };
        if let Some(tokens) = prompt::tokens(&plan.route.pool, api, envelope, body_bytes)? {
            plan.look_up(Arc::new(tokens), Arc::default());
            plan.ask_remote(app).await;
            return Ok(plan);
        }
        if !plan.route.pool.selector.needs_tokens() && !needs_tokens {
            return Ok(plan);
        }
        match tokens(app, api, envelope, &plan.route.pool, body_bytes).await {
            Ok(Known { tokens, media }) => plan.look_up(Arc::new(tokens), media),
            Err(Untokenized::Refused(error)) => return Err(error.into()),
            Err(Untokenized::Unknown(cause)) => {
                app.metrics.untokenized.get_or_create(&CauseLabel { cause }).inc();
            }
        }
        plan.ask_remote(app).await;
        Ok(plan)
    }

    /// The same request for the workers of another pool.
    pub async fn on(&self, app: &App, pool: Arc<Pool>, pinned: Option<InstanceId>) -> Self {
        let mut plan = Self {
            route: Route { pool, lora_name: self.route.lora_name.clone() },
            prompt: Arc::new(select::Prompt::unknown(self.prompt.isl_tokens)),
            client: self.client.anonymous(),
            request_id: None,
            remote: None,
            tokens: None,
            media: Arc::default(),
            cache_salt: self.cache_salt.clone(),
            wish: self.wish,
            expected_output_tokens: None,
            seed: self.seed,
            pinned,
            is_decode_only: false,
        };
        if let Some(tokens) = &self.tokens {
            plan.look_up(Arc::clone(tokens), Arc::clone(&self.media));
            plan.ask_remote(app).await;
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

    /// Who would take it now, by a draw from `seed`, the request's own or a new one; changes nothing.
    ///
    /// # Errors
    /// As [`Plan::book`].
    pub async fn query(&self, seed: Option<u64>) -> Result<Selection> {
        let advice = self.advice(&[]).await;
        let members = self.route.pool.members();
        let is_eligible = |worker: Worker| self.is_eligible(&members, worker, &[]);
        let ask = self.ask(advice.as_ref());
        let overrides = RouteOverride { seed: seed.or(self.seed), ..ask.overrides };
        let ask = Ask { allowed: Some(&is_eligible), overrides, ..ask };
        self.route.pool.selector.query(&ask).map_err(|error| self.explain_absence(error))
    }

    fn look_up(&mut self, tokens: Arc<Tokens>, media: Arc<[MediaItem]>) {
        let selector = &self.route.pool.selector;
        let mut prompt = if selector.needs_tokens() {
            // No list of models tells an adapter's path.
            let lora = self.route.lora_name.as_deref().map(|name| (name, ""));
            let cache_salt = self.cache_salt.as_deref();
            selector.prompt(
                &tokens,
                &NameKeys { lora, cache_salt, media: &media, ..NameKeys::default() },
            )
        } else {
            select::Prompt::of_tokens(&tokens, 0, 0)
        };
        prompt.isl_tokens = prompt.isl_tokens.max(1);
        self.prompt = Arc::new(prompt);
        self.tokens = Some(tokens);
        self.media = media;
    }

    /// Have a remote indexer tell what workers hold; without an answer nothing is known to be held.
    async fn ask_remote(&mut self, app: &App) {
        let Some(remote) = &app.remote else { return };
        let selector = &self.route.pool.selector;
        if selector.uses_overlaps(&RouteOverride::default(), &self.prompt) {
            let select::Prompt { locals, block_size, .. } = &*self.prompt;
            let found = remote.overlaps(&selector.model().key, locals, *block_size).await;
            self.remote = Some(found.unwrap_or_default());
        }
    }

    /// Choose a worker that was not tried yet and book the request there, in one step; where requests
    /// wait for a worker with room to prefill, when there is one.
    ///
    /// # Errors
    /// `NoWorker`, saying what there is and why it can't serve; those of the queue.
    pub async fn book(&self, metrics: &FrontendMetrics, tried: &[InstanceId]) -> Result<Choice> {
        let pool = &self.route.pool;
        let advice = self.advice(tried).await;
        let book = || self.book_now(tried, advice.as_ref());
        let Some(line) = &pool.queue else { return book() };
        let began = Instant::now();
        let cached_tokens = || {
            let members = pool.members();
            let is_eligible = |worker: Worker| self.is_eligible(&members, worker, tried);
            let ask = Ask { allowed: Some(&is_eligible), ..self.ask(None) };
            let blocks = pool.selector.most_held(&ask);
            u64::from(blocks) * u64::from(self.prompt.block_size)
        };
        // Unhealthy workers are nobody's: they set this request apart from no other.
        let is_open =
            || self.pinned.is_none() && tried.is_empty() && self.route.lora_name.is_none();
        let isl_tokens = self.prompt.isl_tokens;
        let outcome = queue::pass(line, &self.wish, isl_tokens, cached_tokens, is_open, book).await;
        metrics.queue_seconds.observe(began.elapsed().as_secs_f64());
        outcome
    }

    fn book_now(&self, tried: &[InstanceId], advice: Option<&Advice>) -> Result<Choice> {
        for _ in 0..MAX_CHOICES {
            if let Some(choice) = self.book_once(tried, advice)? {
                return Ok(choice);
            }
        }
        Err(Error::NoWorker("every chosen worker left while the request was routed".to_owned()))
    }

    /// What a policy outside the core says of those that were not tried yet.
    async fn advice(&self, tried: &[InstanceId]) -> Option<Advice> {
        let selector = &self.route.pool.selector;
        selector.desk()?;
        let question = {
            let members = self.route.pool.members();
            let is_eligible = |worker: Worker| self.is_eligible(&members, worker, tried);
            selector.question(&Ask { allowed: Some(&is_eligible), ..self.ask(None) })
        };
        outside::advice(selector, question).await
    }

    /// `None` when the chosen worker has left meanwhile.
    fn book_once(&self, tried: &[InstanceId], advice: Option<&Advice>) -> Result<Option<Choice>> {
        let pool = &self.route.pool;
        // Read anew each time: workers come and go while a prompt is tokenized or an attempt runs.
        let members = pool.members();
        let is_eligible = |worker: Worker| self.is_eligible(&members, worker, tried);
        let ask = Ask {
            waits: pool.queue.is_some(),
            allowed: (!self.is_open(&members, tried))
                .then_some(&is_eligible as &dyn Fn(Worker) -> bool),
            ..self.ask(advice)
        };
        let (booking, selection) =
            pool.selector.select(&ask).map_err(|error| self.explain_absence(error))?;
        // Once more: a worker may have joined between the two readings. Members and the router's workers
        // change under one lock, so it is found.
        let engine = pool.members().get(booking.worker().instance_id).cloned();
        Ok(engine.map(|engine| Choice {
            engine,
            booking,
            overlap_blocks: selection.overlap_blocks,
            selection,
        }))
    }

    /// Whether every worker may take it, but for a pin.
    fn is_open(&self, members: &Members, tried: &[InstanceId]) -> bool {
        tried.is_empty() && self.route.lora_name.is_none() && members.are_all_healthy()
    }

    fn is_eligible(&self, members: &Members, worker: Worker, tried: &[InstanceId]) -> bool {
        members.is_eligible(worker, tried)
            && self.route.lora_name.as_deref().is_none_or(|name| {
                members.get(worker.instance_id).is_some_and(|engine| engine.serves(name))
            })
    }

    fn ask<'a>(&'a self, advice: Option<&'a Advice>) -> Ask<'a> {
        let overrides = if self.is_decode_only {
            // Its blocks come from the prefill worker, whatever it holds itself.
            RouteOverride {
                overlap_score_weight: Some(0.0),
                assume_kv_reuse: Some(false),
                ..RouteOverride::default()
            }
        } else {
            RouteOverride::default()
        };
        let overrides = RouteOverride { seed: self.seed, ..overrides };
        let pin = self.pinned.map(|instance_id| Pin { instance_id, dp_rank: None });
        Ask {
            overrides,
            pin,
            overlaps: self.remote.as_deref(),
            request_id: self.request_id.as_deref(),
            facts: Facts { advice, ..self.facts() },
            expected_output_tokens: self.expected_output_tokens,
            ..Ask::new(&self.prompt)
        }
    }

    fn facts(&self) -> Facts<'_> {
        self.client.facts(self.tokens.as_deref().map_or(&[], Vec::as_slice))
    }

    fn explain_absence(&self, error: Error) -> Error {
        if !matches!(error, Error::NoWorker(_)) {
            return error;
        }
        let members = self.route.pool.members();
        Error::NoWorker(format!(
            "no worker can take requests for model {:?}: {} registered, {} healthy{}",
            self.route.pool.name,
            members.all().count(),
            members.healthy(),
            unhealthy(members.all()),
        ))
    }

    /// What the request is expected to cost, where cached tokens cost `cached_share` of others.
    pub fn cost(&self, cached_share: f64) -> Cost {
        // What is cached counts only where it can be known and is cheaper.
        let is_asked = cached_share < 1.0 && !self.prompt.locals.is_empty();
        let held = if is_asked { self.expected_blocks() } else { 0 };
        let cached = self.reusable_blocks(held) * u64::from(self.prompt.block_size);
        Cost { input_tokens: self.prompt.isl_tokens, cached_tokens: cached, output_tokens: None }
    }

    /// Blocks that the worker holds which would be chosen now.
    fn expected_blocks(&self) -> u32 {
        let members = self.route.pool.members();
        let is_eligible = |worker: Worker| self.is_eligible(&members, worker, &[]);
        let ask = Ask { allowed: Some(&is_eligible), ..self.ask(None) };
        // Where nobody can be chosen now, somebody who holds nothing will be.
        let preview = self.route.pool.selector.preview(&ask);
        preview.map_or(0, |(selection, _)| selection.overlap_blocks)
    }

    /// Blocks of an overlap that the engine can reuse.
    pub fn reusable_blocks(&self, overlap_blocks: u32) -> u64 {
        self.prompt.reusable_blocks(overlap_blocks)
    }

    /// Tokens of the prompt, where they are known rather than guessed.
    pub fn prompt_tokens(&self) -> Option<u64> {
        self.prompt.are_tokens_known.then_some(self.prompt.isl_tokens)
    }

    /// What the answer of `choice` is to be compared with: nothing where it was not judged by events alone, or the
    /// prompt is prefilled elsewhere.
    pub fn expectation(&self, app: &App, choice: &Choice) -> Option<Expectation> {
        let is_comparable = app.options.uses_events()
            && !self.is_decode_only
            && self.route.pool.selector.is_comparable(&self.prompt);
        is_comparable.then(|| Expectation {
            pool: Arc::clone(&self.route.pool),
            prompt: Arc::clone(&self.prompt),
            selection: choice.selection,
        })
    }

    /// Count the stages of the prompt's tokens.
    pub fn count(&self, metrics: &FrontendMetrics, choice: &Choice) {
        let Some(prompt_tokens) = self.prompt_tokens() else { return };
        let block_size = u64::from(self.prompt.block_size);
        let tokens = |blocks| self.reusable_blocks(blocks) * block_size;
        metrics.input.inc_by(prompt_tokens);
        metrics.available.inc_by(tokens(choice.selection.best_blocks));
        metrics.selected.inc_by(tokens(choice.overlap_blocks));
    }

    /// What would be decided now, with every candidate's terms; nothing is booked.
    ///
    /// # Errors
    /// As [`Plan::book`].
    pub async fn explain(&self, app: &App) -> Result<serde_json::Value> {
        let advice = self.advice(&[]).await;
        // Every candidate of thousands is written down.
        app.aside.make(|| self.explain_now(advice.as_ref())).await
    }

    fn explain_now(&self, advice: Option<&Advice>) -> Result<serde_json::Value> {
        let members = self.route.pool.members();
        let is_eligible = |worker: Worker| self.is_eligible(&members, worker, &[]);
        let ask = Ask { allowed: Some(&is_eligible), ..self.ask(advice) };
        let pool = &self.route.pool;
        let (selection, record) =
            pool.selector.preview(&ask).map_err(|error| self.explain_absence(error))?;
        let prompt = &self.prompt;
        let expected =
            prompt.reusable_blocks(selection.overlap_blocks) * u64::from(prompt.block_size);
        let mut value = record.decision();
        value["lora_name"] = json!(self.route.lora_name);
        value["prompt_tokens"] = json!(self.prompt_tokens());
        value["expected_cached_tokens"] = json!(expected);
        Ok(value)
    }
}
