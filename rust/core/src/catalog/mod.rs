//! The catalog: the models, the publishers of their events, and the effect of each frame on their
//! indexes.
//!
//! A *model index* serves one (model, tenant); a *publisher* is one engine socket whose frames feed
//! it. The transport registers publishers, passes frames as opaque bytes and requests repairs when
//! a gap is reported.

mod cache_groups;
mod code;
mod command;
mod counters;
mod dump;
mod identity;
mod ingest;
mod legal;
mod model;
mod naming;
mod past;
mod publisher;
mod registration;
mod registry;
mod report;
mod reuse;
mod roster;
mod shared;
mod standing;
mod transfer;
mod transfer_json;
mod trust;
mod unheard;
mod watch;

pub use crate::repair::FrameOutcome;
pub use cache_groups::{EngineFacts, Group, Knowledge, Layout, Rule};
pub use code::{Code, Codes, TrustState};
pub use command::{Command, CommandQueue};
pub use counters::{EventCounters, EventCounts};
pub use dump::{apply_router_event, dump_events, dump_worker, store_blocks};
pub use identity::Identity;
pub use legal::check_is_socket;
pub use model::{ModelIndex, ModelKey};
pub use naming::Naming;
pub use publisher::{Publisher, PublisherView};
pub use registration::{ListenerStatus, Place, PublisherId, Registration, Source};
pub use registry::{Catalog, CatalogOptions, DEFAULT_MAX_BLOCKS};
pub use report::Report;
pub use reuse::{Layouts, PromptNames, Question, Reuse};
pub use transfer::{Digest, MAGIC, Part, Progress, TransferError, Watermark, parts, restore};
pub use transfer_json::restore_json;
pub use trust::{Evidence, Reason, Trust, findings};
pub use unheard::Unheard;
pub use watch::CacheWatch;
