//! The query: down the prompt's chain, narrowing the set of workers that still hold every block.

use super::chain;
use super::holders::{HolderSet, View, each_bit, has};
use super::nodes::{LowerSets, Pinned};

/// The prompt's chain hashes, worked out no further than the walk goes.
pub(super) enum Chains<'a> {
    /// From local hashes; the second part holds those worked out so far.
    Local(&'a [u64], Vec<u64>),
    /// Known already.
    Given(&'a [u64]),
}

impl Chains<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Local(locals, _) => locals.len(),
            Self::Given(chains) => chains.len(),
        }
    }

    /// The chain hash of block `at`, which is below `len`.
    fn at(&mut self, at: usize) -> u64 {
        match self {
            Self::Given(chains) => chains[at],
            Self::Local(locals, known) => {
                while known.len() <= at {
                    known.push(chain(known.last().copied(), locals[known.len()]));
                }
                known[at]
            }
        }
    }
}

/// How far one slot reached.
#[derive(Debug, Clone, Copy)]
pub(super) struct Found {
    pub slot: u16,
    /// The tier the walk stands in.
    stage: u8,
    /// Blocks reached, cumulative, per tier.
    pub reach: [u32; 4],
}

impl Found {
    fn new(slot: u16, depth: usize) -> Self {
        // Queries are vectors of u64 in memory: none has 2^32 blocks.
        Self { slot, stage: 1, reach: [depth as u32; 4] }
    }

    /// Takes block `at`, held in the tier it stands in or in a lower one; false when in none.
    fn advance(&mut self, lower: &LowerSets, at: usize) -> bool {
        let stages = usize::from(self.stage)..=3;
        let Some(stage) = stages.into_iter().find(|s| lower[*s - 1].contains(self.slot)) else {
            return false;
        };
        self.stage = stage as u8;
        self.reach[stage..].fill(at as u32 + 1);
        true
    }
}

/// What a walk needs beside its answer; kept between queries so that none allocates.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Bitset of the slots that hold every block so far.
    alive: Vec<u64>,
    /// The slots the walk began with.
    started: Vec<u64>,
    keep: Vec<u64>,
    active: Vec<usize>,
    pub found: Vec<Found>,
    pub chains: Vec<u64>,
}

impl Scratch {
    /// Walks the device tier. Fills `found`, shallowest first.
    pub fn walk_device(&mut self, pin: &Pinned<'_>, chains: &mut Chains<'_>, early_exit: bool) {
        self.found.clear();
        self.started.clear();
        if chains.len() == 0 {
            return;
        }
        let Some(first) = pin.get(&chains.at(0)) else { return };
        let mut alive = self.start(first.device());
        self.started.extend_from_slice(&self.alive);
        let mut depth = 1;
        while alive > 0 && depth < chains.len() && !(early_exit && alive == 1) {
            let Some(node) = pin.get(&chains.at(depth)) else { break };
            alive -= self.narrow(node.device(), alive, depth);
            depth += 1;
        }
        if alive > 0 {
            let Self { alive, found, .. } = self;
            for (at, &word) in alive.iter().enumerate() {
                each_bit(at, word, |slot| found.push(Found::new(slot, depth)));
            }
        }
    }

    /// Walks on through the lower tiers, each slot from its device depth.
    pub fn walk_lower(&mut self, pin: &Pinned<'_>, chains: &mut Chains<'_>) {
        let Self { found, active, started, .. } = self;
        active.clear();
        if chains.len() == 0 {
            return;
        }
        // Slots in `found[..sorted]` join where their device depth ends; those that hold nothing on
        // the device start at block 0.
        let sorted = found.len();
        let Some(first) = pin.get(&chains.at(0)) else { return };
        if let Some(lower) = first.lower() {
            for (tier, set) in lower.iter().enumerate() {
                set.for_each(|slot| {
                    let nearer = lower[..tier].iter().any(|set| set.contains(slot));
                    // The device sets may have changed since they were walked: ask the walk.
                    if !nearer && !has(started, slot) {
                        active.push(found.len());
                        found.push(Found::new(slot, 0));
                    }
                });
            }
        }
        let (mut next, mut depth) = (0, 0);
        loop {
            while next < sorted && found[next].reach[0] as usize == depth {
                active.push(next);
                next += 1;
            }
            if active.is_empty() {
                if next == sorted {
                    break;
                }
                depth = found[next].reach[0] as usize;
                continue;
            }
            if depth == chains.len() {
                break;
            }
            match pin.get(&chains.at(depth)).and_then(|node| node.lower()) {
                Some(lower) => active.retain(|&at| found[at].advance(lower, depth)),
                None => active.clear(),
            }
            depth += 1;
        }
    }

    /// Begins with the holders of block 0; says how many.
    fn start(&mut self, holders: &HolderSet) -> usize {
        self.alive.clear();
        match holders.view() {
            View::Slots(slots) => {
                let words = slots.last().map_or(0, |&max| usize::from(max) / 64 + 1);
                self.alive.resize(words, 0);
                slots.iter().for_each(|&s| self.alive[usize::from(s) / 64] |= 1 << (s % 64));
                slots.len()
            }
            View::Words(words) => {
                self.alive.extend_from_slice(words);
                words.iter().map(|word| word.count_ones() as usize).sum()
            }
        }
    }

    /// Drops the slots that are not in `holders`, with `depth` blocks each; says how many.
    fn narrow(&mut self, holders: &HolderSet, count: usize, depth: usize) -> usize {
        let Self { alive, keep, found, .. } = self;
        let before = found.len();
        let keep = match holders.view() {
            View::Words(words) => words,
            View::Slots(slots) => {
                if slots.iter().filter(|&&slot| has(alive, slot)).count() == count {
                    return 0;
                }
                keep.clear();
                keep.resize(alive.len(), 0);
                for &slot in slots.iter().filter(|&&slot| has(alive, slot)) {
                    keep[usize::from(slot) / 64] |= 1 << (slot % 64);
                }
                keep
            }
        };
        for (at, word) in alive.iter_mut().enumerate() {
            let kept = *word & keep.get(at).copied().unwrap_or(0);
            if kept != *word {
                each_bit(at, *word & !kept, |slot| found.push(Found::new(slot, depth)));
                *word = kept;
            }
        }
        found.len() - before
    }
}
