//! The frontend's metrics besides the common ones.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::metrics::{CauseLabel, KindLabel, OutcomeLabel, metrics, seconds_histogram};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct EncoderLabel {
    pub encoder: &'static str,
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
pub(crate) struct AliasLabel {
    pub alias: String,
    pub model: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct TurnLabel {
    pub model: String,
    pub outcome: &'static str,
}

/// A client's key, by its id; as many as there are meters.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ClientIdLabel {
    pub client: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ClientLabel {
    pub client: String,
    pub outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct FormLabel {
    pub model: String,
    pub version: String,
    pub form: &'static str,
}

metrics! {
    #[derive(Debug, Clone)]
    pub(crate) struct FrontendMetrics {
        @stages "tokens",
            "Prompt tokens by stage: input; available = cached at the best worker; selected = cached at the \
             chosen worker; delivered = reused, as the engine reports":
            pub input, pub available, pub selected, pub delivered;
        pub usage_reported: Counter = "usage_reports",
            "Answers that report how many tokens the engine reused";
        pub token_mismatches: Counter = "token_mismatches",
            "Answers in which the engine counted a different number of prompt tokens than routing";
        pub aliased: Family<AliasLabel, Counter> = "aliased_requests",
            "Requests for an alias, by the model that served them";
        pub untokenized: Family<CauseLabel, Counter> = "untokenized_requests",
            "Requests routed without tokens, so without overlap, by cause";
        pub parity: Family<FormLabel, Gauge> = "parity",
            "1 = prompts of this form have the same tokens here and at engines of this version, 0 = they differ";
        pub parity_probes: Family<OutcomeLabel, Counter> = "parity_probes",
            "Comparisons of tokens with an engine, by outcome";
        pub ids_sent: Counter = "prompt_tokens_sent_as_ids",
            "Prompt tokens sent as ids, which engines need not tokenize again";
        pub ids_given_up: Family<CauseLabel, Counter> = "token_ids_given_up",
            "Engines that no longer get token ids, by cause";
        pub taught: Family<OutcomeLabel, Counter> = "taught_prompts",
            "Chats routed without a tokenizer, by what engines told of them: learned = the ids of the prompt; matched = \
             those of an earlier turn; corrected = others than an earlier turn promised";
        pub taught_given_up: Family<CauseLabel, Counter> = "taught_given_up",
            "Engines that are no longer asked for the token ids of prompts, by cause";
        pub taught_evictions: Counter = "taught_cache_evictions",
            "Conversations evicted from the memory of what engines told";
        pub taught_bytes: Gauge = "taught_cache", [Bytes]
            "Memory of what engines told of conversations";
        pub attempts_failed: Family<CauseLabel, Counter> = "attempts_failed",
            "Attempts at a worker that failed before the first byte, by cause";
        pub refused: Family<CauseLabel, Counter> = "refused_requests",
            "Requests refused by the frontend, by cause";
        pub streams_broken: Counter = "streams_broken",
            "Answers that broke off after their first byte";
        pub clients_gone: Counter = "clients_gone",
            "Clients that disconnected before the end of their answer";
        pub answers: Family<OutcomeLabel, Counter> = "answers",
            "Answers that runtime workers began, by outcome";
        pub prefills: Family<OutcomeLabel, Counter> = "prefills",
            "Prefills at prefill workers, by outcome";
        pub route_seconds: Histogram = "route",
            [Seconds] "Time from a request's body to its decision: tokenize, hash, look up, score",
            seconds_histogram();
        pub first_byte_seconds: Histogram = "first_byte",
            [Seconds] "Time from a request's body to its answer's first byte", seconds_histogram();
        pub inter_token_seconds: Histogram = "inter_token",
            [Seconds] "Time from one chunk of an answer with new tokens to the next, as the worker sends them",
            seconds_histogram();
        pub turn_seconds: Histogram = "turn_wait",
            [Seconds] "Time that requests waited for their turn, refused ones included",
            seconds_histogram();
        pub turns: Family<TurnLabel, Counter> = "turns",
            "Requests of a model that were queued for their turn, by outcome";
        pub turns_waiting: Family<ModelNameLabel, Gauge> = "turns_waiting",
            "Requests of a model that wait for their turn";
        pub turn_clients: Family<ModelNameLabel, Gauge> = "turn_clients",
            "Clients of a model with counted turns; each name that a client uses counts as one";
        pub turn_clients_forgotten: Family<ModelNameLabel, Counter> = "turn_clients_forgotten",
            "Idle clients of a model that were forgotten to make room for others";
        pub queue_seconds: Histogram = "queue_wait",
            [Seconds] "Time that requests took to get a worker, refused ones included (--router-queue-threshold)",
            seconds_histogram();
        pub queued: Family<TurnLabel, Counter> = "queued",
            "Requests of a model that waited for a worker with room to prefill, by outcome";
        pub queue_pending: Family<ModelNameLabel, Gauge> = "queue_pending_requests",
            "Requests of a model that wait for a worker with room to prefill";
        pub queue_pending_tokens: Family<ModelNameLabel, Gauge> = "queue_pending_isl_tokens",
            "Prompt tokens of the requests that wait for a worker with room to prefill";
        pub in_flight: Gauge = "requests_in_flight", "Requests in flight";
        pub worker_healthy: Family<WorkerLabel, Gauge> = "worker_healthy",
            "1 = the worker's last health check passed";
        pub worker_requests: Family<WorkerLabel, Gauge> = "worker_requests_sent",
            "Requests sent to the worker since it was registered";
        pub worker_failures: Family<WorkerLabel, Gauge> = "worker_failures_seen",
            "Failures of the worker since it was registered";
        pub worker_active_blocks: Family<WorkerLabel, Gauge> = "worker_active_blocks",
            "Blocks of requests in flight, shared ones counted once";
        pub worker_active_prefill: Family<WorkerLabel, Gauge> = "worker_active_prefill_tokens",
            "Tokens still to be prefilled, as booked here";
        pub worker_active_requests: Family<WorkerLabel, Gauge> = "worker_active_requests",
            "Requests in flight, as booked here";
        pub worker_prefill_rate: Family<WorkerLabel, Gauge> = "worker_prefill_tokens_per_second",
            "Measured prefill speed in prompt tokens per second (--router-prefill-tokens-per-second)";
        pub worker_busy: Family<WorkerLabel, Gauge> = "worker_busy",
            "1 = the worker is busier than its model's thresholds allow";
        pub dropped: Family<KindLabel, Counter> = "dropped_fields",
            "Fields and headers that control an engine, removed from requests of clients with keys, by kind";
        pub client_requests: Family<ClientLabel, Counter> = "client_requests",
            "Requests of each client key: served, or refused by requests, tokens or concurrency";
        pub client_tokens: Family<ClientIdLabel, Counter> = "client_uncached_prompt_tokens",
            "Uncached prompt tokens of each client key";
        pub client_in_flight: Family<ClientIdLabel, Gauge> = "client_requests_in_flight",
            "Requests of each client key that are in flight";
        pub worker_draining: Family<WorkerLabel, Gauge> = "worker_draining",
            "1 = the worker takes no new requests (PATCH /workers/{id})";
        pub worker_reuse_trust: Family<WorkerLabel, Gauge<f64, AtomicU64>> = "worker_reuse_trust",
            "Weight of the worker's overlap, 0 to 1: lower while the engine's reported reuse contradicts its events";
        pub worker_index_incomplete: Family<WorkerLabel, Gauge> = "worker_index_incomplete",
            "1 = the worker may hold blocks that no event has reported; they earn no credit";
        pub worker_reuse_predicted: Family<WorkerLabel, Counter> = "worker_reuse_predicted_tokens",
            "Prompt tokens that the worker's events predicted, in compared answers";
        pub worker_reuse_reported: Family<WorkerLabel, Counter> = "worker_reuse_reported_tokens",
            "Prompt tokens that the worker reported as reused, in the same answers";
        pub load_expired: Counter = "load_expired",
            "Bookings freed as leaked, without activity for --active-request-expiry";
        pub tokenizer_hits: Gauge = "tokenizer_cache_hits",
            "Pieces of text found in the cache";
        pub tokenizer_misses: Gauge = "tokenizer_cache_misses",
            "Pieces of text that were tokenized";
        pub message_hits: Gauge = "tokenizer_cache_message_hits",
            "Messages of long chats found in the cache";
        pub message_misses: Gauge = "tokenizer_cache_message_misses",
            "Messages of long chats that were parsed";
        pub tokenizer_evictions: Gauge = "tokenizer_cache_evictions",
            "Pieces of text and messages evicted from the cache";
        pub tokenizer_bytes: Gauge = "tokenizer_cache", [Bytes]
            "Memory of cached tokens and messages";
        pub tokenizers: Family<EncoderLabel, Gauge> = "tokenizers",
            "Tokenizers in memory, by the library that makes their ids";
        pub tokenizer_checks: Family<OutcomeLabel, Counter> = "tokenizer_checks",
            "Prompts selected for a second encoding by the tokenizers library, by outcome";
    }
}
