//! Working memory of a query.

use crate::index::arena::runs::RunId;
use crate::index::matches::Match;

/// Working memory of a walk, kept between queries so that none allocates.
#[derive(Debug, Default)]
pub(in crate::index) struct Scratch {
    pub(super) track: Track,
    /// Slots and the depth they reached.
    pub(super) found: Vec<(u16, u32)>,
    /// Home slot -> index in the result, if the entry there is that slot's.
    pub(super) places: Vec<u32>,
    pub(super) homes: Vec<u16>,
    /// The result of one of several prompts, while it is assembled from planes.
    pub(super) one: Vec<Match>,
}

#[derive(Debug, Default)]
pub(in crate::index) struct Track {
    /// Slots that cover every block so far, and those of the current run.
    pub(super) alive: Vec<u64>,
    pub(super) next: Vec<u64>,
    /// Runs of the walk: number, blocks before it, its blocks.
    pub(super) path: Vec<(RunId, u32, u32)>,
}
