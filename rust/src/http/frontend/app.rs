//! Routes of the frontend, and a request's way through it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use axum::body::Body;
use axum::extract::{OriginalUri, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Extension, Router};
use bytes::Bytes;
use http_body::Body as _;
use parking_lot::RwLock;

use super::super::body::{self, Unreadable};
use super::super::indexer::query_routes;
use super::super::metrics::{CommonMetrics, RequestLabel};
use super::super::policy_metrics::PolicyMetrics;
use super::super::remote::RemoteIndexer;
use super::super::{Peer, Reject, Shutdown};
use super::admin;
use super::attempt::{Failed, attempt};
use super::busy;
use super::disagg::{Handoff, Prefill};
use super::engine::{Engine, EngineSpec};
use super::fairness::{Turn, client_name};
use super::fleet::Fleet;
use super::metrics::{CauseLabel, FrontendMetrics};
use super::nvext::Nvext;
use super::openai_prefill;
use super::options::FrontendOptions;
use super::plan::{Api, Plan};
use super::probe;
use super::proxy::Upstream;
use super::query;
use super::reply::{PREFILL_HEADER, answer, relay};
use super::request::Envelope;
use super::runtime::body::Generation;
use super::runtime::call::{self, Ask};
use super::runtime::member::{ModelText, Tokenizers};
use super::runtime::registry;
use super::runtime::spec::ModelInput;
use super::urgency::Urgency;
use crate::catalog::Catalog;
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::ids::InstanceId;
use crate::router::Usage;
use crate::select::MAX_REQUEST_ID_BYTES;
use crate::text::TextModel;

pub(super) static REQUEST_ID_HEADER: HeaderName = HeaderName::from_static("x-request-id");

pub(super) struct App {
    pub options: FrontendOptions,
    pub catalog: Arc<Catalog>,
    pub fleet: Fleet,
    pub upstream: Upstream,
    pub text: Option<Arc<TextModel>>,
    /// The same with its end tokens, for workers whose card names no tokenizer.
    pub own_text: Option<Arc<ModelText>>,
    pub tokenizers: Tokenizers,
    /// Clients are told how to come back to their worker.
    pub keeps_sessions: bool,
    pub common: CommonMetrics,
    pub metrics: FrontendMetrics,
    /// Metrics that others keep, as text.
    pub more_metrics: RwLock<String>,
    pub shutdown: Shutdown,
    /// Who knows what workers hold, where that is not the catalog.
    pub remote: Option<RemoteIndexer>,
    /// The indexer's routes, where they are served.
    questions: Option<Router>,
    in_flight: AtomicUsize,
    /// Whether there were once as many workers as the start waits for.
    has_started: AtomicBool,
}

/// A request's place among those in flight; given back when it is dropped.
pub(super) struct InFlight {
    app: Arc<App>,
    /// Its turn, where clients take turns.
    pub turn: Option<Turn>,
}

impl InFlight {
    /// What was used so far, at the end of an answer.
    pub fn used(&self, usage: Usage) {
        if let Some(turn) = &self.turn {
            turn.used(usage);
        }
    }

    /// So many tokens were generated up to now.
    pub fn generated(&self, tokens: u64) {
        if let Some(turn) = &self.turn {
            turn.generated(tokens);
        }
    }

    fn answered(&self) {
        if let Some(turn) = &self.turn {
            turn.answered();
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.app.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The frontend's service: add engines, serve [`FrontendApp::router`], stop with the shutdown it was given.
#[derive(Clone)]
pub struct FrontendApp {
    pub(super) app: Arc<App>,
}

impl FrontendApp {
    /// A frontend without engines.
    ///
    /// # Errors
    /// `Config`, naming the flag or the tokenizer's file.
    pub fn new(
        options: FrontendOptions,
        catalog: Arc<Catalog>,
        clock: Arc<dyn Clock>,
        shutdown: Shutdown,
    ) -> Result<Self> {
        options.check()?;
        let tokenizers = Tokenizers::default();
        let own_text = match &options.tokenizer {
            Some(folder) => Some(tokenizers.open(folder, options.tokenizer_cache_bytes)?),
            None => None,
        };
        let (common, mut registry) = CommonMetrics::new();
        let metrics = FrontendMetrics::register(&mut registry);
        let policy_metrics = PolicyMetrics {
            name: options.policy_name().to_owned(),
            policies: options.policies.clone(),
            settings: options.settings.clone(),
        };
        registry.register_collector(Box::new(policy_metrics));
        let remote = options.remote_indexer.as_ref();
        let remote =
            remote.map(|options| RemoteIndexer::new(options, &mut registry)).transpose()?;
        if let Some(tls) = &options.tls {
            tls.register(&mut registry);
        }
        common.seal(registry);
        let questions = match options.serve_indexer {
            true => Some(query_routes(Arc::clone(&catalog), options.max_body_bytes)?),
            false => None,
        };
        let app = App {
            keeps_sessions: options.policy_name() == "session-affinity",
            fleet: Fleet::new(options.clone(), Arc::clone(&catalog), clock),
            upstream: Upstream::new(options.connect_timeout, options.worker_api_key.as_deref())?,
            options,
            catalog,
            text: own_text.as_ref().map(|text| Arc::clone(&text.model)),
            own_text,
            tokenizers,
            common,
            metrics,
            more_metrics: RwLock::default(),
            shutdown,
            remote,
            questions,
            in_flight: AtomicUsize::new(0),
            has_started: AtomicBool::new(false),
        };
        Ok(Self { app: Arc::new(app) })
    }

    /// Add an engine and watch it. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// See the fleet: a bad address, one that is there already, or the limit.
    pub fn add(&self, spec: EngineSpec) -> Result<InstanceId> {
        self.app.add_engine(spec).map(|engine| engine.id)
    }

    /// Add a worker of the runtime, or change it, by its JSON. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// `Config` naming the field or the tokenizer's file, `Overloaded` at a limit.
    ///
    /// # Cost
    /// The first worker of a model loads its tokenizer, which takes up to seconds.
    pub fn put_worker(&self, json: &str) -> Result<InstanceId> {
        registry::put(&self.app, json)
    }

    /// Remove a worker: no new requests; those in flight go on.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn remove_worker(&self, id: InstanceId) -> Result<()> {
        self.app.fleet.remove(id).map(|_| ())
    }

    /// Take a runtime worker's own report of its load, by its JSON.
    ///
    /// # Errors
    /// `Config` naming the field; `NotFound` for a worker that is not registered.
    pub fn report_load(&self, json: &str) -> Result<()> {
        registry::report(&self.app, json)
    }

    /// Free bookings that nothing was heard of; call it on a timer.
    pub fn expire(&self) -> usize {
        for pool in self.app.fleet.pools() {
            if let Some(room) = &pool.waiting {
                // Workers may have come since the last request did.
                room.call(pool.members().healthy());
            }
        }
        let expired: usize = self.app.fleet.pools().iter().map(|pool| pool.selector.tick()).sum();
        for queue in self.app.fleet.pools().iter().filter_map(|pool| pool.queue.as_ref()) {
            // Workers may have become well, and others' bookings may have ended.
            queue.call();
        }
        self.app.metrics.load_expired.inc_by(expired as u64);
        expired
    }

    /// The routes, ready for [`super::super::serve`].
    pub fn router(&self) -> Router {
        let openai = |api: Api| {
            post(
                async move |State(app): State<Arc<App>>,
                            OriginalUri(uri): OriginalUri,
                            headers: HeaderMap,
                            peer: Option<Extension<Peer>>,
                            body: Body| {
                    let address = peer.map(|Extension(Peer(address))| address.ip().to_string());
                    forward(app, api, uri, headers, address, body).await
                },
            )
        };
        Router::new()
            .route("/v1/chat/completions", openai(Api::Chat))
            .route("/v1/completions", openai(Api::Completions))
            .route("/v1/models", get(admin::models))
            .route("/health", get(admin::health))
            .route("/ready", get(admin::ready))
            .route("/metrics", get(admin::metrics))
            .route("/workers", get(admin::workers).post(admin::add_worker))
            .route("/workers/{id}", axum::routing::delete(admin::remove_worker))
            .route("/explain", post(admin::explain))
            .route("/why/{id}", get(admin::why))
            .route("/busy_threshold", get(busy::list).post(busy::change))
            .fallback(async |uri: Uri, mut body: Body| {
                body::discard(&mut body).await;
                Reject::new(StatusCode::NOT_FOUND, format!("no such path: {}", uri.path())).openai()
            })
            .method_not_allowed_fallback(async |method: Method, uri: Uri, mut body: Body| {
                body::discard(&mut body).await;
                let message = format!("{} does not take {method}", uri.path());
                Reject::new(StatusCode::METHOD_NOT_ALLOWED, message).openai()
            })
            .with_state(Arc::clone(&self.app))
            .merge(self.app.questions.clone().unwrap_or_default())
    }
}

impl App {
    pub fn add_engine(self: &Arc<Self>, spec: EngineSpec) -> Result<Arc<Engine>> {
        let engine = self.fleet.add(spec)?;
        tokio::spawn(probe::watch(Arc::clone(self), Arc::clone(&engine), self.shutdown.clone()));
        Ok(engine)
    }

    /// A request gets an answer of this process's own instead of a worker's.
    fn refused(&self, cause: &'static str) {
        self.metrics.refused.get_or_create(&CauseLabel { cause }).inc();
    }

    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Whether requests are taken: from the moment on at which enough workers were healthy at once.
    ///
    /// # Errors
    /// `NoWorker`, saying how many are missing.
    pub fn started(&self) -> Result<()> {
        let wanted = self.options.min_initial_workers;
        // Relaxed: who sees it late counts the workers once more.
        if wanted == 0 || self.has_started.load(Ordering::Relaxed) {
            return Ok(());
        }
        let engines = self.fleet.engines();
        let healthy = engines.iter().filter(|engine| engine.is_healthy()).count();
        if healthy >= wanted {
            self.has_started.store(true, Ordering::Relaxed);
            return Ok(());
        }
        Err(Error::NoWorker(format!(
            "starting: {healthy} of the {wanted} workers that must be healthy first \
             (--min-initial-workers)"
        )))
    }

    fn admit(self: &Arc<Self>) -> Result<InFlight, Reject> {
        let limit = self.options.max_concurrent_requests;
        if self.in_flight.fetch_add(1, Ordering::Relaxed) >= limit {
            self.in_flight.fetch_sub(1, Ordering::Relaxed);
            self.metrics.refused.get_or_create(&CauseLabel { cause: "concurrency" }).inc();
            return Err(Error::Overloaded(format!(
                "{limit} requests are in flight, the limit (--max-concurrent-requests)"
            ))
            .into());
        }
        Ok(InFlight { app: Arc::clone(self), turn: None })
    }

    /// The whole body, within its limits of size and time.
    pub async fn read_body(&self, mut body: Body) -> Result<Bytes, Reject> {
        let limit = self.options.max_body_bytes;
        let timeout = self.options.body_timeout;
        let too_large = || {
            let message =
                format!("the body is larger than the limit of {limit} bytes (--max-body-bytes)");
            Reject::new(StatusCode::PAYLOAD_TOO_LARGE, message)
        };
        // Declared too large: refused without being asked for.
        if body.size_hint().lower() > limit as u64 {
            return Err(too_large());
        }
        match tokio::time::timeout(timeout, body::read(&mut body, limit)).await {
            Ok(Ok(bytes)) => Ok(bytes),
            Ok(Err(Unreadable::TooLarge)) => {
                body::discard(&mut body).await;
                Err(too_large())
            }
            Ok(Err(Unreadable::CutOff)) => {
                Err(Reject::bad_request("the body ended before its declared length"))
            }
            Err(_) => Err(Reject::new(
                StatusCode::REQUEST_TIMEOUT,
                format!(
                    "the body did not arrive within {} s (--body-timeout)",
                    timeout.as_secs_f64()
                ),
            )),
        }
    }
}

/// A request from its head to its answer's head; the [`Relay`] goes on from there.
async fn forward(
    app: Arc<App>,
    api: Api,
    uri: Uri,
    headers: HeaderMap,
    address: Option<String>,
    body: Body,
) -> Response {
    let started = Instant::now();
    let request_id = request_id(&headers);
    let address = address.as_deref();
    let answered = attempt_all(&app, api, &uri, &headers, body, &request_id, address).await;
    let mut response = match answered {
        Ok(response) => response,
        Err(reject) => reject.openai(),
    };
    if let Ok(value) = HeaderValue::try_from(request_id) {
        response.headers_mut().insert(REQUEST_ID_HEADER.clone(), value);
    }
    let label = RequestLabel { endpoint: api.path(), status: response.status().as_u16() };
    app.common.requests.get_or_create(&label).inc();
    app.common.request_seconds.observe(started.elapsed().as_secs_f64());
    response
}

/// The name under which a request's decisions are kept: the client's where it gave a usable one.
fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get(&REQUEST_ID_HEADER).and_then(|value| value.to_str().ok());
    let is_usable = |id: &&str| (1..=MAX_REQUEST_ID_BYTES).contains(&id.len());
    given
        .filter(is_usable)
        .map_or_else(|| format!("{:032x}", rand::random::<u128>()), str::to_owned)
}

async fn attempt_all(
    app: &Arc<App>,
    api: Api,
    uri: &Uri,
    headers: &HeaderMap,
    mut body: Body,
    request_id: &str,
    address: Option<&str>,
) -> Result<Response, Reject> {
    let admitted = match app.started() {
        Ok(()) => app.admit(),
        Err(error) => {
            app.refused("no_worker");
            Err(error.into())
        }
    };
    let mut in_flight = match admitted {
        Ok(in_flight) => in_flight,
        Err(reject) => {
            // Else the client, still sending, may see its connection reset instead of the answer.
            body::discard(&mut body).await;
            return Err(reject);
        }
    };
    let body = app.read_body(body).await?;
    let started = Instant::now();
    let envelope = Envelope::parse(&body)?;
    let nvext = Nvext::parse(envelope.nvext)?;
    let plan = Plan::make(app, api, &envelope, headers, body.len(), nvext.is_query()).await;
    let mut plan = plan.inspect_err(|reject| {
        if reject.status == StatusCode::SERVICE_UNAVAILABLE {
            app.refused("no_worker");
        }
    })?;
    plan.request_id = Some(request_id.to_owned());
    let is_plain_heard = plan.route.pool.is_queued();
    let urgency = Urgency::read(headers, &nvext, envelope.priority, is_plain_heard)?;
    plan.wish = urgency.wish();
    plan.expected_output_tokens = nvext.expected_output_tokens();
    plan.pin(nvext.decode_pin())?;
    app.metrics.route_seconds.observe(started.elapsed().as_secs_f64());
    let mut prefill = Prefill::of(app, &plan, &nvext).await?;
    let ask = ask(&plan, api, headers, &body, &envelope, &nvext, request_id)?;
    drop(envelope);
    if nvext.is_query() {
        plan.decode_only(prefill.peek().await.is_some());
        return query::answer(&ask, &plan, &prefill).await;
    }

    if let Some(room) = &plan.route.pool.waiting {
        let client = client_name(plan.client.user.as_deref(), headers, address);
        let workers = plan.route.pool.members().healthy();
        let waited = Instant::now();
        let turn = room.turn(&client, plan.cost(room.cached_share), urgency.turn(), workers).await;
        app.metrics.turn_seconds.observe(waited.elapsed().as_secs_f64());
        in_flight.turn = Some(turn.inspect_err(|_| app.refused("no_turn"))?);
    }

    let mut handoff = Handoff::Alone;
    let mut tried: Vec<InstanceId> = Vec::new();
    let mut last: Option<Failed> = None;
    while tried.len() < app.options.max_attempts {
        // What a prefill beside has begun is of no use to another worker.
        if !prefill.is_idle() && !matches!(handoff, Handoff::Done { .. }) {
            handoff = prefill.hand_off(app, &ask).await?;
            plan.decode_only(!handoff.is_alone());
        }
        let choice = match plan.book(&app.metrics, &tried).await {
            Ok(choice) => choice,
            // Everybody eligible was tried: say how that went, not that nobody is left.
            Err(_) if last.is_some() => break,
            Err(error) => {
                let cause = match error {
                    Error::AllBusy(_) => "all_busy",
                    Error::InvalidArgument(_) => "invalid",
                    Error::Overloaded(_) => "overloaded",
                    _ => "no_worker",
                };
                app.refused(cause);
                return Err(error.into());
            }
        };
        let engine = Arc::clone(&choice.engine);
        tried.push(engine.id);
        if engine.member.is_some() {
            match call::open(app, &choice, &ask, &mut handoff).await {
                Ok(opened) => {
                    app.metrics.first_byte_seconds.observe(started.elapsed().as_secs_f64());
                    choice.booking.first_token();
                    in_flight.answered();
                    plan.count(&app.metrics, &choice);
                    let overlap = plan.reusable_blocks(choice.overlap_blocks);
                    return answer(app, choice, ask, handoff, opened, overlap, in_flight).await;
                }
                Err(failed) if failed.is_final => return Err(failed.into()),
                Err(failed) => {
                    failed.note(app, &engine, tried.len());
                    if failed.cause == "prefill_failed" {
                        // The worker was well; it may have the request again.
                        tried.pop();
                    } else if let Handoff::Beside { worker, .. } = &handoff {
                        prefill.spare(*worker);
                    }
                    last = Some(failed);
                    continue;
                }
            }
        }
        let changed = match &handoff {
            Handoff::Done { params, .. } => openai_prefill::decode_body(&body, params)?,
            _ => body.clone(),
        };
        match attempt(app, &choice, uri, headers, &changed).await {
            Ok((head, first, upstream)) => {
                app.metrics.first_byte_seconds.observe(started.elapsed().as_secs_f64());
                if head.status.is_success() {
                    choice.booking.first_token();
                    in_flight.answered();
                    plan.count(&app.metrics, &choice);
                }
                let overlap = plan.reusable_blocks(choice.overlap_blocks);
                let mut response = relay(
                    app,
                    engine,
                    choice.booking,
                    overlap,
                    head,
                    first,
                    upstream,
                    plan.prompt_tokens(),
                    in_flight,
                );
                let prefiller = handoff.worker().map(|worker| worker.to_string());
                if let Some(Ok(value)) = prefiller.map(HeaderValue::try_from) {
                    response.headers_mut().insert(PREFILL_HEADER.clone(), value);
                }
                return Ok(response);
            }
            Err(failed) => {
                failed.note(app, &engine, tried.len());
                last = Some(failed);
            }
        }
    }
    app.refused("all_failed");
    let failed =
        last.unwrap_or_else(|| Failed::new("none", String::new(), StatusCode::BAD_GATEWAY));
    let mut reject = Reject::new(
        failed.status,
        format!(
            "no worker answered; tried {tried:?}, the last one failed with: {}",
            failed.message
        ),
    );
    if failed.status == StatusCode::SERVICE_UNAVAILABLE {
        reject.retry_after_s = Some(1);
    }
    Err(reject)
}

/// What every attempt at a request needs.
fn ask(
    plan: &Plan,
    api: Api,
    headers: &HeaderMap,
    body: &Bytes,
    envelope: &Envelope<'_>,
    nvext: &Nvext,
    request_id: &str,
) -> Result<Ask, Reject> {
    let members = plan.route.pool.members();
    let mut generation = None;
    let mut runtime = members.all().filter_map(|engine| engine.member.as_ref()).peekable();
    let has_runtime = runtime.peek().is_some();
    if has_runtime && runtime.all(|member| member.spec.card.model_input == ModelInput::Text) {
        generation = Some(Generation::of_text(body)?);
    } else if has_runtime {
        let mut read = Generation::parse(api, body)?;
        let context = members.all().filter_map(|engine| engine.notes.lock().max_model_len).min();
        read.fit(plan.prompt_tokens().unwrap_or(1), context)?;
        generation = Some(read);
    }
    Ok(Ask {
        api,
        request_id: request_id.to_owned(),
        headers: headers.clone(),
        body: body.clone(),
        model: envelope.model.as_deref().unwrap_or(&plan.route.pool.name).to_owned(),
        lora_name: plan.route.lora_name.clone(),
        cache_salt: envelope.cache_salt.as_deref().map(str::to_owned),
        annotations: nvext.annotations().to_vec(),
        tokens: plan.tokens.clone(),
        generation,
    })
}
