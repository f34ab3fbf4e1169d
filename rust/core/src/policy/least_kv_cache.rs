//! `least-kv-cache`: the lowest KV usage of accelerator and host together.

use std::sync::Arc;

use rand::RngCore;

use super::by_metric::ByMetric;
use super::contract::{Candidates, RoutePolicy};
use super::settings::Settings;
use crate::error::Result;

pub(super) fn build(_: &Settings, _: &mut dyn RngCore) -> Result<Arc<dyn RoutePolicy>> {
    Ok(ByMetric::policy("least-kv-cache", values))
}

fn values(candidates: &Candidates<'_>, values: &mut Vec<Option<f64>>) {
    values.extend((0..candidates.len()).map(|index| {
        let metrics = candidates.metrics(index);
        // Most engines have no blocks in host memory and report nothing of it.
        metrics.gpu_kv_usage.map(|gpu| gpu + metrics.cpu_kv_usage.unwrap_or(0.0))
    }));
}
