//! Sizes of the index, and the consistency check of all redundant data.

use std::collections::BTreeMap;

use super::holder::{MemberId, NO_MEMBER, Slot};
use super::run::Loc;
use super::seats::Plane;
use super::writer::Writer;
use crate::index::arena::cover::{Entries, WHOLE};
use crate::index::arena::runs::{ROOT, RunId};
use crate::index::types::IndexStats;

/// Names of removed runs that a size query cleans up: a few milliseconds' worth.
const FORGET_PER_LOOK: usize = 65_536;

impl Writer {
    pub fn stats(&mut self) -> IndexStats {
        self.count_held();
        self.forget_left(FORGET_PER_LOOK);
        let slots = || self.owners.slots.iter().flatten();
        IndexStats {
            workers: self.owners.numbers.len(),
            holders: slots().filter(|s| s.held > 0 && s.plane != Plane::Predicted).count(),
            bytes: self.bytes(),
            ..self.counters
        }
    }

    /// See [`super::RadixIndex::audit`].
    pub(super) fn audit(&mut self) {
        self.count_held();
        let mut holders: BTreeMap<RunId, Vec<MemberId>> = BTreeMap::new();
        let (mut memberships, mut predicted) = (0, 0);
        for (number, slot) in self.owners.slots.iter().enumerate() {
            let Some(slot) = slot else { continue };
            let own = number as u16;
            let mut held = slot.extra.len();
            let mut tails = 0;
            let mut kids: BTreeMap<RunId, u32> = BTreeMap::new();
            for (run, id) in &slot.members {
                let member = self.members.get(*id);
                assert_eq!((member.run, member.slot), (*run, own));
                assert!(!member.spans.is_empty(), "a member without blocks");
                holders.entry(*run).or_default().push(*id);
                held += member.spans.len();
                if slot.plane != Plane::Predicted {
                    let tail = self.name_at(member, usize::from(member.spans.end()) - 1);
                    assert_eq!(tail.and_then(|tail| slot.tails.get(&tail)), Some(id), "a tail");
                    tails += 1;
                }
                let (parent, _) = self.shared.runs.peek(&self.tree.runs, *run).place();
                if parent != ROOT {
                    *kids.entry(parent).or_default() += 1;
                }
            }
            assert_eq!(slot.tails.len(), tails);
            assert_eq!(slot.held, held);
            for (run, count) in &kids {
                let kept = match slot.members.get(run) {
                    Some(id) => self.members.get(*id).kids,
                    None => slot.waiting.get(run).copied().unwrap_or(0),
                };
                assert_eq!(kept, *count, "members on runs that hang on run {run}");
            }
            let waiting = slot.waiting.keys().filter(|run| !kids.contains_key(run)).count();
            assert_eq!(waiting, 0, "a run without kids has no waiting parent");
            match slot.plane {
                Plane::Predicted => predicted += held,
                Plane::Held(_) => memberships += held,
            }
        }
        assert_eq!(self.counters.memberships, memberships);
        assert_eq!(self.counters.predicted, predicted);
        let mut unique = 0;
        for (run, members) in &holders {
            unique += self.audit_run(*run, members);
        }
        assert_eq!(self.counters.unique_blocks, unique);
        let hanging: u32 =
            (0..self.tree.metas.end()).map(|run| self.tree.metas.get(run).kids).sum();
        assert_eq!(
            self.shared.edges.len(&self.tree.edges),
            hanging as usize,
            "an edge for each run"
        );
        self.audit_order();
        self.audit_bytes();
        for state in self.owners.workers.iter().flatten() {
            let Some(dense) = &state.dense else { continue };
            let mut count = 0;
            for slot in state.fact_slots() {
                for (run, id) in &self.slot(slot).members {
                    let member = self.members.get(*id);
                    for offset in member.spans.iter().flat_map(|(start, end)| start..end) {
                        let name = self.name_at(member, offset.into()).expect("facts have names");
                        let loc = Loc { run: *run, offset: offset.into() };
                        assert_eq!(dense.get(&name), Some(&loc), "a worker's table of names");
                        count += 1;
                    }
                }
            }
            assert!(
                dense.len()
                    <= count + state.fact_slots().map(|s| self.slot(s).extra.len()).sum::<usize>()
            );
        }
    }

    /// Each lane lists its members, oldest first, except for those that wait for their children.
    fn audit_order(&self) {
        if !self.keeps_order() {
            return;
        }
        for slot in (0..self.owners.slots.len() as u16)
            .filter(|s| self.owners.slots[usize::from(*s)].is_some())
        {
            for (run, id) in &self.slot(slot).members {
                let member = self.members.get(*id);
                assert!(!member.is_parked || self.floor(slot, *run) > 0, "it waits for something");
                assert_eq!(member.kids > 0, member.floor > 0);
                let (parent, attach) = self.shared.runs.peek(&self.tree.runs, *run).place();
                if let Some(parent) = self.slot(slot).members.get(&parent) {
                    assert!(u32::from(self.members.get(*parent).floor) >= attach);
                }
            }
            let mut lane: Vec<MemberId> = Vec::new();
            let mut at = self.ends(self.lane_of(slot)).map_or(NO_MEMBER, |ends| ends.oldest);
            while at != NO_MEMBER {
                assert!(!self.members.get(at).is_parked);
                lane.push(at);
                at = self.members.get(at).newer;
            }
            assert!(lane.is_sorted_by_key(|id| self.members.get(*id).used), "oldest first");
            let all = self.siblings(slot).flat_map(|slot| self.slot(slot).members.values());
            let listed = all.filter(|id| !self.members.get(**id).is_parked).count();
            assert_eq!(listed, lane.len(), "the order of use has all");
        }
    }

    fn audit_bytes(&self) {
        let columns: usize = self.tree.metas.all().map(|meta| meta.bytes()).sum();
        assert_eq!(self.sizes.columns, columns);
        let spans: usize = self.members.all().map(|member| member.spans.heap_bytes()).sum();
        assert_eq!(self.sizes.spans, spans);
        if self.options.limits.max_bytes > 0 {
            assert_eq!(self.bytes_now(), self.bytes(), "what is counted along the way");
        }
        let slots = self.owners.slots.iter().flatten().map(Box::as_ref);
        let (slots, facts): (Vec<_>, Vec<_>) =
            slots.partition(|slot| slot.plane == Plane::Predicted);
        if self.options.limits.ttl_ms > 0 {
            let members = facts.iter().map(|slot| slot.members.len()).sum();
            self.times.held.audit_all(members, |_| (0, 0));
            for slot in &facts {
                for id in slot.members.values() {
                    self.times.held.audit(slot.worker, *id, self.members.get(*id).spans.end());
                }
            }
        }
        let has_history = |number| self.times.ages.history_most(number).is_some();
        let has_time = self.options.limits.predicted_ttl_ms > 0;
        let is_timed = |slot: &&&Slot| has_time && !has_history(slot.worker);
        let timed = slots.iter().filter(is_timed).map(|slot| slot.members.len()).sum();
        self.times.ages.audit_all(timed, |number| {
            let own = slots.iter().find(|slot| slot.worker == number);
            own.map_or((0, 0), |slot| (slot.members.len(), slot.held))
        });
        for slot in slots.iter().filter(|slot| has_time || has_history(slot.worker)) {
            for id in slot.members.values() {
                self.times.ages.audit(slot.worker, *id, self.members.get(*id).spans.end());
            }
        }
    }

    /// Returns how many blocks of the run are held.
    fn audit_run(&self, run: RunId, members: &[MemberId]) -> usize {
        let meta = self.tree.metas.get(run);
        let at = self.shared.runs.peek(&self.tree.runs, run);
        let len = at.labels().len();
        assert_eq!(meta.holders as usize, members.len());
        let mut expected = Entries::default();
        let (mut wholes, mut held) = (0, vec![false; len]);
        let mut users: BTreeMap<u16, u32> = BTreeMap::new();
        for id in members {
            let member = self.members.get(*id);
            let plane = self.slot(member.slot).plane;
            wholes += u32::from(plane != Plane::Predicted && member.is_whole());
            if plane == Plane::Predicted {
                expected.set_prefix(member.slot, member.spans.lead());
                continue;
            }
            *users.entry(member.column).or_default() += 1;
            for (start, end) in member.spans.iter() {
                held[usize::from(start)..usize::from(end)].fill(true);
            }
            if plane.is_prefix() {
                assert_eq!(member.is_whole(), usize::from(member.spans.lead()) == len);
                let cut = if member.is_whole() { WHOLE } else { member.spans.lead() };
                expected.set_prefix(member.slot, cut);
                let is_scattered = usize::from(member.spans.lead()) != member.spans.len();
                let list = self.tree.scattered.get(&run);
                assert_eq!(list.is_some_and(|list| list.contains(&member.slot)), is_scattered);
            } else {
                expected.set_stretches(member.slot, member.spans.iter());
            }
        }
        let mut published = Entries::default();
        at.cover().decode(&mut published);
        assert_eq!(published, expected, "the cover of run {run}");
        assert_eq!(meta.wholes, wholes);
        for (id, column) in meta.columns() {
            assert_eq!(column.users, users.get(&id).copied().unwrap_or(0), "users of a column");
            for name in column.names.iter().filter(|name| **name != 0) {
                assert!(self.names.filter.contains(*name), "the filter knows every name");
            }
        }
        let held = held.iter().filter(|held| **held).count();
        assert_eq!(meta.held as usize, held);
        held
    }
}
