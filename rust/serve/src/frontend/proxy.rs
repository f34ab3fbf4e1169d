//! HTTP to the engines: one client with pooled connections, and filtered headers.

use std::error::Error as _;
use std::io;
use std::iter;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, header,
};
use bytes::Bytes;
use http_body_util::{BodyExt, Either, Full, Limited};
use hyper::body::Incoming;
use hyper::ext::on_informational;
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use kvflash_core::error::Error;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::engine_spec::{EngineSpec, WorkerKey, base_of, bearer};
use super::options::FrontendOptions;
use crate::body::Forwarded;
use crate::outbound::{Connector, in_full};
use crate::via::VIA;

/// Maximum 1xx responses before the final one: an engine with more never answers.
const MAX_INFORMATIONAL: usize = 16;

/// Maximum idle connections to an engine.
const MAX_IDLE: usize = 1_024;

/// An engine's responses to the frontend's own questions are small; larger ones are refused.
const MAX_ANSWER_BYTES: usize = 8 * 1024 * 1024;

/// The body of a request to an engine: held, or an upload forwarded as it comes.
pub(crate) type Outgoing = Either<Full<Bytes>, Forwarded>;

/// A body that is held.
pub(crate) fn held(body: impl Into<Bytes>) -> Outgoing {
    Outgoing::Left(Full::new(body.into()))
}

/// HTTP/1 to the engines, with persistent connections.
#[derive(Debug, Clone)]
pub(crate) struct Upstream {
    kept: Clients,
    /// Each request has a new connection.
    fresh: Clients,
    /// Authorization of the frontend's own calls.
    authorization: Option<HeaderValue>,
}

#[derive(Debug, Clone)]
struct Clients {
    ours: Client<Connector, Outgoing>,
    /// For workers that were added over HTTP. They have connections of their own: kept ones of the others were not
    /// held to `--worker-allow`.
    added: Client<Connector, Outgoing>,
}

impl Clients {
    fn of(&self, spec: &EngineSpec) -> &Client<Connector, Outgoing> {
        match spec.key {
            WorkerKey::Ours => &self.ours,
            // Somebody added it over HTTP.
            WorkerKey::Own(_) | WorkerKey::Nothing => &self.added,
        }
    }
}

/// Why an attempt, or a call of the frontend itself, ended before the first byte.
#[derive(Debug)]
pub(crate) struct AttemptError {
    pub cause: &'static str,
    pub message: String,
    /// Whether the engine may have received the request.
    pub is_sent: bool,
    /// Whether its system refused or closed the connection, rather than nothing having answered.
    pub is_closed: bool,
    /// The answer's status, where that is the error.
    pub status: Option<u16>,
}

impl AttemptError {
    pub fn new(cause: &'static str, message: impl ToString, is_sent: bool) -> Self {
        Self { cause, message: message.to_string(), is_sent, is_closed: false, status: None }
    }

    /// A call with another answer than 200, as the message says.
    pub fn answered(status: u16, message: impl ToString) -> Self {
        Self { status: Some(status), ..Self::new("status", message, true) }
    }
}

impl Upstream {
    /// # Errors
    /// `Config` for an API key that is not valid in a header.
    pub fn new(options: &FrontendOptions, api_key: Option<&str>) -> Result<Self, Error> {
        let name = "--worker-api-key (or its file or variable)";
        let authorization = api_key.map(|key| bearer(name, key)).transpose()?;
        let (outbound, limit) = (&options.http.outbound, options.connect_timeout);
        let allow = options.http.worker_allow.clone();
        let ours = outbound.connector(limit, None);
        let added = outbound.connector(limit, Some(allow));
        let [kept, fresh] = [MAX_IDLE, 0].map(|max_idle| Clients {
            ours: client_with(ours.clone(), max_idle),
            added: client_with(added.clone(), max_idle),
        });
        Ok(Self { kept, fresh, authorization })
    }

    /// Send a request to a worker of the runtime; returns at the answer's head.
    pub async fn send(
        &self,
        request: Request<Outgoing>,
    ) -> Result<Response<Incoming>, AttemptError> {
        send_with(&self.kept.ours, request).await
    }

    /// Send a request to an engine; returns at the answer's head.
    pub fn send_to(
        &self,
        spec: &EngineSpec,
        request: Request<Outgoing>,
    ) -> impl Future<Output = Result<Response<Incoming>, AttemptError>> {
        send_with(self.kept.of(spec), request)
    }

    /// The key sent to an engine: the frontend's own, or one specific to the engine.
    pub fn authorization<'a>(&'a self, spec: &'a EngineSpec) -> Option<&'a HeaderValue> {
        match &spec.key {
            WorkerKey::Ours => self.authorization.as_ref(),
            WorkerKey::Own(key) => Some(key),
            WorkerKey::Nothing => None,
        }
    }

    /// GET `path` from an engine, with the complete response, at most [`MAX_ANSWER_BYTES`].
    ///
    /// # Errors
    /// Names the path, too.
    pub async fn get(
        &self,
        spec: &EngineSpec,
        path: &str,
        timeout: Duration,
    ) -> Result<(u16, Bytes), AttemptError> {
        let request = || Request::get(url_of(spec, path)).body(held(Bytes::new()));
        match self.whole(spec, request, MAX_ANSWER_BYTES, timeout).await {
            Ok((status, bytes)) => Ok((status.as_u16(), bytes)),
            Err(error) => {
                let message = format!("GET {path}: {}", error.message);
                Err(AttemptError { message, ..error })
            }
        }
    }

    /// POST JSON to `path` at an engine, with the complete response, at most `limit` bytes.
    pub async fn post_json(
        &self,
        spec: &EngineSpec,
        path: &str,
        body: Vec<u8>,
        limit: usize,
        timeout: Duration,
    ) -> Result<(StatusCode, Bytes), AttemptError> {
        let body = Bytes::from(body);
        let request = || {
            Request::post(url_of(spec, path))
                .header(header::CONTENT_TYPE, "application/json")
                .body(held(body.clone()))
        };
        self.whole(spec, request, limit, timeout).await
    }

    /// An engine may close a kept connection just when it is used, which says nothing about the engine. The request is
    /// then repeated on a new connection: none of the frontend's own calls changes anything.
    async fn whole(
        &self,
        spec: &EngineSpec,
        request: impl Fn() -> axum::http::Result<Request<Outgoing>>,
        limit: usize,
        timeout: Duration,
    ) -> Result<(StatusCode, Bytes), AttemptError> {
        let send = async |clients: &Clients| {
            let mut request =
                request().map_err(|error| AttemptError::new("bad_target", error, false))?;
            if let Some(authorization) = self.authorization(spec) {
                request.headers_mut().insert(header::AUTHORIZATION, authorization.clone());
            }
            send_with(clients.of(spec), request).await
        };
        let whole = async {
            let response = match send(&self.kept).await {
                Err(error) if error.is_sent && error.is_closed => send(&self.fresh).await?,
                answered => answered?,
            };
            let status = response.status();
            let whole = Limited::new(response.into_body(), limit).collect().await;
            let whole = whole.map_err(|error| AttemptError::new("no_answer", error, true))?;
            Ok((status, whole.to_bytes()))
        };
        tokio::time::timeout(timeout, whole).await.unwrap_or_else(|_| {
            let why = format!("no answer within {} ms", timeout.as_millis());
            Err(AttemptError::new("timeout", why, true))
        })
    }
}

fn url_of(spec: &EngineSpec, path: &str) -> String {
    format!("{}{path}", base_of(&spec.url))
}

/// A client that keeps up to `max_idle` connections to each engine.
fn client_with(connector: Connector, max_idle: usize) -> Client<Connector, Outgoing> {
    Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        // Common engines close idle connections after 5 s; be first, so that no request meets a closed one.
        .pool_idle_timeout(Duration::from_secs(4))
        .pool_max_idle_per_host(max_idle)
        .build(connector)
}

async fn send_with(
    client: &Client<Connector, Outgoing>,
    mut request: Request<Outgoing>,
) -> Result<Response<Incoming>, AttemptError> {
    request.headers_mut().append(header::VIA, VIA.clone());
    let count = AtomicUsize::new(0);
    let (told, endless) = oneshot::channel();
    let told = Mutex::new(Some(told));
    on_informational(&mut request, move |_| {
        if count.fetch_add(1, Ordering::Relaxed) == MAX_INFORMATIONAL
            && let Some(told) = told.lock().take()
        {
            let _gone = told.send(());
        }
    });
    let answered = tokio::select! {
        biased;
        answered = client.request(request) => answered,
        Ok(()) = endless => {
            let message = format!("more than {MAX_INFORMATIONAL} answers of status 1xx");
            return Err(AttemptError::new("not_an_answer", message, true));
        }
    };
    answered.map_err(|error| {
        let is_sent = !error.is_connect();
        let cause = if is_sent { "no_answer" } else { "connect" };
        let sources = iter::successors(error.source(), |&inner| inner.source());
        let is_closed = sources.fold(false, |is_closed, inner| is_closed | is_close(inner));
        AttemptError { cause, message: in_full(&error), is_sent, is_closed, status: None }
    })
}

/// Whether the other side's system refused or closed a connection.
fn is_close(error: &(dyn std::error::Error + 'static)) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset};
    let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
    matches!(kind, Some(BrokenPipe | ConnectionRefused | ConnectionReset))
        || error.downcast_ref().is_some_and(hyper::Error::is_incomplete_message)
}

/// Headers that speak about one connection, not about the request or answer.
fn is_hop_by_hop(name: &HeaderName) -> bool {
    matches!(
        name.as_str(),
        "connection"
            | "keep-alive"
            | "proxy-connection"
            | "proxy-authenticate"
            | "proxy-authorization"
            | "te"
            | "trailer"
            | "transfer-encoding"
            | "upgrade"
    )
}

/// Headers that `Connection` declares connection-specific (RFC 9110, 7.6.1).
fn named_by_connection(headers: &HeaderMap) -> Vec<HeaderName> {
    headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect()
}

/// The request for the engine: same method, path and body, without the client's connection headers.
pub(crate) fn upstream_request(
    method: &Method,
    uri: Uri,
    headers: &HeaderMap,
    dp_rank: Option<u32>,
    body: Outgoing,
) -> Request<Outgoing> {
    let mut request = Request::new(body);
    *request.method_mut() = method.clone();
    *request.uri_mut() = uri;
    let out = request.headers_mut();
    out.reserve(headers.len() + 1);
    let named = named_by_connection(headers);
    for (name, value) in headers {
        let is_ours = matches!(*name, header::HOST | header::CONTENT_LENGTH | header::EXPECT);
        if !is_ours && !is_hop_by_hop(name) && !named.contains(name) {
            out.append(name.clone(), value.clone());
        }
    }
    if let Some(rank) = dp_rank {
        // vLLM's header for the rank that must take the request.
        out.insert(HeaderName::from_static("x-data-parallel-rank"), rank.into());
    }
    request
}

/// Headers that tell a browser which pages may read an answer. `--cors-origin` decides that here; engines allow every
/// page by default.
fn is_of_cors(name: &HeaderName) -> bool {
    name.as_str().starts_with("access-control-")
}

/// The response headers for the client.
pub(crate) fn client_headers(mut headers: HeaderMap) -> HeaderMap {
    let mut listed = named_by_connection(&headers);
    listed.extend(headers.keys().filter(|name| is_hop_by_hop(name) || is_of_cors(name)).cloned());
    if headers.contains_key(header::TRANSFER_ENCODING) {
        // The body ends where its chunks do; a length beside them is wrong (RFC 9112, 6.3).
        listed.push(header::CONTENT_LENGTH);
    }
    for name in listed {
        headers.remove(name);
    }
    headers
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_length_beside_chunks_is_not_passed_on() {
        let pairs = |given: &[(HeaderName, &'static str)]| {
            let pairs = given.iter().cloned();
            HeaderMap::from_iter(pairs.map(|(name, value)| (name, HeaderValue::from_static(value))))
        };
        let plain = [(header::CONTENT_LENGTH, "5"), (header::CONTENT_TYPE, "application/json")];
        assert_eq!(client_headers(pairs(&plain)), pairs(&plain));
        let chunked = [&plain[..], &[(header::TRANSFER_ENCODING, "chunked")]].concat();
        assert_eq!(client_headers(pairs(&chunked)), pairs(&plain[1..]));
    }

    #[test]
    fn an_engine_lets_no_page_read_its_answer() {
        let mut headers = HeaderMap::new();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
        headers.insert(header::ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
        headers.insert(header::VARY, HeaderValue::from_static("origin"));
        let passed = client_headers(headers);
        assert_eq!(passed.keys().collect::<Vec<_>>(), [header::VARY]);
    }
}
