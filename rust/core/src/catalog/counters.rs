//! What happened to events, counted per publisher.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Live counters of one publisher. Relaxed: each is a total of its own, read for reports only.
        #[derive(Debug, Default)]
        pub struct EventCounters { $($(#[$doc])* pub $name: AtomicU64,)* }

        /// A reading of [`EventCounters`].
        #[derive(Debug, Default, Clone, Copy, PartialEq, Eq, serde::Serialize)]
        pub struct EventCounts { $($(#[$doc])* pub $name: u64,)* }

        impl EventCounters {
            /// Read all counters.
            pub fn read(&self) -> EventCounts {
                EventCounts { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }

        impl EventCounts {
            /// Names and values, for exposition.
            pub fn entries(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }

            /// Add another reading; a count stays at the largest number that there is.
            pub fn add(&mut self, other: &EventCounts) {
                $(self.$name = self.$name.saturating_add(other.$name);)*
            }

            /// What came after `earlier`, a reading of the same counters.
            pub fn since(&self, earlier: &EventCounts) -> Self {
                Self { $($name: self.$name.saturating_sub(earlier.$name),)* }
            }
        }
    };
}

counters! {
    /// Batches applied.
    batches,
    /// Stored events applied.
    stored,
    /// Removed events applied.
    removed,
    /// Cleared events applied.
    cleared,
    /// Blocks that stored events named.
    stored_blocks,
    /// Blocks that removed events named.
    removed_blocks,
    /// Frames that are not an event batch.
    undecodable,
    /// Events of an unknown type.
    unknown_type,
    /// Events with fields that contradict each other or have the wrong type.
    malformed,
    /// Stored events whose block size is not the index's: the whole prefix would never match.
    block_size_mismatch,
    /// Stored events under a parent that the worker does not hold.
    orphaned,
    /// Stored events that name a block twice or as its own ancestor.
    self_parent,
    /// Stored events whose cache salt contradicts their parent's.
    identity_conflict,
    /// Blocks stored under a name that stood for other content, which was released.
    moved_blocks,
    /// Blocks refused because the index is at its limit.
    refused_blocks,
    /// Events on a storage medium that is not known.
    unknown_medium,
    /// Events of further cache groups, and of parts of blocks: kept by name.
    other_group,
    /// Stored events that told of reused blocks, which were held already.
    reuse_reports,
    /// Removed blocks that the worker was not known to hold.
    unknown_removed,
    /// Batches that were missing when a later one came.
    gap_batches,
    /// Missing batches that a replay brought back.
    repaired_batches,
    /// Missing batches that nothing brought back.
    lost_batches,
    /// Batches that came again and were skipped.
    duplicate_batches,
    /// Engine restarts noticed.
    restarts,
    /// Replays that the engine was asked for.
    replays,
    /// Replays that brought no answer, or nonsense.
    failed_replays,
}

/// Add `by` to a counter, which stays at the largest number that metrics can say: engines choose some of these.
pub(super) fn add(counter: &AtomicU64, by: u64) {
    const MOST: u64 = i64::MAX as u64;
    let before = counter.fetch_add(by.min(MOST), Ordering::Relaxed);
    if before.saturating_add(by) > MOST {
        counter.store(MOST, Ordering::Relaxed);
    }
}
