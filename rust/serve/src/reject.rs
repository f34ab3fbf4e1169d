//! Refusals: status and body declared together, one table for both APIs.

use std::borrow::Cow;

use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use kvflash_core::error::Error;
use serde_json::json;

/// Longest message of a refusal, in bytes: a part of the request may be in it, of any length.
const MAX_MESSAGE_BYTES: usize = 4_096;
/// So much of the end of a longer one stays: the limit and the next step.
const END_BYTES: usize = 1_024;

/// Header of a 404: the kind of thing that is not there, for programs.
pub(crate) const MISSING: HeaderName = HeaderName::from_static("x-kvflash-missing");

/// What a 404 says is not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// The path: no kvflash service of this kind has it.
    Path,
    /// What the request names, such as a model, a worker or a request id.
    Entry,
}

impl Missing {
    /// The value of the header.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Path => "path",
            Self::Entry => "entry",
        }
    }
}

/// A refused request. The indexer's API responds with `{"error": "..."}`, the OpenAI API with an
/// error object.
#[derive(Debug, Clone)]
pub struct Reject {
    /// HTTP status.
    pub status: StatusCode,
    /// The error: names the field, the limit and what came. At most 4 KiB.
    pub message: String,
    /// OpenAI's `param`: the invalid field.
    pub param: Option<Cow<'static, str>>,
    /// Seconds after which the client should retry.
    pub retry_after_s: Option<u32>,
    /// Of a 404: what is not there.
    pub missing: Missing,
    /// The original error; callers in the same process get it instead of a status.
    pub cause: Option<Error>,
}

impl Reject {
    /// A refusal with this status.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        let message = bounded(message.into());
        let missing = Missing::Entry;
        Self { status, message, param: None, retry_after_s: None, missing, cause: None }
    }

    /// 404: the path is unknown.
    pub fn no_path(message: impl Into<String>) -> Self {
        Self { missing: Missing::Path, ..Self::new(StatusCode::NOT_FOUND, message) }
    }

    /// 400: the request is invalid; a message that begins with `field: ` names the invalid field.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message).named()
    }

    /// Names the invalid field.
    pub fn param(mut self, param: impl Into<Cow<'static, str>>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// Names the field at the beginning of the message, such as `messages[0].role: ...`.
    fn named(mut self) -> Self {
        let is_name = |name: &&str| {
            name.starts_with(|c: char| c.is_ascii_alphabetic())
                && name.chars().all(|c| c.is_ascii_alphanumeric() || "_.[]".contains(c))
        };
        let head = self.message.split_once(": ").map(|(head, _)| head);
        self.param = head.filter(is_name).map(|name| Cow::Owned(name.to_owned()));
        self
    }

    /// A refusal that a retry may escape, if its status says so: overload may be over in a second.
    pub fn momentary(status: StatusCode, message: impl Into<String>) -> Self {
        let is_busy =
            matches!(status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS);
        Self { retry_after_s: is_busy.then_some(1), ..Self::new(status, message) }
    }

    /// As `{"error": "..."}`.
    pub fn plain(self) -> Response {
        self.respond(|reject| json!({ "error": reject.message }))
    }

    /// As OpenAI's `{"error": {"message", "type", "param", "code"}}`.
    pub fn openai(self) -> Response {
        self.respond(|reject| {
            json!({ "error": {
                "message": reject.message,
                "type": reject.kind(),
                "param": reject.param,
                "code": reject.status.as_u16(),
            } })
        })
    }

    /// As Anthropic's `{"type": "error", "error": {"type", "message"}}`.
    pub fn anthropic(self) -> Response {
        self.respond(|reject| {
            let kind = match reject.status.as_u16() {
                401 => "authentication_error",
                403 => "permission_error",
                404 => "not_found_error",
                413 => "request_too_large",
                429 => "rate_limit_error",
                400..=499 => "invalid_request_error",
                503 | 529 => "overloaded_error",
                504 => "timeout_error",
                _ => "api_error",
            };
            json!({ "type": "error", "error": { "type": kind, "message": reject.message } })
        })
    }

    /// The error in a response of these routes, by its cause; `None` for a successful response.
    pub fn of(response: &Response) -> Option<Error> {
        response.extensions().get::<Self>().map(|reject| {
            let message = reject.message.clone();
            let of_status = || match reject.status.as_u16() {
                404 | 405 => Error::NotFound(message),
                409 => Error::Conflict(message),
                400..=499 => Error::InvalidArgument(message),
                _ => Error::Transport(message),
            };
            reject.cause.clone().unwrap_or_else(of_status)
        })
    }

    fn kind(&self) -> &'static str {
        match self.status.as_u16() {
            404 => "not_found_error",
            429 => "rate_limit_error",
            400..=499 => "invalid_request_error",
            503 => "service_unavailable_error",
            502 | 504 => "upstream_error",
            _ => "internal_error",
        }
    }

    fn respond(self, body: impl Fn(&Self) -> serde_json::Value) -> Response {
        let mut response =
            (self.status, [(header::CONTENT_TYPE, "application/json")], body(&self).to_string())
                .into_response();
        if let Some(seconds) = self.retry_after_s {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::NOT_FOUND {
            response.headers_mut().insert(MISSING, HeaderValue::from_static(self.missing.name()));
        }
        response.extensions_mut().insert(self);
        response
    }
}

/// Beginning and end of a message that is longer than [`MAX_MESSAGE_BYTES`].
fn bounded(message: String) -> String {
    if message.len() <= MAX_MESSAGE_BYTES {
        return message;
    }
    const CUT: &str = " ... ";
    let is_boundary = |at: &usize| message.is_char_boundary(*at);
    let head = (0..=MAX_MESSAGE_BYTES - END_BYTES - CUT.len()).rev().find(is_boundary);
    let tail = (message.len() - END_BYTES..=message.len()).find(is_boundary);
    let (head, tail) = (&message[..head.unwrap_or(0)], &message[tail.unwrap_or(message.len())..]);
    format!("{head}{CUT}{tail}")
}

impl From<Error> for Reject {
    fn from(error: Error) -> Self {
        let (status, _) = error.kind();
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        // Overload, or a lack of workers, may be over in a second.
        let retry_after_s = matches!(status.as_u16(), 429 | 503).then_some(1);
        let message = error.to_string();
        let reject = match status {
            StatusCode::BAD_REQUEST => Self::bad_request(message),
            status => Self::new(status, message),
        };
        Self { retry_after_s, cause: Some(error), ..reject }
    }
}

/// A refusal in the format of the OpenAI API, as what a handler returns.
impl IntoResponse for Reject {
    fn into_response(self) -> Response {
        self.openai()
    }
}

/// A refusal in the format of the router and the indexer, as what a handler returns.
pub(super) struct PlainReject(Reject);

impl<E: Into<Reject>> From<E> for PlainReject {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl IntoResponse for PlainReject {
    fn into_response(self) -> Response {
        self.0.plain()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_404_says_for_programs_what_is_missing() {
        for (reject, wanted) in [
            (Reject::no_path("no such path"), Some("path")),
            (Reject::new(StatusCode::NOT_FOUND, "no such path"), Some("entry")),
            (Reject::from(Error::NotFound("no indexer".to_owned())), Some("entry")),
            (Reject::bad_request("no path"), None),
        ] {
            for response in [reject.clone().plain(), reject.clone().openai(), reject.anthropic()] {
                let found = response.headers().get(MISSING);
                assert_eq!(found.and_then(|what| what.to_str().ok()), wanted);
            }
        }
    }

    #[test]
    fn a_message_has_a_limit_whatever_came() {
        for (letter, count) in [("\"", 1 << 20), ("é", 1 << 19), ("x", MAX_MESSAGE_BYTES - 10)] {
            let came = letter.repeat(count);
            let reject = Reject::bad_request(format!("model: must be short, got {came}; name one"));
            let message = &reject.message;
            assert!(
                (MAX_MESSAGE_BYTES - 4..=MAX_MESSAGE_BYTES).contains(&message.len()),
                "{letter}"
            );
            assert!(
                message.starts_with("model: must be short, got ")
                    && message.ends_with("; name one")
            );
            assert!(message.contains(&format!("{letter} ... {letter}")), "{letter}");
            assert_eq!(reject.param.as_deref(), Some("model"));
        }
        // A field's name is the client's, too.
        let reject = Reject::bad_request(format!("{}: unknown", "x".repeat(1 << 20)));
        assert!(reject.message.len() <= MAX_MESSAGE_BYTES && reject.param.is_none());
        let whole = "x".repeat(MAX_MESSAGE_BYTES);
        assert_eq!(Reject::new(StatusCode::NOT_FOUND, whole.clone()).message, whole);
    }
}
