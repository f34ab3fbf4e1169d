//! The answer to a query: owned by the caller, used again and again.

use super::trie::scratch::Scratch;
use crate::ids::{InstanceId, Worker};

/// How much of a prompt one worker holds. Unit: leading blocks.
///
/// The tiers add up: each figure includes the one before it. `predicted` stands for itself.
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
    /// Leading blocks predicted on the device; not a fact.
    pub predicted: u32,
}

impl Match {
    /// Of a worker that holds `depth` blocks on the device and nothing behind them.
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

/// The answer of [`RadixIndex::find_depths`](super::RadixIndex::find_depths), and its room. Keep one per
/// thread, as [`Matches`].
#[derive(Debug, Default)]
pub struct Depths {
    pub(super) found: Vec<Depth>,
    pub(super) scratch: Scratch,
}

impl Depths {
    /// No matches yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Workers with at least one block, in no order.
    pub fn as_slice(&self) -> &[Depth] {
        &self.found
    }
}

/// The matches of several prompts, one after the other, and the room that finding them takes.
///
/// # Cost
/// As [`Matches`]: keep one per thread; it grows to the largest batch.
#[derive(Debug, Default)]
pub struct ManyMatches {
    pub(super) found: Vec<Match>,
    /// For each prompt the end of its part of `found`.
    pub(super) ends: Vec<usize>,
    pub(super) scratch: Scratch,
}

impl ManyMatches {
    /// No prompts yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// How many prompts were asked for.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether no prompts were asked for.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Workers with at least one block of the prompt at `at`, in no order; `None` behind the last prompt.
    pub fn of(&self, at: usize) -> Option<&[Match]> {
        let end = *self.ends.get(at)?;
        let start = at.checked_sub(1).map_or(0, |before| self.ends[before]);
        self.found.get(start..end)
    }

    /// The matches of each prompt, in the order in which they were asked for.
    pub fn iter(&self) -> impl Iterator<Item = &[Match]> {
        (0..self.len()).filter_map(|at| self.of(at))
    }

    pub(super) fn clear(&mut self) {
        self.found.clear();
        self.ends.clear();
    }

    pub(super) fn push(&mut self, found: &[Match]) {
        self.found.extend_from_slice(found);
        self.ends.push(self.found.len());
    }
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

    /// Workers with at least one block in any tier or predicted, in no order.
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

    /// Puts in what somebody else's index knows of the device: `depths`, ascending by worker, stand instead
    /// of what was found in any tier; predictions stay.
    ///
    /// # Cost
    /// O(matches log matches + depths).
    pub fn set_device(&mut self, depths: &[(Worker, u32)]) {
        self.found.retain(|found| found.predicted > 0);
        self.sort();
        let predicted = std::mem::take(&mut self.found);
        let mut rest = predicted.into_iter().peekable();
        for (worker, depth) in depths {
            while let Some(found) = rest.next_if(|found| found.worker < *worker) {
                self.found.push(Match {
                    predicted: found.predicted,
                    ..Match::on_device(found.worker, 0)
                });
            }
            let same = rest.next_if(|found| found.worker == *worker);
            let predicted = same.map_or(0, |found| found.predicted);
            self.found.push(Match { predicted, ..Match::on_device(*worker, *depth) });
        }
        self.found.extend(rest.map(|found| Match {
            predicted: found.predicted,
            ..Match::on_device(found.worker, 0)
        }));
    }

    /// Puts `found` in place of what was found.
    pub fn replace(&mut self, found: impl Iterator<Item = Match>) {
        self.found.clear();
        self.found.extend(found);
    }

    /// Puts the matches in ascending order of worker.
    pub fn sort(&mut self) {
        self.found.sort_unstable_by_key(|found| found.worker);
    }

    /// Leaves the `count` deepest matches on the device, deepest first; ties in ascending order of worker.
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
