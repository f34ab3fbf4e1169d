//! Routes of the frontend, and a request's way through it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::extract::{OriginalUri, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::response::Response;
use axum::routing::{get, post};
use bytes::Bytes;
use http_body::Body as _;
use http_body_util::BodyExt;
use hyper::body::Incoming;

use super::super::body::{self, Unreadable};
use super::super::indexer::query_routes;
use super::super::metrics::{CommonMetrics, RequestLabel};
use super::super::remote::RemoteIndexer;
use super::super::{Reject, Shutdown};
use super::admin;
use super::busy;
use super::engine::{Engine, EngineSpec};
use super::fleet::Fleet;
use super::metrics::{CauseLabel, FrontendMetrics};
use super::options::FrontendOptions;
use super::plan::{Api, Plan};
use super::probe;
use super::proxy::{Upstream, client_headers, upstream_request};
use super::relay::Relay;
use super::request::Envelope;
use crate::catalog::Catalog;
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::ids::InstanceId;
use crate::select::{MAX_REQUEST_ID_BYTES, Reservation};
use crate::text::{CacheOptions, TextModel, TextOptions};

pub(super) static WORKER_HEADER: HeaderName = HeaderName::from_static("x-kvflash-worker");
pub(super) static REQUEST_ID_HEADER: HeaderName = HeaderName::from_static("x-request-id");
pub(super) static OVERLAP_HEADER: HeaderName = HeaderName::from_static("x-kvflash-overlap-blocks");

pub(super) struct App {
    pub options: FrontendOptions,
    pub catalog: Arc<Catalog>,
    pub fleet: Fleet,
    pub upstream: Upstream,
    pub text: Option<Arc<TextModel>>,
    pub common: CommonMetrics,
    pub metrics: FrontendMetrics,
    pub shutdown: Shutdown,
    /// Who knows what workers hold, where that is not the catalog.
    pub remote: Option<RemoteIndexer>,
    /// The indexer's routes, where they are served.
    questions: Option<Router>,
    in_flight: AtomicUsize,
}

/// A request's place among those in flight; given back when it is dropped.
pub(super) struct InFlight(Arc<App>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The frontend's service: add engines, serve [`FrontendApp::router`], stop with the shutdown it was given.
#[derive(Clone)]
pub struct FrontendApp {
    app: Arc<App>,
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
        let text = match &options.tokenizer {
            Some(folder) => {
                let cache = CacheOptions { capacity_bytes: options.tokenizer_cache_bytes };
                let text = TextOptions { cache, ..TextOptions::default() };
                Some(Arc::new(TextModel::from_folder(folder, text)?))
            }
            None => None,
        };
        let (common, mut registry) = CommonMetrics::new();
        let metrics = FrontendMetrics::register(&mut registry);
        let remote = options.remote_indexer.as_ref();
        let remote =
            remote.map(|options| RemoteIndexer::new(options, &mut registry)).transpose()?;
        common.seal(registry);
        let questions = match options.serve_indexer {
            true => Some(query_routes(Arc::clone(&catalog), options.max_body_bytes)?),
            false => None,
        };
        let app = App {
            fleet: Fleet::new(options.clone(), Arc::clone(&catalog), clock),
            upstream: Upstream::new(options.connect_timeout, options.worker_api_key.as_deref())?,
            options,
            catalog,
            text,
            common,
            metrics,
            shutdown,
            remote,
            questions,
            in_flight: AtomicUsize::new(0),
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

    /// Free bookings that nothing was heard of; call it on a timer.
    pub fn expire(&self) -> usize {
        let expired: usize = self.app.fleet.pools().iter().map(|pool| pool.selector.tick()).sum();
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
                            body: Body| forward(app, api, uri, headers, body).await,
            )
        };
        Router::new()
            .route("/v1/chat/completions", openai(Api::Chat))
            .route("/v1/completions", openai(Api::Completions))
            .route("/v1/models", get(admin::models))
            .route("/health", get(admin::health))
            .route("/metrics", get(admin::metrics))
            .route("/workers", get(admin::workers).post(admin::add_worker))
            .route("/workers/{id}", axum::routing::delete(admin::remove_worker))
            .route("/explain", post(admin::explain))
            .route("/why/{id}", get(admin::why))
            .route("/busy_threshold", get(busy::list).post(busy::change))
            .fallback(async |uri: Uri| {
                Reject::new(StatusCode::NOT_FOUND, format!("no such path: {}", uri.path())).openai()
            })
            .method_not_allowed_fallback(async |method: Method, uri: Uri| {
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

    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
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
        Ok(InFlight(Arc::clone(self)))
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
async fn forward(app: Arc<App>, api: Api, uri: Uri, headers: HeaderMap, body: Body) -> Response {
    let started = Instant::now();
    let request_id = request_id(&headers);
    let mut response = match attempt_all(&app, api, &uri, &headers, body, &request_id).await {
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
    body: Body,
    request_id: &str,
) -> Result<Response, Reject> {
    let in_flight = app.admit()?;
    let body = app.read_body(body).await?;
    let started = Instant::now();
    let envelope = Envelope::parse(&body)?;
    let mut plan = Plan::make(app, api, &envelope, body.len()).await?;
    plan.request_id = Some(request_id.to_owned());
    app.metrics.route_seconds.observe(started.elapsed().as_secs_f64());
    drop(envelope);

    let mut tried: Vec<InstanceId> = Vec::new();
    let mut last: Option<Failed> = None;
    while tried.len() < app.options.max_attempts {
        let choice = match plan.book(&tried) {
            Ok(choice) => choice,
            // Everybody eligible was tried: say how that went, not that nobody is left.
            Err(_) if last.is_some() => break,
            Err(error) => {
                let is_busy = matches!(error, Error::AllBusy(_));
                let cause = if is_busy { "all_busy" } else { "no_worker" };
                app.metrics.refused.get_or_create(&CauseLabel { cause }).inc();
                return Err(error.into());
            }
        };
        let engine = Arc::clone(&choice.engine);
        tried.push(engine.id);
        match attempt(app, &choice, uri, headers, &body).await {
            Ok((head, first, upstream)) => {
                app.metrics.first_byte_seconds.observe(started.elapsed().as_secs_f64());
                if head.status.is_success() {
                    choice.booking.first_token();
                    plan.count(&app.metrics, &choice);
                }
                let worker = choice.booking.worker();
                let overlap = plan.reusable_blocks(choice.overlap_blocks);
                return Ok(relay(
                    app,
                    engine,
                    choice.booking,
                    worker.to_string(),
                    overlap,
                    head,
                    first,
                    upstream,
                    plan.prompt_tokens(),
                    in_flight,
                ));
            }
            Err(failed) => {
                app.metrics
                    .attempts_failed
                    .get_or_create(&CauseLabel { cause: failed.cause })
                    .inc();
                if failed.is_engine_at_fault {
                    engine.failed(&failed.message);
                }
                tracing::warn!(
                    worker = engine.id,
                    cause = failed.cause,
                    why = failed.message,
                    attempt = tried.len(),
                    "attempt failed before the first byte; trying another worker"
                );
                last = Some(failed);
            }
        }
    }
    app.metrics.refused.get_or_create(&CauseLabel { cause: "all_failed" }).inc();
    let failed = last.unwrap_or(Failed {
        cause: "none",
        message: String::new(),
        status: StatusCode::BAD_GATEWAY,
        is_engine_at_fault: false,
    });
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

/// An attempt that ended before the first byte.
struct Failed {
    cause: &'static str,
    message: String,
    /// What the client gets when no other worker does better.
    status: StatusCode,
    is_engine_at_fault: bool,
}

struct Head {
    status: StatusCode,
    headers: HeaderMap,
    is_event_stream: bool,
}

async fn attempt(
    app: &App,
    choice: &super::plan::Choice,
    uri: &Uri,
    headers: &HeaderMap,
    body: &Bytes,
) -> std::result::Result<(Head, Option<Bytes>, Incoming), Failed> {
    let engine = &choice.engine;
    engine.requests.fetch_add(1, Ordering::Relaxed);
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let target = format!("{}{path}", engine.base).parse::<Uri>().map_err(|error| Failed {
        cause: "bad_target",
        message: error.to_string(),
        status: StatusCode::BAD_GATEWAY,
        is_engine_at_fault: false,
    })?;
    let rank = (engine.spec.dp_size > 1).then(|| choice.booking.worker().dp_rank);
    let request = upstream_request(&Method::POST, target, headers, rank, body.clone());
    let to_first_byte = async {
        let response = app.upstream.send(request).await.map_err(|error| Failed {
            cause: error.cause,
            message: error.message,
            status: StatusCode::BAD_GATEWAY,
            is_engine_at_fault: true,
        })?;
        let (parts, mut upstream) = response.into_parts();
        if parts.status == StatusCode::SERVICE_UNAVAILABLE {
            return Err(Failed {
                cause: "unavailable",
                message: format!("worker {} answered 503", engine.id),
                status: StatusCode::SERVICE_UNAVAILABLE,
                is_engine_at_fault: false,
            });
        }
        // Nothing has reached the client yet: until the first chunk is here, another worker can still do it.
        let mut first = None;
        while first.is_none() && !upstream.is_end_stream() {
            match upstream.frame().await {
                Some(Ok(frame)) => first = frame.into_data().ok().filter(|data| !data.is_empty()),
                Some(Err(error)) => {
                    return Err(Failed {
                        cause: "no_first_byte",
                        message: format!("worker {} broke off its answer: {error}", engine.id),
                        status: StatusCode::BAD_GATEWAY,
                        is_engine_at_fault: true,
                    });
                }
                // No engine completes a prompt with nothing: it died behind its head.
                None if parts.status == StatusCode::OK => {
                    return Err(Failed {
                        cause: "no_first_byte",
                        message: format!("worker {} answered 200 without a body", engine.id),
                        status: StatusCode::BAD_GATEWAY,
                        is_engine_at_fault: true,
                    });
                }
                None => break,
            }
        }
        let is_event_stream = parts
            .headers
            .get(header::CONTENT_TYPE)
            .is_some_and(|value| value.as_bytes().starts_with(b"text/event-stream"));
        let head =
            Head { status: parts.status, headers: client_headers(parts.headers), is_event_stream };
        Ok((head, first, upstream))
    };
    let timeout = app.options.first_byte_timeout;
    tokio::time::timeout(timeout, to_first_byte).await.unwrap_or_else(|_| {
        Err(Failed {
            cause: "timeout",
            message: format!(
                "worker {} sent no byte within {} s (--first-byte-timeout)",
                engine.id,
                timeout.as_secs_f64()
            ),
            status: StatusCode::GATEWAY_TIMEOUT,
            is_engine_at_fault: false,
        })
    })
}

#[allow(clippy::too_many_arguments)]
fn relay(
    app: &Arc<App>,
    engine: Arc<Engine>,
    booking: Reservation,
    worker: String,
    overlap_blocks: u64,
    head: Head,
    first: Option<Bytes>,
    upstream: Incoming,
    prompt_tokens: Option<u64>,
    in_flight: InFlight,
) -> Response {
    let relay = Relay::new(
        Arc::clone(app),
        engine,
        upstream,
        first,
        booking,
        head.is_event_stream,
        prompt_tokens,
        in_flight,
    );
    let mut response = Response::new(Body::new(relay));
    *response.status_mut() = head.status;
    *response.headers_mut() = head.headers;
    let headers = response.headers_mut();
    if head.is_event_stream {
        // A stream that breaks ends with an event more than its engine announced.
        headers.remove(header::CONTENT_LENGTH);
    }
    if let Ok(value) = HeaderValue::try_from(worker) {
        headers.insert(WORKER_HEADER.clone(), value);
    }
    headers.insert(OVERLAP_HEADER.clone(), overlap_blocks.into());
    response
}
