//! A publisher's registration, socket state and stream position.

use super::cache_groups::{EngineFacts, Knowledge};
use super::identity::Identity;
use super::model::ModelKey;
use crate::ids::Worker;
use crate::index::snapshot::Cursor;

/// Number of a publisher within one process, never reused.
pub type PublisherId = u64;

named! {
    /// State of a publisher's socket, as reported by the transport.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, serde::Serialize)]
    #[serde(rename_all = "lowercase")]
    pub enum ListenerStatus {
        /// Not connected yet, or reconnected and without data since.
        #[default]
        Pending = "pending",
        /// Connected.
        Active = "active",
        /// Reading is paused.
        Paused = "paused",
        /// Can't work: see the error.
        Failed = "failed",
    }
}

/// How a publisher became known, as GET /workers names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// Its socket's address was given, over HTTP or by a flag.
    #[default]
    Zmq,
    /// Its worker was found in discovery.
    Discovery,
}

/// Data of a publisher's registration.
#[derive(Debug, Clone)]
pub struct Registration {
    /// The engine instance and rank whose blocks it reports.
    pub worker: Worker,
    /// The index that it feeds.
    pub key: ModelKey,
    /// Tokens in a block; `None`: learned from the engine.
    pub block_size: Option<u32>,
    /// Address of the PUB socket.
    pub endpoint: String,
    /// Address of the replay socket.
    pub replay_endpoint: Option<String>,
    /// Blocks on the device of each of its ranks, if known.
    pub capacity_blocks: Option<u64>,
    /// Adapter and salt of its events that name none; the first registration of an index decides.
    pub identity: Identity,
    /// Properties of the engine that no event contains.
    pub facts: EngineFacts,
    /// How it became known.
    pub source: Source,
}

/// How far a publisher's events were applied, and for which ranks: another replica, or a later
/// registration, continues from there.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Place {
    /// The last applied batch; `None` if there was none, or it is unknown.
    pub cursor: Option<Cursor>,
    /// Ranks named by its batches, including the registered one.
    pub ranks: Vec<u32>,
    /// The credited cache group, once an event has named it.
    pub group: Option<u32>,
    /// All cache groups; `None` from replicas that do not report them.
    pub cache: Option<Knowledge>,
    /// The blocks are known to differ slightly from the engine's.
    pub is_inexact: bool,
}
