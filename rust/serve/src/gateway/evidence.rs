//! What answers tell of their workers' events, for operators.

use std::collections::BTreeMap;

use kvflash_core::catalog::Unheard;
use kvflash_core::ids::Worker;
use kvflash_core::select::{EventSource, ReuseView, WorkerReason};
use serde_json::{Value, json};

use crate::frontend::app::App;

/// State of a worker's event source.
pub(super) fn source_of(app: &App, worker: Worker) -> EventSource {
    let publishers = app.catalog.publishers();
    let own = publishers.iter().find(|publisher| publisher.worker == worker);
    match own.map(|publisher| publisher.view().counts.batches) {
        None => EventSource::None,
        Some(0) => EventSource::Silent,
        Some(_) => EventSource::Heard,
    }
}

/// Workers that are distrusted or misconfigured, with cause and fix.
pub(crate) fn reasons(app: &App) -> Vec<WorkerReason> {
    let engines = app.fleet.engines();
    let faults = engines.iter().flat_map(|engine| engine.inspection.lock().faults.clone());
    let pools = app.fleet.pools();
    let views = pools.iter().flat_map(|pool| pool.selector.reuse.views());
    let found = views
        .filter_map(|(worker, view)| Some(view.finding?.explain(worker, source_of(app, worker))));
    faults.chain(found).collect()
}

/// Workers with incomplete index data, and the reasons.
pub(crate) fn unheard(app: &App) -> BTreeMap<Worker, Unheard> {
    let pools = app.fleet.pools();
    pools.iter().flat_map(|pool| pool.selector.model().all_unheard()).collect()
}

/// A worker's reuse; empty for a worker that has not answered yet.
pub(crate) fn reuse_json(view: Option<ReuseView>) -> Value {
    let is_reported = view.and_then(|view| view.is_reported);
    json!({
        "reported": is_reported,
        "note": match is_reported {
            Some(true) => None,
            Some(false) => Some(
                "the engine reports no reuse, so its events cannot be checked; vLLM reports it with \
                 --enable-prompt-tokens-details, SGLang with --enable-cache-report, and both in streams only with \
                 \"stream_options\": {\"include_usage\": true}",
            ),
            None => Some("reuse is not reported yet"),
        },
        "requests": view.map_or(0, |view| view.samples),
        "predicted_tokens": view.map_or(0, |view| view.predicted_tokens),
        "reported_tokens": view.map_or(0, |view| view.reported_tokens),
        "trust": view.map_or(1.0, |view| view.credit),
    })
}
