//! Routes of the indexer.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, header};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use hyper::body::Incoming;
use hyper_util::service::TowerToHyperService;
use kvflash_core::catalog::{
    Catalog, EngineFacts, Identity, ModelKey, Registration, Source, check_is_socket,
};
use kvflash_core::error::{Error, Result as KvResult};
use kvflash_core::hash::engine::NameKeys;
use kvflash_core::ids::Worker;
use prometheus_client::registry::Registry;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::super::body::{Intake, Received, check_encoding, discard};
use super::super::metrics::check_prefix;
use super::answer::worker_entries;
use super::dump::{DUMP_TYPE, DumpQuery, Dumps, binary_body, digests, json_body};
use super::form::{Form, Params, refuse_encoded};
use super::mask::FLAG as HASH_SECRET;
use super::metrics::{self, Endpoint, IndexerMetrics};
use super::overlap::{find_hashes, find_tokens};
use super::recover::recover;
use super::request::{Listener, PeerUrl, Query, QueryByHash, Register, Unregister, WorkersFilter};
use super::startup::Startup;
use crate::cause::Warning;
use crate::lock::Subject;
use crate::reject::PlainReject;
use crate::settings::IndexerOptions;
use crate::state_file::Registrations;
use crate::{Http, Reject, openapi};

/// Header of responses given before this replica was ready; its value is `false`.
const NOT_READY: HeaderName = HeaderName::from_static("x-kvflash-ready");

struct App {
    catalog: Arc<Catalog>,
    options: IndexerOptions,
    intake: Intake,
    metrics: Arc<IndexerMetrics>,
    startup: Arc<Startup>,
    dumps: Dumps,
    http: Http,
    /// Registrations over HTTP.
    registrations: Registrations,
}

/// The indexer's HTTP service over a catalog, for [`super::super::serve`].
///
/// # Cost
/// Queries, which gateways send for each prompt, take a shorter path than through the router.
#[derive(Clone)]
pub struct IndexerApp {
    app: Arc<App>,
    router: Router,
}

impl IndexerApp {
    /// The service over `catalog`.
    ///
    /// With peers, recovery begins here, in the current tokio runtime. Publishers wait for its end,
    /// including those registered before if [`Catalog::hold`] was called first.
    ///
    /// # Errors
    /// `InvalidArgument` for a peer with an invalid URL, `Config` for an invalid prefix of metrics.
    pub fn new(catalog: Arc<Catalog>, options: IndexerOptions, http: &Http) -> KvResult<Self> {
        check_prefix(&options.metrics_prefix)?;
        if http.mask.is_some() && !options.peers.is_empty() {
            return Err(Error::Config(format!(
                "{HASH_SECRET} with --peers: replicas recover from each other's block hashes, and the secret hides \
                 them; use only one of the two"
            )));
        }
        let (has_peers, limit) = (!options.peers.is_empty(), options.max_body_bytes);
        let app = App::new(catalog, options, http, |registry| http.intake(limit, registry))?;
        let counted = from_fn_with_state(Arc::clone(&app.metrics), metrics::count);
        if has_peers {
            app.catalog.hold();
        }
        app.registrations.restore(http.state_file.as_deref(), |request: Register| {
            register_at(&app.catalog, request).map_err(|error| error.to_string())
        })?;
        if has_peers {
            let (catalog, startup) = (Arc::clone(&app.catalog), Arc::clone(&app.startup));
            let trusted = startup.peers();
            tokio::spawn(recover(catalog, startup, http.clone(), trusted));
        }
        let app = Arc::new(app);
        let mut router = Router::new();
        if app.options.test_endpoints {
            router = router
                .route("/test/pause_listener", post(pause_listener))
                .route("/test/resume_listener", post(resume_listener));
        }
        let router = router
            .route("/ready", get(ready))
            .route("/register_peer", post(register_peer))
            .route("/deregister_peer", post(deregister_peer))
            .route("/peers", get(peers))
            .route("/digest", get(digest))
            .route("/health", get(health))
            .route("/live", get(async || StatusCode::OK))
            .route(
                "/metrics",
                get(async |State(app): State<Arc<App>>| {
                    app.metrics.expose(&app.options.metrics_prefix)
                }),
            )
            .route("/register", post(register))
            .route("/unregister", post(unregister))
            .route("/workers", get(workers))
            .route("/query", post(query))
            .route("/query_by_hash", post(query_by_hash))
            .route("/dump", get(dump));
        let router = openapi::complete(router, openapi::INDEXER);
        let router = router.with_state(Arc::clone(&app));
        let router = router.layer(from_fn(refuse_encoded)).layer(counted);
        Ok(Self { app, router })
    }

    /// The same as routes, to be combined with others.
    pub fn router(&self) -> Router {
        self.router.clone()
    }

    /// Saves registrations that could not be saved before; call it on a timer. It writes to a file.
    pub fn save_again(&self) {
        self.app.registrations.try_again();
    }

    /// Whether the start is complete, as GET /ready reports it.
    pub fn is_ready(&self) -> bool {
        self.app.startup.is_ready(&self.app.catalog)
    }
}

impl crate::App for IndexerApp {
    type Service = Self;

    fn service(&self) -> Self {
        self.clone()
    }
}

impl hyper::service::Service<Request<Incoming>> for IndexerApp {
    type Response = Response;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response, Infallible>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        match Endpoint::from_name(request.uri().path()) {
            Some(endpoint) if request.method() == Method::POST => {
                let app = Arc::clone(&self.app);
                Box::pin(async move {
                    let started = Instant::now();
                    let (head, mut body) = request.into_parts();
                    let response = app.ask(endpoint, &head.headers, &mut body).await;
                    app.metrics.count_question(endpoint, response.status().as_u16(), started);
                    Ok(response)
                })
            }
            _ => Box::pin(TowerToHyperService::new(self.router()).call(request)),
        }
    }
}

/// Only the query routes, over a catalog that another service fills.
///
/// # Errors
/// None without peers.
pub(crate) fn query_routes(
    catalog: &Arc<Catalog>,
    intake: &Intake,
    http: &Http,
) -> KvResult<Router> {
    let options = IndexerOptions::default();
    let app = App::new(Arc::clone(catalog), options, http, |_| intake.clone())?;
    let routes = Router::new()
        .route("/query", post(query))
        .route("/query_by_hash", post(query_by_hash))
        .route("/dump", get(dump))
        .route("/digest", get(digest));
    Ok(routes.with_state(Arc::new(app)))
}

impl App {
    fn new(
        catalog: Arc<Catalog>,
        options: IndexerOptions,
        http: &Http,
        intake: impl FnOnce(&mut Registry) -> Intake,
    ) -> KvResult<Self> {
        let startup = Arc::new(Startup::new(&options.peers, options.min_initial_workers)?);
        let (metrics, intake) =
            IndexerMetrics::new(Arc::clone(&catalog), Arc::clone(&startup), intake);
        Ok(Self {
            catalog,
            options,
            intake,
            metrics: Arc::new(metrics),
            startup,
            dumps: Dumps::default(),
            http: http.clone(),
            registrations: Registrations::default(),
        })
    }

    /// Reads a bounded body, and parses it.
    async fn parse<T: DeserializeOwned>(&self, body: Body) -> Result<T, Reject> {
        Form::Json.parse(&self.intake.whole(body).await?.bytes)
    }

    /// Answers a query, in the formats given by `headers`.
    async fn ask(
        &self,
        endpoint: Endpoint,
        headers: &HeaderMap,
        body: &mut (impl http_body::Body<Data = Bytes> + Unpin),
    ) -> Response {
        let received = match check_encoding(headers) {
            Ok(()) => self.intake.whole(body).await,
            Err(reject) => {
                discard(body).await;
                Err(reject)
            }
        };
        let found = received.and_then(|Received { bytes, .. }| {
            let (form, to) = (Form::of_body(headers), Form::of_answer(headers));
            let found = match endpoint {
                Endpoint::Query => self.query(&form.parse_query(&bytes)?, to)?,
                Endpoint::QueryByHash => self.query_by_hash(&form.parse(&bytes)?, to)?,
            };
            Ok((to, found))
        });
        match found {
            Ok((form, bytes)) => self.mark(overlaps(form, bytes)),
            Err(reject) => reject.plain(),
        }
    }

    fn query(&self, request: &Query, form: Form) -> Result<Vec<u8>, Reject> {
        let salt = request.salt()?;
        let model = self.catalog.model(&request.model_name, &request.tenant_id)?;
        let path = request.lora_path.as_deref().unwrap_or("");
        let keys = NameKeys {
            lora: request.lora_name.as_deref().map(|name| (name, path)),
            cache_salt: salt,
            media: &request.mm,
            embeds: &request.embeds,
        };
        Ok(find_tokens(&model, &request.token_ids.0, &keys, form))
    }

    fn query_by_hash(&self, request: &QueryByHash, form: Form) -> Result<Vec<u8>, Reject> {
        let model = self.catalog.model(&request.model_name, &request.tenant_id)?;
        Ok(find_hashes(&model, &request.block_hashes.0, form))
    }

    /// Marks responses given before this replica was ready.
    fn mark(&self, mut response: Response) -> Response {
        if !self.startup.is_ready(&self.catalog) {
            response.headers_mut().insert(NOT_READY, HeaderValue::from_static("false"));
        }
        response
    }
}

type Answer = Result<Response, PlainReject>;

async fn register(State(app): State<Arc<App>>, body: Body) -> Answer {
    let request: Register = app.parse(body).await?;
    app.http.worker_allow.check_socket("endpoint", &request.endpoint).await?;
    if let Some(replay) = &request.replay_endpoint {
        app.http.worker_allow.check_socket("replay_endpoint", replay).await?;
    }
    let worker = format!("{}/{}", request.instance_id, request.dp_rank);
    // Quoted, so that no name of a model can look like another with a tenant.
    let key = format!("{worker}/{:?}/{:?}", request.model_name, request.tenant_id);
    let mut change = app.registrations.change();
    register_at(&app.catalog, request.clone())?;
    change.put(&key, &request);
    drop(change);
    let response = Form::Json.respond(StatusCode::CREATED, &json!({"status": "ok"}));
    Ok(Subject::mark(response, &worker, &request.endpoint))
}

fn register_at(catalog: &Catalog, request: Register) -> KvResult<()> {
    check_is_socket("endpoint", &request.endpoint)?;
    if let Some(replay) = &request.replay_endpoint {
        check_is_socket("replay_endpoint", replay)?;
    }
    let registered = catalog.register(Registration {
        worker: Worker::new(request.instance_id, request.dp_rank),
        key: ModelKey { model_name: request.model_name, tenant_id: request.tenant_id },
        block_size: Some(request.block_size.get()),
        endpoint: request.endpoint,
        replay_endpoint: request.replay_endpoint,
        capacity_blocks: request.capacity_blocks,
        identity: Identity { lora_name: request.lora_name, cache_salt: request.additional_salt },
        facts: EngineFacts {
            attention_chunk_size: request.attention_chunk_size,
            offload_chunk: request.offload_chunk,
        },
        source: Source::Zmq,
    });
    registered.map(drop)
}

async fn unregister(State(app): State<Arc<App>>, body: Body) -> Answer {
    let request: Unregister = app.parse(body).await?;
    let mut change = app.registrations.change();
    app.catalog.unregister(
        request.instance_id,
        &request.model_name,
        request.tenant_id.as_deref(),
        request.dp_rank,
    )?;
    let is_meant =
        |body: &_| Register::deserialize(body).is_ok_and(|registered| request.means(&registered));
    change.remove_where(&format!("{}/", request.instance_id), is_meant);
    Ok(Form::Json.respond(StatusCode::OK, &json!({"status": "ok"})))
}

async fn workers(State(app): State<Arc<App>>, Params(filter): Params<WorkersFilter>) -> Response {
    Form::Json.respond(StatusCode::OK, &worker_entries(&app.catalog, filter.model_name.as_deref()))
}

async fn query(State(app): State<Arc<App>>, headers: HeaderMap, mut body: Body) -> Response {
    app.ask(Endpoint::Query, &headers, &mut body).await
}

async fn query_by_hash(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    mut body: Body,
) -> Response {
    app.ask(Endpoint::QueryByHash, &headers, &mut body).await
}

fn overlaps(form: Form, bytes: Vec<u8>) -> Response {
    let mut response = Response::new(Body::from(bytes));
    let media_type = HeaderValue::from_static(form.media_type());
    response.headers_mut().insert(header::CONTENT_TYPE, media_type);
    response
}

async fn dump(State(app): State<Arc<App>>, Params(query): Params<DumpQuery>) -> Answer {
    let reading = app.dumps.begin()?;
    let (kind, body) = match query.format.as_deref() {
        None | Some("json") => {
            let mask = app.http.mask.clone();
            ("application/json", json_body(&app.catalog, &query, reading, mask))
        }
        Some("snapshot") if app.http.mask.is_some() => {
            let what = "format=snapshot is for replicas, which need the hashes as they are; this server hides them \
                        (--hash-secret-file): leave that out on all replicas, or use format=json";
            return Err(Reject::new(StatusCode::FORBIDDEN, what).into());
        }
        Some("snapshot") => (DUMP_TYPE, binary_body(&app.catalog, &query, reading)),
        Some(other) => {
            let message = format!("format must be json or snapshot, got {other:?}");
            return Err(Reject::bad_request(message).into());
        }
    };
    Ok(app.mark((StatusCode::OK, [(header::CONTENT_TYPE, kind)], body).into_response()))
}

async fn digest(State(app): State<Arc<App>>, Params(query): Params<DumpQuery>) -> Answer {
    let reading = app.dumps.begin()?;
    let found = digests(&app.catalog, &query, &reading, app.http.mask.as_ref());
    Ok(app.mark(Form::Json.respond(StatusCode::OK, &found)))
}

async fn ready(State(app): State<Arc<App>>) -> Response {
    match app.startup.answer(&app.catalog, app.http.shutdown().is_announced()) {
        (true, answer) => Form::Json.respond(StatusCode::OK, &answer),
        (false, answer) => Form::not_ready(&answer),
    }
}

/// 200 while the process runs: empty, as the published API has it, unless there are warnings.
async fn health(State(app): State<Arc<App>>) -> Response {
    let warnings = Warning::of_files(&app.registrations, &app.http);
    if warnings.is_empty() {
        return StatusCode::OK.into_response();
    }
    let texts = Warning::texts(&warnings);
    let answer = json!({ "status": "degraded", "warnings": texts, "causes": warnings });
    Form::Json.respond(StatusCode::OK, &answer)
}

async fn register_peer(State(app): State<Arc<App>>, body: Body) -> Answer {
    let request: PeerUrl = app.parse(body).await?;
    app.startup.add_peer(&request.url)?;
    Ok(Form::Json.respond(StatusCode::CREATED, &json!({"status": "ok"})))
}

async fn deregister_peer(State(app): State<Arc<App>>, body: Body) -> Answer {
    let request: PeerUrl = app.parse(body).await?;
    app.startup.remove_peer(&request.url)?;
    Ok(Form::Json.respond(StatusCode::OK, &json!({"status": "ok"})))
}

async fn peers(State(app): State<Arc<App>>) -> Response {
    Form::Json.respond(StatusCode::OK, &app.startup.peers())
}

async fn pause_listener(State(app): State<Arc<App>>, body: Body) -> Answer {
    set_paused(&app, body, true).await
}

async fn resume_listener(State(app): State<Arc<App>>, body: Body) -> Answer {
    set_paused(&app, body, false).await
}

async fn set_paused(app: &App, body: Body, is_paused: bool) -> Answer {
    let request: Listener = app.parse(body).await?;
    app.catalog.pause(Worker::new(request.instance_id, request.dp_rank), is_paused)?;
    Ok(Form::Json.respond(StatusCode::OK, &json!({"status": "ok"})))
}
