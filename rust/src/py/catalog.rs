//! The transport door's side of the catalog: orders out, frames in.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use super::buffer::Bytes;
use super::error::raise;
use crate::catalog::{self, Command, FrameOutcome, ListenerStatus, Publisher};
use crate::error::Error;

/// Orders for the transport, and the frames it brings.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct Catalog {
    pub(super) inner: Arc<catalog::Catalog>,
}

type Order = (String, u64, String, Option<String>);
type Verdict = (usize, String, u64, u64);

fn sequence(py: Python<'_>, bytes: &[u8]) -> PyResult<u64> {
    bytes.try_into().map(u64::from_be_bytes).map_err(|_| {
        let message = format!("a sequence number has 8 bytes, got {}", bytes.len());
        raise(py, &Error::decode(0, message))
    })
}

impl Catalog {
    fn publisher(&self, id: u64) -> Option<Arc<Publisher>> {
        self.inner.publisher(id)
    }
}

#[pymethods]
impl Catalog {
    fn next_order(&self, py: Python<'_>, timeout_s: f64) -> Option<Order> {
        let timeout = Duration::try_from_secs_f64(timeout_s.max(0.0)).unwrap_or(Duration::MAX);
        let timeout = timeout.min(Duration::from_secs(3_600));
        py.detach(|| self.inner.commands.next(timeout)).map(|command| match command {
            Command::Subscribe { publisher, endpoint, replay_endpoint, is_held } => {
                let kind = if is_held { "hold" } else { "subscribe" };
                (kind.to_owned(), publisher, endpoint, replay_endpoint)
            }
            Command::Resume { publisher } => ("resume".to_owned(), publisher, String::new(), None),
            Command::Pause { publisher } => ("pause".to_owned(), publisher, String::new(), None),
            Command::Unsubscribe { publisher } => {
                ("unsubscribe".to_owned(), publisher, String::new(), None)
            }
        })
    }

    #[pyo3(signature = (publisher, messages, *, replayed=false))]
    fn take(
        &self,
        py: Python<'_>,
        publisher: u64,
        messages: &Bound<'_, PyList>,
        replayed: bool,
    ) -> PyResult<Verdict> {
        let Some(publisher) = self.publisher(publisher) else {
            return Ok((0, "closed".to_owned(), 0, 0));
        };
        // Messages are [.., sequence, payload]: engines differ in what they put before.
        let all = messages.len();
        let mut owned: Vec<(usize, u64, Bytes<'_>)> = Vec::with_capacity(all);
        let mut malformed = Vec::new();
        for (at, message) in messages.iter().enumerate() {
            let parts = message.cast_into::<PyList>()?;
            let len = parts.len();
            let frame = (len >= 2).then(|| -> PyResult<_> {
                let head = Bytes::of(parts.get_item(len - 2)?)?;
                let payload = Bytes::of(parts.get_item(len - 1)?)?;
                Ok((at, sequence(py, head.as_slice())?, payload))
            });
            match frame {
                Some(Ok(frame)) => owned.push(frame),
                _ => malformed.push(at),
            }
        }
        let frames: Vec<(usize, u64, &[u8])> = owned
            .iter()
            .map(|(at, sequence, payload)| (*at, *sequence, payload.as_slice()))
            .collect();
        let verdict = py.detach(|| {
            // Only those before the message that is to be offered again.
            let count = |end: usize| {
                let passed = malformed.iter().filter(|at| **at < end).count();
                publisher.count_malformed_messages(passed as u64);
            };
            for (at, sequence, payload) in frames {
                let outcome = if replayed {
                    publisher.replayed(sequence, payload)
                } else {
                    publisher.live(sequence, payload)
                };
                match outcome {
                    FrameOutcome::Applied | FrameOutcome::Duplicate => {}
                    FrameOutcome::Gap { from, to } => {
                        count(at);
                        return (at, "gap", from, to);
                    }
                    FrameOutcome::Closed => return (at, "closed", 0, 0),
                }
            }
            count(all);
            (all, "applied", 0, 0)
        });
        Ok((verdict.0, verdict.1.to_owned(), verdict.2, verdict.3))
    }

    fn give_up(&self, py: Python<'_>, publisher: u64, sequence: u64) {
        if let Some(publisher) = self.publisher(publisher) {
            py.detach(|| publisher.give_up(sequence));
        }
    }

    #[pyo3(signature = (publisher, message=None))]
    fn verify(
        &self,
        py: Python<'_>,
        publisher: u64,
        message: Option<(Bound<'_, PyBytes>, Bound<'_, PyBytes>)>,
    ) -> PyResult<bool> {
        let Some(publisher) = self.publisher(publisher) else { return Ok(true) };
        let first = match &message {
            Some((head, payload)) => Some((sequence(py, head.as_bytes())?, payload.as_bytes())),
            None => None,
        };
        Ok(py.detach(|| publisher.verify(first)))
    }

    fn replay_started(&self, publisher: u64) {
        if let Some(publisher) = self.publisher(publisher) {
            publisher.replay_started();
        }
    }

    #[pyo3(signature = (publisher, *, is_failed=false, is_empty=false))]
    fn replay_ended(&self, py: Python<'_>, publisher: u64, is_failed: bool, is_empty: bool) {
        if let Some(publisher) = self.publisher(publisher) {
            py.detach(|| publisher.replay_ended(is_failed, is_empty));
        }
    }

    fn position(&self, publisher: u64) -> Option<(u64, Option<u64>)> {
        self.publisher(publisher).map(|publisher| publisher.position())
    }

    #[pyo3(signature = (publisher, status, error=None))]
    fn set_status(
        &self,
        py: Python<'_>,
        publisher: u64,
        status: &str,
        error: Option<String>,
    ) -> PyResult<()> {
        let status = match status {
            "pending" => ListenerStatus::Pending,
            "active" => ListenerStatus::Active,
            "paused" => ListenerStatus::Paused,
            "failed" => ListenerStatus::Failed,
            other => {
                let message =
                    format!("status must be pending, active, paused or failed, got {other:?}");
                return Err(raise(py, &Error::invalid(message)));
            }
        };
        if let Some(publisher) = self.publisher(publisher) {
            publisher.set_status(status, error);
        }
        Ok(())
    }
}
