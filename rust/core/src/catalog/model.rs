//! One (model, tenant): its block size and its index.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use hashbrown::Equivalent;
use parking_lot::RwLock;

use super::cache_groups::Layout;
use super::identity::Agreement;
use super::reuse::{self, Layouts, PromptNames, Question, Reuse};
use super::roster::Roster;
use super::unheard::{Unheard, UnheardTable};
use super::watch::{CacheWatch, CacheWatches};
use crate::error::Error;
use crate::hash::content_hashes;
use crate::hash::engine::{NameCache, NameKeys};
use crate::ids::{Tier, Worker};
use crate::index::groups::{GroupIndex, Holder};
use crate::index::{Matches, RadixIndex, RemoveOutcome};

/// Share of a worker's cache that is assumed to hold recent prompts: answers take room, too.
///
/// # Source
/// A simulated fleet without events on Mooncake's conversations, by share of reused prompt tokens:
/// with caches that keep blocks for minutes 0.247, and 0.122 with a fixed time of 120 s; with
/// caches that keep them for seconds 0.262 and 0.273.
const HISTORY_SHARE: f64 = 0.9;

/// Percentage of a device's capacity at which known blocks fill it: the rest are incomplete blocks
/// of running requests.
const FULL_PERCENT: u64 = 95;

/// The scope of an index: no match ever crosses it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelKey {
    /// The model's name for clients.
    pub model_name: String,
    /// The tenant; by default `default`.
    pub tenant_id: String,
}

/// A borrowed [`ModelKey`] for look-ups; its fields, in the same order, have the same hash.
#[derive(Hash)]
pub(super) struct Named<'a> {
    pub model_name: &'a str,
    pub tenant_id: &'a str,
}

impl Equivalent<ModelKey> for Named<'_> {
    fn equivalent(&self, key: &ModelKey) -> bool {
        self.model_name == key.model_name && self.tenant_id == key.tenant_id
    }
}

impl fmt::Display for ModelKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.model_name, self.tenant_id)
    }
}

/// The block index of one model and tenant.
pub struct ModelIndex {
    /// The model and tenant.
    pub key: ModelKey,
    /// The blocks.
    pub index: RadixIndex,
    /// Blocks by name, of workers with several cache groups.
    pub groups: GroupIndex,
    watches: CacheWatches,
    name_cache: Arc<NameCache>,
    layouts: RwLock<Arc<Layouts>>,
    /// Whether there are any layouts.
    has_layouts: AtomicBool,
    /// 0: unknown until the first stored event or the engine's metrics.
    block_size: AtomicU32,
    /// The block size comes from an engine's metrics: the first event may correct it.
    is_hint: AtomicBool,
    /// Another engine's metrics have another size.
    is_disputed: AtomicBool,
    /// The operator's block size for all future publishers; 0: none.
    given_block_size: u32,
    /// See [`CatalogOptions::has_histories`](super::CatalogOptions::has_histories).
    pub(super) has_histories: bool,
    /// In use by this process, with or without publishers.
    is_kept: AtomicBool,
    /// Adapter and salt of events and queries that name none.
    pub(super) agreement: Agreement,
    /// The workers that may hold blocks of it.
    pub(super) roster: Roster,
    /// Workers that may hold blocks unknown to it.
    pub(super) unheard: UnheardTable,
}

impl ModelIndex {
    pub(super) fn new(
        key: ModelKey,
        given_block_size: u32,
        index: RadixIndex,
        groups: GroupIndex,
        name_cache: Arc<NameCache>,
    ) -> Self {
        Self {
            key,
            index,
            groups,
            watches: CacheWatches::default(),
            name_cache,
            layouts: RwLock::default(),
            has_layouts: AtomicBool::new(false),
            block_size: AtomicU32::new(given_block_size),
            is_hint: AtomicBool::new(false),
            is_disputed: AtomicBool::new(false),
            given_block_size,
            has_histories: false,
            is_kept: AtomicBool::new(false),
            agreement: Agreement::default(),
            roster: Roster::default(),
            unheard: UnheardTable::default(),
        }
    }

    /// Predicts that `worker`, with `capacity_blocks` on its device if known, will hold the prompt
    /// `locals`. Returns the number of blocks that were not predicted before.
    ///
    /// If the catalog keeps histories and the capacity is known, the worker's predictions last
    /// until they exceed 0.9 of it; otherwise for the catalog's time.
    ///
    /// # Cost
    /// As [`RadixIndex::predict_within`].
    pub fn predict(
        &self,
        worker: Worker,
        seed: u64,
        locals: &[u64],
        capacity_blocks: Option<u64>,
    ) -> usize {
        match capacity_blocks.filter(|blocks| self.has_histories && *blocks > 0) {
            Some(blocks) => {
                // Saturates, like every cast from float to integer.
                let most = (blocks as f64 * HISTORY_SHARE) as usize;
                self.index.predict_within(worker, seed, locals, most)
            }
            None => self.index.predict(worker, seed, locals),
        }
    }

    /// Tokens in a block; `None` until an engine has reported it.
    pub fn block_size(&self) -> Option<u32> {
        // Relaxed: a single word that is written once and guards no other memory.
        match self.block_size.load(Ordering::Relaxed) {
            0 => None,
            size => Some(size),
        }
    }

    /// Registered workers and ranks known only from events, by instance and rank.
    ///
    /// # Cost
    /// A pointer, except for the first call after one joined or left: O(workers).
    pub fn workers(&self) -> Arc<[Worker]> {
        self.roster.list()
    }

    /// Why the index is incomplete about `worker`, whose cache may hold unknown blocks.
    ///
    /// # Cost
    /// One atomic read while it is complete about all workers.
    pub fn unheard(&self, worker: Worker) -> Option<Unheard> {
        self.unheard.of(worker)
    }

    /// All workers with incomplete data, in worker order.
    pub fn all_unheard(&self) -> Vec<(Worker, Unheard)> {
        self.unheard.all()
    }

    /// Checks whether `worker`, with `capacity_blocks` on its device, has replaced everything that
    /// it stored before its first received event: once known blocks fill the device, the index is
    /// complete about it. Returns whether that has just happened.
    pub fn settle_unheard(&self, worker: Worker, capacity_blocks: u64) -> bool {
        let held = self.index.blocks_in(worker, Tier::Device) as u64;
        let is_full = held.saturating_mul(100) >= capacity_blocks.saturating_mul(FULL_PERCENT);
        let is_settled =
            self.unheard(worker) == Some(Unheard::Missed) && capacity_blocks > 0 && is_full;
        if is_settled {
            self.unheard.set(worker, None);
        }
        is_settled
    }

    /// The seed of an event's or a query's hashes; unspecified parts are the index's.
    pub fn seed(&self, lora_name: Option<&str>, cache_salt: Option<&str>) -> u64 {
        self.agreement.seed(lora_name, cache_salt)
    }

    /// Local hashes of a prompt's full blocks; empty while the block size is unknown.
    ///
    /// # Cost
    /// O(tokens).
    pub fn locals(&self, tokens: &[u32], keys: &NameKeys<'_>) -> Vec<u64> {
        let seed = self.seed(keys.lora.map(|(name, _)| name), keys.cache_salt);
        let block_size = self.block_size().unwrap_or(0);
        content_hashes(tokens, block_size, seed, keys.media, keys.embeds)
    }

    /// The engines' names of a prompt's blocks, as far as the index needs them.
    ///
    /// # Cost
    /// Nothing for models with one cache group; otherwise a digest per block.
    pub fn names(&self, tokens: &[u32], keys: &NameKeys<'_>) -> PromptNames {
        // Relaxed: a query concurrent with the first event of a group may miss it.
        if !self.has_layouts.load(Ordering::Relaxed) {
            return PromptNames::default();
        }
        let identity = self.agreement.held();
        let lora = keys.lora.or_else(|| Some((identity.lora_name.as_deref()?, "")));
        let cache_salt = keys.cache_salt.or(identity.cache_salt.as_deref());
        let layouts = Arc::clone(&self.layouts.read());
        layouts.names(&self.name_cache, tokens, &NameKeys { lora, cache_salt, ..*keys })
    }

    /// Finds, per worker, the reusable part of a prompt: as [`RadixIndex::find_matches`], but for
    /// workers with several cache groups only as far as all groups can continue. `exact` has the
    /// same for these workers in tokens.
    ///
    /// # Consistency
    /// As [`RadixIndex::find_matches`]; each name of a group is read at its own moment.
    ///
    /// # Cost
    /// That of the walk; with workers with several groups, plus O(names of the prompt and their
    /// holders).
    pub fn find(
        &self,
        locals: &[u64],
        names: &PromptNames,
        tokens: u64,
        matches: &mut Matches,
        exact: &mut Vec<Reuse>,
    ) {
        exact.clear();
        self.index.find_matches(locals, matches);
        if !self.has_layouts.load(Ordering::Relaxed) {
            return;
        }
        let layouts = Arc::clone(&self.layouts.read());
        let question = Question {
            locals,
            names,
            tokens: u32::try_from(tokens).unwrap_or(u32::MAX),
            block_size: self.block_size().unwrap_or(0),
        };
        if !layouts.is_empty() && question.block_size > 0 {
            reuse::evaluate(&layouts, &self.index, &self.groups, question, matches, exact);
        }
    }

    /// Sets the cache groups of `worker`, as shown by its events.
    pub(super) fn set_layout(&self, worker: Worker, layout: Option<Arc<Layout>>) {
        let mut layouts = self.layouts.write();
        let is_known = layouts.get(worker).is_some();
        if !is_known && layout.as_ref().is_none_or(|layout| layout.is_plain()) {
            return;
        }
        *layouts = Arc::new(layouts.with(worker, layout));
        self.has_layouts.store(!layouts.is_empty(), Ordering::Relaxed);
    }

    /// Notifies `watch`, as long as it lives, of blocks that leave workers' devices from now on.
    pub fn watch(&self, watch: Weak<dyn CacheWatch>) {
        self.watches.add(watch);
    }

    /// The engine of `worker` evicted the blocks with these names from `tier`.
    pub fn evict(&self, worker: Worker, tier: Tier, names: &[u64]) -> RemoveOutcome {
        if tier != Tier::Device || !self.watches.is_any() {
            return self.index.remove(worker, tier, names);
        }
        let mut gone = Vec::with_capacity(names.len());
        let outcome = self.index.evict(worker, tier, names, Some(&mut gone));
        if !gone.is_empty() {
            self.watches.tell(|watch| watch.evicted(worker, &gone));
        }
        outcome
    }

    /// Drops everything that `worker` holds, in all tiers; it stays known.
    pub fn clear_worker(&self, worker: Worker) {
        self.index.clear(worker);
        self.watches.tell(|watch| watch.cleared(worker));
        self.groups.remove_worker(worker);
    }

    /// Drops everything that `worker` holds on its device.
    pub(super) fn clear_device(&self, worker: Worker) {
        self.index.clear_tier(worker, Tier::Device);
        self.watches.tell(|watch| watch.cleared(worker));
        self.groups.clear(&Holder::Worker(worker, Tier::Device));
    }

    /// Drops everything that `worker` holds, and forgets it, with the stores that it was the last
    /// to use.
    pub(super) fn remove_worker(&self, worker: Worker) {
        self.index.remove_worker(worker);
        self.groups.remove_worker(worker);
        self.drop_layout(worker);
    }

    /// Forgets the cache groups of `worker`, and drops the stores that it was the last to use.
    pub(super) fn drop_layout(&self, worker: Worker) {
        let mut stores = self.layouts.read().get(worker).map_or(vec![], |it| it.stores.clone());
        self.set_layout(worker, None);
        let layouts = Arc::clone(&self.layouts.read());
        stores.retain(|store| !layouts.use_store(store));
        stores.into_iter().for_each(|store| self.groups.clear(&Holder::Store(store)));
    }

    /// Keeps it when its last publisher leaves.
    pub(super) fn keep(&self) {
        // Relaxed: the catalog's lock orders it with the removal.
        self.is_kept.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_kept(&self) -> bool {
        self.is_kept.load(Ordering::Relaxed)
    }

    /// Resets the block size of an empty index without publishers: the next may differ.
    pub fn forget_block_size(&self) {
        self.block_size.store(self.given_block_size, Ordering::Relaxed);
        self.is_hint.store(false, Ordering::Relaxed);
        self.is_disputed.store(false, Ordering::Relaxed);
    }

    /// Learns the block size if it is unknown, or confirms a hint; returns the current size.
    ///
    /// The first size wins; the caller must report a later, different size.
    pub fn learn_block_size(&self, size: u32) -> u32 {
        debug_assert!(size > 0, "a block holds at least one token");
        match self.block_size.compare_exchange(0, size, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => size,
            Err(known) => {
                if known == size && self.is_hint.load(Ordering::Relaxed) {
                    self.is_hint.store(false, Ordering::Relaxed);
                }
                known
            }
        }
    }

    /// The refusal of another block size, which the router `is_given`, or a worker has.
    pub fn other_block_size(&self, size: u32, is_given: bool) -> Error {
        let ModelKey { model_name, tenant_id } = &self.key;
        let (known, of) =
            (self.block_size().unwrap_or(0), format!("model={model_name} tenant={tenant_id}"));
        Error::Conflict(match (is_given, self.given_block_size > 0) {
            (true, _) => format!(
                "the router's block_size {size} differs from {known}, that of the workers of {of}: give the router {known}"
            ),
            (false, true) => format!(
                "the worker's block_size {size} differs from {known}, the router's for {of}: its blocks never match; \
                 give the router {size}, or the worker {known}"
            ),
            (false, false) => format!("block_size {size} differs from {known}, that of {of}"),
        })
    }

    /// The main group of an engine has blocks of `size` tokens. A hint yields if it is the size of
    /// another group, or if no other metrics contradict it: with context parallelism vLLM publishes
    /// blocks of several times the size in its metrics.
    pub(super) fn correct_block_size(&self, size: u32, is_of_another_group: bool) {
        let may_yield = is_of_another_group || !self.is_disputed.load(Ordering::Relaxed);
        if may_yield && self.is_hint.swap(false, Ordering::Relaxed) {
            self.block_size.store(size, Ordering::Relaxed);
        }
    }

    /// Learns the block size from an engine's metrics, which have a single one even if groups
    /// differ: it is valid until events show another one. Returns the current size.
    pub fn hint_block_size(&self, size: u32) -> u32 {
        debug_assert!(size > 0, "a block holds at least one token");
        match self.block_size.compare_exchange(0, size, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => {
                self.is_hint.store(true, Ordering::Relaxed);
                size
            }
            Err(known) => {
                if known != size {
                    self.is_disputed.store(true, Ordering::Relaxed);
                }
                known
            }
        }
    }

    /// Whether an engine of this model may report `size` in its metrics: it is the index's, or that
    /// of another cache group, or events have shown a multiple of it, as with context parallelism.
    ///
    /// # Source
    /// vLLM's `SingleTypeKVCacheManager` multiplies the block size of `cache_config`, which its
    /// metrics have, by `dcp_world_size * pcp_world_size`.
    pub fn fits_block_size(&self, size: u32) -> bool {
        let layouts = Arc::clone(&self.layouts.read());
        // An operator's size is no observation, and blocks of one token are SGLang's.
        let may_differ = self.given_block_size == 0 && size > 1;
        let fits = |known: u32| known == size || may_differ && known.is_multiple_of(size);
        self.block_size().is_some_and(fits) || layouts.have_block_size(size)
    }
}
