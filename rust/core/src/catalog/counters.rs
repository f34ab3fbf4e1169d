//! Counters of events, per publisher.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Live counters of one publisher. Relaxed: each is an independent total, read only for
        /// reports.
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

            /// Adds another reading; saturates.
            pub fn add(&mut self, other: &EventCounts) {
                $(self.$name = self.$name.saturating_add(other.$name);)*
            }

            /// The difference to `earlier`, a reading of the same counters.
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
    /// Blocks in stored events.
    stored_blocks,
    /// Blocks in removed events.
    removed_blocks,
    /// Frames that are not event batches.
    undecodable,
    /// Events of an unknown type.
    unknown_type,
    /// Events with fields that are inconsistent or have the wrong type.
    malformed,
    /// Stored events with a block size that differs from the index's: their whole prefix would
    /// never match.
    block_size_mismatch,
    /// Stored events with a parent that the worker does not hold.
    orphaned,
    /// Stored events that name a block twice or as its own ancestor.
    self_parent,
    /// Stored events with a cache salt or an adapter that contradicts their parent's.
    identity_conflict,
    /// Blocks stored under a name of other content, which was released.
    moved_blocks,
    /// Blocks refused because the index is at its limit.
    refused_blocks,
    /// Events with an unknown storage medium.
    unknown_medium,
    /// Events of further cache groups, and of parts of blocks: stored by name.
    other_group,
    /// Stored events that reported reused blocks, which were already held.
    reuse_reports,
    /// Removed blocks that the worker was not known to hold.
    unknown_removed,
    /// Batches that were missing when a later one came.
    gap_batches,
    /// Missing batches recovered by a replay.
    repaired_batches,
    /// Missing batches that were not recovered.
    lost_batches,
    /// Repeated batches that were skipped.
    duplicate_batches,
    /// Engine restarts noticed.
    restarts,
    /// Replays requested from the engine.
    replays,
    /// Replays without a valid reply.
    failed_replays,
}

/// Adds `by` to a counter, which saturates at the largest number that metrics support: engines
/// choose some of these values.
pub(super) fn add(counter: &AtomicU64, by: u64) {
    const MOST: u64 = i64::MAX as u64;
    let before = counter.fetch_add(by.min(MOST), Ordering::Relaxed);
    if before.saturating_add(by) > MOST {
        counter.store(MOST, Ordering::Relaxed);
    }
}
