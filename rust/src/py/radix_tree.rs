//! The index as a Python class: events in as JSON, overlaps out.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::buffer::hashes;
use super::error::OrRaise;
use crate::codec::router::{KvEvent, RouterEvent};
use crate::error::Error;
use crate::ids::{Tier, Worker};
use crate::index::{BlockIndex, Matches, Options, RadixIndex};

/// How many leading blocks of a prompt each worker holds.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct OverlapScores {
    matches: Matches,
}

#[pymethods]
impl OverlapScores {
    #[getter]
    fn scores<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let scores = PyDict::new(py);
        for found in self.matches.as_slice().iter().filter(|found| found.device > 0) {
            let Worker { instance_id, dp_rank } = found.worker;
            scores.set_item((instance_id, dp_rank), found.device)?;
        }
        Ok(scores)
    }

    #[getter]
    fn frequencies(&self) -> Vec<u32> {
        let mut out = Vec::new();
        self.matches.frequencies(&mut out);
        out
    }

    fn __len__(&self) -> usize {
        self.matches.len()
    }

    fn __repr__(&self) -> String {
        let parts: Vec<String> = self
            .matches
            .as_slice()
            .iter()
            .take(8)
            .map(|found| format!("{}: {}", found.worker, found.device))
            .collect();
        let more = if self.matches.len() > 8 { ", ..." } else { "" };
        format!("OverlapScores({{{}{more}}})", parts.join(", "))
    }
}

/// Which worker holds which blocks.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct RadixTree {
    index: RadixIndex,
}

#[pymethods]
impl RadixTree {
    #[new]
    fn new() -> Self {
        Self { index: RadixIndex::new(Options::default()) }
    }

    #[pyo3(signature = (sequence, early_exit=false))]
    fn find_matches(
        &self,
        py: Python<'_>,
        sequence: &Bound<'_, PyAny>,
        early_exit: bool,
    ) -> PyResult<OverlapScores> {
        let locals = hashes("block_hashes", sequence)?;
        let locals = locals.as_slice();
        let matches = py.detach(|| {
            let mut matches = Matches::default();
            if early_exit {
                self.index.find_matches_early_exit(locals, &mut matches);
            } else {
                self.index.find_matches(locals, &mut matches);
            }
            matches
        });
        Ok(OverlapScores { matches })
    }

    fn apply_event(
        &self,
        py: Python<'_>,
        worker_id: u64,
        kv_cache_event_bytes: &[u8],
    ) -> PyResult<()> {
        py.detach(|| {
            let event: KvEvent = serde_json::from_slice(kv_cache_event_bytes)
                .map_err(|error| Error::decode(error.column(), error.to_string()))?;
            let event = RouterEvent { worker_id, event, storage_tier: Tier::Device };
            crate::catalog::apply_router_event(&self.index, &event)
        })
        .or_raise(py)
    }

    fn remove_worker(&self, py: Python<'_>, worker_id: u64) -> usize {
        py.detach(|| self.index.remove_instance(worker_id))
    }

    #[pyo3(signature = (worker_id, dp_rank=None))]
    fn clear_all_blocks(&self, py: Python<'_>, worker_id: u64, dp_rank: Option<u32>) -> usize {
        py.detach(|| {
            self.index
                .workers()
                .into_iter()
                .filter(|worker| worker.instance_id == worker_id)
                .filter(|worker| dp_rank.is_none_or(|rank| worker.dp_rank == rank))
                .map(|worker| self.index.clear(worker))
                .sum()
        })
    }

    fn dump_tree_as_events(&self, py: Python<'_>) -> Vec<String> {
        py.detach(|| {
            crate::catalog::dump_events(&self.index).map(|event| event.to_json()).collect()
        })
    }

    fn block_count(&self, worker_id: u64, dp_rank: u32) -> usize {
        self.index.blocks(Worker::new(worker_id, dp_rank))
    }
}
