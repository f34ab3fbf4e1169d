//! A publisher: what callers hand over is checked, then encoded, then queued.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::announce::Announcement;
use crate::fault::{Code, Result, fault, invalid};
use crate::stream::{self, Stream};
use crate::wire::{self, Stored};

/// Blocks and tokens of one call; more is a mistake of the caller's.
pub const CALL_BLOCKS_MAX: usize = 1 << 24;
pub const CALL_TOKENS_MAX: usize = 1 << 28;

/// Where the publisher is announced.
#[derive(Debug)]
pub struct Place {
    pub namespace: String,
    pub component: String,
    pub worker_id: u64,
}

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

/// The blocks of a call.
#[derive(Debug, Clone, Copy)]
pub struct Blocks<'a> {
    pub token_ids: &'a [u32],
    /// None: each has as many as a block.
    pub sizes: Option<&'a [usize]>,
    pub block_hashes: &'a [u64],
    pub parent_hash: Option<u64>,
    pub lora_id: u64,
    pub lora_name: Option<&'a str>,
    pub cache_salt: Option<&'a str>,
    pub medium: Option<&'a str>,
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
            Some(place) => Announcement::put(place, dp_rank, block_size, &stream).map(Some),
        };
        let announcement = match announcement {
            Ok(announcement) => std::sync::Mutex::new(announcement),
            Err(fault) => {
                stream.close();
                return Err(fault);
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
        let size = self.block_size as usize;
        let (count, tokens) = (blocks.block_hashes.len(), blocks.token_ids.len());
        let fitting = match blocks.sizes {
            None => count,
            Some(sizes) => sizes.iter().position(|&each| each != size).unwrap_or(count),
        };
        let declared = match blocks.sizes {
            None => count.checked_mul(size),
            Some(sizes) => sizes.iter().try_fold(0_usize, |sum, &each| sum.checked_add(each)),
        };
        if declared != Some(tokens) {
            let declared = declared.map_or("too many".to_owned(), |sum| sum.to_string());
            return Err(invalid(format!(
                "num_block_tokens adds up to {declared} tokens, token_count is {tokens}"
            )));
        }
        if blocks.lora_id > i64::MAX as u64 {
            return Err(invalid(format!(
                "lora_id must be at most {}, got {}",
                i64::MAX,
                blocks.lora_id
            )));
        }
        let names = [
            ("lora_name", blocks.lora_name),
            ("cache_salt", blocks.cache_salt),
            ("medium", blocks.medium),
        ];
        for (field, name) in names {
            check_name(field, name)?;
        }
        let step = wire::BLOCKS_MAX.min(wire::TOKENS_MAX / size).max(1);
        let mut parent_hash = blocks.parent_hash;
        let mut events = Vec::new();
        for first in (0..fitting).step_by(step) {
            let last = fitting.min(first + step);
            let block_hashes = &blocks.block_hashes[first..last];
            events.push(wire::stored(&Stored {
                block_hashes,
                parent_hash,
                token_ids: &blocks.token_ids[first * size..last * size],
                block_size: self.block_size,
                // Engines count from 1.
                lora_id: Some(blocks.lora_id).filter(|&id| id > 0),
                medium: blocks.medium,
                lora_name: blocks.lora_name,
                cache_salt: blocks.cache_salt,
            }));
            parent_hash = block_hashes.last().copied();
        }
        if !events.is_empty() {
            self.stream.put(events)?;
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
        check_name("medium", medium)?;
        let events: Vec<_> = block_hashes
            .chunks(wire::BLOCKS_MAX)
            .map(|hashes| wire::removed(hashes, medium))
            .collect();
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

fn check_name(field: &str, name: Option<&str>) -> Result<()> {
    match name.map(str::len) {
        Some(length) if length > wire::NAME_BYTES_MAX => {
            Err(invalid(format!("{field} may have {} bytes, got {length}", wire::NAME_BYTES_MAX)))
        }
        _ => Ok(()),
    }
}
