//! The answer to a query as a Python class: kept as it came, converted when it is read.

use kvflash_core::ids::Worker;
use kvflash_core::index::Match;
use pyo3::exceptions::PyStopIteration;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// How many leading blocks of a prompt each worker holds.
///
/// A snapshot. The dictionaries are built when they are read, anew each time: keep what you use
/// twice.
///
/// It can be awaited and is its own result, since the published classes answer coroutines: nothing
/// here ever waits, ``index.find_matches(...)`` and ``await index.find_matches(...)`` are the same.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct OverlapScores {
    found: Box<[Match]>,
}

/// Facts count as they are.
pub(super) fn facts(found: &Match) -> Match {
    *found
}

/// Predictions count as if they were held on the device, and nothing else counts.
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

#[pymethods]
impl OverlapScores {
    /// Blocks on the device by (worker id, dp rank); workers without any are left out.
    ///
    /// Of an ApproxKvIndexer: blocks predicted.
    #[getter]
    fn scores<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let scores = PyDict::new(py);
        for found in self.on_device() {
            let Worker { instance_id, dp_rank } = found.worker;
            scores.set_item((instance_id, dp_rank), found.device)?;
        }
        Ok(scores)
    }

    /// Blocks by (worker id, dp rank) as (device, host, disk, external).
    ///
    /// Each figure includes the one before it: host memory goes on where the device ends, and so
    /// on.
    #[getter]
    fn tier_scores<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let scores = PyDict::new(py);
        for found in self.found.iter().filter(|found| found.external > 0) {
            let Worker { instance_id, dp_rank } = found.worker;
            let depths = (found.device, found.host, found.disk, found.external);
            scores.set_item((instance_id, dp_rank), depths)?;
        }
        Ok(scores)
    }

    /// Per depth, the number of workers that hold at least so many leading blocks.
    #[getter]
    fn frequencies(&self) -> Vec<u32> {
        let deepest = self.found.iter().map(|found| found.device).max().unwrap_or(0);
        let mut out = vec![0; deepest as usize];
        for found in self.on_device() {
            out[found.device as usize - 1] += 1;
        }
        let mut workers = 0;
        for count in out.iter_mut().rev() {
            workers += *count;
            *count = workers;
        }
        out
    }

    /// Workers in ``scores``.
    fn __len__(&self) -> usize {
        self.on_device().count()
    }

    /// The published classes answer coroutines. Nothing here ever waits, so the answer is there at once,
    /// and code that awaits it gets it all the same.
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

/// An awaitable's iterator that is at its end, with a result.
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
