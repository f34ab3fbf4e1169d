//! One (model, tenant): its block size and its index.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use hashbrown::Equivalent;

use super::identity::Agreement;
use super::roster::Roster;
use crate::ids::Worker;
use crate::index::BlockIndex;

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
    /// 0 = not known yet: the first stored event or the engine's metrics tell.
    block_size: AtomicU32,
    /// What the operator set for every publisher to come; 0 = nothing.
    given_block_size: u32,
    /// Somebody in this process counts on it, publishers or not.
    is_kept: AtomicBool,
    /// Adapter and salt of events and queries that name none.
    pub(super) agreement: Agreement,
    /// Who may hold blocks of it.
    pub(super) roster: Roster,
}

impl ModelIndex {
    pub(super) fn new(key: ModelKey, given_block_size: u32, index: Box<dyn BlockIndex>) -> Self {
        Self {
            key,
            index,
            block_size: AtomicU32::new(given_block_size),
            given_block_size,
            is_kept: AtomicBool::new(false),
            agreement: Agreement::default(),
            roster: Roster::default(),
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

    /// The seed of an event's or a query's hashes; what it does not name is the index's.
    pub fn seed(&self, lora_name: Option<&str>, cache_salt: Option<&str>) -> u64 {
        self.agreement.seed(lora_name, cache_salt)
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
    pub(crate) fn forget_block_size(&self) {
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
}

impl fmt::Debug for ModelIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelIndex")
            .field("key", &self.key)
            .field("block_size", &self.block_size())
            .finish_non_exhaustive()
    }
}
