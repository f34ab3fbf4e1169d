//! Lists a worker's content, or copies it for a dump.

use std::collections::BTreeMap;

use super::events::{Copied, Part};
use super::run::Loc;
use super::writer::Writer;
use crate::hash::extend;
use crate::ids::{Tier, Worker};
use crate::index::arena::runs::{ROOT, RunId};
use crate::index::types::{DEFAULT_SEED, Membership};

/// The runs with blocks of a worker and their ancestors, parents first; with each, the number of
/// its blocks up to the last one that is needed.
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
                    let (parent, attach) = self.shared.runs.peek(&self.tree.runs, run).place();
                    if is_known && needed.get(&parent).is_some_and(|n| *n >= attach as usize) {
                        break;
                    }
                    (run, end) = (parent, attach as usize);
                }
            }
        }
        // Parents first: sorted by depth in runs, computed once for each.
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
                at = self.shared.runs.peek(&self.tree.runs, at).place().0;
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
            let at = self.shared.runs.peek(&self.tree.runs, *run);
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
        let Some(&number) = self.owners.numbers.get(&worker) else { return Vec::new() };
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
        self.tree.seeds.get(&run).copied().unwrap_or(DEFAULT_SEED)
    }

    /// Capacity needed for a copy of what `worker` holds.
    pub fn measure(&self, worker: Worker) -> (usize, usize) {
        let slots =
            self.owners.numbers.get(&worker).map(|number| self.worker(*number).fact_slots());
        let sizes = slots.into_iter().flatten().map(|slot| self.slot(slot));
        sizes.fold((0, 0), |(parts, names), slot| (parts + slot.members.len(), names + slot.held))
    }

    /// Copies what `worker` holds: names, and their locations. Labels are read later, under a pin
    /// that is older than the copy.
    pub fn copy_of(&self, worker: Worker, copied: &mut Copied) {
        let Some(&number) = self.owners.numbers.get(&worker) else { return };
        for slot in self.worker(number).fact_slots() {
            let state = self.slot(slot);
            let tier = Tier::ALL[state.plane.number()];
            for (run, id) in &state.members {
                let member = self.members.get(*id);
                let column = &self.tree.metas.get(*run).column(member.column).names;
                for (start, end) in member.spans.iter() {
                    let at = copied.names.len();
                    copied.names.extend_from_slice(&column[usize::from(start)..usize::from(end)]);
                    copied.parts.push(Part { run: *run, tier, start, end, at });
                }
            }
            copied.extra.extend(state.extra.iter().map(|(name, loc)| ((loc, tier), name)));
            copied.copies.extend(state.copies.iter().map(|(name, n)| ((tier, *name), *n)));
            if self.tree.seeds.is_empty() {
                continue;
            }
            // Runs between the held ones and the root have their own seeds.
            for run in state.members.keys().chain(state.waiting.keys()) {
                let mut run = *run;
                while run != ROOT && copied.seeds.insert(run, self.seed_of(run)).is_none() {
                    run = self.shared.runs.peek(&self.tree.runs, run).place().0;
                }
            }
        }
    }
}
