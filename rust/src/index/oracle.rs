//! The dumb twin: plain collections, one lock, every answer worked out from its definition.
//!
//! For tests only. It shares types with the index and nothing else: no sets of holders, no table of
//! blocks, no counters of names, so that a mistake must be made twice to go unseen.

use std::collections::{BTreeMap, BTreeSet};

use parking_lot::Mutex;

use super::matches::{Match, Matches};
use super::types::{
    Block, CountMode, DumpBlock, HeldBlock, IndexStats, MAX_WORKERS, Options, Parent, Rejection,
    RemoveOutcome, StoreOutcome,
};
use super::{BlockIndex, chain};
use crate::ids::{InstanceId, Tier, Worker};

/// What a name stands for.
#[derive(Clone)]
struct Name {
    chain: u64,
    parent: Option<u64>,
    local: u64,
    seed: u64,
    copies: BTreeMap<Tier, u32>,
}

#[derive(Default)]
struct Held {
    names: BTreeMap<u64, Name>,
    /// Name, chain hash, seed; oldest first.
    ghosts: Vec<(u64, u64, u64)>,
}

impl Held {
    fn memberships(&self) -> usize {
        self.names.values().map(|name| name.copies.len()).sum()
    }

    fn holds(&self, chain: u64, tier: Tier) -> bool {
        self.names.values().any(|name| name.chain == chain && name.copies.contains_key(&tier))
    }

    fn locate(&self, name: u64) -> Option<(u64, u64)> {
        let ghost = || self.ghosts.iter().find(|g| g.0 == name).map(|g| (g.1, g.2));
        self.names.get(&name).map(|n| (n.chain, n.seed)).or_else(ghost)
    }
}

#[derive(Default)]
struct State {
    workers: BTreeMap<Worker, Held>,
    counters: IndexStats,
}

impl State {
    fn memberships(&self) -> usize {
        self.workers.values().map(Held::memberships).sum()
    }
}

/// Brute force: slow, small, exact. Answers as [`super::RadixIndex`] must.
#[derive(Default)]
pub struct OracleIndex {
    options: Options,
    state: Mutex<State>,
}

impl OracleIndex {
    /// An empty index.
    pub fn new(options: Options) -> Self {
        Self { options, state: Mutex::default() }
    }

    /// Whether `worker` holds the block `chain` in `tier`.
    pub fn holds(&self, worker: Worker, tier: Tier, chain: u64) -> bool {
        self.state.lock().workers.get(&worker).is_some_and(|held| held.holds(chain, tier))
    }

    fn find(&self, chains: &[u64], out: &mut Matches) {
        let state = self.state.lock();
        out.found.clear();
        for (&worker, held) in &state.workers {
            let mut reach = [0_u32; 4];
            let mut depth = 0;
            for tier in Tier::ALL {
                while depth < chains.len() && held.holds(chains[depth], tier) {
                    depth += 1;
                }
                reach[tier as usize] = depth as u32;
            }
            let [device, host, disk, external] = reach;
            if external > 0 {
                out.found.push(Match { worker, device, host, disk, external });
            }
        }
    }
}

fn chains(locals: &[u64]) -> Vec<u64> {
    let mut chains: Vec<u64> = Vec::new();
    for &local in locals {
        chains.push(chain(chains.last().copied(), local));
    }
    chains
}

impl BlockIndex for OracleIndex {
    fn store(
        &self,
        worker: Worker,
        tier: Tier,
        parent: Option<Parent>,
        seed: u64,
        blocks: &[Block],
    ) -> StoreOutcome {
        let mut state = self.state.lock();
        if blocks.is_empty() {
            return StoreOutcome::default();
        }
        let mut in_event: Vec<u64> = blocks.iter().map(|b| b.engine_hash).collect();
        if let Some(Parent::Engine(parent)) = parent {
            in_event.push(parent);
        }
        if in_event.iter().collect::<BTreeSet<_>>().len() < in_event.len() {
            state.counters.self_references_total += 1;
            return StoreOutcome::because_of(Rejection::SelfReference);
        }
        let mut parent = match parent {
            None => None,
            Some(Parent::Chain(chain)) => Some(chain),
            Some(Parent::Engine(name)) => {
                let known = state.workers.get(&worker).and_then(|held| held.locate(name));
                let Some((chain, _)) = known else {
                    state.counters.orphans_total += 1;
                    return StoreOutcome::because_of(Rejection::Orphan);
                };
                Some(chain)
            }
        };
        let max_workers = self.options.limits.max_workers.min(MAX_WORKERS);
        if !state.workers.contains_key(&worker) && state.workers.len() >= max_workers {
            state.counters.slots_exhausted_total += 1;
            return StoreOutcome::because_of(Rejection::SlotsExhausted);
        }
        state.workers.entry(worker).or_default();

        let mut outcome = StoreOutcome::default();
        for block in blocks {
            let chain = chain(parent, block.local_hash);
            let max_blocks = self.options.limits.max_blocks;
            let is_full = max_blocks > 0 && state.memberships() >= max_blocks;
            let held = state.workers.entry(worker).or_default();
            let fresh = Name {
                chain,
                parent,
                local: block.local_hash,
                seed,
                copies: BTreeMap::from([(tier, 1)]),
            };
            match held.names.get_mut(&block.engine_hash) {
                Some(name) if name.chain != chain => {
                    *name = fresh;
                    outcome.moved += 1;
                }
                Some(name) if name.copies.contains_key(&tier) => {
                    if self.options.count_mode == CountMode::Copies {
                        *name.copies.entry(tier).or_default() += 1;
                    }
                    name.seed = seed;
                    outcome.duplicates += 1;
                }
                _ if is_full => outcome.refused += 1,
                Some(name) => {
                    name.copies.insert(tier, 1);
                    name.seed = seed;
                    outcome.added += 1;
                }
                None => {
                    held.names.insert(block.engine_hash, fresh);
                    held.ghosts.retain(|ghost| ghost.0 != block.engine_hash);
                    outcome.added += 1;
                }
            }
            parent = Some(chain);
        }
        state.counters.duplicate_blocks_total += u64::from(outcome.duplicates);
        state.counters.moved_blocks_total += u64::from(outcome.moved);
        state.counters.refused_blocks_total += u64::from(outcome.refused);
        outcome
    }

    fn remove(&self, worker: Worker, tier: Tier, engine_hashes: &[u64]) -> RemoveOutcome {
        let mut state = self.state.lock();
        let mut outcome = RemoveOutcome::default();
        let mut nobody = Held::default();
        let held = state.workers.get_mut(&worker).unwrap_or(&mut nobody);
        for &hash in engine_hashes {
            let name = held.names.get_mut(&hash);
            let Some(copies) = name.and_then(|name| name.copies.get_mut(&tier)) else {
                outcome.unknown += 1;
                continue;
            };
            *copies -= 1;
            if *copies > 0 {
                outcome.kept += 1;
                continue;
            }
            outcome.removed += 1;
            held.names.entry(hash).and_modify(|name| _ = name.copies.remove(&tier));
            let gone = held.names.get(&hash).filter(|name| name.copies.is_empty()).cloned();
            if let Some(gone) = gone {
                held.names.remove(&hash);
                held.ghosts.push((hash, gone.chain, gone.seed));
                let cap = self.options.limits.min_ghosts.max(held.names.len() / 8);
                while held.ghosts.len() > cap {
                    held.ghosts.remove(0);
                }
            }
        }
        state.counters.unknown_removals_total += u64::from(outcome.unknown);
        outcome
    }

    fn clear(&self, worker: Worker) -> usize {
        let mut state = self.state.lock();
        state.workers.get_mut(&worker).map_or(0, |held| std::mem::take(held).memberships())
    }

    fn remove_worker(&self, worker: Worker) -> bool {
        self.state.lock().workers.remove(&worker).is_some()
    }

    fn remove_instance(&self, instance_id: InstanceId) -> usize {
        let mut state = self.state.lock();
        let before = state.workers.len();
        state.workers.retain(|worker, _| worker.instance_id != instance_id);
        before - state.workers.len()
    }

    fn find_matches(&self, locals: &[u64], out: &mut Matches) {
        self.find(&chains(locals), out);
    }

    fn find_matches_early_exit(&self, locals: &[u64], out: &mut Matches) {
        self.find(&chains(locals), out);
        // The walk stops behind the first block that exactly one worker still holds.
        let holders = |depth: u32| out.found.iter().filter(|m| m.device >= depth).count();
        let stop = (1..=locals.len() as u32).find(|depth| holders(*depth) == 1);
        for found in &mut out.found {
            found.device = found.device.min(stop.unwrap_or(u32::MAX));
            found.host = found.device;
            found.disk = found.device;
            found.external = found.device;
        }
        out.found.retain(|found| found.device > 0);
    }

    fn find_matches_by_sequence(&self, chains: &[u64], out: &mut Matches) {
        self.find(chains, out);
    }

    fn parent_seed(&self, worker: Worker, engine_hash: u64) -> Option<u64> {
        let state = self.state.lock();
        state.workers.get(&worker)?.locate(engine_hash).map(|(_, seed)| seed)
    }

    fn held_block(&self, worker: Worker, engine_hash: u64) -> Option<HeldBlock> {
        let state = self.state.lock();
        let name = state.workers.get(&worker)?.names.get(&engine_hash)?;
        let block = Block { engine_hash, local_hash: name.local };
        Some(HeldBlock { block, parent_chain: name.parent, seed: name.seed })
    }

    fn workers(&self) -> Vec<Worker> {
        self.state.lock().workers.keys().copied().collect()
    }

    fn blocks(&self, worker: Worker) -> usize {
        self.state.lock().workers.get(&worker).map_or(0, Held::memberships)
    }

    fn dump_worker(&self, worker: Worker) -> Vec<DumpBlock> {
        let state = self.state.lock();
        let Some(held) = state.workers.get(&worker) else { return Vec::new() };
        let held_as = |chain: u64| {
            held.names.iter().filter(|(_, n)| n.chain == chain).map(|(hash, _)| *hash).min()
        };
        // Generation by generation: a block is due when its parent was emitted or is not held.
        let mut due: BTreeMap<(u64, u64), Name> = BTreeMap::new();
        let mut waiting: BTreeMap<(u64, u64), Name> =
            held.names.iter().map(|(hash, name)| ((name.chain, *hash), name.clone())).collect();
        let mut emitted: BTreeSet<u64> = BTreeSet::new();
        let mut blocks = Vec::new();
        while !waiting.is_empty() {
            waiting.retain(|key, name| {
                let parent = name.parent.filter(|parent| held_as(*parent).is_some());
                let is_due = parent.is_none_or(|parent| emitted.contains(&parent));
                if is_due {
                    due.insert(*key, name.clone());
                }
                !is_due
            });
            for ((chain, hash), name) in std::mem::take(&mut due) {
                emitted.insert(chain);
                blocks.extend(name.copies.iter().map(|(&tier, &copies)| DumpBlock {
                    worker,
                    tier,
                    parent_engine: name.parent.and_then(held_as),
                    parent_chain: name.parent,
                    engine_hash: hash,
                    local_hash: name.local,
                    seed: name.seed,
                    copies,
                }));
            }
        }
        blocks
    }

    fn stats(&self) -> IndexStats {
        let state = self.state.lock();
        let all = || state.workers.values().flat_map(|held| held.names.values());
        let holder = |held: &Held| {
            let tiers = held.names.values().flat_map(|n| n.copies.keys().copied());
            tiers.collect::<BTreeSet<Tier>>().len()
        };
        IndexStats {
            workers: state.workers.len(),
            holders: state.workers.values().map(holder).sum(),
            unique_blocks: all().map(|name| name.chain).collect::<BTreeSet<_>>().len(),
            memberships: state.memberships(),
            ..state.counters
        }
    }
}
