//! The records of one slot's part of one run.

use super::Writer;
use crate::index::arena::runs::{ROOT, RunId};
use crate::index::trie::holder::{Member, MemberId};
use crate::index::trie::run::NO_COLUMN;

impl Writer {
    pub(super) fn member_or_new(&mut self, slot: u16, run: RunId) -> MemberId {
        if let Some(id) = self.slot(slot).members.get(&run) {
            return *id;
        }
        let kids = self.slot_mut(slot).waiting.remove(&run).unwrap_or(0);
        // The offsets of these were not recorded.
        let floor = if kids > 0 { u16::MAX } else { 0 };
        let id = self.members.add(Member { run, slot, kids, floor, ..Member::default() });
        let (parent, attach) = self.shared.runs.peek(&self.tree.runs, run).place();
        let state = self.owners.slots[usize::from(slot)].as_mut().expect("a slot that is given");
        state.members.insert(run, id);
        if parent != ROOT {
            match state.members.get(&parent) {
                Some(parent) => {
                    let parent = self.members.get_mut(*parent);
                    parent.kids += 1;
                    parent.floor = parent.floor.max(attach as u16);
                }
                None => *state.waiting.entry(parent).or_insert(0) += 1,
            }
        }
        self.tree.metas.get_mut(run).holders += 1;
        self.link(id);
        id
    }

    /// Removes a member without blocks; readers no longer see it.
    pub(super) fn drop_member(&mut self, id: MemberId) {
        let turn = self.unlink(id);
        let Member { run, slot, column, cut, is_scattered, kids, spans, .. } =
            self.members.take(id);
        debug_assert!(spans.is_empty() && cut == 0 && !is_scattered, "it covers nothing");
        let number = self.slot(slot).worker;
        self.times.ages.cut(number, id, 0);
        self.times.held.cut(number, id, 0);
        let (parent, _) = self.shared.runs.peek(&self.tree.runs, run).place();
        let state = self.owners.slots[usize::from(slot)].as_mut().expect("a member's slot");
        state.members.remove(&run);
        if kids > 0 {
            state.waiting.insert(run, kids);
        }
        if parent != ROOT {
            match state.members.get(&parent) {
                Some(parent) => {
                    let parent = self.members.get_mut(*parent);
                    parent.kids -= 1;
                    parent.floor = if parent.kids > 0 { parent.floor } else { 0 };
                }
                None => {
                    if let Some(count) = state.waiting.get_mut(&parent) {
                        *count -= 1;
                        if *count == 0 {
                            state.waiting.remove(&parent);
                        }
                    }
                }
            }
        }
        self.unpark(slot, parent, turn);
        let meta = self.tree.metas.get_mut(run);
        meta.holders -= 1;
        if meta.holders == 0 {
            self.tree.idle.push(run);
        }
        if column != NO_COLUMN {
            self.leave_column(run, column);
        }
    }
}
