//! The result of a query: owned by the caller and reused.

use super::trie::scratch::Scratch;
use crate::ids::{InstanceId, Worker};

/// How much of a prompt one worker holds. Unit: leading blocks.
///
/// The tiers are cumulative: each number includes the one before it. `predicted` is separate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Match {
    /// The worker.
    pub worker: Worker,
    /// Blocks held on the device.
    pub device: u32,
    /// Blocks reached when host memory continues where the device ends.
    pub host: u32,
    /// Blocks reached when local disk continues where host memory ends.
    pub disk: u32,
    /// Blocks reached when shared storage continues where local disk ends.
    pub external: u32,
    /// Leading blocks predicted on the device, not confirmed.
    pub predicted: u32,
}

impl Match {
    /// A match of `depth` blocks on the device, with none after them.
    #[inline]
    pub fn on_device(worker: Worker, depth: u32) -> Self {
        Self { worker, device: depth, host: depth, disk: depth, external: depth, predicted: 0 }
    }
}

/// How many leading blocks of a prompt one worker holds on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Depth {
    /// Instance of the worker.
    pub instance_id: InstanceId,
    /// Its data-parallel rank.
    pub dp_rank: u32,
    /// Leading blocks; at least 1.
    pub blocks: u32,
}

impl Depth {
    #[inline]
    pub(super) fn new(Worker { instance_id, dp_rank }: Worker, blocks: u32) -> Self {
        Self { instance_id, dp_rank, blocks }
    }
}

/// The result of [`RadixIndex::find_depths`](super::RadixIndex::find_depths), and its memory. Keep
/// one per thread, as [`Matches`].
#[derive(Debug, Default)]
pub struct Depths {
    pub(super) found: Vec<Depth>,
    pub(super) scratch: Scratch,
}

impl Depths {
    /// An empty result.
    pub fn new() -> Self {
        Self::default()
    }

    /// Workers with at least one block, in no particular order.
    pub fn as_slice(&self) -> &[Depth] {
        &self.found
    }
}

/// The matches of several prompts, one after the other, and the working memory of the query.
///
/// # Cost
/// As [`Matches`]: keep one per thread; it grows to the largest batch.
#[derive(Debug, Default)]
pub struct ManyMatches {
    pub(super) found: Vec<Match>,
    /// For each prompt, the end of its part of `found`.
    pub(super) ends: Vec<usize>,
    pub(super) scratch: Scratch,
}

impl ManyMatches {
    /// Workers with at least one block of each prompt, in no particular order; the prompts in the
    /// order of the query.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[Match]> {
        let mut start = 0;
        self.ends.iter().map(move |end| &self.found[std::mem::replace(&mut start, *end)..*end])
    }

    pub(super) fn clear(&mut self) {
        self.found.clear();
        self.ends.clear();
    }
}

/// The matches of one query, and the working memory of the query.
///
/// # Cost
/// Keep one per thread: it grows to the largest query and then allocates nothing.
#[derive(Debug, Default)]
pub struct Matches {
    pub(super) found: Vec<Match>,
    pub(super) scratch: Scratch,
}

impl Matches {
    /// An empty result.
    pub fn new() -> Self {
        Self::default()
    }

    /// Workers with at least one block in any tier or predicted, in no particular order.
    pub fn as_slice(&self) -> &[Match] {
        &self.found
    }

    /// Whether no worker holds any of the prompt.
    pub fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// Number of workers that hold some of the prompt.
    pub fn len(&self) -> usize {
        self.found.len()
    }

    /// Replaces the found tiers with another index's result for the device: `depths`, ascending by
    /// worker. Predictions stay.
    ///
    /// # Cost
    /// O(matches log matches + depths).
    pub fn set_device(&mut self, depths: &[(Worker, u32)]) {
        self.found.retain(|found| found.predicted > 0);
        self.sort();
        let of = |worker, depth, predicted| Match { predicted, ..Match::on_device(worker, depth) };
        let mut rest = std::mem::take(&mut self.found).into_iter().peekable();
        for (worker, depth) in depths {
            while let Some(found) = rest.next_if(|found| found.worker < *worker) {
                self.found.push(of(found.worker, 0, found.predicted));
            }
            let same = rest.next_if(|found| found.worker == *worker);
            self.found.push(of(*worker, *depth, same.map_or(0, |found| found.predicted)));
        }
        self.found.extend(rest.map(|found| of(found.worker, 0, found.predicted)));
    }

    /// Replaces the matches.
    pub fn replace(&mut self, found: impl Iterator<Item = Match>) {
        self.found.clear();
        self.found.extend(found);
    }

    /// Sorts the matches by worker, ascending.
    pub fn sort(&mut self) {
        self.found.sort_unstable_by_key(|found| found.worker);
    }

    /// Keeps the `count` deepest matches on the device, deepest first; ties in ascending order of
    /// worker.
    ///
    /// # Cost
    /// O(matches + count log count).
    pub fn keep_top(&mut self, count: usize) {
        let key = |found: &Match| (std::cmp::Reverse(found.device), found.worker);
        if count < self.found.len() {
            if count > 0 {
                self.found.select_nth_unstable_by_key(count - 1, key);
            }
            self.found.truncate(count);
        }
        self.found.sort_unstable_by_key(key);
    }
}

/// Counts, per depth, the workers that hold at least that many leading blocks on the device.
///
/// `out[d]` is the number of workers with `device > d`; its length is the deepest match.
///
/// # Cost
/// O(matches + deepest match).
pub fn frequencies(matches: &[Match], out: &mut Vec<u32>) {
    out.clear();
    let deepest = matches.iter().map(|found| found.device).max().unwrap_or(0);
    out.resize(deepest as usize, 0);
    for found in matches.iter().filter(|found| found.device > 0) {
        out[found.device as usize - 1] += 1;
    }
    let mut workers = 0;
    for count in out.iter_mut().rev() {
        workers += *count;
        *count = workers;
    }
}
