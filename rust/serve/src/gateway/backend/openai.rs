//! Requests to engines with OpenAI's API: a request is forwarded unchanged, and its answer is
//! passed through.

use std::borrow::Cow;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use bytes::Bytes;
use http_body::Body as _;
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use serde_json::{Value, json};

use super::worker::Handoff;
use crate::body::Forwarded;
use crate::frontend::app::App;
use crate::frontend::proxy::{Outgoing, client_headers, held, upstream_request};
use crate::gateway::api::{Api, Row};
use crate::gateway::attempts::Failed;
use crate::gateway::body::Body;
use crate::gateway::book::Choice;
use crate::gateway::call::Call;
use crate::gateway::ids::body_with;
use crate::gateway::lesson::FIELD;
use crate::gateway::plan::Plan;
use crate::gateway::stored;
use crate::outbound::in_full;
use crate::tenant::pass::{REQUEST_ID_HEADER, engine_headers};

/// Size limit of a prefill's response: one token and its transfer parameters.
const MAX_PREFILL_ANSWER_BYTES: usize = 8 * 1024 * 1024;

/// Name of the transfer parameters in requests and responses.
///
/// # Source
/// vLLM's OpenAI server, with any KV connector.
pub(super) const PARAMS: &str = "kv_transfer_params";

/// An engine's answer whose first byte has arrived.
pub(crate) struct Opened {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub is_event_stream: bool,
    /// The chunk that was awaited before the head is forwarded.
    pub first: Option<Bytes>,
    pub upstream: Incoming,
    /// What the request had that its client did not write.
    pub more: Option<More>,
}

/// What a request tells an engine, or asks it, beyond what its client wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum More {
    /// The ids of its prompt.
    Ids,
    /// The engine is to tell these.
    Question,
}

impl More {
    /// With the body that has it.
    fn of(plan: &Plan, choice: &Choice) -> Option<(Self, Bytes)> {
        if let Some(body) = with_ids(plan, choice) {
            return Some((Self::Ids, body));
        }
        let lesson = plan.lesson.as_ref()?;
        let is_asked = !lesson.is_asked && choice.engine.may_teach();
        is_asked.then(|| (Self::Question, plan.call.body.with_json(FIELD, b"true")))
    }

    /// The engine has `refused` it, and accepted the request without it.
    fn refused(self, app: &App, plan: &Plan, choice: &Choice, refused: StatusCode) {
        match self {
            Self::Ids => {
                let why = format!("it answered {refused} to token ids, but accepted the text");
                choice.engine.gets_no_ids(app, plan.call.api(), "refused", &why);
            }
            Self::Question => {
                let why = format!(
                    "it answered {refused} to {FIELD}, but accepted the request without it"
                );
                choice.engine.teaches_no_more(app, "refused", &why);
            }
        }
    }
}

/// Sends `plan`'s request, with the prompt prefilled as `handoff` says, and waits for the answer to
/// begin.
pub(super) async fn open(
    app: &App,
    plan: &Plan,
    choice: &Choice,
    handoff: &Handoff,
) -> Result<Opened, Failed> {
    let mut changes = match handoff {
        Handoff::Done { params, .. } => vec![(PARAMS, Some(transfer_params(params)?))],
        _ => Vec::new(),
    };
    let (mut more, sent) = match handoff.is_alone().then(|| More::of(plan, choice)).flatten() {
        Some((more, body)) => (Some(more), Some(body)),
        None => (None, None),
    };
    let id = choice.engine.id;
    if plan.call.api() == Api::Responses {
        changes.extend(stored::changes(&plan.call, &choice.engine, choice.booking.worker()));
    }
    let body = match changes.as_slice() {
        [] => plan.call.body.bytes().clone(),
        changes => plan.call.body.with(changes),
    };
    let path = plan.call.head.uri.path_and_query().map_or("/", |path| path.as_str());
    let mut headers = Cow::Borrowed(&plan.call.head.headers);
    if more == Some(More::Question) {
        // What an engine compresses cannot be read.
        headers.to_mut().remove(header::ACCEPT_ENCODING);
    }
    let headers = &*headers;
    let sent = sent.unwrap_or_else(|| body.clone());
    let to_first_byte = pin!(async {
        let mut answer = send(app, &plan.call, choice, path, headers, sent).await?;
        if refuses(answer.status())
            && let Some(more) = more.take()
        {
            // By what was added, or by the request itself? It is asked once more, as the client wrote it.
            let refused = answer.status();
            answer = send(app, &plan.call, choice, path, headers, body).await?;
            if answer.status().is_success() {
                more.refused(app, plan, choice, refused);
            }
        }
        let (parts, mut upstream) = answer.into_parts();
        let broken = |message: String| {
            Failed::new("no_first_byte", message, StatusCode::BAD_GATEWAY).fault().died()
        };
        if parts.status == StatusCode::SERVICE_UNAVAILABLE {
            let message = format!("worker {id} answered 503");
            return Err(Failed::new("unavailable", message, StatusCode::SERVICE_UNAVAILABLE));
        }
        // Engines do not redirect clients or switch protocols.
        if parts.status.is_informational() || parts.status.is_redirection() {
            let message = format!("worker {id} answered {}", parts.status);
            return Err(Failed::new("not_an_answer", message, StatusCode::BAD_GATEWAY));
        }
        // Nothing has reached the client yet: until the first chunk arrives, another worker can
        // take over.
        let mut first = None;
        while first.is_none() && !upstream.is_end_stream() {
            match upstream.frame().await {
                Some(Ok(frame)) => {
                    first = frame.into_data().ok().filter(|data| !data.is_empty());
                }
                Some(Err(error)) => {
                    let why = in_full(&error);
                    return Err(broken(format!("worker {id} broke off its answer: {why}")));
                }
                None => break,
            }
        }
        let said = match parts.status {
            StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => said(first.as_deref()),
            _ => None,
        };
        if matches!(said.as_deref(), Some("Not Found" | "Method Not Allowed")) {
            let Row { method, path, .. } = plan.call.row;
            let message =
                format!("worker {id} does not serve {method} {path}: its engine has no such API");
            return Err(Failed::new("no_such_api", message, StatusCode::NOT_IMPLEMENTED));
        }
        if parts.status == StatusCode::NOT_FOUND {
            choice.engine.unknown();
            if plan.call.api() == Api::Responses
                && let Some(gone) = stored::gone_at(&plan.call, id)
            {
                let failed = Failed::new("response_gone", gone.message, gone.status);
                return Err(Failed { param: gone.param, is_final: true, ..failed });
            }
            // Its name is what an engine says of a model that it does not serve.
            if let Ok(Some(model)) = plan.call.body.value::<String>("model")
                && said.is_some_and(|said| has_word(&said, &model))
            {
                let message = format!("worker {id} does not serve model {model:?} any more");
                return Err(Failed::new("no_such_model", message, StatusCode::NOT_FOUND));
            }
        }
        // Engines do not complete a prompt with an empty answer: it died after sending the
        // head. To the removal of a response, an empty answer is one.
        let is_prompt = !plan.call.row.names_response();
        if first.is_none() && parts.status.is_success() && is_prompt {
            let status = parts.status.as_u16();
            return Err(broken(format!("worker {id} answered {status} without a body")));
        }
        // The lines of a compressed stream are not visible, and no event can be added to it.
        let is_event_stream = !parts.headers.contains_key(header::CONTENT_ENCODING)
            && parts.headers.get(header::CONTENT_TYPE).is_some_and(is_event_stream);
        let headers = client_headers(parts.headers);
        let status = parts.status;
        Ok(Opened { status, headers, is_event_stream, first, upstream, more })
    });
    within(app, to_first_byte, || format!("worker {id} sent no byte")).await
}

/// Prefills the prompt; returns what the decode worker needs.
pub(super) async fn prefill(
    app: &App,
    plan: &Plan,
    choice: &Choice,
) -> Result<rmpv::Value, Failed> {
    let id = choice.engine.id;
    let call = &plan.call;
    let body = prefill_body(&call.body, call.api());
    let whole = pin!(async {
        let sent = send(app, call, choice, call.row.path, &call.head.headers, body).await;
        let response = sent.map_err(|failed| Failed {
            message: format!("prefill at worker {id}: {}", failed.message),
            ..failed
        })?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_PREFILL_ANSWER_BYTES).collect().await;
        let body = body.map_err(|error| {
            let message = format!("worker {id} broke off its prefill: {}", in_full(&*error));
            Failed::new("no_answer", message, StatusCode::BAD_GATEWAY).fault().died()
        })?;
        Ok((status, body.to_bytes()))
    });
    let (status, body) =
        within(app, whole, || format!("worker {id} did not finish the prefill")).await?;
    if !status.is_success() {
        let text: String = String::from_utf8_lossy(&body).chars().take(300).collect();
        // If the request itself is invalid, the decode worker would refuse it, too.
        if refuses(status) {
            let message = said(Some(&body)).unwrap_or(text);
            let failed = Failed::new("prefill_status", message, status);
            return Err(Failed { param: param(&body), is_final: true, ..failed });
        }
        let message = format!("worker {id} answered its prefill with {status}: {text}");
        if status == StatusCode::SERVICE_UNAVAILABLE {
            return Err(Failed::new("unavailable", message, status));
        }
        return Err(Failed::new("prefill_status", message, StatusCode::BAD_GATEWAY));
    }
    choice.booking.first_token();
    let answer: Value = serde_json::from_slice(&body).unwrap_or_default();
    let params = answer.get(PARAMS).filter(|params| !params.is_null()).ok_or_else(|| {
        let message = format!("worker {id} returned no {PARAMS}; is a KV connector configured?");
        Failed::new("no_transfer", message, StatusCode::BAD_GATEWAY)
    })?;
    rmpv::ext::to_value(json!({ PARAMS: params })).map_err(|error| {
        let message = format!("worker {id} returned unusable {PARAMS}: {error}");
        Failed::new("no_transfer", message, StatusCode::BAD_GATEWAY)
    })
}

/// Whether a content type is an event stream's: types have no case.
fn is_event_stream(kind: &HeaderValue) -> bool {
    let kind = kind.as_bytes().split(|byte| *byte == b';').next().unwrap_or_default();
    kind.trim_ascii().eq_ignore_ascii_case(b"text/event-stream")
}

/// What an engine says of a request that it does not know.
fn said(body: Option<&[u8]>) -> Option<String> {
    let answer: Value = serde_json::from_slice(body?).ok()?;
    let places = ["/detail", "/error/message", "/message"];
    places.iter().find_map(|place| answer.pointer(place)?.as_str().map(str::to_owned))
}

/// The field that an engine refuses.
fn param(body: &[u8]) -> Option<Cow<'static, str>> {
    let answer: Value = serde_json::from_slice(body).ok()?;
    Some(Cow::Owned(answer.pointer("/error/param")?.as_str()?.to_owned()))
}

/// Whether `text` has `name` as a word of its own.
fn has_word(text: &str, name: &str) -> bool {
    let is_apart = |next: Option<char>| !next.is_some_and(char::is_alphanumeric);
    text.match_indices(name).any(|(at, _)| {
        is_apart(text[..at].chars().next_back()) && is_apart(text[at + name.len()..].chars().next())
    })
}

/// The request with its prompt's ids, if the engine accepts them and they are equivalent to the
/// text.
fn with_ids(plan: &Plan, choice: &Choice) -> Option<Bytes> {
    let (call, ids) = (&plan.call, plan.tokens.as_ref()?);
    let field = plan.replaceable?.field(&choice.engine, call.api(), ids)?;
    Some(body_with(&call.body, field, ids))
}

/// Whether this status of an engine means that a request is invalid or too large.
fn refuses(status: StatusCode) -> bool {
    let wrong =
        [StatusCode::BAD_REQUEST, StatusCode::PAYLOAD_TOO_LARGE, StatusCode::UNPROCESSABLE_ENTITY];
    wrong.contains(&status)
}

/// Sends the client's request with this body to the chosen engine.
///
/// # Errors
/// Its address is invalid, or the response head did not arrive.
async fn send(
    app: &App,
    call: &Call,
    choice: &Choice,
    path: &str,
    headers: &HeaderMap,
    body: Bytes,
) -> Result<axum::http::Response<Incoming>, Failed> {
    let engine = &choice.engine;
    engine.requests.fetch_add(1, Ordering::Relaxed);
    let target = format!("{}{path}", engine.base).parse::<Uri>().map_err(|error| {
        Failed::new("bad_target", error.to_string(), StatusCode::BAD_GATEWAY).unsent()
    })?;
    let rank = (engine.spec.dp_size > 1).then(|| choice.booking.worker().dp_rank);
    let Call { head, request_id, .. } = call;
    let headers = match head.caller.client() {
        Some(key) => Cow::Owned(engine_headers(key, headers, request_id)),
        None => Cow::Borrowed(headers),
    };
    let body = match call.body.rest() {
        None => held(body),
        Some(rest) => Outgoing::Right(Forwarded::new(body, Arc::clone(rest))),
    };
    let mut request = upstream_request(&call.row.method, target, &headers, rank, body);
    // The id in the client's answer, which is the client's own if that is usable.
    if head.caller.client().is_none()
        && let Ok(id) = HeaderValue::try_from(request_id)
    {
        request.headers_mut().insert(REQUEST_ID_HEADER.clone(), id);
    }
    // The key of a client with one of our keys is not meant for the engine.
    if head.caller.key().is_some()
        && let Some(key) = app.upstream.authorization(&engine.spec)
    {
        request.headers_mut().insert(header::AUTHORIZATION, key.clone());
    }
    app.upstream.send_to(&engine.spec, request).await.map_err(|error| {
        let failed = Failed::new(error.cause, error.message, StatusCode::BAD_GATEWAY).fault();
        if error.is_sent { failed.died() } else { failed.unsent() }
    })
}

/// Waits for a worker for the time it may take to begin; `what` is the failed action.
async fn within<T>(
    app: &App,
    work: impl Future<Output = Result<T, Failed>>,
    what: impl FnOnce() -> String,
) -> Result<T, Failed> {
    let timeout = app.options.first_byte_timeout;
    tokio::time::timeout(timeout, work).await.unwrap_or_else(|_| {
        let seconds = timeout.as_secs_f64();
        let message = format!("{} within {seconds} s (--first-byte-timeout)", what());
        Err(Failed::new("timeout", message, StatusCode::GATEWAY_TIMEOUT).lost())
    })
}

/// The prefill copy of a body: one token, not streamed, with its cache kept for another engine. Of
/// Responses it is waited for, and the prefill worker does not keep it.
pub(crate) fn prefill_body(body: &Body, api: Api) -> Bytes {
    let limit = api.output_limit().unwrap_or("max_tokens");
    let params = json!({
        "do_remote_decode": true,
        "do_remote_prefill": false,
        "remote_engine_id": null,
        "remote_block_ids": null,
        "remote_host": null,
        "remote_port": null,
    });
    let one = || Some(json!(1));
    let mut changes = vec![
        ("stream_options", None),
        ("min_tokens", None),
        ("max_completion_tokens", one().filter(|_| body.has("max_completion_tokens"))),
        (limit, one()),
        ("stream", Some(json!(false))),
        (PARAMS, Some(params)),
    ];
    if api == Api::Responses {
        changes.extend([("store", Some(json!(false))), ("background", None)]);
    }
    body.with(&changes)
}

/// The [`PARAMS`] of the decode copy of a body: the result of the prefill.
pub(super) fn transfer_params(params: &rmpv::Value) -> Result<Value, Failed> {
    let params: Value = rmpv::ext::from_value(params.clone()).map_err(|error| {
        let message = format!("the prefill's transfer parameters cannot be forwarded: {error}");
        Failed::new("no_transfer", message, StatusCode::BAD_GATEWAY)
    })?;
    Ok(params.get(PARAMS).cloned().unwrap_or(params))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_known_by_its_type_in_any_case() {
        let is_stream = |kind| is_event_stream(&HeaderValue::from_static(kind));
        for kind in
            ["text/event-stream", "Text/Event-Stream;charset=utf-8", "text/event-stream ; a"]
        {
            assert!(is_stream(kind), "{kind}");
        }
        for kind in ["text/event-streams", "text/plain;text/event-stream", ""] {
            assert!(!is_stream(kind), "{kind}");
        }
    }

    #[test]
    fn prefill_and_decode_are_the_request_with_their_own_fields() {
        let body =
            br#"{"model":"m","stream":true,"stream_options":{},"max_completion_tokens":9,"x":[1]}"#;
        let body = Body::parse(Bytes::from_static(body)).unwrap();
        let prefill: Value = serde_json::from_slice(&prefill_body(&body, Api::Chat)).unwrap();
        assert_eq!(
            (&prefill["max_tokens"], &prefill["max_completion_tokens"]),
            (&json!(1), &json!(1))
        );
        assert_eq!((&prefill["stream"], &prefill["x"]), (&json!(false), &json!([1])));
        assert!(prefill.get("stream_options").is_none());
        assert_eq!(prefill[PARAMS]["do_remote_decode"], true);
        let params = rmpv::ext::to_value(json!({ PARAMS: {"remote_port": 7} })).unwrap();
        let decode = body.with(&[(PARAMS, Some(transfer_params(&params).unwrap()))]);
        let decode: Value = serde_json::from_slice(&decode).unwrap();
        assert_eq!(decode[PARAMS], json!({"remote_port": 7}));
        assert_eq!(
            (&decode["stream"], &decode["max_completion_tokens"]),
            (&json!(true), &json!(9))
        );
    }
}
