//! What readers and the writer share.

use std::sync::atomic::AtomicU64;

use super::seats::Seats;
use crate::index::arena::edges::Edges;
use crate::index::arena::runs::Runs;

/// What readers and the writer share.
pub(super) struct Shared {
    pub runs: Runs,
    pub edges: Edges,
    pub seats: Seats,
    /// No prediction expires before this time; only the writer changes it.
    pub predictions_due_ms: AtomicU64,
}
