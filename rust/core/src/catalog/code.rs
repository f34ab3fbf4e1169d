//! The reasons why a publisher is not believed, by name.

use serde::Serialize;

named! {
    /// How far the index can be believed about a publisher; later is worse.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize)]
    #[serde(rename_all = "lowercase")]
    pub enum TrustState {
        /// Nothing is known to be wrong. An idle engine publishes nothing, so age alone is no reason.
        #[default]
        Exact = "exact",
        /// Some credit is known, or likely, to be missing or wrong.
        Degraded = "degraded",
        /// What is known may be of any age, or means nothing.
        Stale = "stale",
    }
}

macro_rules! codes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $state:ident;)*) => {
        /// Why a publisher is not exact.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum Code { $($(#[$doc])* $variant,)* }

        impl Code {
            /// All codes, as they are listed in answers.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Its name in answers and metrics.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// The state that it alone makes.
            pub const fn state(self) -> TrustState {
                match self { $(Self::$variant => TrustState::$state,)* }
            }
        }
    };
}

codes! {
    /// The socket cannot work.
    Failed = "failed", Stale;
    /// There was no connection since the registration.
    NeverConnected = "never_connected", Stale;
    /// There was a connection, and there is none now.
    Disconnected = "disconnected", Stale;
    /// Told to stop reading.
    Paused = "paused", Stale;
    /// All stored events have another block size than the index.
    BlockSizeMismatch = "block_size_mismatch", Stale;
    /// Frames came, and none is an event batch.
    NothingDecodable = "nothing_decodable", Stale;
    /// Connected, and never heard of.
    NoEventsYet = "no_events_yet", Degraded;
    /// Batches are missing, and are being asked for.
    CatchingUp = "catching_up", Degraded;
    /// Batches before the first one that came are not to be had: credit is missing, none is wrong.
    MissedFirstBatches = "missed_first_batches", Degraded;
    /// Batches in between are not to be had: evictions in them were missed.
    LostBatches = "lost_batches", Degraded;
    /// Connected again, and nothing shows yet that it is the same engine process.
    UnverifiedReconnect = "unverified_reconnect", Degraded;
    /// Blocks came from a peer that could not say up to which batch.
    RecoveredWithoutWatermark = "recovered_without_watermark", Degraded;
    /// Blocks came from a peer that was not exact about it.
    RecoveredInexact = "recovered_inexact", Degraded;
    /// Some frames are no event batch.
    Undecodable = "undecodable", Degraded;
    /// Some events contradict themselves.
    MalformedEvents = "malformed_events", Degraded;
    /// Some events are of an unknown type.
    UnknownEvents = "unknown_events", Degraded;
    /// Some events are on an unknown storage medium.
    UnknownMedium = "unknown_medium", Degraded;
    /// Some stored events have another block size than the index.
    MixedBlockSizes = "mixed_block_sizes", Degraded;
    /// Stored events had a parent that is not held.
    OrphanedStores = "orphaned_stores", Degraded;
    /// Stored events named a block twice, or as its own ancestor.
    SelfParent = "self_parent", Degraded;
    /// Stored events whose cache salt contradicts their parent's.
    IdentityConflict = "identity_conflict", Degraded;
    /// A name was given to other content.
    HashReused = "hash_reused", Degraded;
    /// The index had no room.
    RefusedBlocks = "refused_blocks", Degraded;
    /// The index let blocks go at its memory limit.
    EvictedByLimit = "evicted_by_limit", Degraded;
    /// More blocks on the device than the device has.
    OverCapacity = "over_capacity", Degraded;
}

impl Code {
    /// Codes that need a look into the index, beside the publisher's own memory.
    pub(super) const OF_INDEX: Codes =
        Codes::EMPTY.with(Self::EvictedByLimit).with(Self::OverCapacity);

    /// Part of every healthy start, or over in a moment: not worth a warning.
    pub(super) const fn is_passing(self) -> bool {
        matches!(self, Self::NoEventsYet | Self::CatchingUp | Self::UnverifiedReconnect)
    }
}

/// A set of codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Codes(u32);

impl Codes {
    /// None.
    pub const EMPTY: Self = Self(0);

    /// All that there are.
    pub const fn all() -> Self {
        Self(u32::MAX)
    }

    /// With one more.
    #[must_use]
    pub const fn with(self, code: Code) -> Self {
        Self(self.0 | 1 << code as u8)
    }

    /// Is it among them?
    pub const fn has(self, code: Code) -> bool {
        self.0 & 1 << code as u8 != 0
    }

    /// Those that are not in `others`.
    #[must_use]
    pub const fn without(self, others: Self) -> Self {
        Self(self.0 & !others.0)
    }

    /// Those of both.
    #[must_use]
    pub const fn or(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    /// Those in both.
    #[must_use]
    pub const fn and(self, others: Self) -> Self {
        Self(self.0 & others.0)
    }

    /// In the order of [`Code::ALL`].
    pub fn iter(self) -> impl Iterator<Item = Code> {
        Code::ALL.iter().copied().filter(move |code| self.has(*code))
    }

    /// The worst state that one of them makes.
    pub fn state(self) -> TrustState {
        self.iter().map(Code::state).max().unwrap_or_default()
    }
}
