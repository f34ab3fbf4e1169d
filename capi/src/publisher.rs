//! A publisher with its thread, its sockets and its announcement.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvflash_publish::announce::{Announcement, Offer, Place};
use kvflash_publish::blocks::Blocks;
use kvflash_publish::outbox::{PUB_QUEUE_BATCHES, Settings};
use kvflash_publish::publisher::{EVENT_BYTES_MAX, Publisher as Events};
use kvflash_publish::replay::REPLAY_BURST_BATCHES;
use kvflash_publish::wire::Shape;

use crate::fault::{Code, Result, fault};
use crate::zmq::Sockets;

/// How long closed sockets may still send what they hold.
const LINGER_MS: i32 = 500;

/// Options of a publisher.
#[derive(Debug, Clone)]
pub struct Options {
    pub host: String,
    pub port: u16,
    pub replay_port: u16,
    pub topic: String,
    pub settings: Settings,
}

/// One data-parallel rank of an engine, from the callers' view.
#[derive(Debug)]
pub struct Publisher {
    /// Checks, encodes and queues calls.
    pub events: Arc<Events>,
    thread: Mutex<Option<JoinHandle<()>>>,
    pub endpoint: String,
    pub replay_endpoint: String,
    announcement: Mutex<Option<Announcement>>,
}

impl Publisher {
    /// Binds the sockets, starts the thread and announces.
    pub fn start(block_size: u32, options: Options, place: Option<Place>) -> Result<Self> {
        let dp_rank = options.settings.dp_rank.unwrap_or(0);
        let replay_queue = options.settings.ring_batches.saturating_add(REPLAY_BURST_BATCHES);
        let events = Events::new(Shape::Own, block_size, EVENT_BYTES_MAX, options.settings)?;
        let sockets = Sockets::new(PUB_QUEUE_BATCHES, replay_queue, LINGER_MS)?;
        let (endpoint, replay_endpoint) =
            sockets.bind(&options.host, options.port, options.replay_port)?;
        let events = Arc::new(events);
        let worker = Worker { events: Arc::clone(&events), sockets, topic: options.topic };
        let thread = std::thread::Builder::new()
            .name("kvflash-events".to_owned())
            .spawn(move || worker.run())
            .map_err(|error| fault(Code::Io, format!("can't have a thread: {error}")))?;
        let (thread, announcement) = (Mutex::new(Some(thread)), Mutex::default());
        let mut publisher = Self { events, thread, endpoint, replay_endpoint, announcement };
        if let Some(place) = place {
            let Self { endpoint, replay_endpoint, .. } = &publisher;
            let offer = Offer { endpoint, replay_endpoint, dp_rank, block_size };
            match Announcement::put(&place, &offer) {
                Ok(announcement) => publisher.announcement = Mutex::new(Some(announcement)),
                Err(error) => {
                    publisher.close()?;
                    return Err(error.into());
                }
            }
        }
        Ok(publisher)
    }

    /// Publishes stored blocks, up to the first one of another size.
    pub fn store(&self, blocks: &Blocks<'_>) -> Result<()> {
        match self.events.store(blocks, None)? {
            None => Ok(()),
            Some(dropped) => Err(fault(Code::Partial, dropped)),
        }
    }

    /// Waits until everything published is handed to ZMQ.
    pub fn flush(&self, timeout: Duration) -> Result<()> {
        match self.events.outbox.flush(timeout)? {
            0 => Ok(()),
            left => {
                Err(fault(Code::Timeout, format!("{left} events still wait after {timeout:?}")))
            }
        }
    }

    /// Withdraws the announcement, sends queued events and closes the sockets; waits until that is done.
    ///
    /// # Errors
    /// In a fork, where it has no effect: the process that created it continues.
    pub fn close(&self) -> Result<()> {
        self.events.outbox.check_process()?;
        drop(self.announcement.lock().unwrap_or_else(PoisonError::into_inner).take());
        self.events.outbox.close()?;
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // It ends by itself; a panic in it was printed on stderr.
            let _ = thread.join();
        }
        Ok(())
    }
}

/// A publisher, from its thread's view.
struct Worker {
    events: Arc<Events>,
    sockets: Sockets,
    topic: String,
}

/// Releases all waiting callers, however the thread ends.
impl Drop for Worker {
    fn drop(&mut self) {
        self.events.outbox.end();
    }
}

impl Worker {
    fn run(self) {
        let (outbox, topic) = (&self.events.outbox, self.topic.as_bytes());
        while !outbox.is_over() {
            // Rounded up, because zero would busy-wait.
            let wait = outbox.wait(Instant::now()).map_or(-1, |wait| {
                i64::try_from(wait.as_micros().div_ceil(1_000)).unwrap_or(i64::MAX)
            });
            if self.sockets.wait(outbox.descriptor(), wait)
                && let Some(frames) = self.sockets.request()
            {
                outbox.ask(&frames);
            }
            for reply in outbox.replies() {
                self.sockets.answer(&reply.frames(topic));
            }
            // One batch per turn, so that replays get theirs.
            if let Some((sequence, payload)) = outbox.take(Instant::now()) {
                self.sockets.publish(&[topic, &sequence.to_be_bytes(), &payload]);
            }
        }
    }
}
