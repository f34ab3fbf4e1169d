//! The bare index as a Python class: events in as JSON, overlaps out.

use kvflash_core::ids::Worker;
use kvflash_core::index::{BlockIndex, Options, RadixIndex};
use pyo3::prelude::*;

use super::buffer::hashes;
use super::error::OrRaise;
use super::index;
use super::overlap::{OverlapScores, facts};
use super::query::overlaps;

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
        Ok(overlaps(py, &self.index, locals.as_slice(), early_exit, facts))
    }

    fn apply_event(
        &self,
        py: Python<'_>,
        worker_id: u64,
        kv_cache_event_bytes: &[u8],
    ) -> PyResult<()> {
        py.detach(|| index::apply_event(&self.index, worker_id, kv_cache_event_bytes)).or_raise(py)
    }

    fn remove_worker(&self, py: Python<'_>, worker_id: u64) -> usize {
        py.detach(|| self.index.remove_instance(worker_id))
    }

    #[pyo3(signature = (worker_id, dp_rank=None))]
    fn clear_all_blocks(&self, py: Python<'_>, worker_id: u64, dp_rank: Option<u32>) -> usize {
        py.detach(|| index::clear(&self.index, worker_id, dp_rank))
    }

    fn dump_tree_as_events(&self, py: Python<'_>) -> Vec<String> {
        py.detach(|| {
            kvflash_core::catalog::dump_events(&self.index).map(|event| event.to_json()).collect()
        })
    }

    fn block_count(&self, worker_id: u64, dp_rank: u32) -> usize {
        self.index.blocks(Worker::new(worker_id, dp_rank))
    }
}
