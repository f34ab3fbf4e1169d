//! The repair of one publisher's lost batches, for the door that has its sockets.

use std::sync::Arc;
use std::time::Instant;

use kvflash_core::catalog::{self, Publisher};
use kvflash_core::repair::{self, Answer, Effect, Frame};
use kvflash_core::stream::END_OF_REPLAY;
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::catalog::{Catalog, parts};

/// Kind, first and last number, why.
type Told = (&'static str, u64, u64, String);

/// What to do about one publisher's lost batches, for the one who has its sockets.
///
/// Calls return effects ``(kind, first, last, why)`` in their order: ``ask``: open a socket to the
/// replay endpoint, in place of an earlier one, and ask for the batches from ``first`` on;
/// ``dismiss``: close it; ``peek``: hand what waits in the subscription to ``live``, be it nothing;
/// ``lost``: batches ``first..=last`` are given up, as nobody can be asked; ``failed``: the replay
/// from ``first`` failed.
///
/// Args:
///     catalog: Where frames go.
///     publisher: Whose.
///     has_endpoint: Whether it can be asked for a replay.
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
    /// Asks the machine without the GIL; nothing is to be done for who is not registered any more.
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

    /// Whether the subscription is to be read; else its messages wait in the socket.
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

    /// Read no more.
    fn hold(&self) {
        self.machine.lock().hold();
    }

    /// Read on.
    fn release(&self, py: Python<'_>, is_connected: bool) -> Vec<Told> {
        self.ask(py, |machine, feed, now_ms| machine.release(feed, is_connected, now_ms))
    }

    /// Messages came over the subscription, as lists of parts; see ``Catalog.take``.
    fn live(&self, py: Python<'_>, messages: &Bound<'_, PyList>) -> Vec<Told> {
        let frames = messages.iter().map(|message| frame(&message)).collect();
        self.ask(py, |machine, feed, now_ms| machine.live(feed, frames, now_ms))
    }

    /// Messages came as a replay; what is behind its end is passed over.
    fn answered(&self, py: Python<'_>, messages: &Bound<'_, PyList>) -> PyResult<Vec<Told>> {
        let mut answer = Answer::default();
        for message in messages.iter() {
            let frame = frame(&message);
            // Engines end a replay with the mark; what is empty or one part alone ends it, too.
            let parts: Vec<_> = message.try_iter()?.collect::<PyResult<_>>()?;
            let is_empty = parts.last().is_none_or(|part| part.len().is_ok_and(|size| size == 0));
            answer.has_ended = frame.as_ref().is_some_and(|it| it.sequence == END_OF_REPLAY);
            answer.is_over = parts.len() < 2 || answer.has_ended || is_empty;
            if answer.is_over {
                break;
            }
            answer.frames.push(frame);
        }
        Ok(self.ask(py, |machine, feed, now_ms| machine.answered(feed, answer, now_ms)))
    }

    /// The time is over; ``has_more``: something is here, and will be handed over.
    fn silent(&self, py: Python<'_>, has_more: bool) -> Vec<Told> {
        self.ask(py, |machine, feed, now_ms| machine.silent(feed, has_more, now_ms))
    }

    /// The replay endpoint can't be asked.
    fn unreachable(&self, py: Python<'_>, why: String) -> Vec<Told> {
        self.ask(py, |machine, feed, now_ms| machine.unreachable(feed, why, now_ms))
    }
}
