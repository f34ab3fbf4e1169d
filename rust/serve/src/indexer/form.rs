//! JSON or msgpack: the formats of a body and of its response.

use axum::extract::{FromRequestParts, Query, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use rmp_serde::Deserializer as Msgpack;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::super::Reject;
use super::super::body::{check_encoding, discard};
use super::fault::{worded, worded_parameter};
use super::{plain, request};

/// Maximum nesting of a msgpack body; equal to serde_json's limit.
const MAX_DEPTH: usize = 128;

/// Format of a body or a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// The default: clients such as curl send content types that do not match the body.
    Json,
    /// Under any of its three names.
    Msgpack,
}

impl Form {
    /// 503 for a readiness check that fails; the next one may come in a second.
    pub fn not_ready(body: &impl Serialize) -> Response {
        let mut response = Self::Json.respond(StatusCode::SERVICE_UNAVAILABLE, body);
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        response
    }

    /// From `content-type`.
    pub fn of_body(headers: &HeaderMap) -> Self {
        let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        value.map_or(Self::Json, |value| Self::of_type(media_type(value).0).unwrap_or(Self::Json))
    }

    /// From `accept`: the format with the highest weight, the first one if equal; JSON if none is
    /// named.
    pub fn of_answer(headers: &HeaderMap) -> Self {
        let mut best = (0.0, Self::Json);
        let values = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
        for (name, weight) in values.flat_map(|value| value.split(',')).map(media_type) {
            let form = Self::of_type(name);
            if let Some(form) = form.filter(|_| weight > best.0) {
                best = (weight, form);
            }
        }
        best.1
    }

    /// For `content-type`.
    pub const fn media_type(self) -> &'static str {
        match self {
            Self::Json => "application/json",
            Self::Msgpack => "application/msgpack",
        }
    }

    fn of_type(name: &str) -> Option<Self> {
        let is = |other: &str| name.eq_ignore_ascii_case(other);
        if ["application/msgpack", "application/x-msgpack", "application/vnd.msgpack"]
            .into_iter()
            .any(is)
        {
            return Some(Self::Msgpack);
        }
        ["application/json", "application/*", "*/*"].into_iter().any(is).then_some(Self::Json)
    }

    /// Parses a query like [`Self::parse`], much faster for typical JSON.
    pub(super) fn parse_query(self, bytes: &[u8]) -> Result<request::Query, Reject> {
        match self {
            Self::Json => plain::read(bytes).map_or_else(|| self.parse(bytes), Ok),
            Self::Msgpack => self.parse(bytes),
        }
    }

    /// Parses a request.
    ///
    /// # Errors
    /// 400 naming the invalid field.
    ///
    /// # Cost
    /// Allocates in proportion to the received bytes, whatever lengths they claim.
    pub fn parse<T: DeserializeOwned>(self, bytes: &[u8]) -> Result<T, Reject> {
        match self {
            Self::Json => parse_json(bytes),
            Self::Msgpack => parse_msgpack(bytes),
        }
        .map_err(|message| {
            // Those about the body as a whole name it.
            let is_whole = message.starts_with("the body ");
            let what = if is_whole { message } else { format!("invalid request body: {message}") };
            Reject::bad_request(what)
        })
    }

    /// A response in this format; 500 if the body cannot be written.
    pub fn respond(self, status: StatusCode, body: &impl Serialize) -> Response {
        let bytes = match self {
            Self::Json => serde_json::to_vec(body).map_err(|error| error.to_string()),
            Self::Msgpack => rmp_serde::to_vec_named(body).map_err(|error| error.to_string()),
        };
        match bytes {
            Ok(bytes) => {
                (status, [(header::CONTENT_TYPE, self.media_type())], bytes).into_response()
            }
            Err(error) => Reject::new(StatusCode::INTERNAL_SERVER_ERROR, error).plain(),
        }
    }
}

/// A layer that refuses compressed bodies.
pub(crate) async fn refuse_encoded(mut request: Request, next: Next) -> Response {
    if [Method::POST, Method::PATCH].contains(request.method())
        && let Err(reject) = check_encoding(request.headers())
    {
        discard(request.body_mut()).await;
        return reject.plain();
    }
    next.run(request).await
}

/// The parameters of a query string; refusals are JSON, as everywhere.
pub(crate) struct Params<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Params<T> {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Response> {
        match Query::from_request_parts(parts, state).await {
            Ok(Query(params)) => Ok(Self(params)),
            Err(error) => Err(Reject::bad_request(worded_parameter(&error.body_text())).plain()),
        }
    }
}

/// The type of one entry of a header, without parameters, and its weight.
fn media_type(entry: &str) -> (&str, f32) {
    let mut parts = entry.split(';').map(str::trim);
    let name = parts.next().unwrap_or("");
    let weight = parts.find_map(|part| part.strip_prefix("q=")?.parse().ok());
    (name, weight.unwrap_or(1.0))
}

/// Parses a JSON object.
///
/// # Errors
/// The invalid field, what is legal and what came.
pub(crate) fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    // Derived parsers would also accept a list of the fields.
    match bytes.trim_ascii_start().first() {
        None => return Err("the body is empty: send a JSON object".to_owned()),
        Some(b'[') => return Err("the body must be a JSON object, got a list".to_owned()),
        Some(_) => {}
    }
    serde_json::from_slice(bytes).map_err(|error| {
        // Second, slower pass, to find the name of the invalid field.
        let mut json = serde_json::Deserializer::from_slice(bytes);
        match serde_path_to_error::deserialize::<_, T>(&mut json) {
            Err(error) => with_field(&error),
            Ok(_) => error.to_string(),
        }
    })
}

/// The error with the field's name, which those of long lists have already.
fn with_field<E: std::fmt::Display>(error: &serde_path_to_error::Error<E>) -> String {
    let inner = error.inner().to_string();
    let path = error.path().to_string();
    worded(&path, &inner)
        .unwrap_or_else(|| if inner.starts_with(&path) { inner } else { error.to_string() })
}

fn parse_msgpack<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    if !matches!(bytes.first(), Some(0x80..=0x8f | 0xde | 0xdf)) {
        return Err("not a msgpack map".to_owned());
    }
    let mut msgpack = Msgpack::new(std::io::Cursor::new(bytes));
    msgpack.set_max_depth(MAX_DEPTH);
    let request =
        serde_path_to_error::deserialize(&mut msgpack).map_err(|error| with_field(&error))?;
    match bytes.len() as u64 - msgpack.position() {
        0 => Ok(request),
        rest => Err(format!("{rest} bytes after the end of the map")),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::request::{Query, QueryByHash};
    use super::*;
    use axum::http::HeaderValue;

    fn headers(name: header::HeaderName, value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(name, HeaderValue::from_static(value))])
    }

    #[test]
    fn bodies_are_json_unless_said_otherwise() {
        for (value, form) in [
            ("application/msgpack", Form::Msgpack),
            ("Application/X-MsgPack; charset=binary", Form::Msgpack),
            ("application/vnd.msgpack", Form::Msgpack),
            ("application/json", Form::Json),
            ("application/x-www-form-urlencoded", Form::Json),
            ("", Form::Json),
        ] {
            assert_eq!(Form::of_body(&headers(header::CONTENT_TYPE, value)), form, "{value}");
        }
        assert_eq!(Form::of_body(&HeaderMap::new()), Form::Json);
    }

    #[test]
    fn answers_have_the_form_that_weighs_most() {
        for (value, form) in [
            ("application/msgpack", Form::Msgpack),
            ("text/html, application/x-msgpack;q=0.9, */*;q=0.8", Form::Msgpack),
            ("application/json, application/msgpack", Form::Json),
            ("application/msgpack;q=0", Form::Json),
            ("*/*", Form::Json),
            ("text/html", Form::Json),
        ] {
            assert_eq!(Form::of_answer(&headers(header::ACCEPT, value)), form, "{value}");
        }
        assert_eq!(Form::of_answer(&HeaderMap::new()), Form::Json);
    }

    /// `{"model_name": "m", "token_ids": ...}`
    fn query(token_ids: &[u8]) -> Vec<u8> {
        [b"\x82\xaamodel_name\xa1m\xa9token_ids", token_ids].concat()
    }

    fn refusal<T: DeserializeOwned>(bytes: &[u8]) -> String {
        Form::Msgpack.parse::<T>(bytes).map(|_| ()).unwrap_err().message
    }

    #[test]
    fn tokens_come_as_a_list_or_as_little_endian_words() {
        let listed = Form::Msgpack.parse::<Query>(&query(b"\x93\x01\xcd\x01\x02\xd2\0\0\0\x07"));
        assert_eq!(listed.unwrap().token_ids.0, [1, 0x102, 7]);
        let packed = Form::Msgpack.parse::<Query>(&query(b"\xc4\x08\x01\0\0\0\xff\xff\xff\xff"));
        assert_eq!(packed.unwrap().token_ids.0, [1, u32::MAX]);
        let hashes =
            b"\x82\xaamodel_name\xa1m\xacblock_hashes\xc4\x08\xfe\xff\xff\xff\xff\xff\xff\xff";
        assert_eq!(
            Form::Msgpack.parse::<QueryByHash>(hashes).unwrap().block_hashes.0,
            [u64::MAX - 1]
        );
    }

    #[test]
    fn what_is_wrong_in_msgpack_is_named_as_in_json() {
        for (token_ids, wanted) in [
            (&b"\x92\x01\xff"[..], "token_ids[1] must be an integer in 0..=4294967295, got -1"),
            (
                b"\x92\x01\xcf\0\0\0\x01\0\0\0\0",
                "token_ids[1] must be an integer in 0..=4294967295, got 4294967296",
            ),
            (b"\x92\x01\xa1x", "token_ids[1] must be an integer in 0..=4294967295, got \"x\""),
            (b"\x92\x01\xc4\x01x", "token_ids[1] must be an integer in 0..=4294967295, got bytes"),
            (b"\xc4\x07abcdefg", "token_ids has 7 bytes, not a multiple of 4"),
            (b"\xa3abc", "token_ids must be a list of integers, got \"abc\""),
            (b"\x01", "token_ids must be a list of integers, got 1"),
            (b"\x91\x01\x01", "1 bytes after the end"),
            (b"\xd4\x01\x01", "token_ids"),
        ] {
            let message = refusal::<Query>(&query(token_ids));
            assert!(message.contains(wanted), "{token_ids:?}: {message}");
            assert!(!message.contains(": token_ids: token_ids"), "{message}");
            assert!(message.matches("must be").count() <= 1, "said twice: {message}");
            assert!(!message.contains("]: token_ids"), "said twice: {message}");
        }
        assert!(refusal::<Query>(b"\x81\xaamodel_name\xa1m").contains("missing field `token_ids`"));
        assert!(refusal::<Query>(b"\x92\x01\xa1m").contains("not a msgpack map"));
        assert!(refusal::<Query>(b"").contains("not a msgpack map"));
    }

    #[test]
    fn claimed_lengths_and_depths_are_refused_before_they_cost_anything() {
        for token_ids in [
            &b"\xdd\xff\xff\xff\xff\x01"[..],
            b"\xc6\xff\xff\xff\xff\x01",
            b"\xdb\xff\xff\xff\xff\x01",
            b"\xdf\xff\xff\xff\xff\x01\x01",
        ] {
            assert!(refusal::<Query>(&query(token_ids)).contains("token_ids"), "{token_ids:?}");
        }
        let nested = [b"\x81\xa1x".to_vec(), vec![0x91; 1 << 20]].concat();
        assert!(refusal::<Query>(&nested).contains("depth limit exceeded"));
    }
}
