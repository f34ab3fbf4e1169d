//! Converts a client's request to routing input: model, tokens, hashes, eligible workers.

use std::borrow::Cow;
use std::sync::Arc;

use axum::http::StatusCode;
use bytes::Bytes;
use kvflash_core::error::{Error, Result};
use kvflash_core::fair::Cost;
use kvflash_core::hash::engine::{MediaItem, NameKeys};
use kvflash_core::ids::{InstanceId, Worker};
use kvflash_core::policy::Advice;
use kvflash_core::select::{self, Ask, Pin, Request, RouteOverride, Selection, TokenSource};
use kvflash_core::text::Tokens;
use serde_json::json;

use super::api::{Api, Row, Weight};
use super::body::{Body, EMBEDS, Envelope};
use super::call::{Call, Head, model_of_upload, upload_with_model};
use super::client::{self, Nvext, Session, Urgency};
use super::foreign;
use super::generation::Generation;
use super::ids::Replaceable;
use super::lesson::{self, Lesson};
use super::stored::Kept;
use super::tokens::{Known, Untokenized, tokens};
use crate::body::{Counted, Rest};
use crate::frontend::app::App;
use crate::frontend::engine::{Engine, Members, Pool, Route};
use crate::frontend::fleet::unhealthy;
use crate::frontend::metrics::AliasLabel;
use crate::frontend::runtime::spec::ModelInput;
use crate::metrics::CauseLabel;
use crate::tenant::pass;
use crate::{Reject, outside};

/// Everything known about a request before a worker is chosen.
#[derive(Clone)]
pub(crate) struct Plan {
    pub call: Arc<Call>,
    pub route: Route,
    pub request: Request,
    /// The prompt's tokens, if known.
    pub tokens: Option<Arc<Tokens>>,
    pub urgency: Urgency,
    /// The client's name for the model.
    pub model: String,
    pub cache_salt: Option<String>,
    /// What to generate; parsed only if a worker of the runtime may answer.
    pub generation: Option<Generation>,
    /// Whether its tokens may be sent instead of its text.
    pub replaceable: Option<Replaceable>,
    /// What its answer teaches, and earlier ones taught, where its tokens are not known.
    pub lesson: Option<Arc<Lesson>>,
    /// What stands in the prompt beside text.
    media: Arc<[MediaItem]>,
    /// The response that it continues.
    kept: Option<Arc<Kept>>,
}

/// The part of a request to choose a worker for: all, or the rest.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Part<'a> {
    /// Workers that failed.
    pub tried: &'a [InstanceId],
    /// Its prompt is prefilled elsewhere.
    pub is_decode_only: bool,
    /// A worker was chosen for it before, and failed.
    pub is_retry: bool,
}

impl Plan {
    /// Plans a request with the body `bytes`, which is `counted` also where it is rewritten, and which the `rest` of an upload
    /// follows; `row` is derived from its fields if the path does not determine it.
    ///
    /// # Errors
    /// 400 for a request that no engine would accept, 404 for an unknown model or a required worker
    /// that does not exist, 503 for one that is unhealthy.
    pub async fn make(
        app: &App,
        row: Option<&'static Row>,
        mut head: Head,
        request_id: String,
        bytes: Bytes,
        counted: Counted,
        rest: Option<Arc<Rest>>,
    ) -> Result<Self, Reject> {
        let count = |kind| app.dropped(kind);
        if let Some(key) = head.caller.client() {
            pass::clean_headers(key, &mut head.headers, count);
        }
        let mut body = Call::body(app, row, &head, bytes).await?;
        if let Some(key) = head.caller.client()
            && let Some(cleaned) = pass::clean_body(key, row, &body, app.salts.as_ref(), count)?
        {
            body = Call::body(app, row, &head, counted.hold(cleaned)).await?;
        }
        let is_upload = row.is_some_and(|row| row.weight == Weight::Sound);
        let kept = match row.filter(|row| row.is_of_responses()) {
            Some(row) => Kept::of(app, row, head.uri.path(), &body, &head.caller)?.map(Arc::new),
            None => None,
        };
        let alias = resolve(app, is_upload, &head, &body, kept.as_deref())?;
        if let Some((_, renamed)) = &alias {
            // From here on it is a request for that model: workers do not know aliases.
            body = Call::body(app, row, &head, counted.hold(renamed.clone())).await?;
        }
        let alias = alias.map(|(alias, _)| alias);
        if let Some(rest) = rest {
            body = Arc::new(Body::upload(body.bytes().clone(), rest));
        }
        let mut envelope: Envelope<'_> = body.read()?;
        if is_upload {
            envelope.model = model_of_upload(&head.headers, body.bytes())?.map(Cow::Borrowed);
        }
        if row.is_some_and(Row::names_response) {
            envelope.model = kept.as_ref().and_then(|kept| kept.model()).map(Cow::Owned);
        }
        let has_prompt = envelope.prompt.is_some() || body.has(EMBEDS);
        if row.is_none() && envelope.messages.is_none() && !has_prompt {
            return Err(Reject::bad_request(
                "/explain takes chats and completions: messages or prompt is missing; for other APIs add their path, \
                 as in ?path=/v1/responses",
            ));
        }
        let call = Arc::new(Call::new(row, head, request_id, &body, &envelope)?);
        let route = match envelope.model.as_deref() {
            Some(name) => app.route(name, alias.as_deref()),
            None => app.fleet.only_route(),
        };
        let route = route.map_err(|error| Reject::from(error).param("model"))?;
        let pool = Arc::clone(&route.pool);
        check_workers(&call, &pool)?;
        let model = envelope.model.as_deref().unwrap_or(&pool.name).to_owned();
        if let Some(kept) = &kept {
            kept.check(&route, &model)?;
        }
        if let Some(alias) = &alias {
            let label = AliasLabel::new(alias, &model);
            app.metrics.aliased.get_or_create(&label).inc();
        }
        let cache_salt = envelope.cache_salt.as_deref().map(str::to_owned);
        let (headers, nvext) = (&call.head.headers, &call.nvext);
        let urgency = Urgency::read(headers, nvext, envelope.priority, pool.is_queued())?;
        let Known { tokens, media, replaceable, lesson } =
            understand(app, &call, &envelope, &pool, &model).await?;
        let request = Request {
            request_id: Some(call.request_id.clone()),
            overrides: RouteOverride { seed: nvext.seed, ..RouteOverride::default() },
            alias,
            pin: pin(&pool, nvext)?.or(kept.as_ref().map(|kept| kept.pin())),
            wish: urgency.wish(),
            expected_output_tokens: nvext.agent_hints.osl,
            ..client::read(&call, &envelope, &pool.members(), pool.selector.needs_text())
        };
        let mut plan = Self {
            generation: None,
            tokens: tokens.map(Arc::new),
            media,
            replaceable,
            lesson: lesson.map(Arc::new),
            call: Arc::clone(&call),
            route,
            request,
            urgency,
            model,
            cache_salt,
            kept,
        };
        plan.look_up(app).await;
        let members = pool.members();
        // Engines read these options themselves.
        if call.api().is_for_runtime() && members.all().any(|engine| engine.member.is_some()) {
            let mut of_runtime = members.all().filter_map(|engine| engine.member.as_ref());
            let takes_text =
                of_runtime.all(|member| member.spec.card.model_input == ModelInput::Text);
            let generation = match takes_text {
                true => Generation::of_text(&call.body)?,
                false => {
                    let mut read = Generation::parse(call.api(), &call.body)?;
                    read.fit(plan.prompt_tokens().unwrap_or(1), members.max_model_len())?;
                    read
                }
            };
            plan.generation = Some(generation);
        }
        Ok(plan)
    }

    /// The same request for the workers of another pool.
    pub async fn on(&self, app: &App, pool: Arc<Pool>, pinned: Option<InstanceId>) -> Self {
        let mut plan = self.clone();
        plan.route.pool = pool;
        (plan.replaceable, plan.kept) = (None, None);
        let request = &mut plan.request;
        request.request_id = None;
        // A request at two workers is charged once.
        (request.user, request.session_worker) = (None, None);
        request.pin = pinned.map(|instance_id| Pin { instance_id, dp_rank: None });
        (request.overlaps, request.expected_output_tokens) = (None, None);
        // The end of a prefill is observed.
        request.is_whole = false;
        plan.look_up(app).await;
        plan
    }

    /// Hash the prompt as its pool's workers do, as far as its tokens are known; without them its length is a guess. A prompt
    /// that the engine does not look up in its cache has a length and no hashes. A remote indexer is asked what workers hold.
    async fn look_up(&mut self, app: &App) {
        let selector = &self.route.pool.selector;
        let hashed = |tokens: &[u32]| {
            // No list of models tells an adapter's path.
            let lora = self.route.lora_name().map(|name| (name, ""));
            let cache_salt = self.cache_salt.as_deref();
            let keys = NameKeys { lora, cache_salt, media: &self.media, ..NameKeys::default() };
            selector.prompt(tokens, &keys)
        };
        let is_matched = selector.needs_tokens() && self.call.reads_cache;
        let lesson = self.lesson.as_ref().filter(|_| is_matched);
        let taught = lesson.and_then(|lesson| Some((lesson, lesson.beginning.as_ref()?)));
        let mut prompt = match (&self.tokens, taught) {
            (Some(tokens), _) if is_matched => hashed(tokens),
            (Some(tokens), _) => select::Prompt::of_tokens(tokens, 0, 0),
            (None, Some((lesson, beginning))) => select::Prompt {
                isl_tokens: lesson.guessed_tokens(),
                source: TokenSource::Taught,
                ..hashed(beginning.ids())
            },
            (None, None) => {
                let bytes = self.call.body.prompt_bytes();
                select::Prompt::unknown(self.call.row.weight.tokens(bytes))
            }
        };
        prompt.isl_tokens = prompt.isl_tokens.max(1);
        self.request.prompt = Arc::new(prompt);
        self.request.tokens = self.tokens.clone().unwrap_or_default();
        if let Some(remote) = &app.remote {
            remote.look_up(&self.route.pool.selector, &mut self.request).await;
        }
    }

    /// Calls `act` with the selector's input. Workers come and go during tokenization and attempts,
    /// so they are read again each time.
    pub fn ask<T>(
        &self,
        part: Part<'_>,
        advice: Option<&Advice>,
        act: impl FnOnce(&Ask<'_>) -> T,
    ) -> T {
        let members = self.route.pool.members();
        let is_eligible = |worker: Worker| self.is_eligible(&members, worker, part.tried);
        let is_open =
            part.tried.is_empty() && members.are_all_healthy() && self.suits_all(&members);
        let is_eligible: Option<&dyn Fn(Worker) -> bool> =
            if is_open { None } else { Some(&is_eligible) };
        self.request.ask(is_eligible, advice, |ask| {
            let mut ask = Ask { is_retry: part.is_retry, ..*ask };
            if part.is_decode_only {
                // Its blocks come from the prefill worker, whatever it holds itself.
                ask.overrides.overlap_score_weight = Some(0.0);
                ask.overrides.assume_kv_reuse = Some(false);
            }
            act(&ask)
        })
    }

    /// Whether every worker of the pool can serve it.
    pub fn suits_all(&self, members: &Members) -> bool {
        // Every engine serves these APIs, so most requests need no look at each engine.
        let is_plain = self.call.api().is_for_runtime() && self.route.extra_name.is_none();
        is_plain || members.all().all(|engine| self.suits(engine))
    }

    /// Whether `engine` can serve it: its API, and the model under its name.
    fn suits(&self, engine: &Engine) -> bool {
        self.call.fits(engine) && self.route.is_served_by(engine)
    }

    /// Whether `worker` can serve it now, and is not among the `tried`.
    fn is_eligible(&self, members: &Members, worker: Worker, tried: &[InstanceId]) -> bool {
        members.is_eligible(worker, tried)
            && members.get(worker.instance_id).is_some_and(|engine| self.suits(engine))
    }

    /// The advice of a policy outside the core about the untried workers.
    pub async fn advice(&self, part: Part<'_>) -> Option<Advice> {
        let selector = &self.route.pool.selector;
        selector.desk()?;
        let question = self.ask(part, None, |ask| selector.question(ask));
        outside::advice(selector, question).await
    }

    /// The worker that would take it now, drawn with `seed`, which is given by the request or new;
    /// changes nothing.
    ///
    /// # Errors
    /// `NoWorker`, with the existing workers and why they can't serve it.
    pub async fn query(&self, part: Part<'_>, seed: Option<u64>) -> Result<Selection> {
        let advice = self.advice(part).await;
        let selection = self.ask(part, advice.as_ref(), |ask| {
            let overrides = RouteOverride { seed: seed.or(ask.overrides.seed), ..ask.overrides };
            self.route.pool.selector.query(&Ask { overrides, ..*ask })
        });
        selection.map_err(|error| self.explain_absence(error))
    }

    /// Adds the alternatives to the error for a missing worker.
    pub fn explain_absence(&self, error: Error) -> Error {
        if !matches!(error, Error::NoWorker(_)) {
            return error;
        }
        if let Some(error) = self.kept.as_ref().and_then(|kept| kept.absence()) {
            return error;
        }
        let members = self.route.pool.members();
        let pinned = self.request.pin.and_then(|pin| members.get(pin.instance_id));
        if let Some((engine, why)) = pinned.and_then(|one| Some((one, one.why_unhealthy()?))) {
            let message = format!(
                "the pinned worker {} is unhealthy: {why}; without the pin another worker can \
                 take the request",
                engine.id
            );
            return Error::NoWorker(message);
        }
        let draining = match self.route.pool.selector.draining.all().len() {
            0 => String::new(),
            count => format!(
                ", {count} draining (PATCH /workers/{{id}} with {{\"state\": \"active\"}} brings one back)"
            ),
        };
        let unfit = members.all().filter(|one| one.is_healthy() && !self.call.fits(one)).count();
        let (path, is_isolated) = (self.call.row.path, self.call.is_isolated());
        let unfit = match unfit {
            0 => String::new(),
            _ if is_isolated => format!(", of which {unfit} do not read cache_salt in {path}"),
            _ => format!(", of which {unfit} do not serve {path}"),
        };
        let lack = |one: &&Arc<Engine>| one.is_healthy() && !self.route.is_served_by(one);
        let lacking = match (&self.route.extra_name, members.all().filter(lack).count()) {
            (Some(name), count @ 1..) => format!(", of which {count} do not serve {name:?}"),
            _ => String::new(),
        };
        Error::NoWorker(format!(
            "no worker can take requests for model {:?}: {} registered, {} healthy{unfit}{lacking}{draining}{}",
            self.route.pool.name,
            members.all().count(),
            members.healthy(),
            unhealthy(members.all()),
        ))
    }

    /// Prompt tokens that the worker that would be chosen now does not hold.
    pub fn uncached_tokens(&self) -> u64 {
        let Cost { input_tokens, cached_tokens } = self.cost(0.0);
        input_tokens.saturating_sub(cached_tokens)
    }

    /// Prompt tokens that the worker of `selection` does not hold.
    pub fn uncached_at(&self, selection: &Selection) -> u64 {
        let prompt = &self.request.prompt;
        prompt.isl_tokens.saturating_sub(prompt.reusable_tokens(selection.overlap_blocks))
    }

    /// The expected cost of the request, with cached tokens at `cached_share` of the full price.
    pub fn cost(&self, cached_share: f64) -> Cost {
        let prompt = &self.request.prompt;
        // Cached tokens matter only if they can be known and are cheaper.
        let is_asked = cached_share < 1.0 && !prompt.locals.is_empty();
        // If no worker can be chosen now, assume one without cached blocks.
        let preview =
            || self.ask(Part::default(), None, |ask| self.route.pool.selector.preview(ask));
        let held =
            if is_asked { preview().map_or(0, |(found, _)| found.overlap_blocks) } else { 0 };
        let cached_tokens = prompt.reusable_tokens(held);
        Cost { input_tokens: prompt.isl_tokens, cached_tokens }
    }

    /// Tokens of the prompt, if known and not estimated.
    pub fn prompt_tokens(&self) -> Option<u64> {
        let prompt = &self.request.prompt;
        prompt.are_tokens_known().then_some(prompt.isl_tokens)
    }

    /// Counts the stages of the prompt's tokens.
    pub fn count(&self, app: &App, selection: &Selection) {
        let (metrics, prompt) = (&app.metrics, &self.request.prompt);
        // Where they are not counted here, the engine tells at the end.
        if let Some(prompt_tokens) = self.prompt_tokens() {
            metrics.input.inc_by(prompt_tokens);
        }
        metrics.available.inc_by(prompt.reusable_tokens(selection.best_blocks));
        metrics.selected.inc_by(prompt.reusable_tokens(selection.overlap_blocks));
    }

    /// The decision that would be made now, with every candidate's terms; nothing is booked.
    ///
    /// # Errors
    /// As [`Plan::query`].
    pub async fn explain(&self, app: &App, part: Part<'_>) -> Result<serde_json::Value> {
        let advice = self.advice(part).await;
        // With thousands of candidates this is a long record.
        app.aside.make(|| self.explain_now(part, advice.as_ref())).await
    }

    fn explain_now(&self, part: Part<'_>, advice: Option<&Advice>) -> Result<serde_json::Value> {
        let selector = &self.route.pool.selector;
        let preview = self.ask(part, advice, |ask| selector.preview(ask));
        let (selection, record) = preview.map_err(|error| self.explain_absence(error))?;
        let mut value = record.decision();
        value["lora_name"] = json!(self.route.lora_name());
        value["prompt_tokens"] = json!(self.prompt_tokens());
        let expected = self.request.prompt.reusable_tokens(selection.expected_blocks());
        value["expected_cached_tokens"] = json!(expected);
        Ok(value)
    }
}

/// The prompt's tokens, if needed.
async fn understand(
    app: &App,
    call: &Call,
    envelope: &Envelope<'_>,
    pool: &Pool,
    model: &str,
) -> Result<Known, Reject> {
    let known = match call.api() {
        api @ (Api::Chat | Api::Completions) => tokens(app, call, api, envelope, pool).await,
        // Larger than all other ways together.
        _ => Box::pin(foreign::known(app, call, envelope, pool)).await,
    };
    match known {
        Ok(known) => Ok(known),
        Err(Untokenized::Refused(error)) => Err(error.into()),
        Err(Untokenized::Unknown(cause)) => {
            let is_taught = call.api() == Api::Chat && pool.selector.needs_tokens();
            let lesson = is_taught.then(|| Lesson::of(app, call, envelope, model)).flatten();
            match lesson.as_ref().is_some_and(|lesson| lesson.beginning.is_some()) {
                true => lesson::count(app, "matched"),
                false => {
                    app.metrics.untokenized.get_or_create(&CauseLabel { cause }).inc();
                }
            }
            Ok(Known { lesson, ..Known::default() })
        }
    }
}

/// The alias named by a request, and its body with the chosen model's name: a model of the worker
/// that has `kept` the previous response, if there is one, or else of its session's worker.
///
/// # Errors
/// 400 for a model that is not a string; 404 if that worker serves none of the alias's models.
fn resolve(
    app: &App,
    is_upload: bool,
    head: &Head,
    body: &Body,
    kept: Option<&Kept>,
) -> Result<Option<(Arc<str>, Bytes)>, Reject> {
    let Some(aliases) = &app.aliases else { return Ok(None) };
    let name = match is_upload {
        true => model_of_upload(&head.headers, body.bytes())?.map(Cow::Borrowed),
        false => body.value("model")?.map(Cow::Owned),
    };
    let Some(name) = name else { return Ok(None) };
    let session = Session::read(&head.headers);
    let Some(mut model) = aliases.model(&name, session.key) else { return Ok(None) };
    if session.key.is_none()
        && let Some((engine, _)) = session.engine_among(app.fleet.engines().iter())
        && let Some(served) = aliases.shares(&name).find(|model| engine.serves(model))
    {
        // Its earlier requests were for this model.
        model = served;
    }
    if let Some(kept) = kept.filter(|kept| !kept.serves(model)) {
        let mut models = aliases.models(&name);
        let served = models.clone().find(|model| kept.serves(model));
        model = served.ok_or_else(|| kept.outside(&name, &models.by_ref().collect::<Vec<_>>()))?;
    }
    let renamed = match is_upload {
        true => upload_with_model(body.bytes(), &name, model),
        false => body.with(&[("model", Some(json!(model)))]),
    };
    Ok(Some((Arc::from(&*name), renamed)))
}

/// Checks that a worker of the model can serve the request's API.
///
/// # Errors
/// 501 if all of them are workers of the runtime, which support only chat and completions; 403 if none of them reads
/// the salt of an isolated tenant there.
fn check_workers(call: &Call, pool: &Pool) -> Result<(), Reject> {
    let members = pool.members();
    if members.all().next().is_none() || members.all().any(|engine| call.fits(engine)) {
        return Ok(());
    }
    let (model, path) = (&pool.name, call.row.path);
    if call.is_isolated() && members.all().any(|engine| engine.member.is_none()) {
        let message = format!(
            "{path}: no worker of model {model:?} is known to read cache_salt there, and the key shares no cache with \
             other tenants (isolate); use /v1/chat/completions, or vLLM 0.32 or newer"
        );
        return Err(Reject::new(StatusCode::FORBIDDEN, message));
    }
    let message = format!(
        "the workers of model {model:?} are workers of the runtime, which serve /v1/chat/completions and \
         /v1/completions only; {path} needs an engine over HTTP (--worker URL)"
    );
    Err(Reject::new(StatusCode::NOT_IMPLEMENTED, message))
}

/// The worker that must take a request.
///
/// # Errors
/// 404 if it does not exist.
fn pin(pool: &Pool, nvext: &Nvext) -> Result<Option<Pin>, Reject> {
    match nvext.decode_pin() {
        Some(id) if pool.members().get(id).is_none() => {
            let field = nvext.decode_pin_field();
            let message = format!("{field}: worker {id} does not serve model {:?}", pool.name);
            Err(Reject::from(Error::NotFound(message)).param(field))
        }
        id => Ok(id.map(|instance_id| Pin { instance_id, dp_rank: None })),
    }
}
