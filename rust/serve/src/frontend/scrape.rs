//! GET /metrics: families that are recomputed at each scrape.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::extract::State;
use axum::response::Response;
use kvflash_core::fleet::WorkerState;
use kvflash_core::text::CacheStats;

use super::super::metrics::escape;
use super::app::App;
use super::metrics::{
    ClientIdLabel, ClientLabel, EncoderLabel, ModelNameLabel, TurnLabel, WorkerLabel,
};
use crate::gateway::evidence;
use crate::metrics::OutcomeLabel;

/// GET /metrics
pub(super) async fn metrics(State(app): State<Arc<App>>) -> Response {
    let prefix = &app.options.metrics_prefix;
    let common = &app.fleet.common;
    app.common.expose_with(&app.catalog, &common.journal, prefix, || refill(&app)).await
}

/// Updates the families of current values.
fn refill(app: &App) {
    let metrics = &app.metrics;
    metrics.in_flight.set(app.in_flight() as i64);
    // Rebuilt at each scrape, so that a departed worker leaves no labels behind.
    for family in [
        &metrics.worker_healthy,
        &metrics.worker_requests,
        &metrics.worker_failures,
        &metrics.worker_active_blocks,
        &metrics.worker_active_prefill,
        &metrics.worker_active_requests,
        &metrics.worker_prefill_rate,
        &metrics.worker_busy,
        &metrics.worker_draining,
    ] {
        family.clear();
    }
    for engine in app.fleet.engines() {
        let label = WorkerLabel { worker: engine.id.to_string() };
        metrics.worker_healthy.get_or_create(&label).set(i64::from(engine.is_healthy()));
        let requests = engine.requests.load(Ordering::Relaxed);
        metrics.worker_requests.get_or_create(&label).set(requests as i64);
        metrics.worker_busy.get_or_create(&label).set(0);
        let is_draining = app.fleet.state_of(engine.id) == WorkerState::Draining;
        metrics.worker_draining.get_or_create(&label).set(i64::from(is_draining));
        let failures = engine.failures.load(Ordering::Relaxed);
        metrics.worker_failures.get_or_create(&label).set(failures as i64);
    }
    for pool in app.fleet.pools() {
        for id in pool.selector.busy.busy(pool.selector.loads()) {
            let label = WorkerLabel { worker: id.to_string() };
            metrics.worker_busy.get_or_create(&label).set(1);
        }
        for load in pool.selector.loads() {
            let label = WorkerLabel { worker: load.worker.to_string() };
            metrics.worker_active_blocks.get_or_create(&label).set(load.blocks as i64);
            metrics.worker_active_prefill.get_or_create(&label).set(load.prefill_tokens as i64);
            metrics.worker_active_requests.get_or_create(&label).set(i64::from(load.requests));
            if let Some(per_s) = load.prefill_tokens_per_s {
                metrics.worker_prefill_rate.get_or_create(&label).set(per_s as i64);
            }
        }
    }
    tell_clients(app);
    app.parity.refill(app);
    tell_reuse(app);
    tell_turns(app);
    tell_queues(app);
    tell_tokenizers(app);
    let (taught_bytes, evictions_total) = app.taught.held();
    metrics.taught_bytes.set(taught_bytes as i64);
    metrics.taught_evictions.inner().store(evictions_total, Ordering::Relaxed);
}

/// Loaded tokenizers, their caches, and the results of their checks.
fn tell_tokenizers(app: &App) {
    let metrics = &app.metrics;
    metrics.tokenizers.clear();
    metrics.tokenizer_checks.clear();
    let texts = app.tokenizers.loaded();
    let (tokens, messages): (Vec<_>, Vec<_>) =
        texts.iter().map(|text| text.model.cache_stats()).unzip();
    if !tokens.is_empty() {
        type Part = fn(&CacheStats) -> u64;
        let sum = |stats: &[CacheStats], part: Part| stats.iter().map(part).sum::<u64>() as i64;
        metrics.tokenizer_hits.set(sum(&tokens, |one| one.hits_total));
        metrics.tokenizer_misses.set(sum(&tokens, |one| one.misses_total));
        metrics.message_hits.set(sum(&messages, |one| one.hits_total));
        metrics.message_misses.set(sum(&messages, |one| one.misses_total));
        let of_both = |part| sum(&tokens, part) + sum(&messages, part);
        metrics.tokenizer_bytes.set(of_both(|one| one.held_bytes));
        metrics.tokenizer_evictions.set(of_both(|one| one.evictions_total));
    }
    for report in texts.iter().map(|text| text.model.tokenizer.encoder()) {
        let label = EncoderLabel { encoder: report.name() };
        metrics.tokenizers.get_or_create(&label).inc();
        for (outcome, count) in [
            ("same", report.checks_total - report.mismatches_total),
            ("different", report.mismatches_total),
            ("skipped", report.skipped_total),
        ] {
            metrics.tokenizer_checks.get_or_create(&OutcomeLabel { outcome }).inc_by(count);
        }
    }
}

/// Trust in the workers' events, and the underlying data.
fn tell_reuse(app: &App) {
    let metrics = &app.metrics;
    metrics.worker_index_incomplete.clear();
    for worker in evidence::unheard(app).into_keys() {
        let label = WorkerLabel { worker: worker.to_string() };
        metrics.worker_index_incomplete.get_or_create(&label).set(1);
    }
    metrics.worker_reuse_trust.clear();
    metrics.worker_reuse_predicted.clear();
    metrics.worker_reuse_reported.clear();
    for (worker, view) in app.fleet.pools().iter().flat_map(|pool| pool.selector.reuse.views()) {
        let label = WorkerLabel { worker: worker.to_string() };
        metrics.worker_reuse_trust.get_or_create(&label).set(view.credit);
        for (family, tokens) in [
            (&metrics.worker_reuse_predicted, view.predicted_tokens),
            (&metrics.worker_reuse_reported, view.reported_tokens),
        ] {
            family.get_or_create(&label).inner().store(tokens, Ordering::Relaxed);
        }
    }
}

/// Usage and limits of clients with keys.
fn tell_clients(app: &App) {
    let metrics = &app.metrics;
    metrics.client_requests.clear();
    metrics.client_tokens.clear();
    metrics.client_in_flight.clear();
    for (client, counts, in_flight) in app.meters.all() {
        let label = ClientIdLabel { client: client.clone() };
        metrics.client_in_flight.get_or_create(&label).set(in_flight as i64);
        let tokens = counts.uncached_tokens;
        metrics.client_tokens.get_or_create(&label).inner().store(tokens, Ordering::Relaxed);
        for (outcome, count) in [
            ("served", counts.served),
            ("refused_requests", counts.requests),
            ("refused_tokens", counts.tokens),
            ("refused_concurrency", counts.concurrency),
        ] {
            let label = ClientLabel { client: client.clone(), outcome };
            metrics.client_requests.get_or_create(&label).inner().store(count, Ordering::Relaxed);
        }
    }
}

/// Requests that wait for a turn, and outcomes of earlier ones.
fn tell_turns(app: &App) {
    let metrics = &app.metrics;
    metrics.turns.clear();
    metrics.turns_waiting.clear();
    metrics.turn_clients.clear();
    metrics.turn_clients_forgotten.clear();
    for pool in app.fleet.pools() {
        let Some(room) = &pool.waiting else { continue };
        let (stats, model) = (room.stats(), escape(&pool.name));
        let waiting = metrics.turns_waiting.get_or_create(&ModelNameLabel { model: model.clone() });
        waiting.set(stats.queued as i64);
        let label = ModelNameLabel { model: model.clone() };
        metrics.turn_clients.get_or_create(&label).set(stats.clients as i64);
        let forgotten = metrics.turn_clients_forgotten.get_or_create(&label);
        forgotten.inner().store(stats.forgotten_clients_total, Ordering::Relaxed);
        for (outcome, count) in [
            ("granted", stats.admitted_total),
            ("refused_queue", stats.refused_queue_total),
            ("refused_client_queue", stats.refused_client_queue_total),
            ("refused_clients", stats.refused_clients_total),
            ("expired", stats.expired_total),
            ("left", stats.cancelled_total),
        ] {
            let label = TurnLabel { model: model.clone(), outcome };
            metrics.turns.get_or_create(&label).inner().store(count, Ordering::Relaxed);
        }
    }
}

/// Requests that wait for a worker with room to prefill, and outcomes of earlier ones.
fn tell_queues(app: &App) {
    let metrics = &app.metrics;
    metrics.queue_pending.clear();
    metrics.queue_pending_tokens.clear();
    metrics.queued.clear();
    // A model's prefill workers have a separate queue: the sum is reported.
    for pool in app.fleet.pools() {
        let Some(queue) = &pool.queue else { continue };
        let (stats, model) = (queue.stats(), escape(&pool.name));
        let label = ModelNameLabel { model: model.clone() };
        metrics.queue_pending.get_or_create(&label).inc_by(stats.pending as i64);
        let tokens = stats.pending_isl_tokens as i64;
        metrics.queue_pending_tokens.get_or_create(&label).inc_by(tokens);
        for (outcome, count) in stats.outcomes() {
            let label = TurnLabel { model: model.clone(), outcome };
            metrics.queued.get_or_create(&label).inc_by(count);
        }
    }
}
