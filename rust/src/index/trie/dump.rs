//! What a worker holds, written out: as a list, and as events that make an empty index hold the same.

use std::collections::{BTreeMap, BTreeSet};

use super::run::Loc;
use super::writer::Writer;
use crate::hash::extend;
use crate::ids::{Tier, Worker};
use crate::index::arena::runs::{ROOT, RunId};
use crate::index::types::{Block, DEFAULT_SEED, DumpEvent, Membership};

/// Fillers get names that no engine has, but by a chance of 2^-64 each.
const FILLER: u64 = 0x6b76_666c_6173_6821;

/// The runs that a worker has blocks of and those above them, parents first; with each, behind how many
/// of its blocks something of the worker is.
type Paths = Vec<(RunId, usize)>;

impl Writer {
    fn paths(&self, number: u32) -> Paths {
        let mut needed: BTreeMap<RunId, usize> = BTreeMap::new();
        for slot in self.worker(number).fact_slots() {
            for (run, id) in &self.slot(slot).members {
                let end = usize::from(self.members.get(*id).spans.end());
                let (mut run, mut end) = (*run, end);
                while run != ROOT {
                    let known = needed.entry(run).or_insert(0);
                    let is_known = *known > 0;
                    *known = end.max(*known);
                    let (parent, attach) = self.shared.runs.peek(&self.runs, run).place();
                    if is_known && needed.get(&parent).is_some_and(|n| *n >= attach as usize) {
                        break;
                    }
                    (run, end) = (parent, attach as usize);
                }
            }
        }
        // Parents first: by depth in runs, worked out once for each.
        let mut depths: BTreeMap<RunId, usize> = BTreeMap::new();
        for run in needed.keys() {
            let (mut at, mut climb) = (*run, Vec::new());
            let mut depth = loop {
                if at == ROOT {
                    break 0;
                }
                if let Some(depth) = depths.get(&at) {
                    break *depth;
                }
                climb.push(at);
                at = self.shared.runs.peek(&self.runs, at).place().0;
            };
            while let Some(run) = climb.pop() {
                depth += 1;
                depths.insert(run, depth);
            }
        }
        let mut paths: Paths = needed.into_iter().collect();
        paths.sort_unstable_by_key(|(run, _)| (depths[run], *run));
        paths
    }

    /// Chain hashes of the first blocks of the runs on `paths`.
    fn chains(&self, paths: &Paths) -> BTreeMap<RunId, Vec<u64>> {
        let mut chains: BTreeMap<RunId, Vec<u64>> = BTreeMap::new();
        for (run, needed) in paths {
            let at = self.shared.runs.peek(&self.runs, *run);
            let (parent, attach) = at.place();
            let before = (attach as usize).checked_sub(1);
            let mut chain = before.and_then(|before| chains.get(&parent).map(|c| c[before]));
            let mut own = Vec::with_capacity(*needed);
            for label in &at.labels()[..*needed] {
                let next = extend(chain, *label);
                own.push(next);
                chain = Some(next);
            }
            chains.insert(*run, own);
        }
        chains
    }

    pub fn memberships(&self, worker: Worker) -> Vec<Membership> {
        let Some(&number) = self.numbers.get(&worker) else { return Vec::new() };
        let chains = self.chains(&self.paths(number));
        let mut all = Vec::new();
        for slot in self.worker(number).fact_slots() {
            let state = self.slot(slot);
            let tier = Tier::ALL[state.plane.number()];
            let mut add = |loc: Loc, name: u64| {
                all.push(Membership {
                    chain: chains[&loc.run][loc.offset as usize],
                    engine_hash: name,
                    tier,
                    seed: self.seed_of(loc.run),
                    copies: state.copies.get(&name).copied().unwrap_or(1),
                });
            };
            for (run, id) in &state.members {
                let member = self.members.get(*id);
                for offset in member.spans.iter().flat_map(|(start, end)| start..end) {
                    let loc = Loc { run: *run, offset: offset.into() };
                    let own = self.name_at(member, offset.into());
                    own.into_iter().chain(state.extra.all_at(loc)).for_each(|name| add(loc, name));
                }
            }
        }
        all.sort_unstable();
        all
    }

    pub(super) fn seed_of(&self, run: RunId) -> u64 {
        self.seeds.get(&run).copied().unwrap_or(DEFAULT_SEED)
    }

    pub fn dump(&self, worker: Worker) -> Vec<DumpEvent> {
        let Some(&number) = self.numbers.get(&worker) else { return Vec::new() };
        let paths = self.paths(number);
        let slots: Vec<u16> = self.worker(number).fact_slots().collect();
        let (mut events, mut fillers) = (Vec::new(), Vec::new());
        // What the last needed blocks of runs are called in the dump.
        let mut called: BTreeMap<RunId, Vec<u64>> = BTreeMap::new();
        for (run, needed) in &paths {
            let at = self.shared.runs.peek(&self.runs, *run);
            let (above, attach) = at.place();
            let above = (attach as usize).checked_sub(1).map(|before| called[&above][before]);
            let seed = self.seed_of(*run);
            let mut names: Vec<u64> = Vec::with_capacity(*needed);
            // Between these bounds the same tiers have all or none.
            let mut bounds = BTreeSet::from([0, *needed]);
            let members: Vec<_> = slots
                .iter()
                .filter_map(|slot| {
                    Some((*slot, self.members.get(*self.slot(*slot).members.get(run)?)))
                })
                .collect();
            for (start, end) in members.iter().flat_map(|(_, member)| member.spans.iter()) {
                bounds.extend([usize::from(start), usize::from(end)]);
            }
            let bounds: Vec<usize> = bounds.into_iter().collect();
            for part in bounds.windows(2) {
                let (start, end) = (part[0], part[1]);
                let parent = if start == 0 { above } else { Some(names[start - 1]) };
                let store = |tier, named: &[u64]| {
                    let blocks = named
                        .iter()
                        .zip(&at.labels()[start..end])
                        .map(|(name, label)| Block { engine_hash: *name, local_hash: *label });
                    DumpEvent::Stored { tier, parent, seed, blocks: blocks.collect() }
                };
                for (slot, member) in &members {
                    if !member.spans.contains(start as u16) {
                        continue;
                    }
                    let named: Vec<u64> =
                        (start..end).filter_map(|at| self.name_at(member, at)).collect();
                    events.push(store(Tier::ALL[self.slot(*slot).plane.number()], &named));
                    if names.len() == start {
                        names.extend(named);
                    }
                }
                if names.len() == start {
                    let filler = |at: usize| FILLER ^ (u64::from(*run) << 20 | at as u64);
                    let named: Vec<u64> = (start..end).map(filler).collect();
                    events.push(store(Tier::Device, &named));
                    fillers.extend_from_slice(&named);
                    names.extend(named);
                }
            }
            for (slot, member) in &members {
                let state = self.slot(*slot);
                if state.copies.is_empty() && state.extra.is_empty() {
                    continue;
                }
                let tier = Tier::ALL[state.plane.number()];
                for offset in member.spans.iter().flat_map(|(start, end)| start..end) {
                    let offset = usize::from(offset);
                    let loc = Loc { run: *run, offset: offset as u32 };
                    let parent = if offset == 0 { above } else { Some(names[offset - 1]) };
                    let extra = state.extra.all_at(loc).map(|name| (name, 1));
                    let own = self.name_at(member, offset).map(|name| (name, 0));
                    for (name, first) in own.into_iter().chain(extra) {
                        let times = state.copies.get(&name).copied().unwrap_or(1) - 1 + first;
                        let block = Block { engine_hash: name, local_hash: at.labels()[offset] };
                        let blocks = vec![block];
                        let again = DumpEvent::Stored { tier, parent, seed, blocks };
                        events.extend(std::iter::repeat_n(again, times as usize));
                    }
                }
            }
            called.insert(*run, names);
        }
        if !fillers.is_empty() {
            fillers.reverse();
            events.push(DumpEvent::Removed { tier: Tier::Device, names: fillers });
        }
        events
    }
}
