//! `throughput`: the worker that has had the least to do, prompts counted twice.

use std::sync::Arc;

use rand::RngCore;

use super::by_metric::ByMetric;
use super::contract::{Candidates, RoutePolicy};
use super::settings::Settings;
use crate::error::Result;

pub(super) fn build(_: &Settings, _: &mut dyn RngCore) -> Result<Arc<dyn RoutePolicy>> {
    Ok(ByMetric::policy("throughput", values))
}

/// What a prompt token counts in generated tokens.
const PROMPT_WEIGHT: f64 = 2.0;

fn values(candidates: &Candidates<'_>, values: &mut Vec<Option<f64>>) {
    values.extend((0..candidates.len()).map(|index| {
        let metrics = candidates.metrics(index);
        let (prompt, generation) = (metrics.avg_prompt_tokens?, metrics.avg_generation_tokens?);
        Some(PROMPT_WEIGHT * prompt + generation)
    }));
}
