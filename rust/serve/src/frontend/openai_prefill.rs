//! Prefill at an OpenAI engine, and what its decode request carries of it.

use axum::http::{Method, StatusCode};
use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use serde_json::{Map, Value, json};

use super::app::App;
use super::attempt::Failed;
use super::plan::Choice;
use super::proxy::upstream_request;
use super::runtime::call::Ask;

/// The longest answer to a prefill: one token and its transfer parameters.
const MAX_ANSWER_BYTES: usize = 8 * 1024 * 1024;

/// Name of the transfer parameters in requests and answers.
///
/// # Source
/// vLLM's OpenAI server, with any KV connector.
const PARAMS: &str = "kv_transfer_params";

/// The prefill copy of a body: one token, not streamed, its cache kept for another engine.
pub(super) fn prefill_body(body: &[u8]) -> serde_json::Result<Vec<u8>> {
    let mut fields: Map<String, Value> = serde_json::from_slice(body)?;
    for name in ["stream_options", "min_tokens"] {
        fields.remove(name);
    }
    if fields.contains_key("max_completion_tokens") {
        fields.insert("max_completion_tokens".to_owned(), json!(1));
    }
    fields.insert("max_tokens".to_owned(), json!(1));
    fields.insert("stream".to_owned(), json!(false));
    let params = json!({
        "do_remote_decode": true,
        "do_remote_prefill": false,
        "remote_engine_id": null,
        "remote_block_ids": null,
        "remote_host": null,
        "remote_port": null,
    });
    fields.insert(PARAMS.to_owned(), params);
    serde_json::to_vec(&fields)
}

/// The decode copy of a body: with what the prefill left.
pub(super) fn decode_body(body: &Bytes, params: &rmpv::Value) -> Result<Bytes, Failed> {
    let changed = || -> Result<Vec<u8>, String> {
        let mut fields: Map<String, Value> =
            serde_json::from_slice(body).map_err(|error| error.to_string())?;
        let params: Value =
            rmpv::ext::from_value(params.clone()).map_err(|error| error.to_string())?;
        let params = params.get(PARAMS).cloned().unwrap_or(params);
        fields.insert(PARAMS.to_owned(), params);
        serde_json::to_vec(&fields).map_err(|error| error.to_string())
    };
    changed().map(Bytes::from).map_err(|why| {
        let message = format!("the prefill's transfer parameters can't be handed on: {why}");
        Failed::new("no_transfer", message, StatusCode::BAD_GATEWAY)
    })
}

/// Prefill a prompt; the transfer parameters, as a runtime worker would give them.
pub(super) async fn prefill(app: &App, choice: &Choice, ask: &Ask) -> Result<rmpv::Value, Failed> {
    let engine = &choice.engine;
    engine.requests.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let wrong =
        |message: String| Failed::new("bad_target", message, StatusCode::INTERNAL_SERVER_ERROR);
    let body = prefill_body(&ask.body).map_err(|error| wrong(error.to_string()))?;
    let target = format!("{}{}", engine.base, ask.api.path());
    let target = target.parse().map_err(|_| wrong(format!("{target:?} is not a URL")))?;
    let rank = (engine.spec.dp_size > 1).then(|| choice.booking.worker().dp_rank);
    let mut request = upstream_request(&Method::POST, target, &ask.headers, rank, body.into());
    if let Ok(id) = ask.request_id.parse() {
        request.headers_mut().insert("x-request-id", id);
    }
    let whole = async {
        let response = app.upstream.send(request).await.map_err(|error| {
            let message = format!("prefill at worker {}: {}", engine.id, error.message);
            Failed::new(error.cause, message, StatusCode::BAD_GATEWAY).fault()
        })?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_ANSWER_BYTES).collect().await;
        let body = body.map_err(|error| {
            let message = format!("worker {} broke off its prefill: {error}", engine.id);
            Failed::new("no_answer", message, StatusCode::BAD_GATEWAY).fault()
        })?;
        Ok((status, body.to_bytes()))
    };
    let timeout = app.options.first_byte_timeout;
    let (status, body) = tokio::time::timeout(timeout, whole).await.unwrap_or_else(|_| {
        let seconds = timeout.as_secs_f64();
        let message = format!(
            "worker {} did not prefill within {seconds} s (--first-byte-timeout)",
            engine.id
        );
        Err(Failed::new("timeout", message, StatusCode::GATEWAY_TIMEOUT))
    })?;
    if !status.is_success() {
        let text: String = String::from_utf8_lossy(&body).chars().take(300).collect();
        let message = format!("worker {} answered its prefill with {status}: {text}", engine.id);
        let mut failed = Failed::new("prefill_status", message, StatusCode::BAD_GATEWAY);
        if matches!(status.as_u16(), 400 | 413 | 422) {
            // The request itself is wrong: the decode worker would say the same.
            (failed.status, failed.is_final) = (status, true);
        }
        return Err(failed);
    }
    choice.booking.first_token();
    let answer: Value = serde_json::from_slice(&body).unwrap_or_default();
    match answer.get(PARAMS).filter(|params| !params.is_null()) {
        Some(params) => {
            rmpv::ext::to_value(json!({ PARAMS: params })).map_err(|error| wrong(error.to_string()))
        }
        None => {
            let message =
                format!("worker {} prefilled without {PARAMS}; has it a KV connector?", engine.id);
            Err(Failed::new("no_transfer", message, StatusCode::BAD_GATEWAY))
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn prefill_and_decode_are_the_request_with_their_own_fields() {
        let body =
            br#"{"model":"m","stream":true,"stream_options":{},"max_completion_tokens":9,"x":[1]}"#;
        let prefill: Value = serde_json::from_slice(&prefill_body(body).unwrap()).unwrap();
        assert_eq!(
            (&prefill["max_tokens"], &prefill["max_completion_tokens"]),
            (&json!(1), &json!(1))
        );
        assert_eq!((&prefill["stream"], &prefill["x"]), (&json!(false), &json!([1])));
        assert!(prefill.get("stream_options").is_none());
        assert_eq!(prefill[PARAMS]["do_remote_decode"], true);
        let params = rmpv::ext::to_value(json!({ PARAMS: {"remote_port": 7} })).unwrap();
        let decode = decode_body(&Bytes::from_static(body), &params).unwrap();
        let decode: Value = serde_json::from_slice(&decode).unwrap();
        assert_eq!(decode[PARAMS], json!({"remote_port": 7}));
        assert_eq!(
            (&decode["stream"], &decode["max_completion_tokens"]),
            (&json!(true), &json!(9))
        );
    }
}
