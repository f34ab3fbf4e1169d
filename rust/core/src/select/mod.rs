//! Selection: combines a prompt, one model's index, its router and the signals of its workers.
//!
//! A [`Selector`] hashes a prompt, walks the index, lets the router choose and book, predicts the
//! blocks of the chosen worker, and records the reasons. The frontend and Python use the same
//! selector, so their decisions agree.

mod ask;
mod busy;
mod config;
mod draining;
mod engines;
mod json;
mod manual;
mod note;
mod outbox;
mod outside;
mod queue;
mod record;
mod remote;
mod reservation;
mod reuse;
mod router;
mod selector;
mod settings;
mod start;

pub use ask::Request;
pub use ask::{Ask, Known, Pin, Prompt, TokenSource};
pub use busy::{BusyTable, DEFAULT_BATCHED_TOKENS, Report, Share};
pub use config::{DEFAULT_JOURNAL_BYTES, Overlap, QueueThreshold, SelectorConfig, Thresholds};
pub use draining::{Diverted, DrainTable, Wanted};
pub use engines::EngineTable;
pub use manual::MAX_REQUEST_ID_BYTES;
pub use outbox::{BookingName, Outbox, Tiding};
pub use queue::{Entered, Queue, QueueOptions, QueueStats, Told, Waiting};
pub use record::{CandidateRecord, Outcome, Record, Selection};
pub use record::{Journal, JournalStats};
pub use remote::RemoteStats;
pub use reservation::Reservation;
pub use reuse::{
    EventSource, ReuseChange, ReuseFinding, ReuseSample, ReuseTable, ReuseTrust, ReuseView,
    WorkerReason,
};
pub use router::{
    Considered, Policies, RoomWatch, RouteOverride, Router, RouterConfig, TierWeights, Usage,
};
pub use selector::Selector;
pub use settings::{
    BusySettings, CacheSettings, ClusterSettings, CostSettings, DecisionSettings, IndexSettings,
    LoadSettings, ModeSettings, RemoteSettings, routing_table, without_effect,
};
pub use start::StartGate;

#[cfg(test)]
mod tests;
