//! Bookings shared between routers, in both directions.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvflash_core::ids::Worker;
use kvflash_core::select::{Outbox, Selector, Tiding};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict, PyTuple};

use super::error::Raised;
use super::time::seconds;

/// Bookings that may wait to be shared, and those that one call takes.
const WAITING_MAX: usize = 100_000;
const TAKEN_MAX: usize = 1_000;

/// The selectors of all models.
pub(super) type Selectors = Box<dyn Fn() -> Vec<Arc<Selector>> + Send + Sync>;

/// This router's bookings for its replicas, and the replicas' bookings as they count here.
///
/// ``RouterCore.bookings`` and ``Frontend.bookings`` cover all models. A request is identified by
/// its router and name; an instance and rank say where it was sent.
///
/// Consistency: every decision sees what returned before it. A booking of another router counts
/// like this router's own (shared blocks count once), except against the request limit, until it is
/// freed, its worker or router leaves, or it has been idle for the expiry time.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct Bookings {
    outbox: Arc<Outbox>,
    selectors: Selectors,
    ignored: AtomicU64,
}

impl Bookings {
    pub fn new(outbox: Arc<Outbox>, selectors: Selectors) -> Self {
        Self { outbox, selectors, ignored: AtomicU64::new(0) }
    }
}

#[pymethods]
impl Bookings {
    /// Record bookings from now on, for :meth:`take`; up to 100,000 may wait, and further ones are
    /// counted and not shared.
    fn turn_on(&self) {
        self.outbox.turn_on(WAITING_MAX);
    }

    /// Up to 1,000 bookings since the last call, in order; empty after ``timeout_s``. Releases the
    /// GIL.
    ///
    /// Returns:
    ///     ``("add", name, (instance id, dp rank), sequence hashes or None, isl, overlap)``,
    ///     ``("prefilled", name)`` or ``("free", name)``.
    ///
    /// Raises:
    ///     ConfigError: A negative time.
    fn take<'py>(&self, py: Python<'py>, timeout_s: f64) -> Raised<Vec<Bound<'py, PyTuple>>> {
        let timeout = seconds("timeout_s", timeout_s)?;
        let tidings = py.detach(|| self.outbox.take(timeout, TAKEN_MAX));
        let told = tidings.into_iter().map(|tiding| match tiding {
            Tiding::Added { name, worker, hashes, isl_tokens, overlap_blocks } => {
                let worker = (worker.instance_id, worker.dp_rank);
                let hashes = hashes.map(Vec::from);
                ("add", name.to_string(), worker, hashes, isl_tokens, overlap_blocks)
                    .into_pyobject(py)
            }
            Tiding::Prefilled(name) => ("prefilled", name.to_string()).into_pyobject(py),
            Tiding::Freed(name) => ("free", name.to_string()).into_pyobject(py),
        });
        Ok(told.collect::<PyResult<_>>()?)
    }

    /// Record another router's booking; repeating it changes nothing.
    ///
    /// Returns:
    ///     False if it does not count: the worker is not known here, or a limit (1,024 routers,
    ///         1,048,576 requests per model) is reached.
    ///
    /// Cost: O(blocks).
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
            let is_taken = (self.selectors)().iter().any(|selector| {
                selector.remote_add(router_id, request_id, worker, hashes, isl, overlap)
            });
            // Relaxed: a count for people.
            self.ignored.fetch_add(u64::from(!is_taken), Ordering::Relaxed);
            is_taken
        })
    }

    /// The request's prompt is computed; False for an unknown request.
    fn remote_prefilled(&self, py: Python<'_>, router_id: u64, request_id: &str) -> bool {
        py.detach(|| {
            (self.selectors)().iter().any(|one| one.remote_prefilled(router_id, request_id))
        })
    }

    /// The request has ended; False for an unknown request.
    fn remote_free(&self, py: Python<'_>, router_id: u64, request_id: &str) -> bool {
        py.detach(|| (self.selectors)().iter().any(|one| one.remote_free(router_id, request_id)))
    }

    /// A router has left, with its requests; returns their number.
    fn remote_drop_router(&self, py: Python<'_>, router_id: u64) -> usize {
        py.detach(|| (self.selectors)().iter().map(|one| one.remote_drop_router(router_id)).sum())
    }

    /// A router reports that its requests are still active, so they do not expire.
    fn remote_heard(&self, py: Python<'_>, router_id: u64) {
        py.detach(|| (self.selectors)().iter().for_each(|one| one.remote_heard(router_id)));
    }

    /// Counters.
    ///
    /// Returns:
    ///     remote_requests, remote_refused_total (over a limit), remote_ignored_total (at workers
    ///     that are not known here), waiting (to be taken), dropped_total (not shared).
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let of_models: Vec<_> =
            py.detach(|| (self.selectors)().iter().map(|one| one.remote_stats()).collect());
        let requests: usize = of_models.iter().map(|stats| stats.requests).sum();
        let (waiting, dropped) = self.outbox.counts();
        let entries = [
            ("remote_requests", requests as u64),
            ("remote_refused_total", of_models.iter().map(|stats| stats.refused_total).sum()),
            ("remote_ignored_total", self.ignored.load(Ordering::Relaxed)),
            ("waiting", waiting as u64),
            ("dropped_total", dropped),
        ];
        entries.into_py_dict(py)
    }
}
