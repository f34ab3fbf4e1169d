//! The result of a query as a Python class: stored unchanged, converted on access.

use kvflash_core::ids::Worker;
use kvflash_core::index::{self, Match};
use pyo3::exceptions::PyStopIteration;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

/// The number of leading blocks of a prompt that each worker holds.
///
/// A snapshot. Each access builds a new dictionary, so keep a result that you use twice.
///
/// It can be awaited and is its own result, for compatibility with Dynamo's classes, which return
/// coroutines. Nothing here ever waits: ``index.find_matches(...)`` and ``await
/// index.find_matches(...)`` are the same.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct OverlapScores {
    found: Box<[Match]>,
}

/// Reported blocks, unchanged.
pub(super) fn facts(found: &Match) -> Match {
    *found
}

/// Predicted blocks as if held on the device, and no others.
pub(super) fn predictions(found: &Match) -> Match {
    let predicted = found.predicted;
    Match { device: predicted, host: predicted, disk: predicted, external: predicted, ..*found }
}

impl OverlapScores {
    pub fn of(found: &[Match], counted: fn(&Match) -> Match) -> Self {
        Self { found: found.iter().map(counted).collect() }
    }

    fn on_device(&self) -> impl Iterator<Item = &Match> {
        self.found.iter().filter(|found| found.device > 0)
    }
}

fn named(worker: Worker) -> (u64, u32) {
    (worker.instance_id, worker.dp_rank)
}

#[pymethods]
impl OverlapScores {
    /// Blocks on the device by (worker id, dp rank), without workers that hold none.
    ///
    /// For an ApproxKvIndexer: predicted blocks.
    #[getter]
    fn scores<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.on_device().map(|found| (named(found.worker), found.device)).into_py_dict(py)
    }

    /// Blocks by (worker id, dp rank) as (device, host, disk, external).
    ///
    /// Each number includes the one before it: host memory continues the device's prefix, and so
    /// on.
    #[getter]
    fn tier_scores<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let held = self.found.iter().filter(|found| found.external > 0);
        held.map(|found| {
            let depths = (found.device, found.host, found.disk, found.external);
            (named(found.worker), depths)
        })
        .into_py_dict(py)
    }

    /// Per depth, the number of workers that hold at least that many leading blocks.
    #[getter]
    fn frequencies(&self) -> Vec<u32> {
        let mut out = Vec::new();
        index::frequencies(&self.found, &mut out);
        out
    }

    /// Workers in ``scores``.
    fn __len__(&self) -> usize {
        self.on_device().count()
    }

    /// Dynamo's classes return coroutines. Nothing here ever waits, so awaiting returns at once.
    fn __await__(slf: Py<Self>) -> Ready {
        Ready { scores: slf }
    }

    fn __repr__(&self) -> String {
        let mut parts: Vec<String> = self
            .on_device()
            .take(9)
            .map(|found| format!("{}: {}", found.worker, found.device))
            .collect();
        if parts.len() > 8 {
            parts[8] = "...".to_owned();
        }
        format!("OverlapScores({{{}}})", parts.join(", "))
    }
}

/// The iterator of an awaitable that is complete, with a result.
#[pyclass(frozen, module = "kvflash._core")]
struct Ready {
    scores: Py<OverlapScores>,
}

#[pymethods]
impl Ready {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<()> {
        Err(PyStopIteration::new_err((self.scores.clone_ref(py),)))
    }
}
