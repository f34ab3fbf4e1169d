//! Routes of the indexer.

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::super::Reject;
use super::super::body::{self, Unreadable};
use super::super::metrics::{CommonMetrics, RequestLabel};
use super::answer::worker_entries;
use super::dump::dump_body;
use super::form::{Form, Params};
use super::openapi::openapi;
use super::overlap::{find, find_tokens};
use super::request::{Query, QueryByHash, Register, Unregister};
use crate::catalog::{Catalog, Identity, ModelKey, Registration};
use crate::ids::Worker;

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
    metrics: CommonMetrics,
}

/// The indexer's HTTP service over a catalog.
pub struct IndexerApp;

impl IndexerApp {
    /// Routes over `catalog`, ready for [`super::super::serve`].
    pub fn router(catalog: Arc<Catalog>, options: IndexerOptions) -> Router {
        let (metrics, registry) = CommonMetrics::new();
        metrics.seal(registry);
        let app = Arc::new(App { catalog, options, metrics });
        Router::new()
            .route("/health", get(async || StatusCode::OK))
            .route(
                "/metrics",
                get(async |State(app): State<Arc<App>>| app.metrics.expose(&app.catalog)),
            )
            .route("/register", post(register))
            .route("/unregister", post(unregister))
            .route("/workers", get(workers))
            .route("/query", post(query))
            .route("/query_by_hash", post(query_by_hash))
            .route("/dump", get(dump))
            .route("/openapi.json", get(openapi))
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
    }
}

impl App {
    /// Read a bounded body, parse it, answer, count.
    async fn answer<T: DeserializeOwned>(
        &self,
        endpoint: &'static str,
        body: Body,
        act: impl FnOnce(&Self, T) -> Result<Response, Reject>,
    ) -> Response {
        self.answer_form(endpoint, Form::Json, body, act).await
    }

    /// As [`Self::answer`], of a body in either form.
    async fn answer_form<T: DeserializeOwned>(
        &self,
        endpoint: &'static str,
        form: Form,
        body: Body,
        act: impl FnOnce(&Self, T) -> Result<Response, Reject>,
    ) -> Response {
        let started = Instant::now();
        let request = self.read(body).await.and_then(|bytes| form.parse(&bytes));
        let response = match request.and_then(|request| act(self, request)) {
            Ok(response) => response,
            Err(reject) => reject.plain(),
        };
        let status = response.status().as_u16();
        self.metrics.requests.get_or_create(&RequestLabel { endpoint, status }).inc();
        self.metrics.request_seconds.observe(started.elapsed().as_secs_f64());
        response
    }

    async fn read(&self, mut body: Body) -> Result<Bytes, Reject> {
        let limit = self.options.max_body_bytes;
        match body::read(&mut body, limit).await {
            Ok(bytes) => Ok(bytes),
            Err(Unreadable::TooLarge) => {
                body::discard(&mut body).await;
                let message = format!("the body is larger than the limit of {limit} bytes");
                Err(Reject::new(StatusCode::PAYLOAD_TOO_LARGE, message))
            }
            Err(Unreadable::CutOff) => {
                Err(Reject::bad_request("the body ended before its declared length"))
            }
        }
    }
}

fn json_response(status: StatusCode, body: &impl Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(bytes) => (status, [(header::CONTENT_TYPE, "application/json")], bytes).into_response(),
        Err(error) => Reject::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).plain(),
    }
}

async fn register(State(app): State<Arc<App>>, body: Body) -> Response {
    app.answer("/register", body, |app, request: Register| {
        app.catalog.register(Registration {
            worker: Worker::new(request.instance_id, request.dp_rank),
            key: ModelKey { model_name: request.model_name, tenant_id: request.tenant_id },
            block_size: Some(request.block_size),
            endpoint: request.endpoint,
            replay_endpoint: request.replay_endpoint,
            identity: Identity {
                lora_name: request.lora_name,
                cache_salt: request.additional_salt,
            },
        })?;
        Ok(json_response(StatusCode::CREATED, &serde_json::json!({"status": "ok"})))
    })
    .await
}

async fn unregister(State(app): State<Arc<App>>, body: Body) -> Response {
    app.answer("/unregister", body, |app, request: Unregister| {
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

async fn workers(State(app): State<Arc<App>>, Params(filter): Params<WorkersFilter>) -> Response {
    json_response(StatusCode::OK, &worker_entries(&app.catalog, filter.model_name.as_deref()))
}

async fn query(State(app): State<Arc<App>>, headers: HeaderMap, body: Body) -> Response {
    app.answer_form("/query", Form::of_body(&headers), body, |app, request: Query| {
        let salt = request.salt()?;
        let model = app.catalog.model(&request.model_name, &request.tenant_id)?;
        let form = Form::of_answer(&headers);
        let lora_name = request.lora_name.as_deref();
        Ok(overlaps(form, find_tokens(&model, &request.token_ids.0, lora_name, salt, form)))
    })
    .await
}

async fn query_by_hash(State(app): State<Arc<App>>, headers: HeaderMap, body: Body) -> Response {
    app.answer_form("/query_by_hash", Form::of_body(&headers), body, |app, request: QueryByHash| {
        let model = app.catalog.model(&request.model_name, &request.tenant_id)?;
        let form = Form::of_answer(&headers);
        Ok(overlaps(form, find(&model, &request.block_hashes.0, form)))
    })
    .await
}

fn overlaps(form: Form, bytes: Vec<u8>) -> Response {
    (StatusCode::OK, [(header::CONTENT_TYPE, form.media_type())], bytes).into_response()
}

async fn dump(State(app): State<Arc<App>>) -> Response {
    let body = dump_body(app.catalog.models());
    (StatusCode::OK, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}
