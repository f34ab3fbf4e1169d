//! One stream of event batches: the thread and the sockets that publish and replay them.

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kvflash_publish::pending::Pending;
use kvflash_publish::replay::{REPLAY_BURST_BATCHES, Replays, Request};
use kvflash_publish::ring::Ring;
use kvflash_publish::wire;

use crate::fault::{Code, Result, fault};
use crate::zmq::Sockets;

/// Batches queued for a slow subscriber; beyond that ZMQ drops them, and it sees a gap.
const PUB_QUEUE_BATCHES: usize = 100_000;
/// Sockets that are closed may still hand over what they have for this long.
const LINGER_MS: i32 = 500;

/// What a stream may be told.
#[derive(Debug, Clone)]
pub struct Options {
    pub host: String,
    pub port: u16,
    pub replay_port: u16,
    pub topic: String,
    pub dp_rank: u32,
    pub tick: Duration,
    pub ring_batches: usize,
    pub ring_bytes: usize,
}

/// Counters that others read while the thread works.
#[derive(Debug, Default)]
pub struct Counters {
    pub batches: AtomicU64,
    pub replays: AtomicU64,
    pub replays_refused: AtomicU64,
}

#[derive(Debug, Default)]
struct Queue {
    pending: Pending,
    taken: u64,
    sent: u64,
    /// The thread has been told and not yet found the queue empty.
    is_awake: bool,
    is_closing: bool,
}

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
    counters: Counters,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The stream, as callers see it.
#[derive(Debug)]
pub struct Stream {
    shared: Arc<Shared>,
    wake: UnixStream,
    thread: Mutex<Option<JoinHandle<()>>>,
    process: u32,
    pub endpoint: String,
    pub replay_endpoint: String,
}

impl Stream {
    /// Binds the sockets and starts the thread.
    pub fn start(options: Options) -> Result<Self> {
        let replay_queue = options.ring_batches.saturating_add(REPLAY_BURST_BATCHES);
        let sockets = Sockets::new(PUB_QUEUE_BATCHES, replay_queue, LINGER_MS)?;
        let endpoint = sockets.bind_publish(&options.host, options.port)?;
        let replay_endpoint = sockets.bind_replay(&options.host, options.replay_port)?;
        let (wake, woken) = UnixStream::pair().map_err(|error| io("a pair of sockets", &error))?;
        let shared = Arc::<Shared>::default();
        let worker = Worker {
            shared: Arc::clone(&shared),
            sockets,
            woken,
            ring: Ring::new(options.ring_batches, options.ring_bytes),
            replays: Replays::default(),
            options,
        };
        let thread = std::thread::Builder::new()
            .name("kvflash-events".to_owned())
            .spawn(move || worker.run())
            .map_err(|error| io("a thread", &error))?;
        let process = std::process::id();
        let thread = Mutex::new(Some(thread));
        Ok(Self { shared, wake, thread, process, endpoint, replay_endpoint })
    }

    /// Whether this process made it: a fork has none of its threads.
    pub fn check_process(&self) -> Result<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        let text = "the publisher belongs to the process that created it, not to a fork";
        Err(fault(Code::NoPublisher, text))
    }

    /// Queues encoded events, which stay together; waits only while the queue is full.
    pub fn put(&self, events: Vec<Vec<u8>>) -> Result<()> {
        self.check_process()?;
        let mut queue = self.shared.queue();
        while queue.pending.is_full() && !queue.is_closing {
            queue = self.wait(queue);
        }
        if queue.is_closing {
            return Err(fault(Code::NoPublisher, "the publisher was destroyed"));
        }
        queue.taken += events.len() as u64;
        queue.pending.put(events);
        self.wake(&mut queue);
        Ok(())
    }

    /// Waits until everything that was put before is handed to ZMQ.
    pub fn flush(&self, timeout: Duration) -> Result<()> {
        self.check_process()?;
        let queue = self.shared.queue();
        let wanted = queue.taken;
        let (queue, outcome) = self
            .shared
            .changed
            .wait_timeout_while(queue, timeout, |queue| queue.sent < wanted)
            .unwrap_or_else(PoisonError::into_inner);
        if !outcome.timed_out() {
            return Ok(());
        }
        let left = wanted - queue.sent;
        Err(fault(Code::Timeout, format!("{left} events still wait after {timeout:?}")))
    }

    /// Sends what is queued and closes the sockets; waits for that.
    pub fn close(&self) {
        if self.check_process().is_err() {
            return;
        }
        {
            let mut queue = self.shared.queue();
            queue.is_closing = true;
            self.shared.changed.notify_all();
            self.wake(&mut queue);
        }
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // It ends by itself; a panic in it was told on stderr.
            let _ = thread.join();
        }
    }

    /// Events taken so far, those of them that wait, and the thread's counters.
    pub fn counts(&self) -> (u64, u64, &Counters) {
        let queue = self.shared.queue();
        (queue.taken, queue.taken - queue.sent, &self.shared.counters)
    }

    fn wait<'a>(&self, queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        self.shared.changed.wait(queue).unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self, queue: &mut Queue) {
        if !queue.is_awake {
            queue.is_awake = true;
            // The thread's end is the only reason to fail, and then nobody is to be woken.
            let _ = (&self.wake).write_all(&[0]);
        }
    }
}

/// The stream, as its thread sees it.
struct Worker {
    shared: Arc<Shared>,
    sockets: Sockets,
    woken: UnixStream,
    options: Options,
    ring: Ring,
    replays: Replays,
}

/// However the thread ends: nobody waits for it any more.
struct Farewell(Arc<Shared>);

impl Drop for Farewell {
    fn drop(&mut self) {
        let mut queue = self.0.queue();
        queue.is_closing = true;
        queue.pending.clear();
        queue.sent = queue.taken;
        self.0.changed.notify_all();
    }
}

impl Worker {
    fn run(mut self) {
        let _farewell = Farewell(Arc::clone(&self.shared));
        let mut due: Option<Instant> = None;
        loop {
            let ready = self.sockets.wait(self.woken.as_raw_fd(), self.wait_ms(due));
            if ready.wake {
                let mut byte = [0];
                let _ = self.woken.read(&mut byte);
                due = Some(Instant::now() + self.options.tick);
            }
            if ready.replay {
                self.accept_replay();
            }
            let topic = self.options.topic.as_bytes();
            self.replays.go_on(topic, |frames| self.sockets.answer(frames));
            let (is_closing, is_full) = {
                let queue = self.shared.queue();
                (queue.is_closing, queue.pending.has_batch())
            };
            let is_due = due.is_some_and(|due| Instant::now() >= due);
            if due.is_some() && (is_closing || is_full || is_due) && !self.send_batch() {
                due = None;
            }
            if is_closing && due.is_none() {
                return;
            }
        }
    }

    fn wait_ms(&self, due: Option<Instant>) -> i64 {
        if !self.replays.is_empty() {
            return 0;
        }
        let Some(due) = due else { return -1 };
        let left = due.saturating_duration_since(Instant::now());
        // Rounded up: zero would mean not to wait at all.
        i64::try_from(left.as_micros().div_ceil(1_000)).unwrap_or(i64::MAX)
    }

    /// Publishes one batch; says whether more is queued. If not, the next call wakes the thread.
    fn send_batch(&mut self) -> bool {
        let (events, has_more) = {
            let mut queue = self.shared.queue();
            let events = queue.pending.take_batch();
            queue.is_awake = !queue.pending.is_empty();
            (events, queue.is_awake)
        };
        if !events.is_empty() {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let payload = wire::batch(&events, now.as_secs_f64(), self.options.dp_rank);
            self.publish(payload);
        }
        let mut queue = self.shared.queue();
        queue.sent += events.len() as u64;
        self.shared.changed.notify_all();
        has_more
    }

    fn publish(&mut self, payload: Vec<u8>) {
        // First into the ring: a number that was seen can always be asked for.
        let (sequence, payload) = self.ring.push(payload);
        self.shared.counters.batches.store(self.ring.next_sequence(), Ordering::Relaxed);
        let topic = self.options.topic.as_bytes();
        self.sockets.publish(&[topic, &sequence.to_be_bytes(), &payload]);
    }

    fn accept_replay(&mut self) {
        let Some(frames) = self.sockets.request() else { return };
        let counter = match self.replays.accept(&frames, &self.ring) {
            Request::Started => &self.shared.counters.replays,
            Request::Refused => &self.shared.counters.replays_refused,
            Request::Malformed => return,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

fn io(what: &str, error: &std::io::Error) -> crate::fault::Fault {
    fault(Code::Io, format!("can't have {what}: {error}"))
}
