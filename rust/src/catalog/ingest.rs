//! From an engine's event to the index: identity, tier, group and shape are checked here, once.

use super::counters::{EventCounters, add};
use super::model::ModelIndex;
use super::standing::Standing;
use crate::event::{Batch, Event, ExtraKey, Removed, Stored};
use crate::hash;
use crate::ids::{Tier, Worker};
use crate::index::{Block, Rejection};

/// Cache groups of hybrid models. Credit follows one group: the first one that describes reuse of
/// the whole prompt. The others' blocks have the same hashes, so mixing them would earn false credit.
#[derive(Debug, Default)]
pub(super) struct Groups {
    credited: Option<u32>,
}

impl Groups {
    pub(super) fn crediting(credited: Option<u32>) -> Self {
        Self { credited }
    }

    pub(super) fn credited(&self) -> Option<u32> {
        self.credited
    }

    fn is_credited(&mut self, group_idx: Option<u32>, spec_kind: Option<&str>) -> bool {
        let group = group_idx.unwrap_or(0);
        match spec_kind {
            None | Some("full_attention" | "mla_attention") => {
                *self.credited.get_or_insert(group) == group
            }
            Some(_) => false,
        }
    }

    /// Removals do not repeat the kind of their group.
    fn is_removal_credited(&self, group_idx: Option<u32>) -> bool {
        group_idx.is_none() || self.credited.is_none_or(|credited| Some(credited) == group_idx)
    }
}

/// Applies the events of one batch for one worker.
pub(super) struct Ingest<'a> {
    pub(super) model: &'a ModelIndex,
    pub(super) counters: &'a EventCounters,
    pub(super) worker: Worker,
    pub(super) groups: &'a mut Groups,
    /// Of the publisher, where the worker is the only one it speaks for.
    pub(super) standing: Option<&'a mut Standing>,
}

impl Ingest<'_> {
    pub(super) fn apply(&mut self, batch: Batch) {
        add(&self.counters.unknown_type, u64::from(batch.skipped));
        add(&self.counters.malformed, u64::from(batch.malformed));
        for event in batch.events {
            match event {
                Event::Stored(stored) => self.store(&stored),
                Event::Removed(removed) => self.remove(&removed),
                Event::Cleared => {
                    self.model.index.clear(self.worker);
                    add(&self.counters.cleared, 1);
                    if let Some(standing) = &mut self.standing {
                        let evicted = self.model.index.evicted_blocks_total();
                        standing.cleared(self.counters.read(), evicted);
                    }
                }
            }
        }
    }

    fn store(&mut self, event: &Stored) {
        if !self.groups.is_credited(event.group_idx, event.spec_kind.as_deref()) {
            return add(&self.counters.other_group, 1);
        }
        let Some(tier) = tier_of(event.medium.as_deref()) else {
            return add(&self.counters.unknown_medium, 1);
        };
        if event.token_ids.is_empty() && event.block_size == 0 {
            return self.copy(event, tier);
        }
        let blocks = event.block_hashes.len();
        let expected_tokens = blocks.checked_mul(event.block_size as usize);
        if event.block_size == 0 || expected_tokens != Some(event.token_ids.len()) {
            return add(&self.counters.malformed, 1);
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
        let Some(seed) = self.seed(event) else {
            return add(&self.counters.identity_conflict, 1);
        };
        let blocks = self.blocks(event, seed);
        let outcome = self.model.index.store(self.worker, tier, event.parent, seed, &blocks);
        add(&self.counters.refused_blocks, u64::from(outcome.refused));
        add(&self.counters.moved_blocks, u64::from(outcome.moved));
        match outcome.rejected {
            None => {
                add(&self.counters.stored, 1);
                add(&self.counters.stored_blocks, blocks.len() as u64);
            }
            Some(Rejection::Orphan) => add(&self.counters.orphaned, 1),
            Some(Rejection::SelfReference) => add(&self.counters.self_parent, 1),
            Some(Rejection::SlotsExhausted) => {
                add(&self.counters.refused_blocks, blocks.len() as u64);
            }
        }
    }

    /// Offloading connectors name the blocks that they copied to a tier, without their tokens: the worker
    /// holds them elsewhere, which tells what they are.
    fn copy(&mut self, event: &Stored, tier: Tier) {
        let outcome = self.model.index.copy(self.worker, tier, &event.block_hashes);
        add(&self.counters.stored, 1);
        add(&self.counters.stored_blocks, event.block_hashes.len() as u64);
        add(&self.counters.orphaned, u64::from(outcome.unknown));
        add(&self.counters.refused_blocks, u64::from(outcome.refused));
    }

    fn remove(&mut self, event: &Removed) {
        if !self.groups.is_removal_credited(event.group_idx) {
            return add(&self.counters.other_group, 1);
        }
        let Some(tier) = tier_of(event.medium.as_deref()) else {
            return add(&self.counters.unknown_medium, 1);
        };
        let outcome = self.model.index.remove(self.worker, tier, &event.block_hashes);
        add(&self.counters.removed, 1);
        add(&self.counters.removed_blocks, event.block_hashes.len() as u64);
        add(&self.counters.unknown_removed, u64::from(outcome.unknown));
    }

    /// The identity under which the blocks are hashed. Engines name the salt only with the first block of a
    /// prompt, so a chain that continues inherits its parent's identity; `None` when the event contradicts it.
    fn seed(&self, event: &Stored) -> Option<u64> {
        let salt = event.cache_salt.as_deref().or_else(|| root_salt(event));
        let numbered;
        let lora = match (event.lora_name.as_deref(), event.lora_id) {
            (Some(name), _) => Some(name),
            // An engine that knows no adapter names: its blocks are kept apart, and match no named adapter.
            (None, Some(id)) if id != 0 => {
                numbered = format!("lora_id:{id}");
                Some(numbered.as_str())
            }
            (None, _) => None,
        };
        let own = self.model.seed(lora, salt);
        let Some(parent) = event.parent else { return Some(own) };
        match self.model.index.parent_seed(self.worker, parent) {
            None => Some(own),
            Some(inherited) if inherited == own || salt.is_none() => Some(inherited),
            Some(_) => None,
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

fn tier_of(medium: Option<&str>) -> Option<Tier> {
    medium.map_or(Some(Tier::Device), Tier::from_medium)
}

/// vLLM's order within a block's extra keys is: LoRA name, multimodal items, then (first block of a
/// prompt only) the cache salt. So the salt is the last plain string there that is not the adapter's name.
fn root_salt(event: &Stored) -> Option<&str> {
    if event.parent.is_some() {
        return None;
    }
    let keys = event.extra_keys.first()?.as_deref()?;
    keys.iter().rev().find_map(|key| match key {
        ExtraKey::Text(text) if Some(text.as_str()) != event.lora_name.as_deref() => {
            Some(text.as_str())
        }
        _ => None,
    })
}

/// What else than tokens, salt and adapter makes block `at` differ: multimodal items and unknown keys.
fn item_hashes(event: &Stored, at: usize, out: &mut Vec<u64>) {
    let Some(Some(keys)) = event.extra_keys.get(at) else { return };
    let salt = if at == 0 { root_salt(event) } else { None };
    for key in keys {
        match key {
            ExtraKey::Item { identifier, .. } => out.push(hash::item_hash(identifier)),
            ExtraKey::Opaque(bytes_hash) => out.push(*bytes_hash),
            ExtraKey::Text(text) => {
                let text = Some(text.as_str());
                if text != event.lora_name.as_deref() && text != salt {
                    out.extend(text.map(hash::item_hash));
                }
            }
        }
    }
}
