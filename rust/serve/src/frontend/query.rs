//! `query_instance_id`: where a request would go, told as a stream; nothing is sent or booked.

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use kvflash_core::select::Selection;
use serde_json::json;

use super::super::Reject;
use super::disagg::Prefill;
use super::plan::{Api, Plan};
use super::runtime::call::Ask;

/// The workers that would take the request now, and its tokens.
///
/// # Errors
/// 503 when nobody can take it.
pub(super) async fn answer(ask: &Ask, plan: &Plan, prefill: &Prefill) -> Result<Response, Reject> {
    let Selection { worker: decode, seed, .. } = plan.query(None).await?;
    // One number draws both. Without a prefill worker the one that decodes does both.
    let prefiller = prefill.query(Some(seed)).await.unwrap_or(decode);
    let (id, object) = match ask.api {
        Api::Chat => (format!("chatcmpl-{}", ask.request_id), "chat.completion.chunk"),
        Api::Completions => (format!("cmpl-{}", ask.request_id), "text_completion"),
    };
    let event = json!({
        "id": id,
        "object": object,
        "created": 0,
        "model": ask.model,
        "choices": [],
        "nvext": {
            "worker_id": {
                "prefill_worker_id": prefiller.instance_id,
                "prefill_dp_rank": prefiller.dp_rank,
                "decode_worker_id": decode.instance_id,
                "decode_dp_rank": decode.dp_rank,
            },
            "seed": seed,
            "token_ids": plan.tokens.as_ref().map(|tokens| tokens.as_slice()),
        },
    });
    let mut response = Response::new(Body::from(format!("data: {event}\n\ndata: [DONE]\n\n")));
    let kind = HeaderValue::from_static("text/event-stream");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    Ok(response)
}
