//! Blocks in use with their workers, as a tree of runs: blocks that the same requests use are one
//! node.
//!
//! A sequence hash names a block with all blocks before it, so requests that share a block share
//! the whole path to it. A long prompt is compared with a few runs, and what it costs to count it
//! hardly depends on its length.

use std::collections::BTreeMap;

use slab::Slab;
use smallvec::SmallVec;

use super::holders::{Holders, WHOLE};

const ROOT: usize = 0;

/// Where the blocks of a request end in the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct End(u32);

#[derive(Debug)]
struct Run {
    before: usize,
    /// Sequence hashes of its blocks; none only at the root.
    hashes: Vec<u64>,
    /// The runs after it, by their first hash.
    after: BTreeMap<u64, u32>,
    /// Requests whose blocks end here.
    ends: usize,
    /// Workers of these requests and of all that continue in a run after it.
    holders: Holders,
}

impl Run {
    fn new(before: usize, hashes: Vec<u64>) -> Self {
        Self { before, hashes, after: BTreeMap::new(), ends: 0, holders: Holders::none() }
    }

    /// Its leading blocks with which `hashes` begin.
    fn common(&self, hashes: &[u64]) -> usize {
        match hashes.get(..self.hashes.len()) {
            Some(all) if all == self.hashes => all.len(),
            _ => self.hashes.iter().zip(hashes).take_while(|(own, other)| own == other).count(),
        }
    }

    fn first(&self) -> u64 {
        self.hashes[0]
    }
}

/// Result of releasing a request's blocks on a worker.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Released {
    /// Blocks without users on the worker.
    pub(super) blocks: u64,
    /// Their discount from whole blocks, in units of `1 / WHOLE`.
    pub(super) discount: u64,
}

/// Blocks in use, with their workers.
#[derive(Debug)]
pub(super) struct Blocks {
    runs: Slab<Run>,
}

impl Default for Blocks {
    fn default() -> Self {
        let mut runs = Slab::new();
        runs.insert(Run::new(ROOT, Vec::new()));
        Self { runs }
    }
}

impl Blocks {
    /// References the blocks of a request on `slot`; returns where they end, and the number of
    /// blocks that are new to the slot. `slot_count` is the number of slots in the table.
    ///
    /// # Cost
    /// Comparing `hashes` once, and O(log holders) for each run on the way. Copies the hashes that
    /// are new; where they end within a run, also the hashes and holders of that run.
    pub(super) fn acquire(&mut self, hashes: &[u64], slot: u16, slot_count: usize) -> (End, u64) {
        let (mut at, mut rest, mut added) = (ROOT, hashes, 0);
        while !rest.is_empty() {
            at = self.step(at, rest);
            let run = &mut self.runs[at];
            let blocks = run.hashes.len();
            if run.holders.acquire(slot, slot_count) {
                added += blocks as u64;
            }
            rest = &rest[blocks..];
        }
        self.runs[at].ends += 1;
        (End(at as u32), added)
    }

    /// The run after `at` that `hashes`, which are not empty, begin with; made if missing.
    fn step(&mut self, at: usize, hashes: &[u64]) -> usize {
        let Some(&next) = self.runs[at].after.get(&hashes[0]) else {
            let next = self.runs.insert(Run::new(at, hashes.to_vec()));
            self.runs[at].after.insert(hashes[0], next as u32);
            return next;
        };
        let next = next as usize;
        let run = &self.runs[next];
        let common = run.common(hashes);
        if common < run.hashes.len() { self.split(next, common) } else { next }
    }

    /// Cuts `run` after its first `blocks`; returns the new run of these. The tail keeps the run's
    /// index, because `End`s and the runs after it refer to it.
    fn split(&mut self, run: usize, blocks: usize) -> usize {
        let rest = &mut self.runs[run];
        let tail = rest.hashes.split_off(blocks);
        let mut hashes = std::mem::replace(&mut rest.hashes, tail);
        // The head would keep the memory of the whole run.
        hashes.shrink_to_fit();
        let (before, first, holders) = (rest.before, rest.first(), rest.holders.clone());
        let after = BTreeMap::from([(first, run as u32)]);
        let head = self.runs.insert(Run { before, hashes, after, ends: 0, holders });
        self.runs[run].before = head;
        let first = self.runs[head].first();
        self.runs[before].after.insert(first, head as u32);
        head
    }

    /// Undoes one [`acquire`](Self::acquire).
    ///
    /// # Cost
    /// O(log holders) for each run on the way. Where runs become one, copies their hashes once.
    pub(super) fn release(&mut self, end: End, slot: u16) -> Released {
        let mut released = Released::default();
        let mut at = end.0 as usize;
        self.runs[at].ends -= 1;
        let mut left: SmallVec<[usize; 16]> = SmallVec::new();
        while at != ROOT {
            let run = &mut self.runs[at];
            let (before, first, blocks) = (run.before, run.first(), run.hashes.len() as u64);
            if let Some(fraction) = run.holders.release(slot) {
                released.blocks += blocks;
                released.discount += blocks * u64::from(WHOLE - fraction);
            }
            if run.holders.len() == 0 {
                self.runs.remove(at);
                self.runs[before].after.remove(&first);
            } else {
                left.push(at);
            }
            at = before;
        }
        // From the root on, so that a run that grows by several is copied once.
        left.iter().rev().for_each(|&at| self.join(at));
        // The end of a burst releases its memory; steady traffic never gets here.
        if self.runs.len() == 1 && self.runs.capacity() > 4096 {
            self.runs.shrink_to_fit();
        }
        released
    }

    /// Joins a run with the one after it if the same requests use both. The later one keeps its
    /// index; no request ends at the earlier one.
    fn join(&mut self, at: usize) {
        let run = &self.runs[at];
        let Some((_, &next)) = run.after.first_key_value() else { return };
        let next = next as usize;
        let is_only = run.ends == 0 && run.after.len() == 1;
        if !is_only || !run.holders.equal(&self.runs[next].holders) {
            return;
        }
        let Run { before, mut hashes, .. } = self.runs.remove(at);
        self.runs[before].after.insert(hashes[0], next as u32);
        let rest = &mut self.runs[next];
        hashes.append(&mut rest.hashes);
        (rest.before, rest.hashes) = (before, hashes);
    }

    /// Sets the weight of a request's blocks with exactly one reference on `slot` to `fraction`;
    /// returns the change of the worker's discount, in units of `1 / WHOLE`.
    pub(super) fn weigh(&mut self, end: End, slot: u16, fraction: u16) -> i64 {
        let mut change = 0;
        let mut at = end.0 as usize;
        while at != ROOT {
            let run = &mut self.runs[at];
            // References never grow along a path: if a run is shared, all runs before it are.
            let Some(before) = run.holders.weigh(slot, fraction) else { break };
            change += (i64::from(before) - i64::from(fraction)) * run.hashes.len() as i64;
            at = run.before;
        }
        change
    }

    /// Adds the number of leading blocks of `hashes` that each slot uses now to `counts[slot]`.
    ///
    /// A worker is credited once, where it drops out, and not once per run: a prompt that is active
    /// on every worker costs one pass over the workers.
    pub(super) fn count(&self, hashes: &[u64], counts: &mut [u32]) {
        // The holders of the previous run, and the number of blocks that they are still to be
        // credited with.
        let mut owed: Option<(&Holders, u32)> = None;
        let (mut at, mut rest) = (ROOT, hashes);
        while let Some(next) = rest.first().and_then(|first| self.runs[at].after.get(first)) {
            at = *next as usize;
            let run = &self.runs[at];
            let common = run.common(rest);
            let mut blocks = common as u32;
            if let Some((holders, before)) = owed {
                if holders.credit_without(&run.holders, before, counts) {
                    blocks += before;
                } else {
                    holders.credit(before, counts);
                }
            }
            owed = Some((&run.holders, blocks));
            if common < run.hashes.len() {
                break;
            }
            rest = &rest[common..];
        }
        if let Some((holders, blocks)) = owed {
            holders.credit(blocks, counts);
        }
    }

    /// Distinct blocks in use on any worker.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.runs.iter().map(|(_, run)| run.hashes.len()).sum()
    }

    /// Runs of these blocks, and the hashes that they have memory for.
    #[cfg(test)]
    pub(super) fn runs(&self) -> (usize, usize) {
        (self.runs.len() - 1, self.runs.iter().map(|(_, run)| run.hashes.capacity()).sum())
    }
}
