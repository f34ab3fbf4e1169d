//! A client's request, parsed once.

use std::net::IpAddr;
use std::sync::Arc;

use axum::http::header::CONTENT_ENCODING;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri};
use bytes::Bytes;
use kvflash_core::error::Error;
use kvflash_core::select::MAX_REQUEST_ID_BYTES;

use super::api::{Api, Row, Weight};
use super::body::Body;
use super::envelope::Envelope;
use super::foreign;
use super::identity::{Client, Identity};
use super::nvext::Nvext;
use crate::compute::Busy;
use crate::frontend::app::App;
use crate::tenant::pass;
use crate::{Caller, Reject};

pub(crate) static REQUEST_ID_HEADER: HeaderName = HeaderName::from_static("x-request-id");

/// A client's limit of the workers that its request may try.
static MAX_ATTEMPTS_HEADER: HeaderName = HeaderName::from_static("x-kvflash-max-attempts");

/// Size from which a body is parsed on other threads than those that serve, in bytes: about a
/// millisecond.
const LONG_BODY_BYTES: usize = 512 * 1024;

/// The client and its headers: everything known before the body is read.
#[derive(Debug, Clone)]
pub(crate) struct Head {
    pub uri: Uri,
    pub headers: HeaderMap,
    /// The client's address.
    pub address: Option<IpAddr>,
    /// Whose key it came with.
    pub caller: Caller,
}

impl Head {
    /// The client that is charged for a request with the name `user`: the owner of its key, if it
    /// has one.
    pub fn client(&self, user: Option<&str>, identity: &Identity) -> Client {
        match self.caller.key() {
            Some(key) => Client::known(&key.id),
            None => identity.client(user, &self.headers, self.address),
        }
    }

    /// The client's request id, if it differs from the request's.
    pub fn client_request_id(&self) -> Option<HeaderValue> {
        pass::client(&self.caller)?;
        self.headers.get(&REQUEST_ID_HEADER).cloned()
    }

    /// The request's name in the journal and at engines: the client's if it is usable and the
    /// client has no key. With keys, clients can't choose names that engines see.
    pub fn request_id(&self) -> String {
        if pass::client(&self.caller).is_some() {
            return format!("kvf-{:032x}", rand::random::<u128>());
        }
        let given = self.headers.get(&REQUEST_ID_HEADER).and_then(|value| value.to_str().ok());
        let is_usable = |id: &&str| (1..=MAX_REQUEST_ID_BYTES).contains(&id.len());
        given
            .filter(is_usable)
            .map_or_else(|| format!("{:032x}", rand::random::<u128>()), str::to_owned)
    }
}

/// A client's request. Workers receive its body unchanged.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    /// The requested path.
    pub row: &'static Row,
    pub head: Head,
    pub request_id: String,
    pub body: Arc<Body>,
    /// Its own routing options.
    pub nvext: Nvext,
    /// Whether an engine uses its prefix cache for it, and reports that for a single prompt.
    pub reuses_prefix: bool,
    /// Maximum workers to try, if its client limits them.
    pub max_attempts: Option<usize>,
}

impl Call {
    /// Combines a body and the `envelope` that was read from it; `row` is derived from its fields
    /// if the path does not determine it.
    ///
    /// # Errors
    /// 400 naming the field, what was expected and what came.
    pub fn new(
        row: Option<&'static Row>,
        head: Head,
        request_id: String,
        body: &Arc<Body>,
        envelope: &Envelope<'_>,
    ) -> Result<Self, Reject> {
        let row = row.unwrap_or_else(|| Row::of_fields(envelope.messages.is_some()));
        let nvext = Nvext::parse(envelope.nvext)?;
        let reuses_prefix = envelope.reuses_prefix() && foreign::reuses_prefix(row.api, body);
        let (body, max_attempts) = (Arc::clone(body), max_attempts(&head.headers)?);
        Ok(Self { row, head, request_id, body, nvext, reuses_prefix, max_attempts })
    }

    pub fn api(&self) -> Api {
        self.row.api
    }

    /// A request's body, parsed, for a long one on other threads than those that serve. Uploads are
    /// not parsed, and the body of a request that names a response is dropped.
    ///
    /// # Errors
    /// 400 for anything but a JSON object; 429 if all cores are busy with such work.
    pub async fn body(
        app: &App,
        row: Option<&Row>,
        head: &Head,
        bytes: Bytes,
    ) -> Result<Arc<Body>, Reject> {
        if row.is_some_and(|row| row.weight == Weight::Sound) {
            return Ok(Arc::new(Body::opaque(bytes)));
        }
        if row.is_some_and(Row::names_response) {
            return Ok(Arc::new(Body::opaque(Bytes::new())));
        }
        let encoding =
            head.headers.get(CONTENT_ENCODING).map_or(&b"identity"[..], HeaderValue::as_bytes);
        if !encoding.eq_ignore_ascii_case(b"identity") {
            let what = format!(
                "content-encoding {:?} is not supported: send the body without compression",
                String::from_utf8_lossy(encoding)
            );
            return Err(Reject::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, what));
        }
        let len = bytes.len();
        let parse = || Body::parse(bytes).map(Arc::new);
        if len <= LONG_BODY_BYTES {
            return parse();
        }
        let client = head.client(None, &Identity::default());
        let done = app.compute.run(client.as_name(), len, parse).await;
        done.unwrap_or_else(|Busy| {
            app.refused("tokenizer");
            let what = "all cores are busy with long requests; try again".to_owned();
            Err(Error::Overloaded(what).into())
        })
    }
}

/// The client's limit of workers to try, from a request's headers.
///
/// # Errors
/// 400 for anything but a number of at least 1.
fn max_attempts(headers: &HeaderMap) -> Result<Option<usize>, Reject> {
    let Some(value) = headers.get(&MAX_ATTEMPTS_HEADER) else { return Ok(None) };
    let text = value.to_str().unwrap_or("no text").trim();
    // A number above every setting means no limit.
    let number = text.parse::<u64>().ok().filter(|attempts| *attempts > 0);
    let Some(number) = number else {
        let text: String = text.chars().take(64).collect();
        return Err(Reject::bad_request(format!(
            "header {MAX_ATTEMPTS_HEADER} must be a whole number of at least 1, got {text:?}: leave it out for \
             the server's own limit (--max-attempts)"
        )));
    };
    Ok(Some(usize::try_from(number).unwrap_or(usize::MAX)))
}
