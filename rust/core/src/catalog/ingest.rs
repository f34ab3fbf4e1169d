//! Applies an engine's events to the index: identity, tier, group and shape are checked here, once.

use super::cache_groups::{CacheGroups, EngineFacts, Group, Shown};
use super::counters::{EventCounters, add};
use super::model::ModelIndex;
use super::standing::Standing;
use crate::event::{Batch, Event, ExtraKey, Removed, Stored};
use crate::hash;
use crate::ids::{Tier, Worker};
use crate::index::groups::{GroupBits, Holder};
use crate::index::{Block, Rejection};

/// Applies the events of one batch for one worker.
pub(super) struct Ingest<'a> {
    pub(super) model: &'a ModelIndex,
    pub(super) counters: &'a EventCounters,
    pub(super) worker: Worker,
    /// The ranks of its publisher.
    pub(super) ranks: &'a [u32],
    pub(super) groups: &'a mut CacheGroups,
    pub(super) facts: &'a EngineFacts,
    /// The publisher's standing, if this worker is its only one.
    pub(super) standing: Option<&'a mut Standing>,
}

impl Ingest<'_> {
    pub(super) fn apply(&mut self, batch: Batch) {
        add(&self.counters.unknown_type, u64::from(batch.skipped));
        add(&self.counters.malformed, u64::from(batch.malformed));
        let mut rest = batch.events.as_slice();
        while let Some(event) = rest.first() {
            let together = if self.groups.shown.is_keyed { of_one_prompt(rest) } else { 1 };
            let (events, later) = rest.split_at(together);
            rest = later;
            match event {
                Event::Stored(_) => self.store_prompt(events, later),
                Event::Removed(removed) => {
                    self.remove(removed);
                    self.forget_gone(removed);
                }
                Event::Cleared => {
                    // vLLM keeps what it has offloaded; other engines drop all, and vLLM before its
                    // events had keys may have.
                    match self.groups.shown.is_keyed {
                        true => self.model.clear_device(self.worker),
                        false => self.model.clear_worker(self.worker),
                    }
                    self.groups.forget_worker(self.worker);
                    add(&self.counters.cleared, 1);
                    if let Some(standing) = &mut self.standing {
                        let now = self.counters.read();
                        self.groups.lost_before = now.lost_batches;
                        // What was missed about slower tiers, which keep their blocks, stays wrong.
                        let Shown { is_keyed, offloads, .. } = self.groups.shown;
                        if !(is_keyed && offloads) {
                            standing.cleared(now, self.model.index.evicted_blocks_total());
                        }
                    }
                }
            }
        }
    }

    /// Stores blocks of a prompt in all groups.
    ///
    /// An engine stores held blocks of a prompt again if it has computed them again, and so holds them
    /// twice, or to report reuse: with `kv_cache_report_mode=full` vLLM repeats, for every group, all
    /// blocks of a hit from the first one on. The events look the same. But if the next blocks that
    /// the batch stores follow the repeated ones, a request has gone on from its hit: a report.
    fn store_prompt(&mut self, events: &[Event], later: &[Event]) {
        let stored = || events.iter().filter_map(as_stored);
        let main = stored().find(|event| self.groups.shown.is_keyed && self.starts_prompt(event));
        let main = main.filter(|main| self.holds(&main.block_hashes[..1]));
        let mut not_copied = Vec::new();
        if let Some(main) = main {
            let names = &main.block_hashes;
            if self.holds(names) && self.is_resumable(main) {
                if goes_on(main, later) {
                    self.take_back();
                }
                for event in stored() {
                    // Reports begin with the prompt, in every group.
                    match event.parent {
                        None => self.store_again(event),
                        Some(_) => self.store(event),
                    }
                }
                return;
            }
            // What is not known to be held may be held after losses: this may be a report, too.
            if self.has_losses() {
                not_copied.extend(names.iter().filter(|name| self.holds(&[**name])));
            }
        }
        stored().for_each(|event| self.store(event));
        if !not_copied.is_empty() {
            self.model.evict(self.worker, Tier::Device, &not_copied);
        }
    }

    /// Stores blocks that are held; of a window, a report also names blocks that are gone.
    fn store_again(&mut self, event: &Stored) {
        self.groups.prove(event);
        let group = event.group_idx.unwrap_or(0);
        let is_main = self.groups.learn(event, true) && event.is_full_attention();
        let mut copies = Vec::new();
        for name in &event.block_hashes {
            if self.groups.doubt((self.worker, group, *name)) {
                copies.push(*name);
            }
        }
        if copies.is_empty() {
            return add(&self.counters.reuse_reports, 1);
        }
        self.copy_blocks(self.worker, group, &copies);
        match is_main {
            true => self.count_stored(copies.len()),
            false => add(&self.counters.other_group, 1),
        }
    }

    /// Takes back what was counted as copies: the engine sends reports of reuse.
    fn take_back(&mut self) {
        for ((worker, group, name), count) in self.groups.note_report() {
            for _ in 0..count {
                if self.groups.is_other(group) {
                    let holder = Holder::Worker(worker, Tier::Device);
                    self.model.groups.remove(&holder, group, &[name]);
                } else {
                    self.model.evict(worker, Tier::Device, &[name]);
                }
            }
        }
    }

    /// Adds a copy of blocks that the worker holds.
    fn copy_blocks(&self, worker: Worker, group: u32, names: &[u64]) {
        if self.groups.is_other(group) {
            let holder = Holder::Worker(worker, Tier::Device);
            self.model.groups.store(&holder, group, names);
        } else {
            self.model.index.copy(worker, Tier::Device, names);
        }
    }

    /// Whether the worker's device holds the block in a group other than the main one.
    fn holds_in(&self, group: u32, name: u64) -> bool {
        let holder = Holder::Worker(self.worker, Tier::Device);
        let bit: GroupBits = 1_u16.checked_shl(group).unwrap_or(0);
        self.model.groups.groups_of(&holder, name) & bit != 0
    }

    fn holds(&self, names: &[u64]) -> bool {
        self.model.index.holds_all(self.worker, Tier::Device, names)
    }

    fn starts_prompt(&self, event: &Stored) -> bool {
        event.parent.is_none()
            && !event.block_hashes.is_empty()
            && event.is_full_attention()
            && self.groups.is_main(event.group_idx.unwrap_or(0))
            && is_on_device(event)
            && self.model.block_size() == Some(event.block_size)
    }

    /// Whether the engine, which holds all of the event's blocks, could continue from their end.
    fn is_resumable(&self, event: &Stored) -> bool {
        let names = &event.block_hashes;
        let end = event.block_size * names.len() as u32;
        self.groups.others().all(|group: &Group| {
            let from = group.needs_from(end, self.facts);
            let Some(from) = from.filter(|_| group.block_size == event.block_size) else {
                return false;
            };
            let needed = &names[(from / event.block_size) as usize..];
            needed.iter().all(|name| self.holds_in(group.idx, *name))
        })
    }

    fn store(&mut self, event: &Stored) {
        let Some(tier) = event.tier() else {
            return add(&self.counters.unknown_medium, 1);
        };
        let is_device = tier == Tier::Device;
        self.groups.shown.offloads |= !is_device;
        if is_device {
            self.groups.prove(event);
            if self.groups.becomes_keyed(event) {
                self.drop_unkeyed();
            }
        }
        let is_main = self.groups.learn(event, is_device) && event.is_full_attention();
        if !is_device && event.group_idx.is_some() {
            return self.store_lower(event, tier, is_main);
        }
        if !is_main {
            return self.store_named(event);
        }
        if event.token_ids.is_empty() && (event.block_size == 0 || !is_device) {
            return self.copy(event, tier);
        }
        let blocks = event.block_hashes.len();
        let expected_tokens = blocks.checked_mul(event.block_size as usize);
        if event.block_size == 0 || expected_tokens != Some(event.token_ids.len()) {
            let (block_size, tokens) = (event.block_size, event.token_ids.len());
            tracing::debug!(
                worker = %self.worker, blocks, block_size, tokens,
                "dropped a stored event: its tokens do not fill its blocks"
            );
            return add(&self.counters.malformed, 1);
        }
        if self.is_part(event) {
            self.groups.note_named();
            return self.store_named(event);
        }
        let known = self.model.block_size();
        if is_device && known != Some(event.block_size) {
            let is_another = self.groups.others().any(|group| Some(group.block_size) == known);
            self.model.correct_block_size(event.block_size, is_another);
        }
        if self.model.learn_block_size(event.block_size) != event.block_size {
            let before = self.counters.read().block_size_mismatch;
            add(&self.counters.block_size_mismatch, 1);
            if before == 0 {
                tracing::error!(
                    worker = %self.worker, model = %self.model.key,
                    engine_block_size = event.block_size,
                    index_block_size = self.model.block_size(),
                    "the engine's block size is not the index's: none of its blocks can match; \
                     start the engine with the index's block size, or give it a model of its own"
                );
            }
            return;
        }
        if !is_device && self.groups.shown.is_keyed && event.extra_keys.is_empty() {
            // The engine reports what else it hashed for blocks of its device, but not for these,
            // so only the names identify their prompt.
            return self.copy(event, tier);
        }
        let Some(seed) = self.seed(event) else {
            return add(&self.counters.identity_conflict, 1);
        };
        if is_device {
            let group = event.group_idx.unwrap_or(0);
            self.groups.forget_doubts(self.worker, group, &event.block_hashes);
        }
        let blocks = self.blocks(event, seed);
        let outcome = self.model.index.store(self.worker, tier, event.parent, seed, &blocks);
        add(&self.counters.refused_blocks, u64::from(outcome.refused));
        add(&self.counters.moved_blocks, u64::from(outcome.moved));
        match outcome.rejected {
            None => self.count_stored(blocks.len()),
            Some(Rejection::Orphan) if is_device && self.groups.naming().is_some() => {
                // The tree has no location for them, but they can be found by name.
                self.groups.note_named();
                self.store_named(event);
            }
            Some(Rejection::Orphan) => add(&self.counters.orphaned, 1),
            Some(Rejection::SelfReference) => add(&self.counters.self_parent, 1),
            Some(Rejection::SlotsExhausted) => {
                add(&self.counters.refused_blocks, blocks.len() as u64);
            }
        }
    }

    fn count_stored(&self, blocks: usize) {
        add(&self.counters.stored, 1);
        add(&self.counters.stored_blocks, blocks as u64);
    }

    /// Whether the event is about the first part of one block, which engines with hashes finer than
    /// their blocks can reuse.
    fn is_part(&self, event: &Stored) -> bool {
        let size = self.model.block_size().unwrap_or(0);
        event.group_idx.is_some()
            && event.block_hashes.len() == 1
            && event.block_size < size
            && size.is_multiple_of(event.block_size)
    }

    /// Stores blocks that are known only by name.
    fn store_named(&self, event: &Stored) {
        let holder = Holder::Worker(self.worker, Tier::Device);
        let group = event.group_idx.unwrap_or(0);
        let outcome = self.model.groups.store(&holder, group, &event.block_hashes);
        add(&self.counters.other_group, 1);
        add(&self.counters.refused_blocks, u64::from(outcome.refused));
    }

    /// Stores blocks in a slower tier of an engine with cache groups. Its events have no keys, and
    /// often no tokens: only the names identify the blocks.
    fn store_lower(&mut self, event: &Stored, tier: Tier, is_main: bool) {
        let names = &event.block_hashes;
        let store = event.shared_store();
        let chunk = event.block_size.saturating_mul(names.len() as u32);
        if !self.groups.learn_lower(chunk, store) {
            return add(&self.counters.refused_blocks, names.len() as u64);
        }
        let holder = self.holder(tier, store);
        let group = event.group_idx.unwrap_or(0);
        let mut outcome = self.model.groups.store(&holder, group, names);
        if is_main && store.is_none() {
            // Blocks that the tree has can also be found by content.
            outcome.refused += self.model.index.copy(self.worker, tier, names).refused;
        }
        self.count_stored(names.len());
        add(&self.counters.refused_blocks, u64::from(outcome.refused));
    }

    /// Drops the blocks of slower tiers: without keys they were read as unsalted, and the engine
    /// turns out to report keys, for blocks of its device only.
    fn drop_unkeyed(&self) {
        for dp_rank in self.ranks {
            let worker = Worker::new(self.worker.instance_id, *dp_rank);
            for tier in [Tier::Host, Tier::Disk, Tier::External] {
                self.model.index.clear_tier(worker, tier);
            }
        }
    }

    fn holder(&self, tier: Tier, store: Option<&str>) -> Holder {
        match store {
            Some(store) => Holder::Store(store.to_owned()),
            None => Holder::Worker(self.worker, tier),
        }
    }

    /// Offloading connectors name the blocks that they copied to a tier, without tokens: the worker
    /// also holds them elsewhere, which identifies them.
    fn copy(&mut self, event: &Stored, tier: Tier) {
        let outcome = self.model.index.copy(self.worker, tier, &event.block_hashes);
        self.count_stored(event.block_hashes.len());
        add(&self.counters.orphaned, u64::from(outcome.unknown));
        add(&self.counters.refused_blocks, u64::from(outcome.refused));
    }

    fn remove(&mut self, event: &Removed) {
        let Some(tier) = event.tier() else {
            return add(&self.counters.unknown_medium, 1);
        };
        self.groups.shown.offloads |= tier != Tier::Device;
        let group = event.group_idx.unwrap_or(0);
        // Removals do not repeat the kind of their group.
        let is_main = event.group_idx.is_none() || !self.groups.is_other(group);
        let names = &event.block_hashes;
        let unknown = if tier != Tier::Device && event.group_idx.is_some() {
            let store = event.shared_store();
            let unknown = self.model.groups.remove(&self.holder(tier, store), group, names);
            if is_main && store.is_none() {
                self.model.evict(self.worker, tier, names);
            }
            unknown
        } else if !is_main {
            add(&self.counters.other_group, 1);
            let holder = Holder::Worker(self.worker, tier);
            let unknown = self.model.groups.remove(&holder, group, names);
            return add(&self.counters.unknown_removed, u64::from(unknown));
        } else if tier == Tier::Device && self.removes_copy(group, names) {
            self.count_copies();
            self.model.evict(self.worker, tier, names).unknown
        } else if self.groups.shown.has_named {
            self.remove_main(tier, group, names)
        } else {
            self.model.evict(self.worker, tier, names).unknown
        };
        add(&self.counters.removed, 1);
        add(&self.counters.removed_blocks, names.len() as u64);
        add(&self.counters.unknown_removed, u64::from(unknown));
    }

    /// Of blocks that the device holds no more, no copy can be taken back.
    fn forget_gone(&mut self, event: &Removed) {
        if event.tier() != Some(Tier::Device) {
            return;
        }
        let group = event.group_idx.unwrap_or(0);
        let is_other = self.groups.is_other(group);
        for name in &event.block_hashes {
            let block = (self.worker, group, *name);
            if !self.groups.knows_of(block) {
                continue;
            }
            let is_held = if is_other { self.holds_in(group, *name) } else { self.holds(&[*name]) };
            if !is_held {
                self.groups.forget_copies(block);
            }
        }
    }

    /// Whether one of the blocks was stored again while it was held, and is removed again now.
    fn removes_copy(&self, group: u32, names: &[u64]) -> bool {
        let is_copy = |name: &u64| {
            self.groups.has_doubt((self.worker, group, *name)) && !self.holds(&[*name])
        };
        names.iter().any(is_copy) && !self.has_losses()
    }

    /// Whether batches were lost since the device was last known to be empty.
    fn has_losses(&self) -> bool {
        self.counters.read().lost_batches > self.groups.lost_before
    }

    /// Blocks that were stored again are copies: counts those that are still held.
    fn count_copies(&mut self) {
        for ((worker, group, name), count) in self.groups.note_copies() {
            let is_other = self.groups.is_other(group);
            if is_other || self.model.index.holds_all(worker, Tier::Device, &[name]) {
                (0..count).for_each(|_| self.copy_blocks(worker, group, &[name]));
            }
        }
    }

    /// Removes blocks of the main group, some of which may be known only by name.
    fn remove_main(&self, tier: Tier, group: u32, names: &[u64]) -> u32 {
        let holder = Holder::Worker(self.worker, tier);
        let is_named = |name: &u64| self.model.groups.remove(&holder, group, &[*name]) == 0;
        let rest: Vec<u64> = names.iter().copied().filter(|name| !is_named(name)).collect();
        if rest.is_empty() { 0 } else { self.model.evict(self.worker, tier, &rest).unknown }
    }

    /// The identity in the hashes of the blocks. Engines name the salt only with the first block of
    /// a prompt, so a chain that continues inherits its parent's identity; `None` if the event
    /// contradicts it. All engines name the adapter with every event, but some give the blocks of
    /// several adapters the same names.
    fn seed(&mut self, event: &Stored) -> Option<u64> {
        let salt = event.cache_salt.as_deref().or_else(|| root_salt(event));
        let numbered;
        let lora = match (event.lora_name.as_deref(), event.lora_id) {
            (Some(name), _) => Some(name),
            // An engine that has no adapter names: its blocks are separate, and match no named
            // adapter.
            (None, Some(id)) if id != 0 => {
                numbered = format!("\0lora_id:{id}");
                Some(numbered.as_str())
            }
            (None, _) => None,
        };
        let own = self.model.seed(lora, salt);
        let agreement = &self.model.agreement;
        if lora.is_some() && salt.is_none() {
            agreement.note_adapter(own);
        }
        let seed_of = |name: u64| self.model.index.parent_seed(self.worker, name);
        let Some(parent) = event.parent else {
            if (lora.is_some() || salt.is_some())
                && let Some(first) = event.block_hashes.first()
                && seed_of(*first).is_some_and(|seed| seed != own)
            {
                self.groups.shown.shares_names = true;
            }
            return Some(own);
        };
        match seed_of(parent) {
            Some(inherited) if inherited != own => {
                let is_salted =
                    !self.groups.shown.shares_names && !agreement.is_unsalted(inherited);
                (salt.is_none() && is_salted).then_some(inherited)
            }
            _ => Some(own),
        }
    }

    fn blocks(&self, event: &Stored, seed: u64) -> Vec<Block> {
        let size = event.block_size as usize;
        let mut items = Vec::new();
        event
            .block_hashes
            .iter()
            .zip(event.token_ids.chunks_exact(size))
            .enumerate()
            .map(|(at, (&engine_hash, tokens))| {
                items.clear();
                item_hashes(event, at, &mut items);
                Block { engine_hash, local_hash: hash::local_hash_with_items(tokens, &items, seed) }
            })
            .collect()
    }
}

fn as_stored(event: &Event) -> Option<&Stored> {
    match event {
        Event::Stored(stored) => Some(stored),
        _ => None,
    }
}

fn is_on_device(event: &Stored) -> bool {
    event.tier() == Some(Tier::Device)
}

/// Number of events, at least one, that tell of the same part of a prompt, in one group after the
/// other. Groups may begin at different blocks.
fn of_one_prompt(events: &[Event]) -> usize {
    let Some(first) = events.first().and_then(as_stored).filter(|first| is_on_device(first)) else {
        return 1;
    };
    let mut count = 1;
    for event in events[1..].iter().map_while(as_stored) {
        let mut before = events[..count].iter().filter_map(as_stored);
        if before.any(|known| known.group_idx == event.group_idx) {
            break;
        }
        let (one, other) = (&first.token_ids, &event.token_ids);
        let ends_alike = one.ends_with(other) || other.ends_with(one);
        if !ends_alike || event.lora_name != first.lora_name || !is_on_device(event) {
            break;
        }
        count += 1;
    }
    count
}

/// Whether the next blocks that are stored in the event's group follow its last one.
fn goes_on(event: &Stored, later: &[Event]) -> bool {
    let next = later.iter().filter_map(as_stored).find(|later| later.group_idx == event.group_idx);
    next.is_some_and(|next| {
        next.parent.as_ref() == event.block_hashes.last()
            && next.block_size == event.block_size
            && is_on_device(next)
    })
}

/// The keys of a block after the adapter's name, which vLLM puts first.
fn keys_of(event: &Stored, at: usize) -> &[ExtraKey] {
    let keys = event.extra_keys.get(at).and_then(Option::as_deref).unwrap_or(&[]);
    match (keys, event.lora_name.as_deref()) {
        ([ExtraKey::Text(first), rest @ ..], Some(name)) if first == name => rest,
        _ => keys,
    }
}

/// vLLM's order of a block's extra keys is: LoRA name, multimodal items, then (first block of a
/// prompt only) the cache salt. The salt is therefore the last plain string after the adapter's
/// name.
fn root_salt(event: &Stored) -> Option<&str> {
    if event.parent.is_some() {
        return None;
    }
    keys_of(event, 0).iter().rev().find_map(|key| match key {
        ExtraKey::Text(text) => Some(text.as_str()),
        _ => None,
    })
}

/// Keys that distinguish block `at` besides tokens, salt and adapter: multimodal items, digests of
/// embeddings and unknown keys.
fn item_hashes(event: &Stored, at: usize, out: &mut Vec<u64>) {
    let keys = keys_of(event, at);
    let is_text = |key: &ExtraKey| matches!(key, ExtraKey::Text(_));
    let salt = match event.parent {
        None if at == 0 => keys.iter().rposition(is_text),
        _ => None,
    };
    for (number, key) in keys.iter().enumerate() {
        match key {
            ExtraKey::Item { identifier, offset } => out.push(hash::media_key(identifier, *offset)),
            ExtraKey::Digest(digest) => out.push(hash::embeds_key(digest)),
            ExtraKey::Opaque(bytes_hash) => out.push(*bytes_hash),
            ExtraKey::Text(text) if Some(number) != salt => out.push(hash::item_hash(text)),
            ExtraKey::Text(_) => {}
        }
    }
}
