//! The repair of one publisher's lost batches, for the transport that owns its sockets.

use std::sync::Arc;
use std::time::Instant;

use kvflash_core::catalog::{self, Publisher};
use kvflash_core::repair::{self, Answer, Effect, Frame};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::buffer::Bytes;
use super::catalog::{Catalog, parts};
use super::error::Raised;

/// Kind, first and last number, why.
pub(super) type Told = (&'static str, u64, u64, String);

/// Decides about one publisher's lost batches, for the transport that owns its sockets.
///
/// Calls return effects ``(kind, first, last, why)`` in order: ``ask``: open a socket to the replay
/// endpoint, in place of an earlier one, and request the batches from ``first`` on; ``dismiss``:
/// close it; ``peek``: pass what waits in the subscription to ``live``, even if it is empty;
/// ``lost``: batches ``first..=last`` are given up, because there is no replay; ``failed``: the
/// replay from ``first`` failed.
///
/// Args:
///     catalog: Receives the frames.
///     publisher: Number of the publisher.
///     has_endpoint: Whether it has a replay endpoint.
///     timeout_s: Silence after which a replay is given up.
///     is_held: Read nothing before ``release``.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct Repair {
    catalog: Arc<catalog::Catalog>,
    publisher: u64,
    machine: Mutex<repair::Repair>,
    begun: Instant,
}

impl Repair {
    /// Calls the state machine without the GIL; no effects for an unregistered publisher.
    fn ask(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut repair::Repair, &Publisher, u64) -> Vec<Effect> + Send,
    ) -> Vec<Told> {
        let effects = py.detach(|| {
            let Some(publisher) = self.catalog.publisher(self.publisher) else { return Vec::new() };
            call(&mut self.machine.lock(), &publisher, self.now_ms())
        });
        let told = effects.into_iter().map(|effect| match effect {
            Effect::Ask(first) => ("ask", first, first, String::new()),
            Effect::Dismiss => ("dismiss", 0, 0, String::new()),
            Effect::Peek => ("peek", 0, 0, String::new()),
            Effect::Lost(first, last, held_back) if held_back > 0 => {
                ("lost", first, last, format!(" ({held_back} more losses since the last line)"))
            }
            Effect::Lost(first, last, _) => ("lost", first, last, String::new()),
            Effect::Failed(first, why) => ("failed", first, first, why),
        });
        told.collect()
    }

    /// Passes a part of the reply to a request for a replay.
    pub(super) fn follow(&self, py: Python<'_>, answer: Answer) -> Vec<Told> {
        self.ask(py, |machine, feed, now_ms| machine.answered(feed, answer, now_ms))
    }

    fn now_ms(&self) -> u64 {
        self.begun.elapsed().as_millis() as u64
    }
}

fn frame(message: &Bound<'_, PyAny>) -> Option<Frame> {
    let (sequence, payload) = parts(message.cast::<PyList>().ok()?)?;
    Some(Frame { sequence, payload: payload.as_slice().to_vec() })
}

#[pymethods]
impl Repair {
    #[new]
    #[pyo3(signature = (catalog, publisher, *, has_endpoint, timeout_s, is_held=false))]
    fn new(
        catalog: &Bound<'_, Catalog>,
        publisher: u64,
        has_endpoint: bool,
        timeout_s: f64,
        is_held: bool,
    ) -> Self {
        let machine = repair::Repair::new(has_endpoint, (timeout_s * 1e3) as u64, is_held);
        Self {
            catalog: Arc::clone(&catalog.get().inner),
            publisher,
            machine: Mutex::new(machine),
            begun: Instant::now(),
        }
    }

    /// Whether to read the subscription; otherwise its messages wait in the socket.
    #[getter]
    fn wants_live(&self) -> bool {
        self.machine.lock().wants_live()
    }

    /// Whether nothing is read before ``release``.
    #[getter]
    fn is_held(&self) -> bool {
        self.machine.lock().is_held()
    }

    /// Seconds until ``silent`` is to be called; None without a replay under way.
    fn wait_s(&self) -> Option<f64> {
        let deadline_ms = self.machine.lock().deadline_ms()?;
        Some(deadline_ms.saturating_sub(self.now_ms()) as f64 / 1e3)
    }

    /// The subscription has connected.
    fn connected(&self, py: Python<'_>) -> Vec<Told> {
        self.ask(py, |machine, feed, now_ms| machine.connected(feed, now_ms))
    }

    /// Stop reading.
    fn hold(&self) {
        self.machine.lock().hold();
    }

    /// Resume reading.
    fn release(&self, py: Python<'_>, is_connected: bool) -> Vec<Told> {
        self.ask(py, |machine, feed, now_ms| machine.release(feed, is_connected, now_ms))
    }

    /// Pass messages of the subscription, as lists of parts; see ``Catalog.take``.
    fn live(&self, py: Python<'_>, messages: &Bound<'_, PyList>) -> Vec<Told> {
        let frames = messages.iter().map(|message| frame(&message)).collect();
        self.ask(py, |machine, feed, now_ms| machine.live(feed, frames, now_ms))
    }

    /// Pass messages of a replay; messages after its end are skipped.
    fn answered(&self, py: Python<'_>, messages: &Bound<'_, PyList>) -> Raised<Vec<Told>> {
        let mut answer = Answer::default();
        for message in messages.iter() {
            let message = message.cast::<PyList>().map_err(PyErr::from)?;
            let last = message.iter().next_back().map(Bytes::of).transpose()?;
            let sequence = parts(message).map(|(sequence, _)| sequence);
            answer.add(message.len(), sequence, last.as_ref().map_or(&[], Bytes::as_slice));
        }
        Ok(self.follow(py, answer))
    }

    /// The timeout has passed; ``has_more``: messages have arrived and will be passed.
    fn silent(&self, py: Python<'_>, has_more: bool) -> Vec<Told> {
        self.ask(py, |machine, feed, now_ms| machine.silent(feed, has_more, now_ms))
    }

    /// The replay endpoint is unreachable.
    fn unreachable(&self, py: Python<'_>, why: String) -> Vec<Told> {
        self.ask(py, |machine, feed, now_ms| machine.unreachable(feed, why, now_ms))
    }
}
