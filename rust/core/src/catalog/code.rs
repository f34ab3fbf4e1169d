//! The reasons for reduced trust in a publisher, by name.

use serde::Serialize;

named! {
    /// Trust in the index's data about a publisher; later variants are worse.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize)]
    #[serde(rename_all = "lowercase")]
    pub enum TrustState {
        /// No known problem. An idle engine publishes nothing, so age alone is no reason.
        #[default]
        Exact = "exact",
        /// Some credit is known, or likely, to be missing or wrong.
        Degraded = "degraded",
        /// The data may be of any age, or meaningless.
        Stale = "stale",
    }
}

named! {
    /// Why a publisher is not exact, in the order of responses.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    #[repr(u8)]
    pub enum Code {
        /// The socket can't work.
        Failed = "failed",
        /// No connection since the registration.
        NeverConnected = "never_connected",
        /// The connection was lost.
        Disconnected = "disconnected",
        /// Reading is paused.
        Paused = "paused",
        /// All stored events have another block size than the index.
        BlockSizeMismatch = "block_size_mismatch",
        /// Frames arrived, but none is an event batch.
        NothingDecodable = "nothing_decodable",
        /// Connected, but no events so far.
        NoEventsYet = "no_events_yet",
        /// Batches are missing and requested.
        CatchingUp = "catching_up",
        /// Batches before the first received one are unavailable: credit is missing, none is wrong.
        MissedFirstBatches = "missed_first_batches",
        /// Batches in between are unavailable: their evictions were missed.
        LostBatches = "lost_batches",
        /// Reconnected, and not yet verified to be the same engine process.
        UnverifiedReconnect = "unverified_reconnect",
        /// Blocks came from a peer without their stream position.
        RecoveredWithoutWatermark = "recovered_without_watermark",
        /// Blocks came from a peer with inexact data.
        RecoveredInexact = "recovered_inexact",
        /// Some frames are not event batches.
        Undecodable = "undecodable",
        /// Some events are inconsistent.
        MalformedEvents = "malformed_events",
        /// Some events are of an unknown type.
        UnknownEvents = "unknown_events",
        /// Some events are on an unknown storage medium.
        UnknownMedium = "unknown_medium",
        /// Some stored events have another block size than the index.
        MixedBlockSizes = "mixed_block_sizes",
        /// Stored events had an unknown parent.
        OrphanedStores = "orphaned_stores",
        /// Stored events named a block twice, or as its own ancestor.
        SelfParent = "self_parent",
        /// Stored events whose cache salt or adapter contradicts their parent's.
        IdentityConflict = "identity_conflict",
        /// A name was reused for other content.
        HashReused = "hash_reused",
        /// The index had no room.
        RefusedBlocks = "refused_blocks",
        /// The index evicted blocks at its memory limit.
        EvictedByLimit = "evicted_by_limit",
        /// More blocks on the device than it has room for.
        OverCapacity = "over_capacity",
        /// Another instance in the index has the same event socket.
        SharedSocket = "shared_socket",
    }
}

impl Code {
    /// The state that it causes by itself.
    pub const fn state(self) -> TrustState {
        match self {
            Self::Failed | Self::NeverConnected | Self::Disconnected | Self::Paused => {
                TrustState::Stale
            }
            Self::BlockSizeMismatch | Self::NothingDecodable => TrustState::Stale,
            _ => TrustState::Degraded,
        }
    }

    /// The next step, of a publisher with a replay endpoint or without one.
    pub const fn fix(self, has_replay: bool) -> &'static str {
        match self {
            Self::Failed => {
                "correct the fault that the message names, and register the worker again"
            }
            Self::NeverConnected => {
                "check that the engine runs with KV events on and that this host reaches the endpoint (nc -vz HOST \
                 PORT), unless the message names another cause; for other hosts the engine must bind tcp://*:PORT, \
                 not 127.0.0.1"
            }
            Self::Disconnected => {
                "kvflash reconnects by itself; if the engine is gone for good, remove it (indexer: POST /unregister; \
                 frontend or router: DELETE /workers/ID)"
            }
            Self::Paused => "resume the listener",
            Self::BlockSizeMismatch | Self::MixedBlockSizes => {
                "start the engine with the index's block size, or register it under a model_name or \
                 tenant_id of its own with its own block_size"
            }
            Self::NothingDecodable | Self::Undecodable => {
                "check that the endpoint is the KV event socket of a vLLM or SGLang engine; if it is, report \
                 engine and version"
            }
            Self::MalformedEvents
            | Self::UnknownEvents
            | Self::UnknownMedium
            | Self::SelfParent => "upgrade kvflash, or report engine and version",
            Self::NoEventsYet => {
                "send the engine a prompt longer than one block; if no event arrives, enable its KV events and \
                 prefix caching"
            }
            Self::CatchingUp => "wait; if this lasts, the engine's replay socket does not answer",
            Self::MissedFirstBatches | Self::OrphanedStores if has_replay => {
                "it recovers as prompts are stored again; a larger buffer_steps in the engine's --kv-events-config \
                 lets it replay more"
            }
            Self::MissedFirstBatches | Self::OrphanedStores => {
                "if its events come over ZMQ, register it with its replay_endpoint; otherwise it recovers as prompts are \
                 stored again"
            }
            Self::LostBatches if has_replay => {
                "check that the replay endpoint answers (last_error), and give the engine a larger buffer_steps; to \
                 correct this at once, clear the engine's cache or restart it"
            }
            Self::LostBatches => {
                "if its events come over ZMQ, register it with its replay_endpoint; to correct this at once, clear the \
                 engine's cache or restart it"
            }
            Self::UnverifiedReconnect if has_replay => {
                "the replay endpoint did not answer: check that it is reachable; the next batch resolves this"
            }
            Self::UnverifiedReconnect => {
                "the next batch resolves this; with a replay_endpoint it is resolved at once"
            }
            Self::RecoveredWithoutWatermark => {
                "run the same version on all peers, or add a replay_endpoint; this ends when the engine clears its \
                 cache or restarts"
            }
            Self::RecoveredInexact => {
                "see GET /workers of that peer for the cause; this ends when the engine clears its cache or restarts"
            }
            Self::IdentityConflict => {
                "two cache salts share block hashes: check the engine's version and its hash settings"
            }
            Self::HashReused => {
                "use a collision-free hash in the engine (vLLM: --prefix-caching-hash-algo sha256) and a \
                 replay_endpoint"
            }
            Self::RefusedBlocks => "raise --max-blocks or --index-memory, or run more indexers",
            Self::EvictedByLimit => {
                "raise --index-memory, or run more indexers with fewer engines each"
            }
            Self::OverCapacity => {
                "to correct this at once, clear the engine's cache (vLLM in dev mode: POST /reset_prefix_cache) or \
                 restart it"
            }
            Self::SharedSocket => {
                "if the engine came back under another id, remove the old one (indexer: POST /unregister; frontend or router: \
                 DELETE /workers/ID); else give each engine an event socket of its own"
            }
        }
    }

    /// Codes that depend on the index, not only on the publisher's state.
    pub(super) const OF_INDEX: Codes =
        Codes::EMPTY.with(Self::EvictedByLimit).with(Self::OverCapacity).with(Self::SharedSocket);

    /// Part of every healthy start, or over in a moment: not worth a warning.
    pub(super) const fn is_passing(self) -> bool {
        matches!(self, Self::NoEventsYet | Self::CatchingUp | Self::UnverifiedReconnect)
    }
}

/// A set of codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Codes(u32);

impl Codes {
    /// The empty set.
    pub const EMPTY: Self = Self(0);

    /// The full set.
    pub const fn all() -> Self {
        Self(u32::MAX)
    }

    /// With another code.
    #[must_use]
    pub const fn with(self, code: Code) -> Self {
        Self(self.0 | 1 << code as u8)
    }

    /// Whether the code is included.
    pub const fn has(self, code: Code) -> bool {
        self.0 & 1 << code as u8 != 0
    }

    /// Those that are not in `others`.
    #[must_use]
    pub const fn without(self, others: Self) -> Self {
        Self(self.0 & !others.0)
    }

    /// The union.
    #[must_use]
    pub const fn or(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    /// The intersection.
    #[must_use]
    pub const fn and(self, others: Self) -> Self {
        Self(self.0 & others.0)
    }

    /// In the order of [`Code::ALL`].
    pub fn iter(self) -> impl Iterator<Item = Code> {
        Code::ALL.into_iter().filter(move |code| self.has(*code))
    }

    /// The worst state caused by one of them.
    pub fn state(self) -> TrustState {
        self.iter().map(Code::state).max().unwrap_or_default()
    }
}
