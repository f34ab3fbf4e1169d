//! The frontend's metrics besides the common ones.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::metrics::{CauseLabel, KindLabel, OutcomeLabel, metrics, seconds_histogram};
use crate::page::escaped;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct AliasLabel {
    alias: String,
    model: String,
}

impl AliasLabel {
    pub fn new(alias: &str, model: &str) -> Self {
        Self { alias: escaped(alias), model: escaped(model) }
    }
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
        pub parity_probes: Family<OutcomeLabel, Counter> = "parity_probes",
            "Comparisons of tokens with an engine, by outcome";
        pub ids_sent: Counter = "prompt_tokens_sent_as_ids",
            "Prompt tokens sent as ids, which engines need not tokenize again";
        pub ids_given_up: Family<CauseLabel, Counter> = "token_ids_given_up",
            "Engines that no longer get token ids, by cause";
        pub taught: Family<OutcomeLabel, Counter> = "taught_prompts",
            "Chats routed without a tokenizer, by outcome: learned = the engine returned the prompt's ids; matched = \
             matched by an earlier turn; corrected = the engine returned other ids than in an earlier turn";
        pub taught_given_up: Family<CauseLabel, Counter> = "taught_given_up",
            "Engines that are no longer asked for the token ids of prompts, by cause";
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
        pub route_seconds: Histogram = "route_seconds",
            "Time from a request's body to its decision: tokenize, hash, look up, score",
            seconds_histogram();
        pub first_byte_seconds: Histogram = "first_byte_seconds",
            "Time from a request's body to its answer's first byte", seconds_histogram();
        pub inter_token_seconds: Histogram = "inter_token_seconds",
            "Time from one chunk of an answer with new tokens to the next, as the worker sends them",
            seconds_histogram();
        pub turn_seconds: Histogram = "turn_wait_seconds",
            "Time that requests waited for their turn, refused ones included",
            seconds_histogram();
        pub queue_seconds: Histogram = "queue_wait_seconds",
            "Time that requests took to get a worker, refused ones included (--router-queue-threshold)",
            seconds_histogram();
        pub prefill_queue_seconds: Histogram = "prefill_queue_wait_seconds",
            "Time that requests took to get a prefill worker, refused ones included",
            seconds_histogram();
        pub dropped: Family<KindLabel, Counter> = "dropped_fields",
            "Fields and headers that control an engine, removed from requests of clients with keys, by kind";
        pub load_expired: Counter = "load_expired",
            "Bookings freed as leaked, without activity for --active-request-expiry";
    }
}

/// Causes of [`FrontendMetrics::refused`].
const REFUSED: [&str; 10] = [
    "all_busy",
    "all_failed",
    "client_limit",
    "concurrency",
    "invalid",
    "no_prefill",
    "no_turn",
    "no_worker",
    "overloaded",
    "tokenizer",
];

/// Causes of [`FrontendMetrics::untokenized`].
const UNTOKENIZED: [&str; 14] = [
    "batch",
    "no_engine",
    "not_text",
    "refused",
    "render_failed",
    "render_refused",
    "render_timeout",
    "stored",
    "template",
    "tokenize_failed",
    "tokenize_refused",
    "tokenize_timeout",
    "tokenizer_busy",
    "too_long",
];

impl FrontendMetrics {
    /// Shows each cause with 0: an alert on a rate misses the first count of a series that begins
    /// with it.
    pub fn show_causes(&self) {
        for (family, causes) in [(&self.refused, &REFUSED[..]), (&self.untokenized, &UNTOKENIZED)] {
            for &cause in causes {
                drop(family.get_or_create(&CauseLabel { cause }));
            }
        }
    }
}
