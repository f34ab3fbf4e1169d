//! One data-parallel rank's publisher, except for the sockets: calls are validated, encoded and
//! queued.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::blocks::{self, Blocks};
use crate::error::{Result, invalid};
use crate::items::{ItemPlaces, Part};
use crate::outbox::{Counts, Outbox, Settings};
use crate::wire::{self, Shape};

/// Maximum bytes of an event; receivers accept 16 MiB.
pub const EVENT_BYTES_MAX: usize = 8 << 20;

/// One data-parallel rank of an engine.
#[derive(Debug)]
pub struct Publisher {
    /// Its outgoing events.
    pub outbox: Outbox,
    shape: Shape,
    block_size: u32,
    event_bytes_max: usize,
    items: Mutex<ItemPlaces>,
    stored_blocks: AtomicU64,
    removed_blocks: AtomicU64,
    dropped_blocks: AtomicU64,
}

/// Counters and gauges of a publisher.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Blocks published as stored.
    pub stored_blocks: u64,
    /// Blocks published as removed.
    pub removed_blocks: u64,
    /// Blocks dropped because of another size.
    pub dropped_blocks: u64,
    /// Blocks whose multimodal items continue after them.
    pub open_item_blocks: u64,
    /// Those of the outbox.
    pub outbox: Counts,
}

impl Publisher {
    /// A publisher of blocks of `block_size` tokens, in events of up to `event_bytes_max` bytes.
    ///
    /// # Errors
    /// `InvalidArgument` for a block size of 0, `Io` if the process has reached its limit of
    /// descriptors.
    pub fn new(
        shape: Shape,
        block_size: u32,
        event_bytes_max: usize,
        settings: Settings,
    ) -> Result<Self> {
        if block_size == 0 {
            return Err(invalid("kv_block_size must be at least 1, got 0"));
        }
        Ok(Self {
            outbox: Outbox::new(settings)?,
            shape,
            block_size,
            event_bytes_max,
            items: Mutex::new(ItemPlaces::new(block_size)),
            stored_blocks: AtomicU64::new(0),
            removed_blocks: AtomicU64::new(0),
            dropped_blocks: AtomicU64::new(0),
        })
    }

    /// Publishes stored blocks, up to the first one of another size; `items` are the multimodal
    /// items of each block. Returns a message about dropped blocks, if any.
    ///
    /// # Errors
    /// `InvalidArgument` for anything that [`Blocks::encode`] and [`ItemPlaces::begins`] refuse,
    /// `Closed` after the shutdown. Nothing of the call is published then.
    pub fn store(
        &self,
        blocks: &Blocks<'_>,
        items: Option<&[Vec<Part>]>,
    ) -> Result<Option<String>> {
        let (size, count) = (self.block_size, blocks.block_hashes.len());
        let (items, reached) = match items {
            None => (None, Vec::new()),
            Some(items) if items.len() == count => {
                self.items().begins(items, blocks.parent_hash)?
            }
            Some(items) => {
                let got = items.len();
                let text = "block_mm_infos must have one entry for each of the";
                return Err(invalid(format!("{text} {count} blocks, got {got}")));
            }
        };
        let blocks = Blocks { items: items.as_deref(), ..*blocks };
        let encoded = blocks.encode(self.shape, size, self.event_bytes_max)?;
        self.items().remember(blocks.block_hashes, reached);
        self.outbox.put(encoded.events)?;
        let (fitting, dropped) = (encoded.blocks, count - encoded.blocks);
        self.stored_blocks.fetch_add(fitting as u64, Ordering::Relaxed);
        self.dropped_blocks.fetch_add(dropped as u64, Ordering::Relaxed);
        let odd = blocks.sizes.and_then(|sizes| sizes.get(fitting));
        Ok(odd.map(|odd| {
            format!(
                "num_block_tokens[{fitting}] is {odd} and kv_block_size {size}: dropped {dropped} blocks"
            )
        }))
    }

    /// Publishes removed blocks.
    ///
    /// # Errors
    /// As [`Publisher::store`].
    pub fn remove(&self, block_hashes: &[u64], medium: Option<&str>) -> Result<()> {
        self.outbox.put(blocks::removed(
            self.shape,
            block_hashes,
            medium,
            self.event_bytes_max,
        )?)?;
        self.removed_blocks.fetch_add(block_hashes.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Publishes that the cache is empty.
    ///
    /// # Errors
    /// `Closed` after the shutdown.
    pub fn clear(&self) -> Result<()> {
        self.items().clear();
        self.outbox.put(vec![wire::cleared(self.shape)])
    }

    /// Counters and gauges.
    pub fn stats(&self) -> Stats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            stored_blocks: read(&self.stored_blocks),
            removed_blocks: read(&self.removed_blocks),
            dropped_blocks: read(&self.dropped_blocks),
            open_item_blocks: self.items().open_blocks() as u64,
            outbox: self.outbox.counts(),
        }
    }

    fn items(&self) -> MutexGuard<'_, ItemPlaces> {
        self.items.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
