//! `query_instance_id`: returns the worker of a request as a stream; nothing is sent or booked.

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use kvflash_core::select::Selection;
use serde_json::json;

use super::api::Api;
use super::backend::disagg::Prefill;
use super::plan::{Part, Plan};
use crate::Reject;

/// The workers that would take the request now, and its tokens.
///
/// # Errors
/// 503 if no worker can take it.
pub(super) async fn answer(plan: &Plan, prefill: &Prefill) -> Result<Response, Reject> {
    let is_decode_only = prefill.query(None).await.is_some();
    let part = Part { is_decode_only, ..Part::default() };
    let Selection { worker: decode, seed, .. } = plan.query(part, None).await?;
    // One seed draws both. Without a prefill worker the decode worker does both.
    let prefiller = prefill.query(Some(seed)).await.unwrap_or(decode);
    let (id, object) = match plan.call.api() {
        Api::Chat => (format!("chatcmpl-{}", plan.call.request_id), "chat.completion.chunk"),
        _ => (format!("cmpl-{}", plan.call.request_id), "text_completion"),
    };
    let event = json!({
        "id": id,
        "object": object,
        "created": 0,
        "model": plan.model,
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
