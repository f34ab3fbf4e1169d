//! A publisher with its sockets and announcement.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kvflash_publish::announce::{Announcement, Offer, Place};
use kvflash_publish::blocks::Blocks;
use kvflash_publish::publisher::Stats;

use crate::fault::{Code, Result, fault};
use crate::stream::{Options, Stream};

/// One data-parallel rank of an engine.
#[derive(Debug)]
pub struct Publisher {
    pub stream: Stream,
    announcement: Mutex<Option<Announcement>>,
}

impl Publisher {
    /// Binds, starts and announces.
    pub fn start(block_size: u32, options: Options, place: Option<Place>) -> Result<Self> {
        let dp_rank = options.settings.dp_rank.unwrap_or(0);
        let stream = Stream::start(block_size, options)?;
        let announced = place.map(|place| {
            let offer = Offer {
                endpoint: &stream.endpoint,
                replay_endpoint: &stream.replay_endpoint,
                dp_rank,
                block_size,
            };
            Announcement::put(&place, &offer)
        });
        match announced.transpose() {
            Ok(announcement) => Ok(Self { stream, announcement: Mutex::new(announcement) }),
            Err(error) => {
                stream.close()?;
                Err(error.into())
            }
        }
    }

    /// Publishes stored blocks, up to the first one of another size.
    pub fn store(&self, blocks: &Blocks<'_>) -> Result<()> {
        match self.stream.publisher.store(blocks, None)? {
            None => Ok(()),
            Some(dropped) => Err(fault(Code::Partial, dropped)),
        }
    }

    /// Publishes removed blocks.
    pub fn remove(&self, block_hashes: &[u64], medium: Option<&str>) -> Result<()> {
        Ok(self.stream.publisher.remove(block_hashes, medium)?)
    }

    /// Publishes that the cache is empty.
    pub fn clear(&self) -> Result<()> {
        Ok(self.stream.publisher.clear()?)
    }

    /// Waits until everything published is handed to ZMQ.
    pub fn flush(&self, timeout: Duration) -> Result<()> {
        match self.stream.publisher.outbox.flush(timeout)? {
            0 => Ok(()),
            left => {
                Err(fault(Code::Timeout, format!("{left} events still wait after {timeout:?}")))
            }
        }
    }

    /// Counters and gauges.
    pub fn stats(&self) -> Stats {
        self.stream.publisher.stats()
    }

    /// Withdraws the announcement, sends queued events, closes.
    ///
    /// # Errors
    /// In a fork, where it has no effect: the process that created it continues.
    pub fn close(&self) -> Result<()> {
        self.stream.publisher.outbox.check_process()?;
        drop(self.announcement.lock().unwrap_or_else(PoisonError::into_inner).take());
        self.stream.close()
    }
}
