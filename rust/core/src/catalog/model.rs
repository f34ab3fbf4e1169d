//! One (model, tenant): its block size and its index.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use hashbrown::Equivalent;
use parking_lot::RwLock;

use super::cache_groups::Layout;
use super::identity::Agreement;
use super::reuse::{self, Layouts, PromptNames, Question, Reuse};
use super::roster::Roster;
use super::unheard::{Unheard, UnheardTable};
use super::watch::{CacheWatch, CacheWatches};
use crate::hash::content_hashes;
use crate::hash::engine::{NameCache, NameKeys};
use crate::ids::{Tier, Worker};
use crate::index::groups::{GroupIndex, Holder};
use crate::index::{BlockIndex, Matches, RemoveOutcome};

/// Share of a worker's cache that is believed to hold what was sent there last: answers take room, too.
///
/// # Source
/// A simulated fleet without events on Mooncake's conversations, share of prompt tokens reused: where caches
/// keep blocks for minutes 0.247, and 0.122 with a fixed time of 120 s; where they keep them for seconds
/// 0.262 and 0.273.
const HISTORY_SHARE: f64 = 0.9;

/// Known blocks fill a device that holds so many percent of what it has room for: the rest is blocks of running
/// requests that are not full yet.
const FULL_PERCENT: u64 = 95;

/// What an index is for: no match ever crosses it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelKey {
    /// The model, as clients name it.
    pub model_name: String,
    /// The tenant; `default` where nobody says.
    pub tenant_id: String,
}

/// A [`ModelKey`] that is looked up; its fields, in its order, hash to the same.
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
    /// Which model and tenant.
    pub key: ModelKey,
    /// The blocks.
    pub index: Box<dyn BlockIndex>,
    /// Blocks by name, of workers with several cache groups.
    pub groups: GroupIndex,
    watches: CacheWatches,
    name_cache: Arc<NameCache>,
    layouts: RwLock<Arc<Layouts>>,
    /// Whether there is any layout.
    has_layouts: AtomicBool,
    /// 0 = not known yet: the first stored event or the engine's metrics tell.
    block_size: AtomicU32,
    /// The block size is what an engine's metrics say: the first event may know better.
    is_hint: AtomicBool,
    /// What the operator set for every publisher to come; 0 = nothing.
    given_block_size: u32,
    /// See [`CatalogOptions::has_histories`](super::CatalogOptions::has_histories).
    pub(super) has_histories: bool,
    /// Somebody in this process counts on it, publishers or not.
    is_kept: AtomicBool,
    /// Adapter and salt of events and queries that name none.
    pub(super) agreement: Agreement,
    /// Who may hold blocks of it.
    pub(super) roster: Roster,
    /// Who may hold blocks that it has not heard of.
    pub(super) unheard: UnheardTable,
}

impl ModelIndex {
    pub(super) fn new(
        key: ModelKey,
        given_block_size: u32,
        index: Box<dyn BlockIndex>,
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
            given_block_size,
            has_histories: false,
            is_kept: AtomicBool::new(false),
            agreement: Agreement::default(),
            roster: Roster::default(),
            unheard: UnheardTable::default(),
        }
    }

    /// Predicts that `worker`, whose device has `capacity_blocks` where that is known, will hold the prompt
    /// `locals`. Returns the blocks that were not predicted before.
    ///
    /// Where the catalog keeps histories and the capacity is known, the worker's predictions stand until
    /// they are more than 0.9 of it; else for the catalog's time.
    ///
    /// # Cost
    /// As [`BlockIndex::predict_within`].
    pub fn predict(
        &self,
        worker: Worker,
        seed: u64,
        locals: &[u64],
        capacity_blocks: Option<u64>,
    ) -> usize {
        match capacity_blocks.filter(|blocks| self.has_histories && *blocks > 0) {
            Some(blocks) => {
                // Saturates, as casts of floats do.
                let most = (blocks as f64 * HISTORY_SHARE) as usize;
                self.index.predict_within(worker, seed, locals, most)
            }
            None => self.index.predict(worker, seed, locals),
        }
    }

    /// Tokens in a block; `None` while no engine has told.
    pub fn block_size(&self) -> Option<u32> {
        // Relaxed: a single word that is written once and guards no other memory.
        match self.block_size.load(Ordering::Relaxed) {
            0 => None,
            size => Some(size),
        }
    }

    /// Registered workers and ranks that only events have named, by instance and rank.
    ///
    /// # Cost
    /// A pointer, but for the first call after one joined or left: O(workers).
    pub fn workers(&self) -> Arc<[Worker]> {
        self.roster.list()
    }

    /// Why the index is incomplete about `worker`: its cache may hold blocks that were never heard of.
    ///
    /// # Cost
    /// One atomic read while it is complete about all workers.
    pub fn unheard(&self, worker: Worker) -> Option<Unheard> {
        self.unheard.of(worker)
    }

    /// All workers about which it is incomplete, in worker order.
    pub fn all_unheard(&self) -> Vec<(Worker, Unheard)> {
        self.unheard.all()
    }

    /// `worker`, whose device has `capacity_blocks`, may have turned over all that it stored before its first event
    /// that came: where blocks that are known fill the device, the index is complete about it again. Returns
    /// whether it is so from now on.
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

    /// The seed of an event's or a query's hashes; what it does not name is the index's.
    pub fn seed(&self, lora_name: Option<&str>, cache_salt: Option<&str>) -> u64 {
        self.agreement.seed(lora_name, cache_salt)
    }

    /// Local hashes of a prompt's full blocks; none while the block size is not known.
    ///
    /// # Cost
    /// O(tokens).
    pub fn locals(&self, tokens: &[u32], keys: &NameKeys<'_>) -> Vec<u64> {
        let seed = self.seed(keys.lora.map(|(name, _)| name), keys.cache_salt);
        let block_size = self.block_size().unwrap_or(0);
        content_hashes(tokens, block_size, seed, keys.media, keys.embeds)
    }

    /// What engines call a prompt's blocks, as far as the index needs it.
    ///
    /// # Cost
    /// Nothing for models of one cache group; else a digest a block.
    pub fn names(&self, tokens: &[u32], keys: &NameKeys<'_>) -> PromptNames {
        // Relaxed: a query beside the first event of a group may miss it.
        if !self.has_layouts.load(Ordering::Relaxed) {
            return PromptNames::default();
        }
        let identity = self.agreement.held();
        let lora = keys.lora.or_else(|| Some((identity.lora_name.as_deref()?, "")));
        let cache_salt = keys.cache_salt.or(identity.cache_salt.as_deref());
        let layouts = Arc::clone(&self.layouts.read());
        layouts.names(&self.name_cache, tokens, &NameKeys { lora, cache_salt, ..*keys })
    }

    /// Finds, per worker, what it can reuse of a prompt: as [`BlockIndex::find_matches`], but of workers with
    /// several cache groups only what all groups can go on from. `exact` has the same of these workers in
    /// tokens.
    ///
    /// # Consistency
    /// As [`BlockIndex::find_matches`]; each name of a group is read at a moment of its own.
    ///
    /// # Cost
    /// That of the walk; where there are workers with several groups, O(names of the prompt, and who holds
    /// them) more.
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
            reuse::evaluate(&layouts, self.index.as_ref(), &self.groups, question, matches, exact);
        }
    }

    /// What `worker`'s events have shown of its cache groups changed.
    pub(super) fn set_layout(&self, worker: Worker, layout: Option<Arc<Layout>>) {
        let mut layouts = self.layouts.write();
        let is_known = layouts.get(worker).is_some();
        if !is_known && layout.as_ref().is_none_or(|layout| layout.is_plain()) {
            return;
        }
        *layouts = Arc::new(layouts.with(worker, layout));
        self.has_layouts.store(!layouts.is_empty(), Ordering::Relaxed);
    }

    /// Have `watch` told, as long as it lives, what leaves workers' devices from now on.
    pub fn watch(&self, watch: &Arc<dyn CacheWatch>) {
        self.watches.add(watch);
    }

    /// The engine of `worker` evicted the blocks of these names from `tier`.
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

    /// Drops all that `worker` holds, in all tiers; it stays known.
    pub fn clear_worker(&self, worker: Worker) {
        self.index.clear(worker);
        self.watches.tell(|watch| watch.cleared(worker));
        self.groups.remove_worker(worker);
    }

    /// Drops what `worker` holds on its device.
    pub(super) fn clear_device(&self, worker: Worker) {
        self.index.clear_tier(worker, Tier::Device);
        self.watches.tell(|watch| watch.cleared(worker));
        self.groups.clear(&Holder::Worker(worker, Tier::Device));
    }

    /// Drops all that `worker` holds and forgets it.
    pub(super) fn remove_worker(&self, worker: Worker) {
        self.index.remove_worker(worker);
        self.groups.remove_worker(worker);
        self.set_layout(worker, None);
    }

    /// It stays when its last publisher goes.
    pub(super) fn keep(&self) {
        // Relaxed: the catalog's lock orders it with the removal.
        self.is_kept.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_kept(&self) -> bool {
        self.is_kept.load(Ordering::Relaxed)
    }

    /// Nobody publishes for this index any more, and it is empty: what comes next may differ.
    pub fn forget_block_size(&self) {
        self.block_size.store(self.given_block_size, Ordering::Relaxed);
    }

    /// Learn the block size if it is unknown; returns the size that now holds.
    ///
    /// The first one to tell wins; a later, different size is the caller's to report.
    pub fn learn_block_size(&self, size: u32) -> u32 {
        debug_assert!(size > 0, "a block holds at least one token");
        match self.block_size.compare_exchange(0, size, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => size,
            Err(known) => known,
        }
    }

    /// The main group of an engine has blocks of `size` tokens, another one those of the hint that holds.
    pub(super) fn correct_block_size(&self, size: u32) {
        if self.is_hint.swap(false, Ordering::Relaxed) {
            self.block_size.store(size, Ordering::Relaxed);
        }
    }

    /// Learn the block size from an engine's metrics, which name one even where groups have several: until
    /// events show that it is another group's. Returns the size that now holds.
    pub fn hint_block_size(&self, size: u32) -> u32 {
        debug_assert!(size > 0, "a block holds at least one token");
        match self.block_size.compare_exchange(0, size, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => {
                self.is_hint.store(true, Ordering::Relaxed);
                size
            }
            Err(known) => known,
        }
    }

    /// Whether an engine of this model may name `size` in its metrics: it is the index's, or that of another
    /// cache group.
    pub fn fits_block_size(&self, size: u32) -> bool {
        let layouts = Arc::clone(&self.layouts.read());
        self.block_size() == Some(size) || layouts.have_block_size(size)
    }
}
