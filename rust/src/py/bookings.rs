//! What routers tell each other of their bookings, both ways.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvflash_core::error::Error;
use kvflash_core::ids::Worker;
use kvflash_core::select::{Outbox, Selector, Tiding};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use super::error::OrRaise;
use super::indexer::seconds;

/// Calls back with one selector after the other until the answer is true; whether it was.
pub(super) type Each = Box<dyn Fn(&mut dyn FnMut(&Selector) -> bool) -> bool + Send + Sync>;

/// This router's bookings as others are to hear of them, and those of others as they count here.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct Bookings {
    outbox: Arc<Outbox>,
    each: Each,
    ignored: AtomicU64,
}

impl Bookings {
    pub fn new(outbox: Arc<Outbox>, each: Each) -> Self {
        Self { outbox, each, ignored: AtomicU64::new(0) }
    }
}

#[pymethods]
impl Bookings {
    #[pyo3(signature = (*, waiting_max=100_000))]
    fn turn_on(&self, py: Python<'_>, waiting_max: usize) -> PyResult<()> {
        if waiting_max == 0 {
            return Err(Error::invalid("waiting_max must be at least 1, got 0")).or_raise(py);
        }
        self.outbox.turn_on(waiting_max);
        Ok(())
    }

    #[pyo3(signature = (timeout_s, limit=1_000))]
    fn take<'py>(
        &self,
        py: Python<'py>,
        timeout_s: f64,
        limit: usize,
    ) -> PyResult<Bound<'py, PyList>> {
        let timeout = match timeout_s {
            0.0 => Duration::ZERO,
            _ => seconds(py, "timeout_s", timeout_s)?,
        };
        let tidings = py.detach(|| self.outbox.take(timeout, limit));
        let list = PyList::empty(py);
        for tiding in tidings {
            let entry: Bound<'py, PyTuple> = match tiding {
                Tiding::Added { name, worker, hashes, isl_tokens, overlap_blocks } => {
                    let worker = (worker.instance_id, worker.dp_rank);
                    let hashes = hashes.map(Vec::from);
                    ("add", name.to_string(), worker, hashes, isl_tokens, overlap_blocks)
                        .into_pyobject(py)?
                }
                Tiding::Prefilled(name) => ("prefilled", name.to_string()).into_pyobject(py)?,
                Tiding::Freed(name) => ("free", name.to_string()).into_pyobject(py)?,
            };
            list.append(entry)?;
        }
        Ok(list)
    }

    #[pyo3(signature = (router_id, request_id, worker, hashes, isl, overlap))]
    #[allow(clippy::too_many_arguments)]
    fn remote_add(
        &self,
        py: Python<'_>,
        router_id: u64,
        request_id: &str,
        worker: (u64, u32),
        hashes: Option<Vec<u64>>,
        isl: u64,
        overlap: u32,
    ) -> bool {
        let worker = Worker::new(worker.0, worker.1);
        py.detach(|| {
            let hashes = hashes.as_deref();
            let is_taken = (self.each)(&mut |selector| {
                selector.remote_add(router_id, request_id, worker, hashes, isl, overlap)
            });
            // Relaxed: a count for people.
            self.ignored.fetch_add(u64::from(!is_taken), Ordering::Relaxed);
            is_taken
        })
    }

    fn remote_prefilled(&self, py: Python<'_>, router_id: u64, request_id: &str) -> bool {
        py.detach(|| (self.each)(&mut |one| one.remote_prefilled(router_id, request_id)))
    }

    fn remote_free(&self, py: Python<'_>, router_id: u64, request_id: &str) -> bool {
        py.detach(|| (self.each)(&mut |one| one.remote_free(router_id, request_id)))
    }

    fn remote_drop_router(&self, py: Python<'_>, router_id: u64) -> usize {
        py.detach(|| {
            let mut dropped = 0;
            (self.each)(&mut |one| {
                dropped += one.remote_drop_router(router_id);
                false
            });
            dropped
        })
    }

    fn remote_heard(&self, py: Python<'_>, router_id: u64) {
        py.detach(|| {
            (self.each)(&mut |one| {
                one.remote_heard(router_id);
                false
            });
        });
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (mut requests, mut refused) = (0, 0);
        py.detach(|| {
            (self.each)(&mut |one| {
                let stats = one.remote_stats();
                requests += stats.requests;
                refused += stats.refused_total;
                false
            });
        });
        let (waiting, dropped) = self.outbox.counts();
        let entry = PyDict::new(py);
        entry.set_item("remote_requests", requests)?;
        entry.set_item("remote_refused_total", refused)?;
        entry.set_item("remote_ignored_total", self.ignored.load(Ordering::Relaxed))?;
        entry.set_item("waiting", waiting)?;
        entry.set_item("dropped_total", dropped)?;
        Ok(entry)
    }
}
