//! `least-busy-time`: the accelerator that was busy for the smallest share of the time.

use std::sync::Arc;

use rand::RngCore;

use super::by_metric::ByMetric;
use super::contract::{Candidates, RoutePolicy};
use super::settings::Settings;
use crate::error::Result;

pub(super) fn build(_: &Settings, _: &mut dyn RngCore) -> Result<Arc<dyn RoutePolicy>> {
    Ok(ByMetric::policy("least-busy-time", values))
}

fn values(candidates: &Candidates<'_>, values: &mut Vec<Option<f64>>) {
    values.extend((0..candidates.len()).map(|index| candidates.metrics(index).busy_ratio));
}
