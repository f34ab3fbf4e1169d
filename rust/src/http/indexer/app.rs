//! Routes of the indexer.

use std::cell::RefCell;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Query as UrlQuery, State};
use axum::http::{StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::super::Reject;
use super::super::body::{self, Unreadable};
use super::answer::{QueryAnswer, worker_entries};
use super::dump::dump_body;
use super::metrics::{self, IndexerMetrics};
use super::request::{Query, QueryByHash, Register, Unregister};
use crate::catalog::{Catalog, ModelIndex, ModelKey, Registration};
use crate::hash;
use crate::ids::Worker;
use crate::index::Matches;

/// Limits of the indexer's API.
#[derive(Debug, Clone)]
pub struct IndexerOptions {
    /// Largest request body, bytes.
    pub max_body_bytes: usize,
}

impl Default for IndexerOptions {
    fn default() -> Self {
        Self { max_body_bytes: 8 * 1024 * 1024 }
    }
}

struct App {
    catalog: Arc<Catalog>,
    options: IndexerOptions,
    metrics: Arc<IndexerMetrics>,
}

/// The indexer's HTTP service over a catalog.
pub struct IndexerApp;

impl IndexerApp {
    /// Routes over `catalog`, ready for [`super::super::serve`].
    pub fn router(catalog: Arc<Catalog>, options: IndexerOptions) -> Router {
        let metrics = Arc::new(IndexerMetrics::new(Arc::clone(&catalog)));
        let counted = from_fn_with_state(Arc::clone(&metrics), metrics::count);
        let app = Arc::new(App { catalog, options, metrics });
        Router::new()
            .route("/health", get(async || StatusCode::OK))
            .route("/metrics", get(async |State(app): State<Arc<App>>| app.metrics.expose()))
            .route("/register", post(register))
            .route("/unregister", post(unregister))
            .route("/workers", get(workers))
            .route("/query", post(query))
            .route("/query_by_hash", post(query_by_hash))
            .route("/dump", get(dump))
            .fallback(async |mut body: Body| {
                body::discard(&mut body).await;
                Reject::new(StatusCode::NOT_FOUND, "no such path").plain()
            })
            .method_not_allowed_fallback(async |mut body: Body| {
                body::discard(&mut body).await;
                Reject::new(StatusCode::METHOD_NOT_ALLOWED, "this path takes another method")
                    .plain()
            })
            .with_state(app)
            .layer(counted)
    }
}

impl App {
    /// Read a bounded body, parse it, answer.
    async fn answer<T: DeserializeOwned>(
        &self,
        body: Body,
        act: impl FnOnce(&Self, T) -> Result<Response, Reject>,
    ) -> Response {
        match self.read::<T>(body).await.and_then(|request| act(self, request)) {
            Ok(response) => response,
            Err(reject) => reject.plain(),
        }
    }

    async fn read<T: DeserializeOwned>(&self, mut body: Body) -> Result<T, Reject> {
        let limit = self.options.max_body_bytes;
        let bytes = match body::read(&mut body, limit).await {
            Ok(bytes) => bytes,
            Err(Unreadable::TooLarge) => {
                body::discard(&mut body).await;
                let message = format!("the body is larger than the limit of {limit} bytes");
                return Err(Reject::new(StatusCode::PAYLOAD_TOO_LARGE, message));
            }
            Err(Unreadable::CutOff) => {
                return Err(Reject::bad_request("the body ended before its declared length"));
            }
        };
        // Derived readers would take a list too, field by field.
        if bytes.trim_ascii_start().first() == Some(&b'[') {
            return Err(Reject::bad_request("invalid request body: a list instead of an object"));
        }
        serde_json::from_slice(&bytes).map_err(|error| {
            // Second, slower pass, for the name of the field at fault.
            let mut json = serde_json::Deserializer::from_slice(&bytes);
            match serde_path_to_error::deserialize::<_, T>(&mut json) {
                Err(error) => Reject::bad_request(format!("invalid request body: {error}")),
                Ok(_) => Reject::bad_request(format!("invalid request body: {error}")),
            }
        })
    }

    fn find(&self, model: &ModelIndex, locals: &[u64]) -> Response {
        let Some(block_size) = model.block_size() else {
            return json_response(StatusCode::OK, &QueryAnswer::default());
        };
        thread_local! {
            // The walk's buffers, reused by every query of the thread.
            static MATCHES: RefCell<Matches> = RefCell::default();
        }
        let registered = self.catalog.workers_of(&model.key);
        let answer = MATCHES.with_borrow_mut(|matches| {
            model.index.find_matches(locals, matches);
            QueryAnswer::new(matches, &registered, block_size)
        });
        json_response(StatusCode::OK, &answer)
    }
}

fn json_response(status: StatusCode, body: &impl Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(bytes) => (status, [(header::CONTENT_TYPE, "application/json")], bytes).into_response(),
        Err(error) => Reject::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).plain(),
    }
}

async fn register(State(app): State<Arc<App>>, body: Body) -> Response {
    app.answer(body, |app, request: Register| {
        app.catalog.register(Registration {
            worker: Worker::new(request.instance_id, request.dp_rank),
            key: ModelKey { model_name: request.model_name, tenant_id: request.tenant_id },
            block_size: Some(request.block_size),
            endpoint: request.endpoint,
            replay_endpoint: request.replay_endpoint,
            capacity_blocks: request.capacity_blocks,
        })?;
        Ok(json_response(StatusCode::CREATED, &serde_json::json!({"status": "ok"})))
    })
    .await
}

async fn unregister(State(app): State<Arc<App>>, body: Body) -> Response {
    app.answer(body, |app, request: Unregister| {
        app.catalog.unregister(
            request.instance_id,
            &request.model_name,
            request.tenant_id.as_deref(),
            request.dp_rank,
        )?;
        Ok(json_response(StatusCode::OK, &serde_json::json!({"status": "ok"})))
    })
    .await
}

#[derive(Debug, Deserialize)]
struct WorkersFilter {
    model_name: Option<String>,
}

async fn workers(
    State(app): State<Arc<App>>,
    UrlQuery(filter): UrlQuery<WorkersFilter>,
) -> Response {
    json_response(StatusCode::OK, &worker_entries(&app.catalog, filter.model_name.as_deref()))
}

async fn query(State(app): State<Arc<App>>, body: Body) -> Response {
    app.answer(body, |app, request: Query| {
        let model = app.catalog.model(&request.model_name, &request.tenant_id)?;
        let seed = hash::identity_seed(request.lora_name.as_deref(), request.cache_salt.as_deref());
        let locals = match model.block_size() {
            Some(block_size) => hash::local_hashes(&request.token_ids.0, block_size, seed),
            None => Vec::new(),
        };
        Ok(app.find(&model, &locals))
    })
    .await
}

async fn query_by_hash(State(app): State<Arc<App>>, body: Body) -> Response {
    app.answer(body, |app, request: QueryByHash| {
        let model = app.catalog.model(&request.model_name, &request.tenant_id)?;
        Ok(app.find(&model, &request.block_hashes.0))
    })
    .await
}

async fn dump(State(app): State<Arc<App>>) -> Response {
    let body = dump_body(app.catalog.models());
    (StatusCode::OK, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}
