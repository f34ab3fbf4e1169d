//! The frontend as a service: its workers, its routes.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{OriginalUri, State};
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::routing::{MethodFilter, get, on, post};
use axum::{Extension, Router};
use kvflash_core::catalog::Catalog;
use kvflash_core::clock::Clock;
use kvflash_core::error::Result;
use kvflash_core::ids::InstanceId;
use kvflash_core::select::{Outbox, Selector};

use super::app::App;
use super::engine::Engine;
use super::engine_spec::EngineSpec;
use super::options::FrontendOptions;
use super::runtime::registry;
use super::workers::NewWorker;
use super::{admin, probe, scrape, workers};
use crate::gateway::api::{Form, RESPONSES, ROWS, Row};
use crate::gateway::call::Head;
use crate::gateway::send::forward;
use crate::{Caller, Peer, Reject, body, openapi};

/// The frontend's service: add engines, serve [`FrontendApp::router`], stop with the given
/// shutdown.
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
    ) -> Result<Self> {
        Ok(Self { app: Arc::new(App::new(options, catalog, clock)?) })
    }

    /// Adds an engine and monitors it. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// An invalid address, an existing one, or the limit; see the fleet.
    pub fn add(&self, spec: EngineSpec) -> Result<InstanceId> {
        probe::add(&self.app, spec).map(|engine| engine.id)
    }

    /// Restores the content of `--state-file`. Must be called within a tokio runtime, once, after
    /// the workers from flags were added.
    ///
    /// # Errors
    /// `Config`, naming the file.
    pub fn restore(&self) -> Result<()> {
        let app = &self.app;
        let file = app.options.http.state_file.as_deref();
        app.registrations.restore(file, |new: NewWorker| {
            new.register(app, None).map(drop).map_err(|reject| reject.message)
        })
    }

    /// Adds or changes a worker of the runtime, from its JSON. Must be called within a tokio
    /// runtime.
    ///
    /// # Errors
    /// `Config` naming the field or the tokenizer's file, `Overloaded` at a limit.
    ///
    /// # Cost
    /// The first worker of a model loads its tokenizer, which takes up to seconds.
    pub fn put_worker(&self, json: &str) -> Result<InstanceId> {
        registry::put(&self.app, json)
    }

    /// Removes a worker: it gets no new requests; those in flight go on.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn remove_worker(&self, id: InstanceId) -> Result<()> {
        let was_refused = self.app.fleet.note_refused(id, None);
        let is_member = |engine: &Arc<Engine>| engine.member.is_some();
        if was_refused && !self.app.fleet.engine(id).as_ref().is_some_and(is_member) {
            // The id may be that of a worker from elsewhere, which is why it was refused.
            return Ok(());
        }
        self.app.fleet.remove(id).map(|_| ())
    }

    /// Sets whether a worker takes new requests.
    ///
    /// # Errors
    /// `NotFound`; `Config` for an unknown state.
    pub fn set_worker_state(&self, id: InstanceId, state: &str) -> Result<()> {
        self.app.fleet.set_state(id, state.parse()?).map(drop)
    }

    /// Sets the caller's warnings about failed matching, for `/health`; replaces earlier ones.
    pub fn set_warnings(&self, warnings: Vec<String>) {
        *self.app.outside_warnings.write() = warnings;
    }

    /// Applies a runtime worker's report of its load, from its JSON.
    ///
    /// # Errors
    /// `Config` naming the field; `NotFound` for an unregistered worker.
    pub fn report_load(&self, json: &str) -> Result<()> {
        registry::report(&self.app, json)
    }

    /// Whether it accepts requests, as `GET /ready` reports it, and has checked each worker once.
    pub fn is_ready(&self) -> bool {
        let is_checked =
            |engine: &Arc<Engine>| engine.is_healthy() || engine.notes.lock().last_error.is_some();
        admin::not_ready(&self.app).is_none() && self.app.fleet.engines().iter().all(is_checked)
    }

    /// Saves registrations that could not be saved before; call it on a timer. It writes to a file.
    pub fn save_again(&self) {
        self.app.registrations.try_again();
    }

    /// Frees inactive bookings; call it on a timer.
    pub fn expire(&self) -> usize {
        for pool in self.app.fleet.pools() {
            if let Some(room) = &pool.waiting {
                // Workers may have joined since the last request.
                room.call(pool.serving());
            }
        }
        let expired = self.app.fleet.expire();
        self.app.metrics.load_expired.inc_by(expired as u64);
        expired
    }

    /// The routes, ready for [`super::super::serve`].
    pub fn router(&self) -> Router {
        let forwarded = |row: &'static Row| {
            on(
                MethodFilter::try_from(row.method.clone()).expect("rows have methods of routes"),
                async move |State(app): State<Arc<App>>,
                            OriginalUri(uri): OriginalUri,
                            headers: HeaderMap,
                            peer: Option<Extension<Peer>>,
                            caller: Caller,
                            body: Body| {
                    let http = &app.options.http;
                    let address =
                        peer.map(|Extension(Peer(peer))| http.client_of(peer.ip(), &headers));
                    forward(app, row, Head { uri, headers, address, caller }, body).await
                },
            )
        };
        let mut routes = Router::new();
        for row in ROWS.iter().chain(&RESPONSES) {
            routes = routes.route(row.path, forwarded(row));
        }
        routes
            .route("/v1/models", get(admin::models))
            .route("/v1/models/{*id}", get(admin::model))
            .route("/health", get(admin::health))
            .route("/live", get(async || StatusCode::OK))
            .route("/ready", get(admin::ready))
            .route("/metrics", get(scrape::metrics))
            .route("/workers", get(workers::workers).post(workers::add_worker))
            .route(
                "/workers/{id}",
                get(workers::tell_worker)
                    .patch(workers::change_worker)
                    .delete(workers::remove_worker),
            )
            .route("/explain", post(admin::explain))
            .route("/why/{id}", get(admin::why))
            .route("/busy_threshold", get(admin::thresholds).post(admin::set_thresholds))
            .route("/openapi.json", get(async || openapi::answer(openapi::FRONTEND)))
            .fallback(async |uri: Uri, mut body: Body| {
                body::discard(&mut body).await;
                let (form, message) = Row::missing(uri.path());
                form.refuse(Reject::no_path(message))
            })
            .method_not_allowed_fallback(async |method: Method, uri: Uri, mut body: Body| {
                body::discard(&mut body).await;
                let message =
                    format!("{} does not accept {method}; see the Allow header", uri.path());
                Form::of(uri.path()).refuse(Reject::new(StatusCode::METHOD_NOT_ALLOWED, message))
            })
            .with_state(Arc::clone(&self.app))
            .merge(self.app.questions.clone().unwrap_or_default())
    }

    /// Receives the bookings of all models.
    pub fn outbox(&self) -> Arc<Outbox> {
        Arc::clone(&self.app.fleet.common.outbox)
    }

    /// The selectors of all models.
    pub fn selectors(&self) -> Vec<Arc<Selector>> {
        self.app.fleet.pools().iter().map(|pool| Arc::clone(&pool.selector)).collect()
    }

    /// Uses this indexer from now on, in place of a discovered one; none if `None`.
    ///
    /// # Errors
    /// `Config` for an invalid address.
    pub fn set_remote_indexer(&self, url: Option<&str>) -> Result<()> {
        self.app.remote.as_ref().map_or(Ok(()), |remote| remote.set(url))
    }

    /// Sets additional lines for `/metrics`, in the text format.
    pub fn set_more_metrics(&self, text: String) {
        *self.app.common.more.write() = text;
    }
}
