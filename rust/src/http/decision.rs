//! A decision as services tell it: to POST /explain beforehand, to GET /why afterwards.

use serde_json::{Value, json};

use crate::select::Record;

/// A decision with every candidate's terms.
pub(super) fn decision_json(record: &Record) -> Value {
    let candidates: Vec<_> = record
        .candidates
        .iter()
        .map(|one| {
            let terms = &one.terms;
            json!({
                "worker": terms.worker.to_string(),
                "overlap_blocks": terms.overlap_blocks,
                "device_blocks": one.device_blocks,
                "host_blocks": one.host_blocks,
                "disk_blocks": one.disk_blocks,
                "predicted_blocks": one.predicted_blocks,
                "prefill_tokens": terms.prefill_tokens,
                "prefill_blocks": terms.prefill_blocks,
                "decode_blocks": terms.decode_blocks,
                "active_requests": terms.active_requests,
                "is_busy": one.is_busy,
                "cost": terms.cost,
                "formula": terms.formula(&record.request).to_string(),
            })
        })
        .collect();
    json!({
        "policy": record.policy.name(),
        "worker": record.worker.to_string(),
        "reason": record.reason.name(),
        "ties": record.ties,
        "margin": record.margin,
        "request_blocks": record.request_blocks,
        "overlap_blocks": record.overlap_blocks,
        "overlap_score_weight": record.request.overlap_score_weight,
        "temperature": record.request.temperature,
        "candidates": candidates,
    })
}

/// A past decision, with what became of its request.
pub(super) fn record_json(record: &Record) -> Value {
    let mut value = decision_json(record);
    value["outcome"] = json!(record.outcome.name());
    value["first_token_ms"] = json!(record.first_token_ms);
    value["ended_ms"] = json!(record.ended_ms);
    value["cached_tokens"] = json!(record.cached_tokens);
    value
}
