//! What a query needs beside its answer.

use crate::index::arena::runs::RunId;
use crate::index::matches::Match;

/// What a walk needs beside its answer; kept between queries so that none allocates.
#[derive(Debug, Default)]
pub(in crate::index) struct Scratch {
    pub(super) track: Track,
    /// Slots and how far they got.
    pub(super) found: Vec<(u16, u32)>,
    /// Home slot -> place in the answer, where it is that slot's.
    pub(super) places: Vec<u32>,
    pub(super) homes: Vec<u16>,
    /// The answer to one prompt of several, where it is put together from planes.
    pub(super) one: Vec<Match>,
}

#[derive(Debug, Default)]
pub(in crate::index) struct Track {
    /// Slots that cover every block so far, and those of the run being looked at.
    pub(super) alive: Vec<u64>,
    pub(super) next: Vec<u64>,
    /// Runs of the walk: number, blocks before it, blocks of it.
    pub(super) path: Vec<(RunId, u32, u32)>,
}
