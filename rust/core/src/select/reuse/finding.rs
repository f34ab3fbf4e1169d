//! Why a worker's overlap is not trusted, with cause and fix.

use serde::Serialize;

use crate::ids::Worker;

/// How a worker's answers contradict its events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReuseFinding {
    /// It reuses much more than its events announce.
    ReuseNotInEvents,
    /// It reuses much less than its events promise.
    EventsNotReused,
    /// Both.
    EventsCrossed,
}

/// State of a worker's event source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventSource {
    /// It has no event socket here.
    None,
    /// It has one, but nothing has arrived.
    Silent,
    /// Events have arrived.
    Heard,
    /// Events have arrived from where the worker itself says that it publishes.
    Announced,
}

/// A worker's problem in words, in the format of the reasons of [`crate::catalog::Trust`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct WorkerReason {
    /// Short and stable, for machines.
    pub code: &'static str,
    /// The worker.
    pub worker: String,
    /// The observation, and the likely cause.
    pub message: String,
    /// The fix.
    pub fix: &'static str,
}

const SWAPPED: &str = "check that events= and replay= of each worker name the sockets of the engine behind its URL \
                       (--kv-events-config of vLLM and SGLang): an engine that gets one request should \
                       publish at its own events= only. If they do, check the network to these sockets";

const LATE: &str = "check the network between this process and the worker's events (its sockets, or NATS with \
                    --event-plane nats); last_event_age_ms in GET /workers is the age of a worker's last event";

impl ReuseFinding {
    /// The finding about `worker`, with events from `source`.
    pub fn explain(self, worker: Worker, source: EventSource) -> WorkerReason {
        let (code, cause, fix) = match (self, source) {
            (Self::ReuseNotInEvents | Self::EventsCrossed, EventSource::None) => (
                "events_missing",
                "reuses prefixes, but has no event socket, so none of them earns credit. Is events= missing?",
                "give the worker events=tcp://HOST:PORT, the endpoint of the engine's --kv-events-config",
            ),
            (Self::ReuseNotInEvents | Self::EventsCrossed, EventSource::Silent) => (
                "events_missing",
                "reuses prefixes, but no event ever came from its event socket. Does events= name the right socket, or has \
                 the engine stored nothing since this service started?",
                "point events= at the endpoint of the engine's --kv-events-config, and check that its KV events are on",
            ),
            (Self::ReuseNotInEvents, EventSource::Heard) => (
                "reuse_not_in_events",
                "reuses prefixes that its events do not mention. Are the event ports of two engines swapped, or do \
                 events arrive late?",
                SWAPPED,
            ),
            (Self::ReuseNotInEvents, EventSource::Announced) => (
                "reuse_not_in_events",
                "reuses prefixes that its events do not mention. Do they arrive late?",
                LATE,
            ),
            (Self::EventsNotReused, EventSource::Announced) => (
                "events_not_reused",
                "does not reuse prefixes that its events predict. Do they arrive late, or were removals lost?",
                LATE,
            ),
            (Self::EventsNotReused, _) => (
                "events_not_reused",
                "does not reuse prefixes that its events predict. Are the event ports of two engines swapped, or \
                 were removals lost or late?",
                SWAPPED,
            ),
            (Self::EventsCrossed, EventSource::Heard) => (
                "events_crossed",
                "reuses prefixes that its events do not mention, and does not reuse those that they predict. Are \
                 the event ports of two engines swapped, or do events arrive late?",
                SWAPPED,
            ),
            (Self::EventsCrossed, EventSource::Announced) => (
                "events_crossed",
                "reuses prefixes that its events do not mention, and does not reuse those that they predict. Do \
                 they arrive late?",
                LATE,
            ),
        };
        WorkerReason {
            code,
            worker: worker.to_string(),
            message: format!("worker {worker} {cause}"),
            fix,
        }
    }
}
