//! The catalog: which models there are, who publishes events for them, and what a frame does to their indexes.
//!
//! A *model index* serves one (model, tenant); a *publisher* is one engine socket whose frames feed it.
//! Doors register publishers, hand over frames as opaque bytes and ask for repairs when told of a gap.

mod command;
mod counters;
mod dump;
mod identity;
mod ingest;
mod model;
mod publisher;
mod registry;
mod roster;

pub use command::{Command, CommandQueue};
pub use counters::{EventCounters, EventCounts};
pub use dump::{apply_router_event, dump_events, dump_worker, store_blocks};
pub use identity::Identity;
pub use model::{ModelIndex, ModelKey};
pub use publisher::{FrameOutcome, ListenerStatus, Publisher, PublisherId, PublisherView};
pub use registry::{Catalog, CatalogOptions, Registration};
