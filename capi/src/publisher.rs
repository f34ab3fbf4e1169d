//! A publisher: what callers hand over is checked, then encoded, then queued.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvflash_publish::announce::{Announcement, Offer, Place};
use kvflash_publish::blocks::{self, Blocks};
use kvflash_publish::wire;

use crate::fault::{Code, Result, fault, invalid};
use crate::stream::{self, Stream};

/// One data-parallel rank of an engine.
#[derive(Debug)]
pub struct Publisher {
    pub stream: Stream,
    block_size: u32,
    announcement: std::sync::Mutex<Option<Announcement>>,
    stored_blocks: AtomicU64,
    removed_blocks: AtomicU64,
    dropped_blocks: AtomicU64,
}

/// Counters and gauges.
#[derive(Debug, Clone, Copy, Default)]
pub struct Stats {
    pub stored_blocks_total: u64,
    pub removed_blocks_total: u64,
    pub dropped_blocks_total: u64,
    pub events_total: u64,
    pub pending_events: u64,
    pub batches_total: u64,
    pub replays_total: u64,
    pub replays_refused_total: u64,
}

impl Publisher {
    /// Binds, starts, announces.
    pub fn start(block_size: u32, options: stream::Options, place: Option<Place>) -> Result<Self> {
        if block_size == 0 {
            return Err(invalid("kv_block_size must be at least 1, got 0"));
        }
        let dp_rank = options.dp_rank;
        let stream = Stream::start(options)?;
        let announcement = match &place {
            None => Ok(None),
            Some(place) => {
                let offer = Offer {
                    endpoint: &stream.endpoint,
                    replay_endpoint: &stream.replay_endpoint,
                    dp_rank,
                    block_size,
                };
                Announcement::put(place, &offer).map(Some)
            }
        };
        let announcement = match announcement {
            Ok(announcement) => std::sync::Mutex::new(announcement),
            Err(error) => {
                stream.close();
                return Err(error.into());
            }
        };
        Ok(Self {
            stream,
            block_size,
            announcement,
            stored_blocks: AtomicU64::new(0),
            removed_blocks: AtomicU64::new(0),
            dropped_blocks: AtomicU64::new(0),
        })
    }

    /// Publishes stored blocks, up to the first one of another size.
    pub fn store(&self, blocks: &Blocks<'_>) -> Result<()> {
        let encoded = blocks.encode(self.block_size)?;
        let (size, count, fitting) = (self.block_size, blocks.block_hashes.len(), encoded.blocks);
        if !encoded.events.is_empty() {
            self.stream.put(encoded.events)?;
        }
        self.stored_blocks.fetch_add(fitting as u64, Ordering::Relaxed);
        let Some(odd) = blocks.sizes.and_then(|sizes| sizes.get(fitting)) else { return Ok(()) };
        let dropped = count - fitting;
        self.dropped_blocks.fetch_add(dropped as u64, Ordering::Relaxed);
        let text = format!(
            "num_block_tokens[{fitting}] is {odd} and kv_block_size {size}: dropped {dropped} blocks"
        );
        Err(fault(Code::Partial, text))
    }

    /// Publishes removed blocks.
    pub fn remove(&self, block_hashes: &[u64], medium: Option<&str>) -> Result<()> {
        let events = blocks::removed(block_hashes, medium)?;
        if !events.is_empty() {
            self.stream.put(events)?;
        }
        self.removed_blocks.fetch_add(block_hashes.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Publishes that the cache is empty.
    pub fn clear(&self) -> Result<()> {
        self.stream.put(vec![wire::cleared()])
    }

    /// Waits until what was published is handed to ZMQ.
    pub fn flush(&self, timeout: Duration) -> Result<()> {
        self.stream.flush(timeout)
    }

    /// Counters and gauges.
    pub fn stats(&self) -> Stats {
        let (events_total, pending_events, counters) = self.stream.counts();
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            stored_blocks_total: read(&self.stored_blocks),
            removed_blocks_total: read(&self.removed_blocks),
            dropped_blocks_total: read(&self.dropped_blocks),
            events_total,
            pending_events,
            batches_total: read(&counters.batches),
            replays_total: read(&counters.replays),
            replays_refused_total: read(&counters.replays_refused),
        }
    }

    /// Withdraws the announcement, sends what is queued, closes.
    ///
    /// # Errors
    /// In a fork, where nothing is done: the process that created it goes on.
    pub fn close(&self) -> Result<()> {
        self.stream.check_process()?;
        let announcement =
            self.announcement.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        drop(announcement);
        self.stream.close();
        Ok(())
    }
}
