//! Overlaps from a remote indexer instead of a local index, within a deadline.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use axum::http::{HeaderMap, Request, StatusCode, Uri, header};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use kvflash_core::catalog::ModelKey;
use kvflash_core::error::{Error, Result};
use kvflash_core::ids::Worker;
use kvflash_core::select::{self, Prompt, Selector};
use parking_lot::{Mutex, RwLock};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::time::Instant;

use super::Http;
use super::frontend::engine_spec::without_login;
use super::lock::Credential;
use super::metrics::{OutcomeLabel, add, seconds_histogram};
use super::outbound::{Connector, in_full};
use super::reject::{MISSING, Missing};

/// Size limit of a response: thousands of workers.
const ANSWER_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Indexers close connections after 10 idle seconds, possibly while a request is in transit.
const IDLE_TIMEOUT: Duration = Duration::from_secs(4);
const IDLE_CONNECTIONS_MAX: usize = 64;

const QUERY_PATH: &str = "/query_by_hash";
/// How an indexer's error about an unknown model begins, for those without the header.
const OLD_UNKNOWN_MODEL: &str = "no indexer for ";

/// Address of the indexer, and its deadline.
#[derive(Debug, Clone)]
pub struct RemoteIndexerOptions {
    /// Its address, `http://host:port`; empty: discovered later.
    pub url: String,
    /// Longest wait for an answer.
    pub deadline: Duration,
}

/// Why there is no response.
#[derive(Debug)]
enum Failure {
    Late,
    Unknown,
    Other(String),
}

/// A kvflash indexer, queried over HTTP.
pub(super) struct RemoteIndexer {
    client: Client<Connector, Full<Bytes>>,
    /// Address of queries; `None` until it is discovered.
    uri: RwLock<Option<Uri>>,
    deadline: Duration,
    credential: Credential,
    lookups: Family<OutcomeLabel, Counter>,
    seconds: Histogram,
    /// Why the last query failed.
    trouble: Mutex<Option<String>>,
}

#[derive(Serialize)]
struct Query<'a> {
    model_name: &'a str,
    tenant_id: &'a str,
    #[serde(serialize_with = "as_bytes")]
    block_hashes: &'a [u64],
}

/// Tokens by instance and rank; the rest of the response is for people.
#[derive(Deserialize)]
struct Answer {
    scores: BTreeMap<String, BTreeMap<String, u64>>,
}

fn as_bytes<S: serde::Serializer>(hashes: &&[u64], serializer: S) -> Result<S::Ok, S::Error> {
    let bytes: Vec<u8> = hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
    serializer.serialize_bytes(&bytes)
}

/// Whether a 404 is an indexer's word about the model. Indexers from before the header are known by
/// their error.
fn is_model_unknown(headers: &HeaderMap, body: &[u8]) -> bool {
    match headers.get(MISSING) {
        Some(what) => what == Missing::Entry.name(),
        None => serde_json::from_slice(body).is_ok_and(|body: Value| {
            body["error"].as_str().is_some_and(|error| error.starts_with(OLD_UNKNOWN_MODEL))
        }),
    }
}

/// The address of queries to an indexer.
///
/// # Errors
/// `Config`, naming the flag.
fn question_uri(url: &str) -> Result<Uri> {
    let wrong = || {
        Error::Config(format!(
            "--use-remote-indexer must be http://host:port of an indexer, or https://, got {url:?}"
        ))
    };
    let address = url.trim_end_matches('/');
    let uri: Uri = format!("{address}{QUERY_PATH}").parse().map_err(|_| wrong())?;
    let has_host = uri.authority().is_some_and(|authority| !authority.host().is_empty());
    if !matches!(uri.scheme_str(), Some("http" | "https")) || !has_host || uri.query().is_some() {
        return Err(wrong());
    }
    Ok(uri)
}

impl RemoteIndexer {
    /// A client; sends no query yet.
    ///
    /// # Errors
    /// `Config`, naming the flag.
    pub fn new(
        options: &RemoteIndexerOptions,
        http: &Http,
        registry: &mut Registry,
    ) -> Result<Self> {
        let RemoteIndexerOptions { url, deadline } = options;
        let uri = (!url.is_empty()).then(|| question_uri(url)).transpose()?;
        if deadline.is_zero() {
            return Err(Error::Config("--remote-indexer-deadline must be above 0".to_owned()));
        }
        let connector = http.outbound.connector(*deadline, None);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_max_idle_per_host(IDLE_CONNECTIONS_MAX)
            .build(connector);
        let help = "Queries to the remote indexer, by outcome; without an answer only the load and the prompts sent lately decide";
        let lookups = add(registry, "remote_indexer_lookups", help, Family::default());
        let help = "Time that queries to the remote indexer took, failed ones included";
        let seconds = add(registry, "remote_indexer_lookup_seconds", help, seconds_histogram());
        let (uri, trouble) = (RwLock::new(uri), Mutex::default());
        let (deadline, credential) = (*deadline, http.lock().credential().clone());
        Ok(Self { client, uri, deadline, credential, lookups, seconds, trouble })
    }

    /// Uses this indexer from now on; none if `None`.
    ///
    /// # Errors
    /// `Config` for an invalid address.
    pub fn set(&self, url: Option<&str>) -> Result<()> {
        *self.uri.write() = url.map(question_uri).transpose()?;
        Ok(())
    }

    /// Why the last query failed and what follows, as a warning; `None` if it succeeded.
    pub fn warning(&self) -> Option<String> {
        let why = self.trouble.lock().clone()?;
        Some(format!(
            "--use-remote-indexer: {why}; until it answers, only the load and the prompts sent lately \
             decide"
        ))
    }

    /// Its address, for display; `None` until it is discovered.
    fn url(&self) -> Option<String> {
        let uri = self.uri.read().as_ref()?.to_string();
        Some(without_login(uri.strip_suffix(QUERY_PATH).unwrap_or(&uri)))
    }

    fn note(&self, trouble: Option<String>) {
        let mut known = self.trouble.lock();
        match (&*known, &trouble) {
            (None, Some(why)) => {
                tracing::warn!(why, "the remote indexer cannot be used")
            }
            (Some(_), None) => {
                tracing::info!(url = self.url(), "the remote indexer answers again")
            }
            _ => {}
        }
        *known = trouble;
    }

    /// Sets the overlaps of `request`, if its decision uses them. Without a timely response, which
    /// is counted and logged, overlaps are unknown and load decides.
    ///
    /// # Cost
    /// At most the deadline.
    pub async fn look_up(&self, selector: &Selector, request: &mut select::Request) {
        if selector.uses_overlaps(&request.overrides, &request.prompt) {
            let Prompt { locals, block_size, .. } = &*request.prompt;
            let found = self.overlaps(&selector.model().key, locals, *block_size).await;
            request.overlaps = Some(found.unwrap_or_default());
        }
    }

    /// Leading blocks on each worker's device, by worker; `None` without a response.
    async fn overlaps(
        &self,
        key: &ModelKey,
        locals: &[u64],
        block_size: u32,
    ) -> Option<Vec<(Worker, u32)>> {
        let started = Instant::now();
        let asked = tokio::time::timeout(self.deadline, self.ask(key, locals, block_size)).await;
        self.seconds.observe(started.elapsed().as_secs_f64());
        let url = self.url().unwrap_or_default();
        let (outcome, found, trouble) = match asked.unwrap_or(Err(Failure::Late)) {
            Ok(found) => ("answered", Some(found), None),
            Err(Failure::Late) => {
                let deadline = self.deadline.as_secs_f64();
                ("late", None, Some(format!("no answer within {deadline} s")))
            }
            Err(Failure::Unknown) => (
                "unknown_model",
                None,
                Some(format!(
                    "it does not know the model {key} (model:tenant); kvflash workers {url} lists \
                     those that it knows"
                )),
            ),
            Err(Failure::Other(why)) => ("failed", None, Some(why)),
        };
        self.note(trouble.map(|why| if url.is_empty() { why } else { format!("{url}: {why}") }));
        self.lookups.get_or_create(&OutcomeLabel { outcome }).inc();
        found
    }

    async fn ask(
        &self,
        key: &ModelKey,
        locals: &[u64],
        block_size: u32,
    ) -> Result<Vec<(Worker, u32)>, Failure> {
        let other = |error: &dyn fmt::Display| Failure::Other(error.to_string());
        let query =
            Query { model_name: &key.model_name, tenant_id: &key.tenant_id, block_hashes: locals };
        let body = rmp_serde::to_vec_named(&query).map_err(|error| other(&error))?;
        let uri = self.uri.read().clone();
        let uri = uri.ok_or_else(|| other(&"discovery has no indexer"))?;
        let mut request = Request::post(uri)
            .header(header::CONTENT_TYPE, "application/msgpack")
            .header(header::ACCEPT, "application/msgpack")
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| other(&error))?;
        self.credential.show(request.headers_mut());
        let sent = self.client.request(request).await;
        let response = sent.map_err(|error| Failure::Other(in_full(&error)))?;
        let (parts, body) = response.into_parts();
        let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
        let bytes = body.map_err(|error| Failure::Other(in_full(&*error)))?.to_bytes();
        match parts.status {
            StatusCode::OK => {}
            StatusCode::NOT_FOUND if is_model_unknown(&parts.headers, &bytes) => {
                return Err(Failure::Unknown);
            }
            status @ StatusCode::NOT_FOUND => {
                return Err(other(&format!("not a kvflash indexer: it answered {status}")));
            }
            status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => {
                return Err(other(&format!(
                    "it answered {status}: set --service-key-file to a file with one of its admin keys"
                )));
            }
            status => return Err(other(&format!("it answered {status}"))),
        }
        let answer: Answer = rmp_serde::from_slice(&bytes)
            .map_err(|error| other(&format!("not the answer of a kvflash indexer: {error}")))?;
        let mut found = Vec::new();
        for (instance, ranks) in &answer.scores {
            let instance_id =
                instance.parse().map_err(|_| other(&"a score with an invalid instance"))?;
            for (rank, tokens) in ranks.iter().filter(|(_, tokens)| **tokens > 0) {
                let dp_rank = rank.parse().map_err(|_| other(&"a score with an invalid rank"))?;
                // The indexer counts tokens; with another block size no hash of ours would match.
                let blocks = tokens / u64::from(block_size.max(1));
                found.push((
                    Worker::new(instance_id, dp_rank),
                    blocks.min(locals.len() as u64) as u32,
                ));
            }
        }
        found.sort_unstable();
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn only_an_indexer_says_that_a_model_is_unknown() {
        let ours =
            |what: &'static str| HeaderMap::from_iter([(MISSING, HeaderValue::from_static(what))]);
        assert!(is_model_unknown(&ours("entry"), b""));
        assert!(!is_model_unknown(&ours("path"), br#"{"error": "no such path"}"#));
        // An indexer of before the header, an OpenAI API, a proxy.
        let without = HeaderMap::new();
        assert!(is_model_unknown(&without, br#"{"error": "no indexer for m"}"#));
        assert!(!is_model_unknown(&without, br#"{"error": {"message": "Not Found"}}"#));
        assert!(!is_model_unknown(&without, br#"{"status": 404, "error": "Not Found"}"#));
        assert!(!is_model_unknown(&without, b"Not Found"));
    }
}
