//! `least-request`: the fewest active requests, as this router booked them.

use std::sync::Arc;

use rand::RngCore;

use super::by_metric::ByMetric;
use super::contract::{Candidates, RoutePolicy};
use super::settings::Settings;
use crate::error::Result;

pub(super) fn build(_: &Settings, _: &mut dyn RngCore) -> Result<Arc<dyn RoutePolicy>> {
    Ok(ByMetric::policy("least-request", values))
}

fn values(candidates: &Candidates<'_>, values: &mut Vec<Option<f64>>) {
    // A worker that the load table does not know counts as idle.
    let requests = |index| Some(f64::from(candidates.requests(index)));
    values.extend((0..candidates.len()).map(requests));
}
