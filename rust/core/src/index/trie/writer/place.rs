//! Adds blocks: follows existing runs, and creates new ones for the rest.

use hashbrown::HashMap;

use super::{Chain, NOWHERE, Writer};
use crate::index::arena::epoch::pin;
use crate::index::arena::runs::{ROOT, RunId};
use crate::index::trie::holder::{Member, MemberId, NO_MEMBER};
use crate::index::trie::run::{Loc, RunMeta};
use crate::index::types::{Block, CountMode, DEFAULT_SEED, MAX_COPIES, StoreOutcome};

impl Writer {
    /// Places a part of an event at `place`, or nothing if that is [`NOWHERE`]. Returns where the
    /// next part continues.
    pub(super) fn place_piece(
        &mut self,
        slot: u16,
        place: Loc,
        seed: u64,
        chain: Chain<'_>,
        outcome: &mut StoreOutcome,
    ) -> Loc {
        let nowhere = Loc { run: NOWHERE, offset: 0 };
        let may_go_on = place.run != NOWHERE && outcome.refused == 0;
        if !may_go_on || !self.make_room(slot, chain.len()) || !self.is_open(slot, place) {
            outcome.refused += chain.len() as u32;
            return nowhere;
        }
        let place = self.place(slot, place, seed, chain, outcome);
        if self.options.limits.max_bytes > 0 {
            self.recount(self.slot(slot).worker);
        }
        place
    }

    /// Walks down from `place` along existing runs, and adds the rest. Returns the location after
    /// the last block.
    pub(in crate::index::trie) fn place(
        &mut self,
        slot: u16,
        place: Loc,
        seed: u64,
        chain: Chain<'_>,
        outcome: &mut StoreOutcome,
    ) -> Loc {
        let Loc { mut run, offset } = place;
        let mut offset = offset as usize;
        let mut at = 0;
        while at < chain.len() {
            let rest = chain.part(at, chain.len());
            if run != ROOT {
                let same =
                    rest.common(&self.shared.runs.peek(&self.tree.runs, run).labels()[offset..]);
                if same > 0 {
                    let loc = Loc { run, offset: offset as u32 };
                    let taken = self.cover(slot, loc, rest.part(0, same), outcome);
                    if taken < same {
                        outcome.refused += (rest.len() - taken) as u32;
                        break;
                    }
                    at += same;
                    offset += same;
                    continue;
                }
            }
            if let Some(child) = self.child(run, offset as u32, rest.label(0)) {
                self.hang(slot, run, offset as u32);
                (run, offset) = (child, 0);
                continue;
            }
            // From here on no run exists.
            self.fetch_names(rest);
            let room = self.room_for(slot, rest);
            if room == 0 {
                outcome.refused += rest.len() as u32;
                break;
            }
            let can_append = self.can_append(slot, run, offset);
            let longest = self.longest_run();
            let most = if can_append { longest - offset } else { longest };
            let more = rest.part(0, rest.len().min(room).min(most));
            if can_append {
                self.shared.runs.append(&mut self.tree.runs, run, more.labels());
            } else {
                self.hang(slot, run, offset as u32);
                run = self.add_child(run, offset as u32, seed, more);
                offset = 0;
            }
            let loc = Loc { run, offset: offset as u32 };
            let taken = self.cover(slot, loc, more, outcome);
            debug_assert_eq!(taken, more.len(), "room was made sure of");
            at += more.len();
            offset += more.len();
        }
        Loc { run, offset: offset as u32 }
    }

    /// How many of the chain's blocks may be added. A name that stands for other content frees its
    /// own room, so each block is checked when room is tight.
    fn room_for(&mut self, slot: u16, chain: Chain<'_>) -> usize {
        let max = self.options.limits.max_blocks;
        let Chain::Named(blocks) = chain else { return chain.len() };
        if max == 0 {
            return blocks.len();
        }
        let mut room = max.saturating_sub(self.counters.memberships);
        if room >= blocks.len() {
            return blocks.len();
        }
        let number = self.slot(slot).worker;
        let mut taken = 0;
        for block in blocks {
            room += self.tiers_of(number, block.engine_hash);
            if room == 0 {
                break;
            }
            room -= 1;
            taken += 1;
        }
        taken
    }

    fn tiers_of(&mut self, number: u32, name: u64) -> usize {
        let slots = self.worker(number).fact_slots();
        slots.filter(|slot| self.locate_in(*slot, name).is_some()).count()
    }

    fn can_append(&self, slot: u16, run: RunId, offset: usize) -> bool {
        if run == ROOT || offset >= self.longest_run() {
            return false;
        }
        let len = self.shared.runs.peek(&self.tree.runs, run).labels().len();
        if offset != len {
            return false;
        }
        // A holder of the whole run would cover added blocks, too.
        let member = self.slot(slot).members.get(&run).map(|id| self.members.get(*id));
        let own = u32::from(member.is_some_and(Member::is_whole));
        self.tree.metas.get(run).wholes == own
    }

    pub(in crate::index::trie) fn child(
        &self,
        run: RunId,
        offset: u32,
        first: u64,
    ) -> Option<RunId> {
        let pin = pin();
        self.shared.child(&pin, run, offset, first)
    }

    fn add_child(&mut self, parent: RunId, offset: u32, seed: u64, chain: Chain<'_>) -> RunId {
        let place = (parent, offset);
        let run = self.shared.runs.add(&mut self.tree.runs, place, chain.labels());
        let first = chain.label(0);
        self.shared.edges.insert(&mut self.tree.edges, parent, offset, first, run);
        *self.tree.metas.get_or_grow(run) = RunMeta::default();
        self.tree.metas.get_or_grow(parent).kids += 1;
        if seed != DEFAULT_SEED {
            self.tree.seeds.insert(run, seed);
        }
        // No slot covers it yet.
        self.tree.idle.push(run);
        run
    }

    /// Records that this worker has a child after block `offset - 1` of a run: later prompts that
    /// branch off there name that block as their parent.
    fn hang(&mut self, slot: u16, run: RunId, offset: u32) {
        let Some(offset) = offset.checked_sub(1).filter(|_| run != ROOT) else { return };
        let Some(id) = self.slot(slot).members.get(&run) else { return };
        let loc = Loc { run, offset };
        let Some(name) = self.name_at(self.members.get(*id), offset as usize) else { return };
        let most = 64 + 2 * self.members.len();
        if self.names.anchors.len() >= most {
            self.names.anchors = HashMap::with_hasher(self.mix);
        }
        self.names.anchors.insert(name, loc);
    }

    /// Covers blocks that are in the tree. Returns how many there was room for.
    pub(in crate::index::trie) fn cover(
        &mut self,
        slot: u16,
        loc: Loc,
        chain: Chain<'_>,
        outcome: &mut StoreOutcome,
    ) -> usize {
        match chain {
            Chain::Named(blocks) => self.cover_named(slot, loc, blocks, outcome),
            Chain::Plain(locals) => {
                let end = loc.offset as usize + locals.len();
                outcome.added += self.cover_predicted(slot, loc, end as u16) as u32;
                locals.len()
            }
        }
    }

    fn cover_predicted(&mut self, slot: u16, loc: Loc, end: u16) -> usize {
        let id = self.member_or_new(slot, loc.run);
        let before = self.members.get(id).spans.len();
        self.reshape(id, |spans| spans.add(loc.offset as u16, end));
        let added = self.members.get(id).spans.len() - before;
        if added > 0 {
            self.account(slot, added, true);
            self.publish(id);
        }
        self.touch(id);
        self.refresh(id, loc, end);
        added
    }

    /// Covers `blocks`, with the labels at `loc`, under their names. Returns how many there was
    /// room for; the caller counts the others.
    pub(super) fn cover_named(
        &mut self,
        slot: u16,
        loc: Loc,
        blocks: &[Block],
        outcome: &mut StoreOutcome,
    ) -> usize {
        let id = self.member_or_new(slot, loc.run);
        self.busy = id;
        let (start, end) = (loc.offset as usize, loc.offset as usize + blocks.len());
        let max = self.options.limits.max_blocks;
        let has_room = max == 0 || self.counters.memberships + blocks.len() <= max;
        let number = self.slot(slot).worker;
        let is_new = !self.members.get(id).spans.meets(start as u16, end as u16);
        let is_dense = self.worker(number).dense.is_some();
        let taken = if is_new && has_room && !is_dense {
            let mut doubtful = std::mem::take(&mut self.names.doubtful);
            doubtful.clear();
            self.assign(id, start, blocks, &mut doubtful);
            let mut moved = 0;
            for (name, offset) in &doubtful {
                let loc = Loc { run: loc.run, offset: *offset as u32 };
                moved += u32::from(self.release_elsewhere(number, *name, loc));
            }
            self.names.doubtful = doubtful;
            outcome.moved += moved;
            outcome.added += blocks.len() as u32 - moved;
            self.grow(slot, id, start as u16, end as u16);
            // Searches for doubtful names may have made it dense.
            if let Some(dense) = &mut self.worker_mut(number).dense {
                let at = |offset| Loc { run: loc.run, offset };
                dense.extend(blocks.iter().zip(loc.offset..).map(|(b, o)| (b.engine_hash, at(o))));
            }
            blocks.len()
        } else {
            let mut taken = 0;
            for (at, block) in blocks.iter().enumerate() {
                if !self.cover_one(slot, id, start + at, *block, outcome) {
                    break;
                }
                taken += 1;
            }
            taken
        };
        self.busy = NO_MEMBER;
        if self.members.get(id).spans.is_empty() {
            self.drop_member(id);
        } else {
            self.touch(id);
            if taken > 0 {
                let end = loc.offset + taken as u32;
                self.stamp(slot, Loc { offset: end, ..loc });
            }
        }
        taken
    }

    /// Covers one block, whatever the slot holds there. False without room.
    fn cover_one(
        &mut self,
        slot: u16,
        id: MemberId,
        offset: usize,
        block: Block,
        outcome: &mut StoreOutcome,
    ) -> bool {
        let name = block.engine_hash;
        let run = self.members.get(id).run;
        let loc = Loc { run, offset: offset as u32 };
        let number = self.slot(slot).worker;
        let has_block = self.members.get(id).spans.contains(offset as u16);
        let is_held = (has_block && self.name_at(self.members.get(id), offset) == Some(name))
            || self.slot(slot).extra.find(name) == Some(loc);
        if is_held {
            outcome.duplicates += 1;
            if self.options.count_mode == CountMode::Copies {
                let copies = self.slot_mut(slot).copies.entry(name).or_insert(1);
                *copies = copies.saturating_add(1).min(MAX_COPIES);
            }
            return true;
        }
        let is_moved = self.release_elsewhere(number, name, loc);
        let max = self.options.limits.max_blocks;
        if max > 0 && self.counters.memberships >= max {
            return false;
        }
        if is_moved {
            outcome.moved += 1;
        } else {
            outcome.added += 1;
        }
        if has_block {
            self.note(name);
            let state = self.slot_mut(slot);
            state.extra.add(name, loc);
            self.account(slot, 1, true);
        } else {
            let mut doubtful = Vec::new();
            self.assign(id, offset, &[block], &mut doubtful);
            self.grow(slot, id, offset as u16, offset as u16 + 1);
        }
        if let Some(dense) = &mut self.worker_mut(number).dense {
            dense.insert(name, loc);
        }
        true
    }

    /// Releases `name` in all tiers if the worker holds it anywhere except at `own`. Returns
    /// whether it did.
    fn release_elsewhere(&mut self, number: u32, name: u64, own: Loc) -> bool {
        if self.locate(number, name).is_none_or(|loc| loc == own) {
            return false;
        }
        for slot in self.worker(number).fact_slots() {
            if let Some(loc) = self.locate_in(slot, name) {
                self.slot_mut(slot).copies.remove(&name);
                self.let_go(slot, loc, name);
            }
        }
        true
    }
}
