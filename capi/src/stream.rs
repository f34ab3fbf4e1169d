//! One stream of event batches: the thread and the sockets that publish and replay them.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use kvflash_publish::outbox::{PUB_QUEUE_BATCHES, Settings};
use kvflash_publish::publisher::{EVENT_BYTES_MAX, Publisher};
use kvflash_publish::replay::REPLAY_BURST_BATCHES;
use kvflash_publish::wire::Shape;

use crate::fault::{Code, Result, fault};
use crate::zmq::Sockets;

/// How long closed sockets may still send what they hold.
const LINGER_MS: i32 = 500;

/// Options of a stream.
#[derive(Debug, Clone)]
pub struct Options {
    pub host: String,
    pub port: u16,
    pub replay_port: u16,
    pub topic: String,
    pub settings: Settings,
}

/// A publisher with its thread, from the callers' view.
#[derive(Debug)]
pub struct Stream {
    pub publisher: Arc<Publisher>,
    thread: Mutex<Option<JoinHandle<()>>>,
    pub endpoint: String,
    pub replay_endpoint: String,
}

impl Stream {
    /// Binds the sockets and starts the thread.
    pub fn start(block_size: u32, options: Options) -> Result<Self> {
        let replay_queue = options.settings.ring_batches.saturating_add(REPLAY_BURST_BATCHES);
        let publisher = Publisher::new(Shape::Own, block_size, EVENT_BYTES_MAX, options.settings)?;
        let sockets = Sockets::new(PUB_QUEUE_BATCHES, replay_queue, LINGER_MS)?;
        let endpoint = sockets.bind_publish(&options.host, options.port)?;
        let replay_endpoint = sockets.bind_replay(&options.host, options.replay_port)?;
        let publisher = Arc::new(publisher);
        let worker = Worker { publisher: Arc::clone(&publisher), sockets, topic: options.topic };
        let thread = std::thread::Builder::new()
            .name("kvflash-events".to_owned())
            .spawn(move || worker.run())
            .map_err(|error| fault(Code::Io, format!("can't have a thread: {error}")))?;
        let thread = Mutex::new(Some(thread));
        Ok(Self { publisher, thread, endpoint, replay_endpoint })
    }

    /// Sends queued events and closes the sockets; waits until that is done.
    ///
    /// # Errors
    /// In a fork, where it has no effect: the process that created it continues.
    pub fn close(&self) -> Result<()> {
        self.publisher.outbox.close()?;
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // It ends by itself; a panic in it was printed on stderr.
            let _ = thread.join();
        }
        Ok(())
    }
}

/// The stream, from its thread's view.
struct Worker {
    publisher: Arc<Publisher>,
    sockets: Sockets,
    topic: String,
}

/// Releases all waiting callers, however the thread ends.
impl Drop for Worker {
    fn drop(&mut self) {
        self.publisher.outbox.end();
    }
}

impl Worker {
    fn run(self) {
        let (outbox, topic) = (&self.publisher.outbox, self.topic.as_bytes());
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
