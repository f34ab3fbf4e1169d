//! Applies an engine's events to the index: identity, tier, group and shape are checked here, once.

use super::cache_groups::{CacheGroups, EngineFacts, Group, Repeat};
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
        let reports = self.reports(&batch.events);
        for event in &batch.events {
            match event {
                Event::Stored(stored) if is_report(stored, &reports) => {
                    if self.groups.sends_reports() {
                        add(&self.counters.reuse_reports, 1);
                        continue;
                    }
                    // No report had a continuation so far: it may be a second copy.
                    self.groups.note_repeat(Repeat {
                        worker: self.worker,
                        group: stored.group_idx.unwrap_or(0),
                        names: stored.block_hashes.clone(),
                    });
                    self.store(stored);
                }
                Event::Stored(stored) => self.store(stored),
                Event::Removed(removed) => self.remove(removed),
                Event::Cleared => {
                    self.model.clear_device(self.worker);
                    self.groups.forget_repeats(self.worker);
                    add(&self.counters.cleared, 1);
                    if let Some(standing) = &mut self.standing {
                        let evicted = self.model.index.evicted_blocks_total();
                        standing.cleared(self.counters.read(), evicted);
                    }
                }
            }
        }
    }

    /// Tokens of the events that report reused blocks as if they had been stored, or could.
    ///
    /// With `kv_cache_report_mode=full` vLLM repeats, for every group, all blocks of a hit from the
    /// first one on; the blocks that the request then computes follow in the same batch. A prompt
    /// that is recomputed although its blocks are held arrives as one event, or could not have been
    /// a hit because some group could not continue from its end.
    fn reports<'a>(&mut self, events: &'a [Event]) -> Vec<&'a [u32]> {
        let mut reports = Vec::new();
        for (at, event) in events.iter().enumerate() {
            let Event::Stored(stored) = event else { continue };
            if !self.groups.is_keyed() || !self.starts_prompt(stored) || !self.is_resumable(stored)
            {
                continue;
            }
            let goes_on = |later: &Event| {
                matches!(later, Event::Stored(later)
                    if later.parent.as_ref() == stored.block_hashes.last()
                        && later.group_idx == stored.group_idx
                        && later.block_size == stored.block_size
                        && later.tier() == Some(Tier::Device))
            };
            if events[at + 1..].iter().any(goes_on) && !self.groups.sends_reports() {
                self.take_back();
            }
            reports.push(stored.token_ids.as_slice());
        }
        reports
    }

    /// The engine sends reports: those that were counted as copies are no copies.
    fn take_back(&mut self) {
        for Repeat { worker, group, names } in self.groups.note_reports() {
            add(&self.counters.reuse_reports, 1);
            if self.groups.is_other(group) {
                let holder = Holder::Worker(worker, Tier::Device);
                self.model.groups.remove(&holder, group, &names);
            } else {
                self.model.evict(worker, Tier::Device, &names);
            }
        }
    }

    fn starts_prompt(&self, event: &Stored) -> bool {
        event.parent.is_none()
            && !event.block_hashes.is_empty()
            && event.is_full_attention()
            && self.groups.is_main(event.group_idx.unwrap_or(0))
            && event.tier() == Some(Tier::Device)
            && self.model.block_size() == Some(event.block_size)
    }

    /// Whether the engine held all of the event's blocks and could continue from their end.
    fn is_resumable(&self, event: &Stored) -> bool {
        let names = &event.block_hashes;
        if !self.model.index.holds_all(self.worker, Tier::Device, names) {
            return false;
        }
        let holder = Holder::Worker(self.worker, Tier::Device);
        let end = event.block_size * names.len() as u32;
        self.groups.others().all(|group: &Group| {
            let from = group.needs_from(end, self.facts);
            let Some(from) = from.filter(|_| group.block_size == event.block_size) else {
                return false;
            };
            let needed = &names[(from / event.block_size) as usize..];
            let bit: GroupBits = 1_u16.checked_shl(group.idx).unwrap_or(0);
            needed.iter().all(|name| self.model.groups.groups_of(&holder, *name) & bit != 0)
        })
    }

    fn store(&mut self, event: &Stored) {
        let Some(tier) = event.tier() else {
            return add(&self.counters.unknown_medium, 1);
        };
        let is_device = tier == Tier::Device;
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
            return add(&self.counters.malformed, 1);
        }
        if self.is_part(event) {
            self.groups.note_named();
            return self.store_named(event);
        }
        let known = self.model.block_size();
        if known != Some(event.block_size)
            && self.groups.others().any(|group| Some(group.block_size) == known)
        {
            self.model.correct_block_size(event.block_size);
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
        if !is_device && self.groups.is_keyed() && event.extra_keys.is_empty() {
            // The engine reports what else it hashed for blocks of its device, but not for these,
            // so only the names identify their prompt.
            return self.copy(event, tier);
        }
        let Some(seed) = self.seed(event) else {
            return add(&self.counters.identity_conflict, 1);
        };
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
        self.groups.learn_lower(chunk, store);
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
        } else if self.groups.has_named() {
            self.remove_main(tier, group, names)
        } else {
            self.model.evict(self.worker, tier, names).unknown
        };
        add(&self.counters.removed, 1);
        add(&self.counters.removed_blocks, names.len() as u64);
        add(&self.counters.unknown_removed, u64::from(unknown));
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
                self.groups.note_shared_names();
            }
            return Some(own);
        };
        match seed_of(parent) {
            Some(inherited) if inherited != own => {
                let is_salted = !self.groups.shares_names() && !agreement.is_unsalted(inherited);
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

/// Whether the event repeats one of `reports`: those of all groups have equal tokens.
fn is_report(event: &Stored, reports: &[&[u32]]) -> bool {
    !reports.is_empty()
        && event.parent.is_none()
        && event.tier() == Some(Tier::Device)
        && reports.contains(&event.token_ids.as_slice())
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
