//! Bookings for a Python event loop: at once, or when a worker has room to prefill.

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvflash_core::error::{Error, Result};
use kvflash_core::policy::Advice;
use kvflash_core::select::{
    Ask, Entered, Queue, Request, Reservation, Selection, Selector, Told, Waiting,
};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::buffer::tokens;
use super::error::{Fault, Raised};
use super::query::{SHORT_BLOCKS, SHORT_TOKENS, detached};
use super::router_ask::Options;
use super::router_booking::RouterBooking;

/// Instance, rank, overlap in blocks, and the seed of the draw.
pub(super) type Selected = (u64, u32, u32, u64);

pub(super) fn selected(selection: &Selection) -> Selected {
    let worker = selection.worker;
    (worker.instance_id, worker.dp_rank, selection.overlap_blocks, selection.seed)
}

/// Makes the decisions about requests.
pub(super) trait Decisions: Send + Sync {
    /// One model's selector, and its queue of requests that wait for a worker with room.
    ///
    /// # Errors
    /// `NotFound` for a model without workers; `NoWorker` until enough workers have joined.
    fn find(&self, model: Option<&str>, pinned: Option<u64>) -> Result<Desk>;

    /// Ask the remote indexer, if there is one, which workers hold the prompt.
    fn look_up(&self, _desk: &Desk, _request: &mut Request) {}

    /// Count the outcome.
    fn note(&self, _request: &Request, _is_booked: bool, _outcome: Result<&Selection, &Error>) {}

    /// Whether a decision may take too long to hold the GIL.
    fn is_slow(&self) -> bool;
}

/// Decides requests of one model.
pub(super) struct Desk {
    pub selector: Arc<Selector>,
    pub queue: Option<Arc<Queue>>,
}

/// Announces which requests should try again, through a socket that an event loop watches, so that
/// a thread that frees room does not need Python.
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
            // There is room: the socket holds at most one byte.
            let _written = (&self.ring).write(&[1]);
        }
        called.push(number);
    }

    fn take(&self) -> Vec<u64> {
        let mut called = self.called.lock();
        // The byte may have been read before.
        let _read = (&self.heard).read(&mut [0; 8]);
        std::mem::take(&mut called)
    }
}

/// Books requests for an event loop: at once, or when a worker has room to prefill.
///
/// ``options`` are those of :class:`RouterCore`, plus ``model_name`` for a router of several
/// models.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct Decider {
    decisions: Arc<dyn Decisions>,
    bell: Arc<Bell>,
    came: AtomicU64,
}

impl Decider {
    /// # Errors
    /// `Transport` if the system provides no socket.
    pub fn new(decisions: Arc<dyn Decisions>) -> Result<Self> {
        let bell = Bell::new()
            .map_err(|error| Error::Transport(format!("no socket for the queue: {error}")))?;
        Ok(Self { decisions, bell: Arc::new(bell), came: AtomicU64::new(0) })
    }

    fn request(
        &self,
        ids: &[u32],
        options: Options,
        request_id: Option<String>,
    ) -> Result<(Desk, Request)> {
        let desk = self.decisions.find(options.model_name.as_deref(), options.pinned())?;
        let mut request = options.request(&desk.selector, ids, request_id);
        request.check_client()?;
        self.decisions.look_up(&desk, &mut request);
        Ok((desk, request))
    }

    fn take(
        &self,
        ids: &[u32],
        options: Options,
        request_id: Option<String>,
    ) -> Result<Entered<(Reservation, Selection), Place>> {
        let (Desk { selector, queue }, request) = self.request(ids, options, request_id)?;
        // A policy in Python is asked once, before the request waits.
        let advice = request.ask(None, None, |ask| selector.advice(ask));
        // Relaxed: the number only has to be unique.
        let number = self.came.fetch_add(1, Ordering::Relaxed);
        let decisions = Arc::clone(&self.decisions);
        let place = Booker { decisions, selector, request, advice };
        let entered = match queue {
            None => place.book(false).map(Entered::Booked),
            Some(queue) => {
                let isl_tokens = place.request.prompt.isl_tokens;
                let book = || place.book(true);
                let bell = Arc::clone(&self.bell);
                let told: Told = Arc::new(move || bell.call(number));
                queue.enter(&place.request.wish, isl_tokens, || place.cached_tokens(), told, book)
            }
        };
        match entered {
            Ok(Entered::Waits(waiting)) => {
                Ok(Entered::Waits(Place { booker: place, number, waiting }))
            }
            Ok(Entered::Booked(booked)) => {
                place.note(Ok(&booked.1));
                Ok(Entered::Booked(booked))
            }
            Err(error) => {
                place.note(Err(&error));
                Err(error)
            }
        }
    }
}

/// Books one request.
struct Booker {
    decisions: Arc<dyn Decisions>,
    selector: Arc<Selector>,
    request: Request,
    advice: Option<Advice>,
}

impl Booker {
    fn book(&self, waits: bool) -> Result<(Reservation, Selection)> {
        let advice = self.advice.as_ref();
        self.request.ask(None, advice, |ask| self.selector.select(&Ask { waits, ..*ask }))
    }

    fn cached_tokens(&self) -> u64 {
        self.request.ask(None, None, |ask| self.selector.most_held_tokens(ask))
    }

    fn note(&self, outcome: Result<&Selection, &Error>) {
        self.decisions.note(&self.request, true, outcome);
    }
}

/// A place in the queue.
struct Place {
    booker: Booker,
    number: u64,
    waiting: Waiting,
}

#[pymethods]
impl Decider {
    /// The worker that would be selected now; see :meth:`RouterCore.query`.
    #[pyo3(signature = (token_ids, options=None))]
    fn query(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> Raised<Selected> {
        let ids = tokens("token_ids", token_ids)?;
        let ids = ids.as_slice();
        let options = Options::of(options)?;
        let query = || {
            let (Desk { selector, .. }, request) = self.request(ids, options, None)?;
            let advice = request.ask(None, None, |ask| selector.advice(ask));
            let outcome = request.ask(None, advice.as_ref(), |ask| selector.query(ask));
            self.decisions.note(&request, false, outcome.as_ref());
            outcome
        };
        Ok(selected(&py.detach(query)?))
    }

    /// Choose a worker, and book the request there; ``request_id`` is only its name for
    /// :meth:`RouterCore.why`.
    ///
    /// Returns:
    ///     A place in the queue, if ``router_queue_threshold`` is set and every eligible worker has
    ///     more than that to prefill.
    ///
    /// Raises:
    ///     OverloadedError: Also if the queue is full.
    #[pyo3(signature = (token_ids, options=None, *, request_id=None))]
    fn enter(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
        request_id: Option<String>,
    ) -> Raised<Py<PyAny>> {
        let ids = tokens("token_ids", token_ids)?;
        let ids = ids.as_slice();
        let options = Options::of(options)?;
        let is_long = ids.len() > SHORT_TOKENS || self.decisions.is_slow();
        match detached(py, is_long, || self.take(ids, options, request_id))? {
            Entered::Booked(booked) => Ok(Py::new(py, RouterBooking::new(booked))?.into_any()),
            Entered::Waits(place) => Ok(Py::new(py, RouterWait::new(place))?.into_any()),
        }
    }

    /// A socket that is readable while :meth:`called` has results.
    #[getter]
    fn wake_fd(&self) -> i32 {
        self.bell.heard.as_raw_fd()
    }

    /// Numbers of queued requests that should try now; each call is reported once.
    fn called(&self) -> Vec<u64> {
        self.bell.take()
    }
}

/// A request in the queue for a worker with room to prefill.
///
/// It leaves the queue with :meth:`leave`, or with the object; nothing is booked then.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct RouterWait {
    place: Mutex<Option<Box<Place>>>,
    /// Its number in :meth:`Decider.called`.
    #[pyo3(get)]
    number: u64,
}

impl RouterWait {
    fn new(place: Place) -> Self {
        let number = place.number;
        Self { place: Mutex::new(Some(Box::new(place))), number }
    }

    fn take(&self) -> Result<Box<Place>> {
        let taken = self.place.lock().take();
        taken.ok_or_else(|| Error::Closed("the request is no longer waiting".into()))
    }
}

#[pymethods]
impl RouterWait {
    /// Book it if there is room now; call this when the request is called.
    ///
    /// Returns:
    ///     None without room: it keeps waiting, and the next request is called.
    ///
    /// Raises:
    ///     KvflashError: As :meth:`Decider.enter`; the request has then left the queue.
    ///     ClosedError: It no longer waits.
    fn try_again(&self, py: Python<'_>) -> Raised<Option<RouterBooking>> {
        // Without holding its lock during the call: another thread may want the GIL.
        let mut place = self.take()?;
        let is_long = place.booker.request.prompt.locals.len() > SHORT_BLOCKS;
        let (tried, place) = detached(py, is_long, || {
            let Place { booker, waiting, .. } = &mut *place;
            let tried = waiting.try_again(|| booker.request.is_open(), || booker.book(true));
            match &tried {
                Ok(None) => {}
                Ok(Some((_, selection))) => booker.note(Ok(selection)),
                Err(error) => booker.note(Err(error)),
            }
            (tried, place)
        });
        let booked = tried?;
        if booked.is_none() {
            *self.place.lock() = Some(place);
        }
        Ok(booked.map(RouterBooking::new))
    }

    /// Leave the queue after a timeout; returns the AllBusyError to raise.
    fn expire(&self) -> PyErr {
        let expired = self.take().map(|place| {
            let Place { booker, waiting, .. } = *place;
            let error = waiting.expire();
            booker.note(Err(&error));
            error
        });
        Fault::from(expired.unwrap_or_else(|error| error)).into()
    }

    /// Leave the queue. Does nothing if it has left, or after :meth:`try_again` has booked it.
    fn leave(&self) {
        let _left = self.place.lock().take();
    }
}
