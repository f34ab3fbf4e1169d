//! Converts a copy of a worker's content to events that recreate it in an empty index.
//!
//! The copy is made under the writer's lock and contains little more than names. Everything else is
//! computed here, beside the writer, from data that readers see too.

use std::collections::{BTreeMap, HashMap};

use super::run::Loc;
use super::shared::Shared;
use crate::hash::extend;
use crate::ids::Tier;
use crate::index::arena::epoch::Pin;
use crate::index::arena::runs::{ROOT, RunId};
use crate::index::types::{Block, DEFAULT_SEED, DumpEvent, Membership};

/// What a worker holds, by its dump; ascending.
pub(super) fn memberships(events: &[DumpEvent]) -> Vec<Membership> {
    let mut chains: HashMap<u64, u64> = HashMap::new();
    let mut held: HashMap<(u64, Tier), Membership> = HashMap::new();
    for event in events {
        match event {
            DumpEvent::Stored { tier, parent, seed, blocks } => {
                let mut chain = parent.map(|parent| chains[&parent]);
                for Block { engine_hash, local_hash } in blocks {
                    let own = extend(chain, *local_hash);
                    chain = Some(own);
                    chains.insert(*engine_hash, own);
                    let (engine_hash, tier, seed) = (*engine_hash, *tier, *seed);
                    held.entry((engine_hash, tier))
                        .and_modify(|known| known.copies += 1)
                        .or_insert(Membership { chain: own, engine_hash, tier, seed, copies: 1 });
                }
            }
            DumpEvent::Removed { tier, names } => {
                for name in names {
                    held.remove(&(*name, *tier));
                }
            }
        }
    }
    let mut all: Vec<Membership> = held.into_values().collect();
    all.sort_unstable();
    all
}

/// Fillers get names that differ from all engine names, up to a probability of 2^-64 each.
const FILLER: u64 = 0x6b76_666c_6173_6821;

/// A part of a run that is held in a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Part {
    pub run: RunId,
    pub tier: Tier,
    pub start: u16,
    pub end: u16,
    /// Start of its names in [`Copied::names`].
    pub at: usize,
}

/// A worker's content at one moment.
#[derive(Debug, Default)]
pub(super) struct Copied {
    pub parts: Vec<Part>,
    pub names: Vec<u64>,
    /// Additional names of blocks.
    pub extra: Vec<((Loc, Tier), u64)>,
    /// Names stored more than once.
    pub copies: Vec<((Tier, u64), u32)>,
    /// Seeds of runs with an identity.
    pub seeds: HashMap<RunId, u64>,
}

/// A run that contains, or leads to, content of the worker.
#[derive(Clone, Copy)]
struct Path {
    depth: u32,
    run: RunId,
    parent: RunId,
    /// Number of the parent's blocks before it.
    attach: u32,
    /// Number of its own blocks up to the last one that is needed.
    needed: u32,
    /// Its parts, as indices of [`Copied::parts`].
    parts: (usize, usize),
}

impl Copied {
    /// A copy with preallocated memory that is already touched, because copying under a lock must
    /// not wait for page faults.
    pub fn with_room((parts, names): (usize, usize)) -> Self {
        let touched = |len: usize| {
            let mut names = vec![1; len + len / 16];
            names.clear();
            names
        };
        Self {
            parts: Vec::with_capacity(parts + parts / 16),
            names: touched(names),
            ..Self::default()
        }
    }

    /// The runs of the parts and their ancestors, parents first.
    fn paths(&self, shared: &Shared, pin: &Pin<'_>) -> Vec<Path> {
        let mut known: HashMap<RunId, usize> = HashMap::with_capacity(self.parts.len());
        let mut paths: Vec<Path> = Vec::with_capacity(self.parts.len());
        let mut at = 0;
        for parts in self.parts.chunk_by(|a, b| a.run == b.run) {
            let (mut run, mut needed) = (parts[0].run, 0);
            parts.iter().for_each(|part| needed = needed.max(u32::from(part.end)));
            let own = (at, at + parts.len());
            at += parts.len();
            let mut parts = own;
            while run != ROOT {
                let new = paths.len();
                let number = *known.entry(run).or_insert(new);
                if number == new {
                    let (parent, attach) = shared.runs.get(pin, run).place();
                    paths.push(Path { depth: 0, run, parent, attach, needed: 0, parts: (0, 0) });
                }
                let path = &mut paths[number];
                if parts.1 > 0 {
                    path.parts = parts;
                }
                let is_enough = number != new && path.needed >= needed;
                path.needed = path.needed.max(needed);
                if is_enough {
                    break;
                }
                (run, needed, parts) = (path.parent, path.attach, (0, 0));
            }
        }
        let mut climb = Vec::new();
        for number in 0..paths.len() {
            let mut at = number;
            while paths[at].depth == 0 {
                climb.push(at);
                match known.get(&paths[at].parent) {
                    Some(parent) => at = *parent,
                    None => break,
                }
            }
            while let Some(at) = climb.pop() {
                let above = known.get(&paths[at].parent).map_or(0, |parent| paths[*parent].depth);
                paths[at].depth = above + 1;
            }
        }
        paths.sort_unstable_by_key(|path| (path.depth, path.run));
        paths
    }

    /// The name of a block in the dump, for a run with these parts.
    fn call(&self, run: RunId, parts: &[Part], offset: u32) -> u64 {
        let holds = |part: &&Part| (u32::from(part.start)..u32::from(part.end)).contains(&offset);
        match parts.iter().find(holds) {
            Some(part) => self.names[part.at + offset as usize - usize::from(part.start)],
            None => FILLER ^ (u64::from(run) << 20 | u64::from(offset)),
        }
    }

    /// The events. `pin` must be older than the copy, and held since.
    pub fn events(mut self, shared: &Shared, pin: &Pin<'_>) -> Vec<DumpEvent> {
        self.parts.sort_unstable();
        let paths = self.paths(shared, pin);
        let mut extra: BTreeMap<Loc, Vec<(Tier, u64)>> = BTreeMap::new();
        for ((loc, tier), name) in &self.extra {
            extra.entry(*loc).or_default().push((*tier, *name));
        }
        let mut dump = Dump {
            parts_of: paths.iter().map(|path| (path.run, path.parts)).collect(),
            extra,
            copies: self.copies.iter().copied().collect(),
            events: Vec::with_capacity(self.parts.len()),
            fillers: Vec::new(),
            bounds: Vec::new(),
            copied: &self,
        };
        for path in paths {
            let labels = shared.runs.get(pin, path.run).labels();
            dump.add_run(path, labels);
        }
        let Dump { mut events, mut fillers, .. } = dump;
        if !fillers.is_empty() {
            fillers.reverse();
            events.push(DumpEvent::Removed { tier: Tier::Device, names: fillers });
        }
        events
    }
}

/// A dump in progress.
struct Dump<'a> {
    copied: &'a Copied,
    /// Of runs and their ancestors, as indices of [`Copied::parts`].
    parts_of: HashMap<RunId, (usize, usize)>,
    extra: BTreeMap<Loc, Vec<(Tier, u64)>>,
    copies: HashMap<(Tier, u64), u32>,
    events: Vec<DumpEvent>,
    /// Names of blocks that are stored only as parents of others.
    fillers: Vec<u64>,
    bounds: Vec<u32>,
}

impl<'a> Dump<'a> {
    fn parts(&self, run: RunId) -> &'a [Part] {
        let (from, to) = self.parts_of[&run];
        &self.copied.parts[from..to]
    }

    /// Name of the block before the one at `offset`.
    fn before(&self, path: &Path, offset: u32) -> Option<u64> {
        let Path { run, parent, attach, .. } = *path;
        let (run, at) = if offset > 0 { (run, offset) } else { (parent, attach) };
        let before = at.checked_sub(1).filter(|_| run != ROOT)?;
        Some(self.copied.call(run, self.parts(run), before))
    }

    /// Stores the held blocks of a run, and the unheld ones that others need.
    fn add_run(&mut self, path: Path, labels: &[u64]) {
        let parts = self.parts(path.run);
        // Between two bounds each tier has either all blocks or none.
        let mut bounds = std::mem::take(&mut self.bounds);
        bounds.clear();
        bounds.extend([0, path.needed]);
        bounds.extend(parts.iter().flat_map(|p| [u32::from(p.start), u32::from(p.end)]));
        bounds.sort_unstable();
        bounds.dedup();
        for stretch in bounds.windows(2) {
            let (start, end) = (stretch[0], stretch[1]);
            let is_there =
                |part: &&Part| u32::from(part.start) <= start && end <= u32::from(part.end);
            let mut is_held = false;
            for part in parts.iter().filter(is_there) {
                let at = part.at + start as usize - usize::from(part.start);
                let names = &self.copied.names[at..][..(end - start) as usize];
                self.store(&path, part.tier, start, names, labels);
                is_held = true;
            }
            if !is_held {
                let name = |offset| self.copied.call(path.run, &[], offset);
                let names: Vec<u64> = (start..end).map(name).collect();
                self.store(&path, Tier::Device, start, &names, labels);
                self.fillers.extend(names);
            }
        }
        self.bounds = bounds;
        if !self.extra.is_empty() || !self.copies.is_empty() {
            parts.iter().for_each(|part| self.add_again(&path, part, labels));
        }
    }

    /// Stores further copies, and blocks under further names.
    fn add_again(&mut self, path: &Path, part: &Part, labels: &[u64]) {
        for (nth, offset) in (part.start..part.end).enumerate() {
            let offset = u32::from(offset);
            let mut again = vec![(self.copied.names[part.at + nth], 0)];
            let others = self.extra.get(&Loc { run: path.run, offset }).into_iter().flatten();
            let others = others.filter(|(tier, _)| *tier == part.tier);
            again.extend(others.map(|(_, name)| (*name, 1)));
            for (name, first) in again {
                let times = self.copies.get(&(part.tier, name)).copied().unwrap_or(1) - 1 + first;
                for _ in 0..times {
                    self.store(path, part.tier, offset, &[name], labels);
                }
            }
        }
    }

    fn store(&mut self, path: &Path, tier: Tier, start: u32, names: &[u64], labels: &[u64]) {
        let block = |(name, label): (&u64, &u64)| Block { engine_hash: *name, local_hash: *label };
        let blocks = names.iter().zip(&labels[start as usize..]).map(block).collect();
        let seed = self.copied.seeds.get(&path.run).copied().unwrap_or(DEFAULT_SEED);
        let parent = self.before(path, start);
        self.events.push(DumpEvent::Stored { tier, parent, seed, blocks });
    }
}
