//! A client's request, parsed once; its body is passed through unchanged. Of an upload in parts
//! (`multipart/form-data`) the model is read, the one field that routing needs.

use std::net::IpAddr;
use std::num::IntErrorKind;
use std::sync::Arc;

use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Uri};
use bytes::Bytes;
use kvflash_core::error::Error;
use kvflash_core::select::MAX_REQUEST_ID_BYTES;
use memchr::memmem;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::api::{Api, Row, Weight};
use super::body::{Body, Envelope, is_off};
use super::client::Nvext;
use super::turn::{Client, Identity};
use crate::body::check_encoding;
use crate::compute::Busy;
use crate::frontend::app::App;
use crate::frontend::engine::Engine;
use crate::tenant::pass::REQUEST_ID_HEADER;
use crate::{Caller, Reject};

/// A client's limit of the workers that its request may try.
static MAX_ATTEMPTS_HEADER: HeaderName = HeaderName::from_static("x-kvflash-max-attempts");

/// Size from which a body is parsed on other threads than those that serve, in bytes: about a
/// millisecond.
const LONG_BODY_BYTES: usize = 512 * 1024;

/// Size limit of a part's head, in bytes.
const MAX_PART_HEAD_BYTES: usize = 4_096;

/// Parts of an upload that are searched for the model: a body may hold its boundary millions of
/// times.
const MAX_PARTS: usize = 1_024;

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

    /// Calls `job`, which processes `bytes` of its request, in its client's turn.
    ///
    /// # Errors
    /// [`Busy`].
    pub async fn compute<T: Send>(
        &self,
        app: &App,
        bytes: usize,
        job: impl FnOnce() -> T + Send,
    ) -> Result<T, Busy> {
        let client = self.client(None, &Identity::default());
        app.compute.run(client.as_name(), bytes, job).await
    }

    /// The client's request id, if it differs from the request's.
    pub fn client_request_id(&self) -> Option<HeaderValue> {
        self.caller.client()?;
        self.headers.get(&REQUEST_ID_HEADER).cloned()
    }

    /// The request's name in the journal and at engines: the client's if it is usable and the
    /// client has no key. With keys, clients can't choose names that engines see.
    pub fn request_id(&self) -> String {
        if self.caller.client().is_some() {
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
    /// Whether an engine looks its prompt up in the prefix cache; otherwise no match counts.
    pub reads_cache: bool,
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
        body.check_values(|name| name == "nvext")?;
        let nvext = Nvext::parse(envelope.nvext)?;
        let own = cache_use(row.api, body);
        let reads_cache = envelope.reads_cache() && own.reads;
        let reuses_prefix = envelope.reuses_prefix() && own.reports;
        let (body, max_attempts) = (Arc::clone(body), max_attempts(&head.headers)?);
        Ok(Self { row, head, request_id, body, nvext, reads_cache, reuses_prefix, max_attempts })
    }

    pub fn api(&self) -> Api {
        self.row.api
    }

    /// Whether its client's tenant shares no cache with others.
    pub fn is_isolated(&self) -> bool {
        self.head.caller.client().is_some_and(|key| key.is_isolated)
    }

    /// Whether `engine` serves its API, and reads the salt of an isolated tenant there.
    pub fn fits(&self, engine: &Engine) -> bool {
        (self.api().is_for_runtime() || engine.member.is_none())
            && (!self.is_isolated() || engine.takes_salt(self.api()))
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
        check_encoding(&head.headers)?;
        let len = bytes.len();
        let parse = || Body::parse(bytes).map(Arc::new);
        if len <= LONG_BODY_BYTES {
            return parse();
        }
        head.compute(app, len, parse).await.unwrap_or_else(|Busy| {
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
    let number = match text.parse::<u64>() {
        Err(error) if *error.kind() == IntErrorKind::PosOverflow => Some(u64::MAX),
        number => number.ok().filter(|attempts| *attempts > 0),
    };
    let Some(number) = number else {
        let text: String = text.chars().take(64).collect();
        return Err(Reject::bad_request(format!(
            "header {MAX_ATTEMPTS_HEADER} must be a whole number of at least 1, got {text:?}: leave it out for \
             the server's own limit (--max-attempts)"
        )));
    };
    Ok(Some(usize::try_from(number).unwrap_or(usize::MAX)))
}

/// A completion prompt, in the forms that OpenAI allows.
#[derive(Debug, PartialEq)]
pub(crate) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    /// Several prompts in one request, so there is no single prefix to route by.
    Batch,
}

impl Prompt {
    /// # Errors
    /// `InvalidArgument` naming the invalid element.
    pub fn parse(json: &str) -> Result<Self, Error> {
        Self::parse_at(json, false)
    }

    /// A list within a list is a batch of one; engines accept no deeper nesting, and recursion must
    /// be bounded.
    fn parse_at(json: &str, is_nested: bool) -> Result<Self, Error> {
        let wrong = |what: &str| Error::invalid(format!("prompt: {what}"));
        let text = json.trim_start();
        if text.starts_with('"') {
            return serde_json::from_str(text)
                .map(Self::Text)
                .map_err(|error| wrong(&error.to_string()));
        }
        if !text.starts_with('[') {
            return Err(wrong("must be a string, a list of token ids or a list of prompts"));
        }
        let items: Vec<&RawValue> =
            serde_json::from_str(text).map_err(|error| wrong(&error.to_string()))?;
        let Some(first) = items.first() else { return Err(wrong("must not be empty")) };
        if !first.get().starts_with(|c: char| c.is_ascii_digit() || c == '-') {
            return match items.as_slice() {
                [only] if !is_nested => Self::parse_at(only.get(), true),
                [_] => Err(wrong("a list of prompts must hold strings or lists of token ids")),
                _ => Ok(Self::Batch),
            };
        }
        let token = |(at, item): (usize, &&RawValue)| {
            item.get().parse::<u32>().map_err(|_| {
                wrong(&format!(
                    "token id [{at}] must be an integer in 0..=4294967295, got {}",
                    item.get()
                ))
            })
        };
        items.iter().enumerate().map(token).collect::<Result<_, _>>().map(Self::Tokens)
    }
}

/// What the engine does with its prefix cache for a request, according to its API's own fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CacheUse {
    /// It looks the prompt up.
    pub reads: bool,
    /// It reports the outcome for a single prompt.
    pub reports: bool,
}

/// See [`CacheUse`]; a body that can't be read counts as one that does neither.
fn cache_use(api: Api, body: &Body) -> CacheUse {
    #[derive(Default, Deserialize)]
    struct Sampling<'a> {
        #[serde(borrow)]
        n: Option<&'a RawValue>,
        prompt_logprobs: Option<&'a RawValue>,
        skip_reading_prefix_cache: Option<&'a RawValue>,
    }
    if !matches!(api, Api::Tokens | Api::Generate) {
        return CacheUse { reads: true, reports: true };
    }
    let neither = CacheUse { reads: false, reports: false };
    let Ok(sampling) = body.value::<Sampling<'_>>("sampling_params") else { return neither };
    let Ok(start) = body.text_of_one("logprob_start_len") else { return neither };
    // -1: only for the answer's tokens.
    let is_answer_only = is_off(start, "-1");
    let Sampling { n, prompt_logprobs, skip_reading_prefix_cache } = sampling.unwrap_or_default();
    let is_off = |field: Option<&RawValue>, off: &str| is_off(field.map(RawValue::get), off);
    let reads = is_answer_only
        && is_off(prompt_logprobs, "null")
        && is_off(skip_reading_prefix_cache, "false");
    CacheUse { reads, reports: reads && is_off(n, "1") }
}

/// The field `model` of an upload with these headers.
///
/// # Errors
/// 400 for a body without parts, or a model that is not a string.
pub(super) fn model_of_upload<'a>(
    headers: &HeaderMap,
    body: &'a [u8],
) -> Result<Option<&'a str>, Reject> {
    Ok(find_model(headers, body)?.map(|(name, _)| name))
}

/// Whether the beginning of an upload names its model.
pub(super) fn names_model(headers: &HeaderMap, beginning: &[u8]) -> bool {
    matches!(find_model(headers, beginning), Ok(Some((_, true))))
}

/// The field `model`, and whether its end was found.
fn find_model<'a>(headers: &HeaderMap, body: &'a [u8]) -> Result<Option<(&'a str, bool)>, Reject> {
    let kind = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let Some(boundary) = kind.and_then(boundary) else {
        let got = kind.unwrap_or("none");
        return Err(Reject::bad_request(format!(
            "content-type: must be multipart/form-data with a boundary, got {got:?}"
        )));
    };
    let boundary = format!("--{boundary}");
    // Data before the first boundary, and the line that ends it, belong to no part.
    let starts = memmem::find_iter(body, boundary.as_bytes()).map(|at| at + boundary.len());
    for start in starts.take(MAX_PARTS) {
        let part = &body[start..];
        let head = &part[..part.len().min(MAX_PART_HEAD_BYTES)];
        let Some(end) = memmem::find(head, b"\r\n\r\n") else { continue };
        if name_of(&part[..end]) != Some("model") {
            continue;
        }
        let value = &part[end + 4..];
        let end = memmem::find(value, b"\r\n");
        return match std::str::from_utf8(&value[..end.unwrap_or(value.len())]) {
            Ok(name) => Ok(Some((name, end.is_some()))),
            Err(_) => Err(Reject::bad_request("model: must be UTF-8 text")),
        };
    }
    Ok(None)
}

/// The upload with its model `name`, found by [`model_of_upload`], replaced.
pub(super) fn upload_with_model(body: &Bytes, name: &str, model: &str) -> Bytes {
    let at = name.as_ptr() as usize - body.as_ptr() as usize;
    let parts = [&body[..at], model.as_bytes(), &body[at + name.len()..]];
    parts.concat().into()
}

/// The boundary in a content type.
fn boundary(kind: &str) -> Option<&str> {
    let mut parts = kind.split(';').map(str::trim);
    parts.next().filter(|kind| kind.eq_ignore_ascii_case("multipart/form-data"))?;
    let value = parts.find_map(|part| {
        let (name, value) = part.split_once('=')?;
        name.eq_ignore_ascii_case("boundary").then_some(value.trim_matches('"'))
    });
    value.filter(|boundary| !boundary.is_empty())
}

/// The name in a part's `Content-Disposition`.
fn name_of(head: &[u8]) -> Option<&str> {
    let head = std::str::from_utf8(head).ok()?;
    let line = head.split("\r\n").find(|line| {
        let name = line.split(':').next().unwrap_or_default();
        name.eq_ignore_ascii_case("content-disposition")
    })?;
    line.split(';').find_map(|part| Some(part.trim().strip_prefix("name=")?.trim_matches('"')))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
