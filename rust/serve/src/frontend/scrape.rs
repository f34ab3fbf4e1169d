//! GET /metrics: values that are read at each scrape.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::extract::State;
use axum::response::Response;
use kvflash_core::fleet::WorkerState;
use kvflash_core::text::CacheStats;

use super::admin::{not_ready, warnings_count};
use super::app::App;
use crate::gateway::book;
use crate::page::{Labels, Page, and, column, label, of_model};

/// GET /metrics
pub(super) async fn metrics(State(app): State<Arc<App>>) -> Response {
    let (of, prefix) = (Arc::clone(&app), &app.options.metrics_prefix);
    let read = move |page: &mut Page<'_>| {
        page.gauge("requests_in_flight", "Requests in flight", of.in_flight())?;
        page.state(not_ready(&of).is_none(), warnings_count(&of))?;
        write_workers(&of, page)?;
        write_clients(&of, page)?;
        write_reuse(&of, page)?;
        write_turns(&of, page)?;
        write_tokenizers(&of, page)?;
        let (bytes, evictions_total) = of.taught.held();
        page.gauge(
            "taught_cache_bytes",
            "Memory of the token ids that engines returned for conversations",
            bytes,
        )?;
        let help = "Conversations evicted from the memory of returned token ids";
        page.counter("taught_cache_evictions", help, evictions_total)
    };
    app.common.expose(&app.catalog, &app.fleet.common.journal, prefix, read).await
}

fn write_workers(app: &App, page: &mut Page<'_>) -> fmt::Result {
    let engines: Vec<_> = app
        .fleet
        .engines()
        .into_iter()
        .map(|engine| (label("worker", engine.id), engine))
        .collect();
    let pools = app.fleet.pools();
    let busy: BTreeSet<_> =
        pools.iter().flat_map(|pool| pool.selector.busy.busy(pool.selector.loads())).collect();
    let healthy = column(&engines, |engine| u32::from(engine.is_healthy()));
    page.gauges("worker_healthy", "1 = the worker's last health check passed", healthy)?;
    let sent = column(&engines, |engine| engine.requests.load(Ordering::Relaxed));
    let help = "Requests sent to the worker since it was registered";
    page.gauges("worker_requests_sent", help, sent)?;
    let failures = column(&engines, |engine| engine.failures.load(Ordering::Relaxed));
    let help = "Failures of the worker since it was registered";
    page.gauges("worker_failures_seen", help, failures)?;
    let is_busy = column(&engines, |engine| u32::from(busy.contains(&engine.id)));
    let help = "1 = the worker is busier than its model's thresholds allow";
    page.gauges("worker_busy", help, is_busy)?;
    let is_draining = column(&engines, |engine| {
        u32::from(app.fleet.state_of(engine.id) == WorkerState::Draining)
    });
    let help = "1 = the worker takes no new requests (PATCH /workers/{id})";
    page.gauges("worker_draining", help, is_draining)?;
    let loads = pools.iter().flat_map(|pool| pool.selector.loads());
    page.loads(&loads.map(|load| (label("worker", load.worker), load)).collect::<Vec<_>>())?;
    let queues =
        pools.iter().filter_map(|pool| Some((of_model(&pool.key), pool.queue.as_ref()?.stats())));
    page.queues(queues)
}

/// Usage and limits of clients with keys.
fn write_clients(app: &App, page: &mut Page<'_>) -> fmt::Result {
    let clients = app.meters.all();
    let clients: Vec<_> = clients
        .into_iter()
        .map(|(client, counts, in_flight)| (label("client", client), (counts, in_flight)))
        .collect();
    let in_flight = column(&clients, |(_, in_flight)| *in_flight);
    let help = "Requests of each client key that are in flight";
    page.gauges("client_requests_in_flight", help, in_flight)?;
    let tokens = column(&clients, |(counts, _)| counts.uncached_tokens);
    let help = "Uncached prompt tokens of each client key";
    page.counters("client_uncached_prompt_tokens", help, tokens)?;
    let requests = clients.iter().flat_map(|(client, (counts, _))| {
        [
            ("served", counts.served),
            ("refused_requests", counts.requests),
            ("refused_tokens", counts.tokens),
            ("refused_concurrency", counts.concurrency),
        ]
        .map(|(outcome, count)| (and(client, "outcome", outcome), count))
    });
    let help = "Requests of each client key: served, or refused by requests, tokens or concurrency";
    page.counters("client_requests", help, requests)
}

/// Trust in the workers' events, and the underlying data.
fn write_reuse(app: &App, page: &mut Page<'_>) -> fmt::Result {
    let unheard = book::unheard(app).into_keys().map(|worker| (label("worker", worker), 1));
    let help = "1 = the worker may hold blocks that no event has reported; they earn no credit";
    page.gauges("worker_index_incomplete", help, unheard)?;
    let pools = app.fleet.pools();
    let views = pools.iter().flat_map(|pool| pool.selector.reuse.views());
    let views: Vec<_> = views.map(|(worker, view)| (label("worker", worker), view)).collect();
    page.gauges(
        "worker_reuse_trust",
        "Weight of the worker's overlap, 0 to 1: lower while the engine's reported reuse contradicts its events",
        column(&views, |view| view.credit),
    )?;
    page.counters(
        "worker_reuse_predicted_tokens",
        "Prompt tokens that the worker's events predicted, in compared answers",
        column(&views, |view| view.predicted_tokens),
    )?;
    page.counters(
        "worker_reuse_reported_tokens",
        "Prompt tokens that the worker reported as reused, in the same answers",
        column(&views, |view| view.reported_tokens),
    )?;
    let help = "1 = prompts of this form have the same tokens here and at engines of this version, 0 = they differ";
    page.gauges("parity", help, app.compared().rows())
}

/// Requests that wait for a turn, and outcomes of earlier ones.
fn write_turns(app: &App, page: &mut Page<'_>) -> fmt::Result {
    let pools = app.fleet.pools();
    let rooms = pools.iter().filter_map(|pool| Some((&pool.name, pool.waiting.as_ref()?.stats())));
    let rooms: Vec<_> = rooms.map(|(model, stats)| (label("model", model), stats)).collect();
    let waiting = column(&rooms, |stats| stats.queued);
    page.gauges("turns_waiting", "Requests of a model that wait for their turn", waiting)?;
    page.gauges(
        "turn_clients",
        "Clients of a model with counted turns; each name that a client uses counts as one",
        column(&rooms, |stats| stats.clients),
    )?;
    page.counters(
        "turn_clients_forgotten",
        "Idle clients of a model that were forgotten to make room for others",
        column(&rooms, |stats| stats.forgotten_clients_total),
    )?;
    let turns = rooms.iter().flat_map(|(model, stats)| {
        [
            ("granted", stats.admitted_total),
            ("refused_queue", stats.refused_queue_total),
            ("refused_client_queue", stats.refused_client_queue_total),
            ("refused_clients", stats.refused_clients_total),
            ("refused_names", stats.refused_names_total),
            ("expired", stats.expired_total),
            ("left", stats.cancelled_total),
        ]
        .map(|(outcome, count)| (and(model, "outcome", outcome), count))
    });
    page.counters("turns", "Requests of a model that were queued for their turn, by outcome", turns)
}

/// Loaded tokenizers, their caches, and the results of their checks.
fn write_tokenizers(app: &App, page: &mut Page<'_>) -> fmt::Result {
    type Part = fn(&CacheStats) -> u64;
    let texts = app.tokenizers.loaded();
    let (tokens, messages): (Vec<_>, Vec<_>) =
        texts.iter().map(|text| text.model.cache_stats()).unzip();
    let sum = |stats: &[CacheStats], part: Part| stats.iter().map(part).sum::<u64>();
    let of_both = |part| sum(&tokens, part) + sum(&messages, part);
    for (name, help, value) in [
        ("hits", "Pieces of text found in the cache", sum(&tokens, |one| one.hits_total)),
        ("misses", "Pieces of text that were tokenized", sum(&tokens, |one| one.misses_total)),
        (
            "message_hits",
            "Messages of long chats found in the cache",
            sum(&messages, |one| one.hits_total),
        ),
        (
            "message_misses",
            "Messages of long chats that were parsed",
            sum(&messages, |one| one.misses_total),
        ),
        (
            "evictions",
            "Pieces of text and messages evicted from the cache",
            of_both(|one| one.evictions_total),
        ),
        ("bytes", "Memory of cached tokens and messages", of_both(|one| one.held_bytes)),
    ] {
        page.gauge(&format!("tokenizer_cache_{name}"), help, value)?;
    }
    let mut encoders = BTreeMap::<Labels, u64>::new();
    let mut checks = BTreeMap::<Labels, u64>::new();
    for report in texts.iter().map(|text| text.model.tokenizer.encoder()) {
        *encoders.entry(label("encoder", report.name())).or_default() += 1;
        for (outcome, count) in [
            ("same", report.checks_total - report.mismatches_total),
            ("different", report.mismatches_total),
            ("skipped", report.skipped_total),
        ] {
            *checks.entry(label("outcome", outcome)).or_default() += count;
        }
    }
    let help = "Tokenizers in memory, by the library that makes their ids";
    page.gauges("tokenizers", help, encoders)?;
    let help = "Prompts selected for a second encoding by the tokenizers library, by outcome";
    page.counters("tokenizer_checks", help, checks)
}
