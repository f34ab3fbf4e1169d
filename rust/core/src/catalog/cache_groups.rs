//! A publisher's cache groups and naming scheme, as shown by its events.

use std::sync::Arc;

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use serde::{Deserialize, Serialize};

use super::naming::{Naming, NamingOf, Proof};
use crate::event::Stored;
use crate::ids::{InstanceId, Worker};
use crate::index::MAX_COPIES;
use crate::index::groups::MAX_GROUPS;

/// How much of a prefix a group must hold so that the engine can continue from its end.
///
/// # Source
/// `find_longest_cache_hit` of the managers in vLLM's `v1/core/single_type_kv_cache_manager.py`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rule {
    /// All of it.
    Full,
    /// The last blocks that the next token attends to.
    Window {
        /// Tokens of the window, including the next one.
        tokens: u32,
    },
    /// The state at its end.
    State,
    /// The blocks of the chunk in which it ends.
    Chunk,
    /// Unknown here: assumed to reuse nothing.
    Unknown,
}

impl Rule {
    fn of(event: &Stored) -> Self {
        if event.is_full_attention() {
            return Self::Full;
        }
        match (event.spec_kind.as_deref(), event.sliding_window) {
            // Without a length the window may be any.
            (Some("sliding_window" | "sliding_window_mla"), tokens) => {
                Self::Window { tokens: tokens.unwrap_or(u32::MAX) }
            }
            (Some("mamba"), _) => Self::State,
            (Some("chunked_local_attention"), _) => Self::Chunk,
            _ => Self::Unknown,
        }
    }
}

/// One cache group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// Its number; a bit of [`GroupBits`](crate::index::groups::GroupBits).
    pub idx: u32,
    /// Its rule for prefixes.
    pub rule: Rule,
    /// Tokens in one of its blocks.
    pub block_size: u32,
}

impl Group {
    /// Where the blocks begin that the group must hold to continue after a prefix of `end` tokens;
    /// `None` if it can't.
    pub fn needs_from(&self, end: u32, facts: &EngineFacts) -> Option<u32> {
        let size = self.block_size.max(1);
        match self.rule {
            Rule::Full => Some(0),
            Rule::Unknown => None,
            Rule::State => Some(end.saturating_sub(1)),
            Rule::Window { tokens } => {
                let blocks = tokens.saturating_sub(1).div_ceil(size);
                Some(end.saturating_sub(blocks.saturating_mul(size)))
            }
            Rule::Chunk => match facts.attention_chunk_size {
                Some(chunk) if chunk > 0 => Some(end / chunk * chunk),
                _ => Some(0),
            },
        }
    }
}

/// Properties of an engine that an operator knows and no event contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineFacts {
    /// Tokens in a chunk of chunked local attention; `None`: reuse needs all chunks.
    pub attention_chunk_size: Option<u32>,
    /// Tokens that the engine copies to a slower tier at once.
    pub offload_chunk: Option<u32>,
}

/// Everything that a query needs about a worker with several cache groups, or with blocks found by
/// name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// The group in the tree of contents: the first one with full attention.
    pub main: Option<Group>,
    /// All other groups.
    pub others: Vec<Group>,
    /// The engine's naming scheme, if proven.
    pub naming: Option<Naming>,
    /// Properties that no event contains.
    pub facts: EngineFacts,
    /// Maximum tokens that one event named in a slower tier.
    pub seen_chunk: u32,
    /// Whether the table of groups has entries of slower tiers.
    pub has_lower: bool,
    /// Whether it has blocks of the main group that are missing in the tree of contents.
    pub has_named: bool,
    /// Stores that the worker shares with others.
    pub stores: Vec<String>,
}

impl Layout {
    /// Whether the tree of contents is complete: one group with full attention on the device.
    pub fn is_plain(&self) -> bool {
        self.is_of_tree() && !self.has_lower
    }

    /// Whether the tree of contents is complete for the device.
    pub fn is_of_tree(&self) -> bool {
        self.others.is_empty() && !self.has_named && !self.has_parts()
    }

    /// Whether hashes are finer than blocks, so that reuse may end within a block.
    pub fn has_parts(&self) -> bool {
        let unit = self.naming.as_ref().map(|naming| naming.unit);
        unit.is_some_and(|unit| self.main.is_some_and(|main| unit < main.block_size))
    }
}

/// What a publisher's events have shown so far.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct Shown {
    /// The group in the tree of contents, once an event has named it.
    pub main: Option<u32>,
    seen: Vec<Group>,
    seen_chunk: u32,
    has_lower: bool,
    /// Blocks of the main group may be known only by name.
    pub has_named: bool,
    pub stores: Vec<String>,
    /// Its events contain, or could contain, everything besides tokens that the engine hashed, so
    /// that an absent key means none.
    pub is_keyed: bool,
    /// Stores that looked like reports of reuse, with the blocks that their requests then computed.
    #[serde(default)]
    reports: u32,
    /// A block that was stored twice was removed twice.
    #[serde(default)]
    has_copies: bool,
    /// Blocks of different adapters or salts have had the same name.
    #[serde(default)]
    pub shares_names: bool,
    /// It has had blocks in slower tiers.
    #[serde(default)]
    pub offloads: bool,
}

/// Maximum blocks of a publisher with doubtful copies; copies of further blocks are not counted.
const MAX_DOUBTS: usize = 1 << 16;

/// After this many reports of reuse no repeated store counts as a copy, whatever is removed.
const REPORTS_MIN: u32 = 3;

/// A block of a worker: its group and its name.
pub(super) type Doubted = (Worker, u32, u64);

/// How often a block was stored while it was held, as another copy or as a report of reuse: as often as the index
/// counts, which has the first one, too.
#[derive(Debug, Clone, Copy, Default)]
struct Doubt {
    counted: u32,
    not_counted: u32,
}

/// The groups of one publisher, as shown by its events.
#[derive(Debug, Default)]
pub(super) struct CacheGroups {
    pub shown: Shown,
    proof: Proof,
    /// Blocks that were stored while they were held.
    doubts: HashMap<Doubted, Doubt>,
    /// Batches lost before the device was last known to be empty, by the publisher's counter.
    pub lost_before: u64,
    /// Something of the above changed since the last call of [`changed`](Self::changed).
    has_changed: bool,
}

/// A publisher's cache groups, in the form sent between replicas.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Knowledge {
    shown: Shown,
    naming: Option<NamingOf>,
    /// Blocks whose counted copies may be reports of reuse.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) doubts: Vec<CountedCopies>,
}

/// Counted copies of a block: rank, group, name, number.
pub(super) type CountedCopies = (u32, u32, u64, u32);

/// Maximum stores of slower tiers per publisher.
const MAX_STORES: usize = 16;

/// Whether an event of the device has everything besides tokens that the engine hashed, or would.
fn has_keys(event: &Stored) -> bool {
    event.group_idx.is_some() || !event.extra_keys.is_empty()
}

impl CacheGroups {
    /// For a publisher whose credited group was reported by another replica.
    pub fn crediting(main: Option<u32>) -> Self {
        Self { shown: Shown { main, ..Shown::default() }, ..Self::default() }
    }

    /// For a publisher of the instance, reported by another replica.
    pub fn knowing(known: &Knowledge, instance_id: InstanceId) -> Self {
        let mut shown = known.shown.clone();
        shown.stores.truncate(MAX_STORES);
        shown.seen.truncate(MAX_GROUPS as usize + 1);
        let proof = Proof::told(known.naming.as_ref().and_then(NamingOf::naming));
        let told = known.doubts.iter().take(MAX_DOUBTS);
        let doubts = told.map(|&(dp_rank, group, name, counted)| {
            let counted = counted.min(MAX_COPIES - 1);
            ((Worker::new(instance_id, dp_rank), group, name), Doubt { counted, not_counted: 0 })
        });
        Self { shown, proof, doubts: doubts.collect(), has_changed: true, lost_before: 0 }
    }

    /// Everything known, for another replica; `None` for an engine that names no groups and no
    /// keys.
    pub fn knowledge(&self) -> Option<Knowledge> {
        let shown = &self.shown;
        let is_plain = self.others().next().is_none() && !shown.has_lower && !shown.has_named;
        if is_plain && !shown.is_keyed {
            return None;
        }
        let counted = self.doubts.iter().filter(|(_, doubt)| doubt.counted > 0);
        let told = |(&(worker, group, name), doubt): (&Doubted, &Doubt)| {
            (worker.dp_rank, group, name, doubt.counted)
        };
        Some(Knowledge {
            shown: self.shown.clone(),
            naming: self.naming().map(NamingOf::of),
            doubts: counted.map(told).collect(),
        })
    }

    /// Records a stored event; returns whether it belongs to the main group.
    pub fn learn(&mut self, event: &Stored, is_device: bool) -> bool {
        let idx = event.group_idx.unwrap_or(0);
        self.shown.is_keyed |= is_device && has_keys(event);
        let rule = Rule::of(event);
        // Copied blocks without a description reveal nothing about their group.
        let is_described = event.block_size > 0 && (is_device || event.spec_kind.is_some());
        if rule == Rule::Full
            && self.shown.main.is_none()
            && (is_described || event.group_idx.is_none())
        {
            self.shown.main = Some(idx);
            self.has_changed = true;
        }
        if is_described && is_device {
            self.note(Group { idx, rule, block_size: event.block_size });
        }
        self.is_main(idx)
    }

    fn note(&mut self, group: Group) {
        let known = self.shown.seen.len();
        match self.shown.seen.iter_mut().find(|seen| seen.idx == group.idx) {
            // Parts of a block are smaller than the group's blocks.
            Some(seen) => {
                let block_size = seen.block_size.max(group.block_size);
                let newer = Group { block_size, ..group };
                self.has_changed |= *seen != newer;
                *seen = newer;
            }
            // The first number beyond the limit stands for all further groups.
            None if known <= MAX_GROUPS as usize => {
                self.shown.seen.push(group);
                self.has_changed = true;
            }
            None => {}
        }
    }

    /// Whether the group is in the tree of contents. Removals do not repeat the kind of their
    /// group.
    pub fn is_main(&self, idx: u32) -> bool {
        self.shown.main == Some(idx)
    }

    /// Records the properties of an event of a slower tier. Returns false for a shared store beyond
    /// the limit: nothing would clear its names.
    pub fn learn_lower(&mut self, tokens: u32, store: Option<&str>) -> bool {
        self.has_changed |= tokens > self.shown.seen_chunk;
        self.shown.seen_chunk = self.shown.seen_chunk.max(tokens);
        self.has_changed |= !std::mem::replace(&mut self.shown.has_lower, true);
        let stores = &mut self.shown.stores;
        let is_known = |store| stores.iter().any(|known| known == store);
        let Some(store) = store.filter(|store| !is_known(*store)) else { return true };
        let has_room = stores.len() < MAX_STORES;
        if has_room {
            stores.push(store.to_owned());
            self.has_changed = true;
        }
        has_room
    }

    /// Records that some blocks of the main group are known only by name.
    pub fn note_named(&mut self) {
        self.has_changed |= !std::mem::replace(&mut self.shown.has_named, true);
    }

    /// Another worker has these groups.
    pub fn touch(&mut self) {
        self.has_changed = true;
    }

    /// Compares the event's names with those of the known schemes; call it with every stored event
    /// of the device.
    pub fn prove(&mut self, event: &Stored) {
        self.has_changed |= self.proof.look(event);
    }

    /// The engine's naming scheme, if proven.
    pub fn naming(&self) -> Option<&Naming> {
        self.proof.naming()
    }

    /// Whether this event of the device is the first to show that events have keys.
    pub fn becomes_keyed(&self, event: &Stored) -> bool {
        !self.shown.is_keyed && has_keys(event)
    }

    /// Whether a block that is stored again counts as another copy, instead of as a report of reuse.
    pub fn counts_copies(&self) -> bool {
        self.shown.reports == 0 || self.shown.has_copies && self.shown.reports < REPORTS_MIN
    }

    /// Records a store that looks like a report of reuse by a request that went on. Returns copies
    /// that count no more, with their number.
    pub fn note_report(&mut self) -> Vec<(Doubted, u32)> {
        let did_count = self.counts_copies();
        self.shown.reports = self.shown.reports.saturating_add(1);
        if !did_count || self.counts_copies() {
            return Vec::new();
        }
        self.judge_again(|Doubt { counted, not_counted }| (counted, not_counted))
    }

    /// Moves the copies of every doubt from one of its counts to the other. Returns the blocks with
    /// any, with their number.
    fn judge_again(
        &mut self,
        counts: fn(&mut Doubt) -> (&mut u32, &mut u32),
    ) -> Vec<(Doubted, u32)> {
        let judged = self.doubts.iter_mut().map(|(block, doubt)| {
            let (from, to) = counts(doubt);
            *to += *from;
            (*block, std::mem::take(from))
        });
        judged.filter(|(_, count)| *count > 0).collect()
    }

    /// Records that a block was stored although it is held. Returns whether that counts as a copy.
    pub fn doubt(&mut self, block: Doubted) -> bool {
        if self.doubts.len() >= MAX_DOUBTS && !self.doubts.contains_key(&block) {
            return false;
        }
        let is_counted = self.counts_copies();
        let doubt = self.doubts.entry(block).or_default();
        if doubt.counted + doubt.not_counted >= MAX_COPIES - 1 {
            return false;
        }
        match is_counted {
            true => doubt.counted += 1,
            false => doubt.not_counted += 1,
        }
        is_counted
    }

    /// Whether such a block was stored again, and not counted.
    pub fn has_doubt(&self, block: Doubted) -> bool {
        self.doubts.get(&block).is_some_and(|doubt| doubt.not_counted > 0)
    }

    /// Whether such a block was stored again.
    pub fn knows_of(&self, block: Doubted) -> bool {
        self.doubts.contains_key(&block)
    }

    /// The block is gone, with all counted copies. One that was not counted stays known: its second
    /// removal would prove it.
    pub fn forget_copies(&mut self, block: Doubted) {
        if let Entry::Occupied(mut doubt) = self.doubts.entry(block) {
            doubt.get_mut().counted = 0;
            if doubt.get().not_counted == 0 {
                doubt.remove();
            }
        }
    }

    /// These blocks of `worker` were stored because it held them no more.
    pub fn forget_doubts(&mut self, worker: Worker, group: u32, names: &[u64]) {
        if !self.doubts.is_empty() {
            for name in names {
                self.doubts.remove(&(worker, group, *name));
            }
        }
    }

    /// The worker's device was cleared, with all copies.
    pub fn forget_worker(&mut self, worker: Worker) {
        self.doubts.retain(|(of, ..), _| *of != worker);
    }

    /// A block that was stored twice was removed twice: such blocks are copies. Returns those that
    /// count from now on, with their number.
    pub fn note_copies(&mut self) -> Vec<(Doubted, u32)> {
        self.shown.has_copies = true;
        if !self.counts_copies() {
            return Vec::new();
        }
        self.judge_again(|Doubt { counted, not_counted }| (not_counted, counted))
    }

    /// Whether the group is known to differ from the main group.
    pub fn is_other(&self, idx: u32) -> bool {
        match self.shown.main {
            Some(main) => main != idx,
            None => self.shown.seen.iter().any(|group| group.idx == idx),
        }
    }

    /// All groups except the main one.
    pub fn others(&self) -> impl Iterator<Item = &Group> {
        self.shown.seen.iter().filter(|group| !self.is_main(group.idx))
    }

    /// The layout for queries, if it has changed since the last call.
    pub fn changed(&mut self, facts: EngineFacts) -> Option<Arc<Layout>> {
        if !std::mem::take(&mut self.has_changed) {
            return None;
        }
        Some(Arc::new(Layout {
            main: self.shown.seen.iter().find(|group| self.is_main(group.idx)).copied(),
            others: self.others().copied().collect(),
            naming: self.naming().cloned(),
            facts,
            seen_chunk: self.shown.seen_chunk,
            has_lower: self.shown.has_lower,
            has_named: self.shown.has_named,
            stores: self.shown.stores.clone(),
        }))
    }
}
