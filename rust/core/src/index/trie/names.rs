//! Workers' names of blocks, and the way from a name to its block.
//!
//! There is no table of all names. A run stores columns of names beside its labels, and a member
//! knows which column its holder uses. A name is resolved in steps: the caller's own guess, the
//! last blocks of the holder's members, parents of other blocks, additional names of blocks, and
//! finally a search through everything that the worker holds. Each hint is checked against the
//! column, so a wrong hint only costs time. Before the search, a filter of all names in the tree
//! rules out most names without a holder. A worker that needs the search too often gets its own
//! table, and keeps it.

use std::collections::VecDeque;

use super::holder::{Member, MemberId};
use super::room::shrink_set;
use super::run::{Column, ColumnId, Loc, NO_COLUMN};
use super::writer::{Chain, Writer};
use crate::ids::Worker;
use crate::index::arena::runs::{ROOT, RunId};
use crate::index::types::Block;

/// Search credit of a worker: the blocks that it holds, times this, plus [`SEARCH_GRACE`] blocks.
const SEARCH_TIMES: usize = 4;
const SEARCH_GRACE: usize = 16_384;

/// A short column still costs a cache miss, as much as this many consecutive blocks.
const SMALL_COSTS: usize = 64;

/// Prefetch distance of the filter's lines, in names.
const AHEAD: usize = 8;

/// Columns up to this length are dropped with their run; longer ones during later events.
const FORGET_AT_ONCE: usize = 32;

/// Leftover names dropped per new name. The oldest are dropped first, because they are the first to
/// return and must then be new.
pub(super) const FORGET_PER_NAME: usize = 2;

/// Leftover names may wait to be dropped up to this many bytes, however little is held.
const LEFT_BYTES_KEPT: usize = 1 << 20;

/// Up to this many suspects are kept without looking for outdated ones.
const FEW_SUSPECTS: usize = 4_096;

/// Columns compared with a new member before it gets its own.
const COLUMNS_COMPARED: usize = 64;

/// Finds `name` in `names`, in chunks that the compiler vectorizes.
fn search(names: &[u64], name: u64) -> Option<usize> {
    let mut at = 0;
    for chunk in names.chunks(16) {
        if chunk.iter().fold(false, |found, other| found | (*other == name)) {
            return chunk.iter().position(|other| *other == name).map(|within| at + within);
        }
        at += chunk.len();
    }
    None
}

impl Writer {
    /// A member's name of a block; `None` for predictions.
    pub(super) fn name_at(&self, member: &Member, offset: usize) -> Option<u64> {
        if member.column == NO_COLUMN {
            return None;
        }
        self.tree.metas.get(member.run).column(member.column).names.get(offset).copied()
    }

    pub(super) fn label(&self, loc: Loc) -> u64 {
        self.shared.runs.peek(&self.tree.runs, loc.run).labels()[loc.offset as usize]
    }

    /// The block before the one at `loc`, if there is one.
    pub(super) fn before(&self, loc: Loc) -> Option<Loc> {
        if loc.offset > 0 {
            return Some(Loc { run: loc.run, offset: loc.offset - 1 });
        }
        let (run, attach) = self.shared.runs.peek(&self.tree.runs, loc.run).place();
        (run != ROOT && attach > 0).then(|| Loc { run, offset: attach - 1 })
    }

    /// Whether the slot holds the block at `loc` and `name` is its first name.
    pub(super) fn is_named(&self, slot: u16, loc: Loc, name: u64) -> bool {
        self.slot(slot).members.get(&loc.run).is_some_and(|id| {
            let member = self.members.get(*id);
            member.spans.contains(loc.offset as u16)
                && self.name_at(member, loc.offset as usize) == Some(name)
        })
    }

    /// A worker's names of the leading blocks of a prompt, as far as the tree has them.
    pub(super) fn names_along(&self, worker: Worker, locals: &[u64], out: &mut Vec<Option<u64>>) {
        let Some(&number) = self.owners.numbers.get(&worker) else { return };
        let mut place = Loc { run: ROOT, offset: 0 };
        while let Some(first) = locals.get(out.len())
            && let Some(run) = self.child(place.run, place.offset, *first)
        {
            let labels = self.shared.runs.peek(&self.tree.runs, run).labels();
            let rest = &locals[out.len()..];
            let common =
                labels.iter().zip(rest).take_while(|(label, local)| label == local).count();
            let member = |slot: u16| self.slot(slot).members.get(&run);
            for offset in 0..common {
                let name = self.worker(number).fact_slots().find_map(|slot| {
                    let member = self.members.get(*member(slot)?);
                    let is_held = member.spans.contains(offset as u16);
                    if is_held { self.name_at(member, offset) } else { None }
                });
                out.push(name);
            }
            place = Loc { run, offset: common as u32 };
        }
    }

    /// The location of the worker's block `name`, in any tier.
    pub(super) fn locate(&mut self, number: u32, name: u64) -> Option<Loc> {
        self.worker(number).fact_slots().find_map(|slot| self.locate_in(slot, name))
    }

    /// The location of the block `name` in the slot.
    pub(super) fn locate_in(&mut self, slot: u16, name: u64) -> Option<Loc> {
        let state = self.slot(slot);
        if let Some(id) = state.tails.get(&name) {
            let member = self.members.get(*id);
            let loc = Loc { run: member.run, offset: u32::from(member.spans.end()) - 1 };
            debug_assert!(self.is_named(slot, loc, name), "tails are kept exact");
            return Some(loc);
        }
        if !state.extra.is_empty()
            && let Some(loc) = state.extra.find(name)
        {
            return Some(loc);
        }
        let worker = self.worker(state.worker);
        if let Some(dense) = &worker.dense {
            return dense.get(&name).copied().filter(|loc| self.is_named(slot, *loc, name));
        }
        if let Some(loc) = self.names.anchors.get(&name)
            && self.is_named(slot, *loc, name)
        {
            return Some(*loc);
        }
        if !self.may_be_known(name) {
            return None;
        }
        self.search(slot, name)
    }

    fn search(&mut self, slot: u16, name: u64) -> Option<Loc> {
        let state = self.slot(slot);
        let number = state.worker;
        let mut searched = 0;
        let found = state.members.iter().find_map(|(run, id)| {
            let member = self.members.get(*id);
            if member.column == NO_COLUMN {
                return None;
            }
            let names = &self.tree.metas.get(*run).column(member.column).names;
            member.spans.iter().find_map(|(start, end)| {
                let (start, end) = (usize::from(start), usize::from(end));
                searched += end - start + SMALL_COSTS;
                let offset = (start + search(&names[start..end], name)?) as u32;
                Some(Loc { run: *run, offset })
            })
        });
        // In the same unit as the search cost. Otherwise a single search through many short
        // members, for a false positive of the filter, would suffice.
        let whole = state.held + SMALL_COSTS * state.members.len();
        let worker = self.worker_mut(number);
        worker.search_debt += searched;
        if worker.search_debt > SEARCH_TIMES * whole + SEARCH_GRACE {
            // With a byte budget, this must wait until others can be evicted.
            match self.options.limits.max_bytes {
                0 => self.densify(number),
                _ => self.worker_mut(number).wants_dense = true,
            }
        }
        found
    }

    /// Size in bytes of a table of all names of a worker.
    pub(super) fn dense_bytes(&self, number: u32) -> usize {
        let buckets = (self.held(number) * 8 / 7 + 1).next_power_of_two();
        buckets * (size_of::<(u64, Loc)>() + 1) + 16
    }

    /// Names held by a worker, counted per tier.
    fn held(&self, number: u32) -> usize {
        self.worker(number).fact_slots().map(|slot| self.slot(slot).held).sum()
    }

    /// Builds a table of all names of a worker.
    pub(super) fn densify(&mut self, number: u32) {
        let held = self.held(number);
        let mut dense = hashbrown::HashMap::with_capacity_and_hasher(held, self.mix);
        for slot in self.worker(number).fact_slots() {
            dense.extend(self.slot(slot).extra.iter());
            for (run, id) in &self.slot(slot).members {
                let member = self.members.get(*id);
                for (start, end) in member.spans.iter() {
                    for offset in start..end {
                        if let Some(name) = self.name_at(member, usize::from(offset)) {
                            dense.insert(name, Loc { run: *run, offset: offset.into() });
                        }
                    }
                }
            }
        }
        let worker = self.worker_mut(number);
        worker.dense = Some(dense);
        tracing::debug!(
            worker = %worker.worker,
            "the worker evicts blocks in random order; keeping a table of its names from now on"
        );
    }

    // ---- the filter

    /// False if no worker uses the name; true means maybe. 0 fills gaps in columns and is not
    /// recorded.
    fn may_be_known(&self, name: u64) -> bool {
        name == 0 || self.names.filter.contains(name)
    }

    /// Prefetches the filter's lines for the first names of blocks that are about to be added,
    /// which hides the memory latency.
    pub(super) fn fetch_names(&self, chain: Chain<'_>) {
        let Chain::Named(blocks) = chain else { return };
        for block in blocks.iter().take(AHEAD) {
            self.names.filter.prefetch(block.engine_hash);
        }
    }

    fn is_suspect(&self, name: u64) -> bool {
        name == 0 || (!self.names.suspects.is_empty() && self.names.suspects.contains(&name))
    }

    /// Records another location of a name; returns whether it may have had one before. An
    /// additional name of a block always needs a search when it appears again.
    pub(super) fn note(&mut self, name: u64) -> bool {
        if name == 0 {
            return true;
        }
        let is_known = self.names.filter.insert_new(name);
        if is_known {
            self.names.suspects.insert(name);
            // False positives of the filter remain as suspects, which must not accumulate.
            let few = FEW_SUSPECTS + self.names.filter.len() / 64;
            if self.names.suspects.len() > few.max(self.names.suspects_most) {
                let filter = &self.names.filter;
                self.names.suspects.retain(|name| filter.contains_twice(*name));
                shrink_set(&mut self.names.suspects);
                // If most are suspects for good reason, checking each one at every name would be
                // quadratic.
                self.names.suspects_most = 2 * self.names.suspects.len();
            }
        }
        is_known
    }

    pub(super) fn forget(&mut self, name: u64) {
        if name == 0 {
            return;
        }
        let was_there = self.names.filter.remove(name);
        debug_assert!(was_there, "what is forgotten was noted");
        // At a single location: no search is needed until it appears again.
        let is_cleared = !self.names.suspects.is_empty()
            && self.names.suspects.contains(&name)
            && !self.names.filter.contains_twice(name);
        if is_cleared {
            self.names.suspects.remove(&name);
            shrink_set(&mut self.names.suspects);
        }
    }

    // ---- columns

    /// Sets the names of blocks from `start` on, which are new to the member. Appends names that
    /// the worker may hold elsewhere to `doubtful`, with their offsets.
    pub(super) fn assign(
        &mut self,
        id: MemberId,
        start: usize,
        blocks: &[Block],
        doubtful: &mut Vec<(u64, usize)>,
    ) {
        let Member { run, column, .. } = *self.members.get(id);
        let column = if column == NO_COLUMN {
            let column = self.join_column(run, start, blocks);
            self.members.get_mut(id).column = column;
            column
        } else {
            column
        };
        let names = &self.tree.metas.get(run).column(column).names;
        let known = names.len().saturating_sub(start).min(blocks.len());
        let differs = |(name, block): (&u64, &Block)| *name != block.engine_hash;
        let is_same = known == 0 || !names[start..start + known].iter().zip(blocks).any(differs);
        for (block, at) in blocks[..known].iter().zip(start..) {
            if self.is_suspect(block.engine_hash) {
                doubtful.push((block.engine_hash, at));
            }
        }
        if !is_same {
            let column = self.own_column(id);
            for (at, block) in blocks[..known].iter().enumerate() {
                let old = self.tree.metas.get(run).column(column).names[start + at];
                if old != block.engine_hash {
                    if self.note(block.engine_hash) {
                        doubtful.push((block.engine_hash, start + at));
                    }
                    self.tree.metas.get_mut(run).column_mut(column).names[start + at] =
                        block.engine_hash;
                    self.forget(old);
                }
            }
        }
        if known < blocks.len() {
            let column = self.members.get(id).column;
            for (block, at) in blocks.iter().zip(start..).skip(known) {
                if let Some(later) = blocks.get(at - start + AHEAD) {
                    self.names.filter.prefetch(later.engine_hash);
                }
                if self.note(block.engine_hash) {
                    doubtful.push((block.engine_hash, at));
                }
            }
            let column = self.tree.metas.get_mut(run).column_mut(column);
            let room = column.names.capacity();
            if column.names.len() < start {
                // This holder lacks these blocks, so their names are never read.
                column.names.resize(start, 0);
            }
            column.extend(blocks[known..].iter().map(|block| block.engine_hash));
            self.sizes.columns += (column.names.capacity() - room) * size_of::<u64>();
        }
    }

    /// Changes a member's name of one block.
    pub(super) fn rename(&mut self, id: MemberId, offset: usize, name: u64) {
        let column = self.own_column(id);
        let Member { run, slot, .. } = *self.members.get(id);
        self.note(name);
        let names = &mut self.tree.metas.get_mut(run).column_mut(column).names;
        let old = std::mem::replace(&mut names[offset], name);
        self.forget(old);
        if usize::from(self.members.get(id).spans.end()) == offset + 1 {
            let tails = &mut self.slot_mut(slot).tails;
            tails.remove(&old);
            tails.insert(name, id);
        }
    }

    /// A column that can store these names from `start` on; counts one more user of it.
    fn join_column(&mut self, run: RunId, start: usize, blocks: &[Block]) -> ColumnId {
        let fits = |column: &Column| {
            let names = &column.names;
            names.len() >= start
                && names[start..].iter().zip(blocks).all(|(name, b)| *name == b.engine_hash)
        };
        let meta = self.tree.metas.get(run);
        let found = meta
            .columns()
            .take(COLUMNS_COMPARED)
            // An unused column beside used ones is a number to be reassigned.
            .find(|(id, column)| (*id == 0 || column.users > 0) && fits(column))
            .map(|(id, _)| id);
        let column = found.unwrap_or_else(|| self.new_column(run));
        self.tree.metas.get_mut(run).column_mut(column).users += 1;
        column
    }

    fn new_column(&mut self, run: RunId) -> ColumnId {
        let meta = self.tree.metas.get_mut(run);
        let list = meta.list_bytes();
        let column = meta.new_column().expect("fewer holders than columns");
        self.sizes.columns += meta.list_bytes() - list;
        column
    }

    /// Ensures that a member has its own column.
    fn own_column(&mut self, id: MemberId) -> ColumnId {
        let Member { run, column, .. } = *self.members.get(id);
        if self.tree.metas.get(run).column(column).users == 1 {
            return column;
        }
        let names = self.tree.metas.get(run).column(column).names.clone();
        for name in &names {
            // The name is known at this location, so it is not suspect.
            if *name != 0 {
                self.names.filter.insert(*name);
            }
        }
        self.sizes.columns += names.capacity() * size_of::<u64>();
        let own = self.new_column(run);
        let meta = self.tree.metas.get_mut(run);
        meta.column_mut(column).users -= 1;
        let own_column = meta.column_mut(own);
        own_column.names = names;
        own_column.users = 1;
        self.members.get_mut(id).column = own;
        own
    }

    /// Removes a member's use of this column.
    pub(super) fn leave_column(&mut self, run: RunId, column: ColumnId) {
        let left = self.tree.metas.get_mut(run).column_mut(column);
        left.users -= 1;
        if left.users == 0 {
            let mut names = std::mem::take(&mut left.names);
            let meta = self.tree.metas.get_mut(run);
            let list = meta.list_bytes();
            meta.trim();
            self.sizes.columns -= names.capacity() * size_of::<u64>() + list - meta.list_bytes();
            // With a budget, memory must be free when eviction needs it; and leftovers must not
            // outgrow held data.
            let may_wait = self.options.limits.max_bytes == 0
                && self.names.left_bytes <= self.sizes.columns.max(LEFT_BYTES_KEPT);
            if names.len() > FORGET_AT_ONCE && may_wait {
                self.names.left_bytes += names.capacity() * size_of::<u64>();
                // They are dropped from the end.
                names.reverse();
                self.names.left.push_back(names);
            } else {
                self.forget_last(&mut names, usize::MAX);
            }
        }
    }

    /// Removes and drops up to `most` names from the end of a list. Returns their number.
    fn forget_last(&mut self, names: &mut Vec<u64>, most: usize) -> usize {
        let keep = names.len().saturating_sub(most);
        let gone = names.len() - keep;
        while names.len() > keep {
            if let Some(later) = names.len().checked_sub(AHEAD) {
                self.names.filter.prefetch(names[later]);
            }
            if let Some(name) = names.pop() {
                self.forget(name);
            }
        }
        gone
    }

    /// Drops up to `most` leftover names of removed runs, oldest first. Until then the filter
    /// considers them known, which only costs searches.
    pub(super) fn forget_left(&mut self, most: usize) {
        let mut credit = most;
        while credit > 0 {
            let Some(mut names) = self.names.left.pop_front() else {
                if self.names.left.capacity() > 64 {
                    self.names.left = VecDeque::new();
                }
                return;
            };
            credit -= self.forget_last(&mut names, credit);
            if names.is_empty() {
                self.names.left_bytes -= names.capacity() * size_of::<u64>();
            } else {
                self.names.left.push_front(names);
            }
        }
    }

    /// Drops the names of a removed run.
    pub(super) fn forget_names(&mut self, run: RunId) {
        let meta = std::mem::take(self.tree.metas.get_mut(run));
        debug_assert!(
            meta.columns().all(|(_, column)| column.users == 0 && column.names.is_empty())
        );
    }
}

#[cfg(test)]
mod tests {
    use super::LEFT_BYTES_KEPT;
    use crate::ids::{Tier, Worker};
    use crate::index::types::DEFAULT_SEED;
    use crate::index::{Block, RadixIndex};

    fn store(index: &RadixIndex, worker: Worker, name: u64) {
        let block = Block { engine_hash: name, local_hash: name };
        index.store(worker, Tier::Device, None, DEFAULT_SEED, &[block]);
    }

    #[test]
    fn only_repeated_searches_earn_a_table_also_among_short_runs() {
        let index = RadixIndex::default();
        let (worker, other) = (Worker::new(1, 0), Worker::new(2, 0));
        (1..=2_000).for_each(|name| store(&index, worker, name));
        let has_table = || {
            let writer = index.writer.lock();
            writer.worker(writer.owners.numbers[&worker]).dense.is_some()
        };
        // The filter knows the name, but it is somebody else's: only a search tells.
        store(&index, other, 1_000_000);
        let searches = (1..=8).find(|_| {
            assert_eq!(index.remove(worker, Tier::Device, &[1_000_000]).unknown, 1);
            has_table()
        });
        assert_eq!(searches, Some(5));
        index.audit();
    }

    #[test]
    fn names_that_come_back_are_suspects_for_a_while_only() {
        const NAMES: u64 = 40_000;
        let index = RadixIndex::default();
        let workers = [1, 2].map(|id| Worker::new(id, 0));
        let chain = |start: u64| -> Vec<Block> {
            (start..start + 500).map(|at| Block { engine_hash: at, local_hash: at }).collect()
        };
        let fill = |worker| {
            let first = worker_start(worker);
            for start in (first..first + NAMES).step_by(500) {
                index.store(worker, Tier::Device, None, DEFAULT_SEED, &chain(start));
            }
        };
        workers.into_iter().for_each(fill);
        for round in 0..6 {
            let worker = workers[round % 2];
            match round {
                0 | 1 => _ = index.clear(worker),
                2 | 3 => _ = index.remove_worker(worker),
                _ => {
                    let first = worker_start(worker);
                    let names: Vec<u64> = (first..first + NAMES).rev().collect();
                    names.chunks(500).for_each(|names| {
                        assert_eq!(index.remove(worker, Tier::Device, names).removed, 500);
                    });
                }
            }
            fill(worker);
            let writer = index.writer.lock();
            assert_eq!(
                (writer.names.left.len(), writer.names.suspects.len()),
                (0, 0),
                "round {round}"
            );
        }
        index.audit();
    }

    #[test]
    fn what_is_left_to_be_forgotten_does_not_outgrow_what_is_held() {
        let index = RadixIndex::default();
        let [holder, other] = [1, 2].map(|id| Worker::new(id, 0));
        let chain: Vec<Block> =
            (1..=4_000).map(|at| Block { engine_hash: at, local_hash: at }).collect();
        index.store(holder, Tier::Device, None, DEFAULT_SEED, &chain);
        for round in 0..400 {
            // It shares the holder's names, and then has one of its own: a column for itself.
            let own = Block { engine_hash: 1_000_000 + round, local_hash: 2 };
            index.store(other, Tier::Device, None, DEFAULT_SEED, &chain[..1]);
            index.store(other, Tier::Device, Some(1), DEFAULT_SEED, &[own]);
            index.remove(other, Tier::Device, &[own.engine_hash, 1]);
        }
        let writer = index.writer.lock();
        let column = 8 * 4_096;
        assert!(
            writer.names.left_bytes <= LEFT_BYTES_KEPT + column,
            "{} bytes",
            writer.names.left_bytes
        );
        drop(writer);
        index.audit();
    }

    fn worker_start(worker: Worker) -> u64 {
        worker.instance_id * 1_000_000
    }
}
