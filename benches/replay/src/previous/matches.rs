//! The answer to a query: owned by the caller, used again and again.

use super::walk::Scratch;
use kvflash_core::ids::Worker;

/// How much of a prompt one worker holds. Unit: leading blocks; each figure includes the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Match {
    /// Who.
    pub worker: Worker,
    /// Blocks held on the device.
    pub device: u32,
    /// Blocks reached when host memory goes on where the device ends.
    pub host: u32,
    /// Blocks reached when local disk goes on where host memory ends.
    pub disk: u32,
    /// Blocks reached when shared storage goes on where local disk ends.
    pub external: u32,
}

/// The matches of one query, and the room that finding them takes.
///
/// # Cost
/// Keep one per thread: it grows to the largest query and allocates nothing after that.
#[derive(Debug, Default)]
pub struct Matches {
    pub(super) found: Vec<Match>,
    pub(super) scratch: Scratch,
}

impl Matches {
    /// No matches yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Workers with at least one block in any tier, in no order.
    pub fn as_slice(&self) -> &[Match] {
        &self.found
    }

    /// Whether nobody holds anything of the prompt.
    pub fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// How many workers hold something of the prompt.
    pub fn len(&self) -> usize {
        self.found.len()
    }

    /// Puts the matches in ascending order of worker.
    pub fn sort(&mut self) {
        self.found.sort_unstable_by_key(|found| found.worker);
    }

    /// Counts, per depth, the workers that hold at least that many leading blocks on the device.
    ///
    /// `out[d]` is the number of workers with `device > d`; its length is the deepest match.
    ///
    /// # Cost
    /// O(matches + deepest match).
    pub fn frequencies(&self, out: &mut Vec<u32>) {
        out.clear();
        let deepest = self.found.iter().map(|found| found.device).max().unwrap_or(0);
        out.resize(deepest as usize, 0);
        for found in self.found.iter().filter(|found| found.device > 0) {
            out[found.device as usize - 1] += 1;
        }
        let mut workers = 0;
        for count in out.iter_mut().rev() {
            workers += *count;
            *count = workers;
        }
    }
}
