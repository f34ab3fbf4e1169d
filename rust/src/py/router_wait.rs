//! A request of Python's that waits until a worker has room to prefill it.

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvflash_core::clock::Clock;
use kvflash_core::error::{Error, Result};
use kvflash_core::policy::Advice;
use kvflash_core::router::Facts;
use kvflash_core::select::{
    Ask, Entered, Prompt, Queue, QueueOptions, QueueStats, Reservation, Selection, Selector,
    Waiting,
};
use parking_lot::Mutex;
use pyo3::prelude::*;

use super::error::{OrRaise, raise};
use super::query::{SHORT_BLOCKS, detached};
use super::router_ask::Options;
use super::router_booking::RouterBooking;

/// A prompt, hashed, and what is wanted for it.
pub(super) struct Asked {
    prompt: Prompt,
    text: Vec<u8>,
    options: Options,
    advice: Option<Advice>,
}

impl Asked {
    /// # Cost
    /// O(tokens).
    pub fn new(selector: &Selector, ids: &[u32], options: Options) -> Self {
        let prompt = selector.prompt(ids, &options.keys());
        let text = if selector.needs_facts() { options.text(ids) } else { Vec::new() };
        Self { prompt, text, options, advice: None }
    }

    /// Call `then` with the question; `ids` are those of [`new`](Self::new).
    pub fn with<T>(&self, ids: &[u32], then: impl FnOnce(&Ask<'_>) -> T) -> T {
        let allows = |worker| self.options.allows(worker);
        let mut ask = self.options.ask(&self.prompt, &allows);
        let advice = self.advice.as_ref();
        ask.facts = Facts { prompt: &self.text, token_ids: ids, advice, ..self.options.facts() };
        then(&ask)
    }
}

/// Says which requests are to try again, through a socket that an event loop watches: nobody who makes room
/// needs Python for it.
struct Bell {
    ring: UnixStream,
    heard: UnixStream,
    called: Mutex<Vec<u64>>,
}

impl Bell {
    fn new() -> std::io::Result<Self> {
        let (ring, heard) = UnixStream::pair()?;
        ring.set_nonblocking(true)?;
        heard.set_nonblocking(true)?;
        Ok(Self { ring, heard, called: Mutex::default() })
    }

    fn call(&self, number: u64) {
        let mut called = self.called.lock();
        if called.is_empty() {
            // There is room for a byte: there is at most one in it.
            let _written = (&self.ring).write(&[1]);
        }
        called.push(number);
    }

    fn take(&self) -> Vec<u64> {
        let mut called = self.called.lock();
        // There is none when it was taken before.
        let _read = (&self.heard).read(&mut [0; 8]);
        std::mem::take(&mut called)
    }
}

/// Where the requests of one core wait.
pub(super) struct Line {
    queue: Arc<Queue>,
    bell: Arc<Bell>,
    came: AtomicU64,
}

/// A place in it.
pub(super) struct Kept {
    selector: Arc<Selector>,
    asked: Asked,
    ids: Vec<u32>,
    request_id: Option<String>,
    number: u64,
    waiting: Waiting,
}

impl Line {
    /// # Errors
    /// As [`QueueOptions::check`]; `Transport` when the system has no socket for it.
    pub fn new(options: &QueueOptions, selector: &Selector, clock: Arc<dyn Clock>) -> Result<Self> {
        options.check()?;
        let bell = Bell::new()
            .map_err(|error| Error::Transport(format!("no socket for the queue: {error}")))?;
        let queue = Queue::serving(options, selector, &clock);
        Ok(Self { queue, bell: Arc::new(bell), came: AtomicU64::new(0) })
    }

    /// Book what is asked, or take it into the line; a policy in Python is asked once, before.
    pub fn enter(
        &self,
        selector: &Arc<Selector>,
        ids: &[u32],
        mut asked: Asked,
        request_id: Option<String>,
    ) -> Result<Entered<(Reservation, Selection), Kept>> {
        asked.advice = asked.with(ids, |ask| selector.advice(ask));
        // Relaxed: it only has to differ.
        let number = self.came.fetch_add(1, Ordering::Relaxed);
        let bell = Arc::clone(&self.bell);
        let block_size = u64::from(asked.prompt.block_size);
        let entered = self.queue.enter(
            &asked.options.wish(),
            asked.prompt.isl_tokens,
            || asked.with(ids, |ask| u64::from(selector.most_held(ask)) * block_size),
            Arc::new(move || bell.call(number)),
            || select(selector, &asked, ids, request_id.as_deref()),
        )?;
        Ok(match entered {
            Entered::Booked(booked) => Entered::Booked(booked),
            Entered::Waits(waiting) => {
                let (selector, ids) = (Arc::clone(selector), ids.to_vec());
                Entered::Waits(Kept { selector, asked, ids, request_id, number, waiting })
            }
        })
    }

    pub fn call(&self) {
        self.queue.call();
    }

    pub fn stats(&self) -> QueueStats {
        self.queue.stats()
    }

    pub fn fileno(&self) -> i32 {
        self.bell.heard.as_raw_fd()
    }

    pub fn called(&self) -> Vec<u64> {
        self.bell.take()
    }
}

fn select(
    selector: &Selector,
    asked: &Asked,
    ids: &[u32],
    request_id: Option<&str>,
) -> Result<(Reservation, Selection)> {
    asked.with(ids, |ask| selector.select(&Ask { request_id, waits: true, ..*ask }))
}

/// A request in the line.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct RouterWait {
    kept: Mutex<Option<Box<Kept>>>,
    #[pyo3(get)]
    number: u64,
}

impl RouterWait {
    pub fn new(kept: Kept) -> Self {
        let number = kept.number;
        Self { kept: Mutex::new(Some(Box::new(kept))), number }
    }
}

#[pymethods]
impl RouterWait {
    fn try_again(&self, py: Python<'_>) -> PyResult<Option<RouterBooking>> {
        // Out of its lock while it is asked: another thread may want the GIL.
        let taken = self.kept.lock().take();
        let Some(mut kept) = taken else {
            return Err(raise(py, &Error::Closed("the request waits no more".into())));
        };
        let is_long = kept.asked.prompt.locals.len() > SHORT_BLOCKS;
        let (tried, kept) = detached(py, is_long, || {
            let Kept { selector, asked, ids, request_id, waiting, .. } = &mut *kept;
            let book = || select(selector, asked, ids, request_id.as_deref());
            let tried = waiting.try_again(|| asked.options.is_open(), book);
            (tried, kept)
        });
        let booked = tried.or_raise(py)?;
        if booked.is_none() {
            *self.kept.lock() = Some(kept);
        }
        Ok(booked.map(RouterBooking::new))
    }

    fn expire(&self, py: Python<'_>) -> PyErr {
        let taken = self.kept.lock().take();
        match taken {
            Some(kept) => raise(py, &kept.waiting.expire()),
            None => raise(py, &Error::Closed("the request waits no more".into())),
        }
    }

    fn leave(&self) {
        let _left = self.kept.lock().take();
    }
}
