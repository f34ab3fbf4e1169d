//! Decisions as JSON, for people and scripts.

use serde_json::{Value, json};

use super::draining::Diverted;
use super::record::{CandidateRecord, Record};
use crate::policy::{AUTO, Policy};

impl Record {
    /// The decision with the terms of the candidates that it keeps, without the outcome.
    pub fn decision(&self) -> Value {
        let candidates = self.candidates();
        json!({
            "model": &*self.model,
            "alias": self.alias.as_deref(),
            "policy": &*self.policy,
            "instead_of": self.instead_of.as_deref(),
            "worker": self.worker.to_string(),
            "reason": self.choice.reason.name(),
            "ties": self.choice.ties,
            "margin": self.choice.margin,
            "score": self.choice.score,
            "seed": self.seed,
            "prompt_source": self.prompt_source.name(),
            "isl_tokens": self.request.isl_tokens,
            "block_size": (self.request.block_size > 0).then_some(self.request.block_size),
            "request_blocks": self.request_blocks,
            "overlap_blocks": self.overlap_blocks,
            "overlap_score_weight": self.request.overlap_score_weight,
            "temperature": self.request.temperature,
            "because": self.because(&candidates),
            "diverted": self.diverted.map(|Diverted { from, by }| json!({
                "from": from, "by": by.name(), "because": "draining",
            })),
            "candidates": candidates.iter().map(|one| self.candidate(one)).collect::<Vec<_>>(),
            "candidates_left_out": self.seen.left_out,
        })
    }

    /// Why the chosen worker was cheaper than the next one, if the price decided; largest part
    /// first.
    fn because(&self, candidates: &[CandidateRecord]) -> Option<String> {
        if &*self.policy != AUTO {
            return None;
        }
        let chosen = candidates.iter().find(|one| one.terms.worker == self.worker)?;
        let others =
            candidates.iter().filter(|one| !one.is_busy && !one.is_draining && one != &chosen);
        let next = others.min_by(|a, b| a.terms.cost.total_cmp(&b.terms.cost))?;
        let parts = chosen.terms.price.parts().into_iter().zip(next.terms.price.parts());
        let mut differences: Vec<(&str, f64)> =
            parts.map(|((name, own), (_, other))| (name, own - other)).collect();
        differences.retain(|(_, difference)| difference.abs() >= 0.5);
        differences.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()));
        let word = |difference: f64| if difference < 0.0 { "less" } else { "more" };
        let mut said: Vec<String> = differences
            .iter()
            .map(|(name, by)| format!("{:.0} tokens {} {name}", by.abs(), word(*by)))
            .collect();
        let mut compare = |own: u32, other: u32, what: &str| {
            if own != other {
                let more = if own > other { "more" } else { "fewer" };
                let count = own.abs_diff(other);
                let blocks = if count == 1 { "block" } else { "blocks" };
                said.push(format!("{count} {more} {blocks} {what}"));
            }
        };
        let further = |one: &CandidateRecord| one.terms.overlap_blocks - one.overlap_blocks;
        compare(chosen.overlap_blocks, next.overlap_blocks, "cached");
        compare(further(chosen), further(next), "predicted");
        if said.is_empty() {
            return Some(format!("{} costs about as much", next.terms.worker));
        }
        Some(format!("{} than {}", said.join(", "), next.terms.worker))
    }

    /// The decision, and its outcome so far.
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
        let is_by_price = &*self.policy == AUTO;
        // A policy that is not built in judges no worker that was passed over: its cost is `kv`'s.
        let is_unpriced =
            Policy::from_name(&self.policy).is_none() && (one.is_busy || one.is_draining);
        let mut value = json!({
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
            "is_draining": one.is_draining,
            "cost": (!is_unpriced).then_some(terms.cost),
        });
        // The others choose by something else than this cost.
        if is_by_price && is_unpriced {
            (value["formula"], value["price"]) = (Value::Null, Value::Null);
        } else if is_by_price {
            value["formula"] = json!(format!("{}: {}", terms.worker, terms.price));
            value["price"] = terms.price.parts().into_iter().collect();
        } else if &*self.policy == Policy::Kv.name() {
            value["formula"] = json!(terms.formula(&self.request).to_string());
        }
        if let Some(credit) = one.credit {
            value["reuse_credit"] = json!(credit);
        }
        value
    }
}
