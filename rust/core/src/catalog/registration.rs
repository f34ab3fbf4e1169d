//! The words of a publisher: what it is registered as, what its door says, where its stream stands.

use super::cache_groups::{EngineFacts, Knowledge};
use super::identity::Identity;
use super::model::ModelKey;
use crate::ids::Worker;
use crate::index::snapshot::Cursor;

/// Number of a publisher within one process, never used twice.
pub type PublisherId = u64;

/// What the transport door says about a publisher's socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ListenerStatus {
    /// Not connected yet, or connected again after a loss and not heard since.
    #[default]
    Pending,
    /// Connected.
    Active,
    /// Told to stop reading.
    Paused,
    /// Cannot work: see the error.
    Failed,
}

/// What a publisher is registered as.
#[derive(Debug, Clone)]
pub struct Registration {
    /// The engine instance and rank whose blocks it reports.
    pub worker: Worker,
    /// The index that it feeds.
    pub key: ModelKey,
    /// Tokens in a block; `None` = learn it from the engine.
    pub block_size: Option<u32>,
    /// Address of the PUB socket.
    pub endpoint: String,
    /// Address of the replay socket.
    pub replay_endpoint: Option<String>,
    /// Blocks that the device of each of its ranks has, where somebody knows.
    pub capacity_blocks: Option<u64>,
    /// Adapter and salt of its events that name none; the first registration of an index decides.
    pub identity: Identity,
    /// What no event says of the engine.
    pub facts: EngineFacts,
}

/// How far a publisher's events went, and for whom: what another replica, or a later registration,
/// needs in order to go on from there.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Place {
    /// The last batch applied; `None` when there was none, or nobody knows.
    pub cursor: Option<Cursor>,
    /// Ranks that its batches have named, the registered one included.
    pub ranks: Vec<u32>,
    /// The cache group that is credited, once an event has named it.
    pub group: Option<u32>,
    /// What is known of all cache groups; `None` from replicas that do not tell.
    pub cache: Option<Knowledge>,
    /// What is held is known to be not quite what the engine holds.
    pub is_inexact: bool,
}
