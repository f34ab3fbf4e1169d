//! Decisions as JSON, for people and scripts.

use serde_json::{Value, json};

use super::record::{CandidateRecord, Record};

impl Record {
    /// The decision with every candidate's terms, without what became of it.
    pub fn decision(&self) -> Value {
        let candidates: Vec<Value> =
            self.candidates.iter().map(|one| self.candidate(one)).collect();
        json!({
            "model": &*self.model,
            "policy": &*self.policy,
            "worker": self.worker.to_string(),
            "reason": self.reason.name(),
            "ties": self.ties,
            "margin": self.margin,
            "score": self.score,
            "isl_tokens": self.request.isl_tokens,
            "block_size": (self.request.block_size > 0).then_some(self.request.block_size),
            "request_blocks": self.request_blocks,
            "overlap_blocks": self.overlap_blocks,
            "overlap_score_weight": self.request.overlap_score_weight,
            "temperature": self.request.temperature,
            "candidates": candidates,
        })
    }

    /// The decision, and what became of it by now.
    pub fn whole(&self, now_ms: u64) -> Value {
        let mut value = self.decision();
        value["age_ms"] = json!(now_ms.saturating_sub(self.decided_at_ms));
        value["outcome"] = json!(self.outcome.name());
        value["first_token_ms"] = json!(self.first_token_ms);
        value["ended_ms"] = json!(self.ended_ms);
        value["cached_tokens"] = json!(self.cached_tokens);
        value
    }

    fn candidate(&self, one: &CandidateRecord) -> Value {
        let terms = &one.terms;
        json!({
            "worker": terms.worker.to_string(),
            "overlap_blocks": one.overlap_blocks,
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
            "formula": terms.formula(&self.request).to_string(),
        })
    }
}
