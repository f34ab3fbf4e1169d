//! What the frontend counts besides the common metrics.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::super::metrics::{CauseLabel, seconds_histogram};

/// Where tokens of prompts stand on the way from request to reuse.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StageLabel {
    stage: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct OutcomeLabel {
    pub outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct WorkerLabel {
    pub worker: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ModelNameLabel {
    pub model: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct TurnLabel {
    pub model: String,
    pub outcome: &'static str,
}

#[derive(Debug, Clone)]
pub(crate) struct FrontendMetrics {
    /// Tokens of all prompts.
    pub input: Counter,
    /// Tokens that the best worker could have reused.
    pub available: Counter,
    /// Tokens that the chosen worker was expected to reuse.
    pub selected: Counter,
    /// Tokens that engines say they reused.
    pub delivered: Counter,
    /// Answers that told their reuse.
    pub usage_reported: Counter,
    /// Answers whose engine counted another number of prompt tokens than routing did.
    pub token_mismatches: Counter,
    /// Why a request was routed without tokens.
    pub untokenized: Family<CauseLabel, Counter>,
    /// Why an attempt failed.
    pub attempts_failed: Family<CauseLabel, Counter>,
    /// Why a request was refused here.
    pub refused: Family<CauseLabel, Counter>,
    /// Answers that broke off after their first byte.
    pub streams_broken: Counter,
    /// Clients that left before their answer's end.
    pub clients_gone: Counter,
    /// How answers of runtime workers ended.
    pub answers: Family<OutcomeLabel, Counter>,
    /// What became of prefills at other workers.
    pub prefills: Family<OutcomeLabel, Counter>,
    /// Time from body to decision.
    pub route_seconds: Histogram,
    /// Time from a request's body to its answer's first byte.
    pub first_byte_seconds: Histogram,
    /// Time that requests waited for their turn, refused ones included.
    pub turn_seconds: Histogram,
    pub turns: Family<TurnLabel, Counter>,
    pub turns_waiting: Family<ModelNameLabel, Gauge>,
    /// Time that requests took to get a worker where they may have to wait for one with room.
    pub queue_seconds: Histogram,
    pub queued: Family<TurnLabel, Counter>,
    pub queue_pending: Family<ModelNameLabel, Gauge>,
    pub queue_pending_tokens: Family<ModelNameLabel, Gauge>,
    pub in_flight: Gauge,
    pub worker_healthy: Family<WorkerLabel, Gauge>,
    pub worker_requests: Family<WorkerLabel, Gauge>,
    pub worker_failures: Family<WorkerLabel, Gauge>,
    pub worker_active_blocks: Family<WorkerLabel, Gauge>,
    pub worker_active_prefill: Family<WorkerLabel, Gauge>,
    pub worker_active_requests: Family<WorkerLabel, Gauge>,
    pub worker_prefill_rate: Family<WorkerLabel, Gauge>,
    pub worker_busy: Family<WorkerLabel, Gauge>,
    pub worker_reuse_trust: Family<WorkerLabel, Gauge<f64, AtomicU64>>,
    pub worker_reuse_predicted: Family<WorkerLabel, Counter>,
    pub worker_reuse_reported: Family<WorkerLabel, Counter>,
    pub load_expired: Counter,
    pub journal_bytes: Gauge,
    pub journal_records: Gauge,
    pub journal_dropped: Counter,
    pub tokenizer_hits: Gauge,
    pub tokenizer_misses: Gauge,
    pub tokenizer_bytes: Gauge,
}

impl FrontendMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let stages: Family<StageLabel, Counter> = Family::default();
        let stage = |stage| stages.get_or_create(&StageLabel { stage }).clone();
        let metrics = Self {
            input: stage("input"),
            available: stage("available"),
            selected: stage("selected"),
            delivered: stage("delivered"),
            usage_reported: Counter::default(),
            token_mismatches: Counter::default(),
            untokenized: Family::default(),
            attempts_failed: Family::default(),
            refused: Family::default(),
            streams_broken: Counter::default(),
            clients_gone: Counter::default(),
            answers: Family::default(),
            prefills: Family::default(),
            route_seconds: seconds_histogram(),
            first_byte_seconds: seconds_histogram(),
            turn_seconds: seconds_histogram(),
            turns: Family::default(),
            turns_waiting: Family::default(),
            queue_seconds: seconds_histogram(),
            queued: Family::default(),
            queue_pending: Family::default(),
            queue_pending_tokens: Family::default(),
            in_flight: Gauge::default(),
            worker_healthy: Family::default(),
            worker_requests: Family::default(),
            worker_failures: Family::default(),
            worker_active_blocks: Family::default(),
            worker_active_prefill: Family::default(),
            worker_active_requests: Family::default(),
            worker_prefill_rate: Family::default(),
            worker_busy: Family::default(),
            worker_reuse_trust: Family::default(),
            worker_reuse_predicted: Family::default(),
            worker_reuse_reported: Family::default(),
            load_expired: Counter::default(),
            journal_bytes: Gauge::default(),
            journal_records: Gauge::default(),
            journal_dropped: Counter::default(),
            tokenizer_hits: Gauge::default(),
            tokenizer_misses: Gauge::default(),
            tokenizer_bytes: Gauge::default(),
        };
        let m = &metrics;
        registry.register(
            "tokens",
            "Prompt tokens: input; available = best any worker held; selected = expected at the chosen \
             worker; delivered = reused as the engine says",
            stages.clone(),
        );
        registry.register(
            "usage_reports",
            "Answers whose engine told how many tokens it reused",
            m.usage_reported.clone(),
        );
        registry.register(
            "token_mismatches",
            "Answers whose engine counted another number of prompt tokens than routing did",
            m.token_mismatches.clone(),
        );
        registry.register(
            "untokenized_requests",
            "Requests routed without tokens, so without overlap, by cause",
            m.untokenized.clone(),
        );
        registry.register(
            "attempts_failed",
            "Attempts at a worker that failed before the first byte, by cause",
            m.attempts_failed.clone(),
        );
        registry.register("refused_requests", "Requests refused here, by cause", m.refused.clone());
        registry.register(
            "streams_broken",
            "Answers that broke off after their first byte",
            m.streams_broken.clone(),
        );
        registry.register(
            "clients_gone",
            "Clients that left before the end of their answer",
            m.clients_gone.clone(),
        );
        registry.register(
            "answers",
            "Answers of runtime workers that began, by how they ended",
            m.answers.clone(),
        );
        registry.register(
            "prefills",
            "Prefills at prefill workers, by what became of them",
            m.prefills.clone(),
        );
        registry.register_with_unit(
            "route",
            "Time from a request's body to its decision: tokenize, hash, look up, score",
            Unit::Seconds,
            m.route_seconds.clone(),
        );
        registry.register_with_unit(
            "first_byte",
            "Time from a request's body to its answer's first byte",
            Unit::Seconds,
            m.first_byte_seconds.clone(),
        );
        registry.register_with_unit(
            "turn_wait",
            "Time that requests waited for their turn, refused ones included",
            Unit::Seconds,
            m.turn_seconds.clone(),
        );
        registry.register(
            "turns",
            "Requests of a model that came to wait, by what became of them",
            m.turns.clone(),
        );
        registry.register(
            "turns_waiting",
            "Requests of a model that wait for their turn",
            m.turns_waiting.clone(),
        );
        registry.register_with_unit(
            "queue_wait",
            "Time that requests took to get a worker, refused ones included (--router-queue-threshold)",
            Unit::Seconds,
            m.queue_seconds.clone(),
        );
        registry.register(
            "queued",
            "Requests of a model that waited for a worker with room to prefill, by what became of them",
            m.queued.clone(),
        );
        registry.register(
            "queue_pending_requests",
            "Requests of a model that wait for a worker with room to prefill",
            m.queue_pending.clone(),
        );
        registry.register(
            "queue_pending_isl_tokens",
            "Tokens of their prompts",
            m.queue_pending_tokens.clone(),
        );
        registry.register("requests_in_flight", "Requests in flight", m.in_flight.clone());
        registry.register(
            "worker_healthy",
            "1 = the worker's last health check passed",
            m.worker_healthy.clone(),
        );
        registry.register(
            "worker_requests_sent",
            "Requests sent to the worker since it was registered",
            m.worker_requests.clone(),
        );
        registry.register(
            "worker_failures_seen",
            "Failures of the worker since it was registered",
            m.worker_failures.clone(),
        );
        registry.register(
            "worker_active_blocks",
            "Blocks of requests in flight, shared ones counted once",
            m.worker_active_blocks.clone(),
        );
        registry.register(
            "worker_active_prefill_tokens",
            "Tokens still to be prefilled, as booked here",
            m.worker_active_prefill.clone(),
        );
        registry.register(
            "worker_active_requests",
            "Requests in flight, as booked here",
            m.worker_active_requests.clone(),
        );
        registry.register(
            "worker_prefill_tokens_per_second",
            "Prompt tokens a second that first tokens have shown, where prefill speed counts",
            m.worker_prefill_rate.clone(),
        );
        registry.register(
            "worker_busy",
            "1 = the worker is busier than its model's thresholds allow",
            m.worker_busy.clone(),
        );
        registry.register(
            "worker_reuse_trust",
            "What the worker's overlap counts, 0 to 1: less where the engine's reported reuse contradicts its events",
            m.worker_reuse_trust.clone(),
        );
        registry.register(
            "worker_reuse_predicted_tokens",
            "Prompt tokens that the worker's events promised, in answers that were compared",
            m.worker_reuse_predicted.clone(),
        );
        registry.register(
            "worker_reuse_reported_tokens",
            "Prompt tokens that the worker reported as reused, in the same answers",
            m.worker_reuse_reported.clone(),
        );
        registry.register_with_unit(
            "decision_journal",
            "Memory of past decisions",
            Unit::Bytes,
            m.journal_bytes.clone(),
        );
        registry.register(
            "decision_journal_records",
            "Past decisions that are kept",
            m.journal_records.clone(),
        );
        registry.register(
            "decision_journal_dropped",
            "Past decisions that gave way to later ones",
            m.journal_dropped.clone(),
        );
        registry.register(
            "load_expired",
            "Bookings freed because nothing was heard of them for the expiry time",
            m.load_expired.clone(),
        );
        registry.register(
            "tokenizer_cache_hits",
            "Pieces of text whose tokens were remembered",
            m.tokenizer_hits.clone(),
        );
        registry.register(
            "tokenizer_cache_misses",
            "Pieces of text that were tokenized",
            m.tokenizer_misses.clone(),
        );
        registry.register_with_unit(
            "tokenizer_cache",
            "Memory of remembered tokens",
            Unit::Bytes,
            m.tokenizer_bytes.clone(),
        );
        metrics
    }
}
