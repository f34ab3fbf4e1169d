//! What a publisher's events have said of its cache groups, and how its engine names blocks.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::naming::{Naming, NamingOf, Proof};
use crate::event::Stored;
use crate::index::groups::MAX_GROUPS;

/// How much of a prefix a group must hold so that the engine can go on from the end of it.
///
/// # Source
/// `find_longest_cache_hit` of the managers in vLLM's `v1/core/single_type_kv_cache_manager.py`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rule {
    /// All of it.
    Full,
    /// The last blocks that the next token looks back to.
    Window {
        /// Tokens of the window, the next one included.
        tokens: u32,
    },
    /// The state at its end.
    State,
    /// The blocks of the chunk that it ends in.
    Chunk,
    /// Not known here: nothing is reused as far as anybody can tell.
    Unknown,
}

impl Rule {
    fn of(event: &Stored) -> Self {
        if event.is_full_attention() {
            return Self::Full;
        }
        match (event.spec_kind.as_deref(), event.sliding_window) {
            // Without a word about its length the window may be any.
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
    /// What a prefix needs of it.
    pub rule: Rule,
    /// Tokens in one of its blocks.
    pub block_size: u32,
}

impl Group {
    /// Where the blocks begin that a prefix of `end` tokens needs of the group, so that the engine can go on
    /// from its end; `None` where nothing is enough.
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

/// What an operator knows of an engine and no event says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineFacts {
    /// Tokens of the chunks that chunked local attention looks at; `None`: reuse needs all chunks.
    pub attention_chunk_size: Option<u32>,
    /// Tokens that the engine copies to a farther tier at once.
    pub offload_chunk: Option<u32>,
}

/// All that a query needs to know of a worker with more than one cache group, or whose blocks are found by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// The group that the tree of contents follows: the first one of full attention.
    pub main: Option<Group>,
    /// The others.
    pub others: Vec<Group>,
    /// How the engine names blocks, where that is proven.
    pub naming: Option<Naming>,
    /// What no event says.
    pub facts: EngineFacts,
    /// Most tokens that one event named in a farther tier.
    pub seen_chunk: u32,
    /// Whether the table of groups knows of farther tiers.
    pub has_lower: bool,
    /// Whether it knows blocks of the main group that the tree of contents has no place for.
    pub has_named: bool,
    /// Stores that the worker shares with others.
    pub stores: Vec<String>,
}

impl Layout {
    /// Whether the tree of contents tells all there is to know: one group of full attention on the device.
    pub fn is_plain(&self) -> bool {
        self.is_of_tree() && !self.has_lower
    }

    /// Whether the tree of contents knows all that the device holds.
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
struct Shown {
    main: Option<u32>,
    seen: Vec<Group>,
    seen_chunk: u32,
    has_lower: bool,
    has_named: bool,
    stores: Vec<String>,
    /// Its events say of each block what else than tokens the engine hashed, or could say it.
    is_keyed: bool,
    /// It has told of reused blocks as if they had been stored.
    sends_reports: bool,
}

/// The groups of one publisher, as its events show them.
#[derive(Debug, Default)]
pub(super) struct CacheGroups {
    shown: Shown,
    proof: Proof,
    /// Something of the above changed since [`changed`](Self::changed) was asked.
    has_changed: bool,
}

/// What is known of a publisher's cache groups, as one replica tells another.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Knowledge {
    shown: Shown,
    naming: Option<NamingOf>,
}

/// Stores of farther tiers that a publisher may name.
const MAX_STORES: usize = 16;

impl CacheGroups {
    /// Of a publisher whose credited group another replica has told.
    pub fn crediting(main: Option<u32>) -> Self {
        Self { shown: Shown { main, ..Shown::default() }, ..Self::default() }
    }

    /// Of a publisher of which another replica tells.
    pub fn knowing(known: &Knowledge) -> Self {
        let mut shown = known.shown.clone();
        shown.stores.truncate(MAX_STORES);
        shown.seen.truncate(MAX_GROUPS as usize + 1);
        let proof = Proof::told(known.naming.as_ref().and_then(NamingOf::naming));
        Self { shown, proof, has_changed: true }
    }

    /// All that is known, for another replica; `None` of an engine with one group on the device alone.
    pub fn knowledge(&self) -> Option<Knowledge> {
        let has_others = self.others().next().is_some();
        if !has_others && !self.shown.has_lower && !self.shown.has_named {
            return None;
        }
        Some(Knowledge { shown: self.shown.clone(), naming: self.naming().map(NamingOf::of) })
    }

    /// The group that the tree of contents follows, once an event has named it.
    pub fn credited(&self) -> Option<u32> {
        self.shown.main
    }

    /// Takes note of a stored event; returns whether it is of the main group.
    pub fn learn(&mut self, event: &Stored, is_device: bool) -> bool {
        let idx = event.group_idx.unwrap_or(0);
        if is_device && (event.group_idx.is_some() || !event.extra_keys.is_empty()) {
            self.shown.is_keyed = true;
        }
        let rule = Rule::of(event);
        // Blocks that were copied without a word about them say nothing of their group.
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
            // One more than can be told apart stands for all of those.
            None if known <= MAX_GROUPS as usize => {
                self.shown.seen.push(group);
                self.has_changed = true;
            }
            None => {}
        }
    }

    /// Whether the tree of contents follows the group. Removals do not repeat the kind of their group.
    pub fn is_main(&self, idx: u32) -> bool {
        self.shown.main == Some(idx)
    }

    /// Takes note of how an event of a farther tier looks.
    pub fn learn_lower(&mut self, tokens: u32, store: Option<&str>) {
        if tokens > self.shown.seen_chunk {
            self.shown.seen_chunk = tokens;
            self.has_changed = true;
        }
        if !self.shown.has_lower {
            self.shown.has_lower = true;
            self.has_changed = true;
        }
        if let Some(store) = store
            && !self.shown.stores.iter().any(|known| known == store)
            && self.shown.stores.len() < MAX_STORES
        {
            self.shown.stores.push(store.to_owned());
            self.has_changed = true;
        }
    }

    /// Some blocks of the main group are known by name only.
    pub fn note_named(&mut self) {
        self.has_changed |= !std::mem::replace(&mut self.shown.has_named, true);
    }

    /// Whether blocks of the main group may be known by name only.
    pub fn has_named(&self) -> bool {
        self.shown.has_named
    }

    /// A worker more has these groups.
    pub fn touch(&mut self) {
        self.has_changed = true;
    }

    /// Compares the event's names with those that the known schemes give; to be called with every stored
    /// event of the device.
    pub fn prove(&mut self, event: &Stored) {
        self.has_changed |= self.proof.look(event);
    }

    /// How the engine names blocks, where that is proven.
    pub fn naming(&self) -> Option<&Naming> {
        self.proof.naming()
    }

    /// Whether events say what else than tokens makes blocks differ, so that silence is not "nothing".
    pub fn is_keyed(&self) -> bool {
        self.shown.is_keyed
    }

    /// Whether the publisher has sent reports of reuse.
    pub fn sends_reports(&self) -> bool {
        self.shown.sends_reports
    }

    /// It has.
    pub fn note_reports(&mut self) {
        self.shown.sends_reports = true;
    }

    /// Whether the group is known to be another one than the main group.
    pub fn is_other(&self, idx: u32) -> bool {
        match self.shown.main {
            Some(main) => main != idx,
            None => self.shown.seen.iter().any(|group| group.idx == idx),
        }
    }

    /// The groups beside the main one.
    pub fn others(&self) -> impl Iterator<Item = &Group> {
        self.shown.seen.iter().filter(|group| !self.is_main(group.idx))
    }

    /// What queries need to know, when that has changed since the last call.
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
