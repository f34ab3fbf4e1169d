//! Routes of the frontend, and a request's way through it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Body;
use axum::extract::{OriginalUri, State};
use axum::http::{HeaderMap, HeaderName, Method, StatusCode, Uri};
use axum::routing::{get, post};
use axum::{Extension, Router};
use bytes::Bytes;
use http_body::Body as _;
use kvflash_core::catalog::Catalog;
use kvflash_core::clock::Clock;
use kvflash_core::error::{Error, Result};
use kvflash_core::ids::InstanceId;
use kvflash_core::router::Usage;
use kvflash_core::select::StartGate;
use kvflash_core::text::TextModel;
use parking_lot::{Mutex, RwLock};

use super::super::aside::Aside;
use super::super::body::{self, Unreadable};
use super::super::indexer::query_routes;
use super::super::metrics::CommonMetrics;
use super::super::policy_metrics::PolicyMetrics;
use super::super::remote::RemoteIndexer;
use super::super::{Peer, Reject, Shutdown};
use super::admin;
use super::busy;
use super::engine::{Engine, EngineSpec};
use super::fairness::Turn;
use super::fleet::Fleet;
use super::forward::forward;
use super::metrics::{CauseLabel, FrontendMetrics};
use super::options::FrontendOptions;
use super::plan::Api;
use super::probe;
use super::proxy::Upstream;
use super::runtime::member::{ModelText, Tokenizers};
use super::runtime::registry;
use super::scrape;

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
    /// What makes matching fail and is known outside only.
    pub outside_warnings: RwLock<Vec<String>>,
    /// Why workers of discovery were not taken, by the name of each.
    pub refused_workers: Mutex<BTreeMap<InstanceId, String>>,
    /// Metrics that others keep, as text.
    pub more_metrics: RwLock<String>,
    /// Where answers that tell of every worker are made.
    pub aside: Aside,
    pub shutdown: Shutdown,
    /// Who knows what workers hold, where that is not the catalog.
    pub remote: Option<RemoteIndexer>,
    /// The indexer's routes, where they are served.
    questions: Option<Router>,
    in_flight: AtomicUsize,
    /// Whether there were once as many workers as the start waits for.
    start: StartGate,
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

    /// A worker answers.
    pub fn answered(&self) {
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
        let wanted = options.min_initial_workers;
        let app = App {
            start: StartGate::new(wanted, "be healthy", "--min-initial-workers"),
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
            outside_warnings: RwLock::default(),
            refused_workers: Mutex::default(),
            more_metrics: RwLock::default(),
            aside: Aside::default(),
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
        let was_refused = self.app.refused_workers.lock().remove(&id).is_some();
        match self.app.fleet.remove(id) {
            Err(Error::NotFound(_)) if was_refused => Ok(()),
            removed => removed.map(|_| ()),
        }
    }

    /// What makes matching fail and only the caller knows, for `/health`; replaces what it said before.
    pub fn set_warnings(&self, warnings: Vec<String>) {
        *self.app.outside_warnings.write() = warnings;
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
            .route("/v1/models/{*id}", get(admin::model))
            .route("/health", get(admin::health))
            .route("/ready", get(admin::ready))
            .route("/metrics", get(scrape::metrics))
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
    pub fn refused(&self, cause: &'static str) {
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
        self.start
            .check(|| self.fleet.engines().iter().filter(|engine| engine.is_healthy()).count())
    }

    pub fn admit(self: &Arc<Self>) -> Result<InFlight, Reject> {
        let limit = self.options.max_concurrent_requests;
        if self.in_flight.fetch_add(1, Ordering::Relaxed) >= limit {
            self.in_flight.fetch_sub(1, Ordering::Relaxed);
            self.refused("concurrency");
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
