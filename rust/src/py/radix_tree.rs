//! The bare index as a Python class: events in as JSON, overlaps out.

use kvflash_core::ids::Worker;
use kvflash_core::index::{Options, RadixIndex};
use pyo3::prelude::*;

use super::buffer::hashes;
use super::error::{Raised, released};
use super::index;
use super::overlap::{OverlapScores, facts};
use super::query::overlaps;

/// Which worker holds which blocks, by hashes only; KvIndexer is the same with a block size.
///
/// Consistency: a query sees every event whose call returned before it began; it never waits for
/// writers. Safe to use from many threads.
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

    /// Count, per worker, the leading blocks that it holds.
    ///
    /// Args:
    ///     sequence: Local block hashes in prompt order.
    ///     early_exit: Stop when only one worker is left, and report the depth reached so far.
    ///
    /// Raises:
    ///     InvalidArgumentError: A hash outside 64 bits, by index and value.
    ///
    /// Cost: one probe per branching point plus a comparison of the blocks; releases the GIL for
    /// long prompts.
    #[pyo3(signature = (sequence, early_exit=false))]
    fn find_matches(
        &self,
        py: Python<'_>,
        sequence: &Bound<'_, PyAny>,
        early_exit: bool,
    ) -> Raised<OverlapScores> {
        let locals = hashes("sequence", sequence)?;
        Ok(overlaps(py, &self.index, locals.as_slice(), early_exit, facts))
    }

    /// Apply one event of a worker.
    ///
    /// Args:
    ///     worker_id: The engine instance.
    ///     kv_cache_event_bytes: JSON: ``{"event_id", "data": {"stored": ...} | {"removed": ...} |
    ///         "cleared", "dp_rank"}``.
    ///
    /// Raises:
    ///     DecodeError: Not such an event.
    ///     InvalidArgumentError: An unknown parent, or a repeated block; nothing of the event is
    ///         stored.
    fn apply_event(
        &self,
        py: Python<'_>,
        worker_id: u64,
        kv_cache_event_bytes: &[u8],
    ) -> Raised<()> {
        released(py, || index::apply_event(&self.index, worker_id, kv_cache_event_bytes))
    }

    /// Forget all ranks of an instance. Returns the number of ranks.
    fn remove_worker(&self, py: Python<'_>, worker_id: u64) -> usize {
        py.detach(|| self.index.remove_instance(worker_id))
    }

    /// Drop the blocks of an instance (or one rank), which stays registered. Returns their number.
    #[pyo3(signature = (worker_id, dp_rank=None))]
    fn clear_all_blocks(&self, py: Python<'_>, worker_id: u64, dp_rank: Option<u32>) -> usize {
        py.detach(|| index::clear(&self.index, worker_id, dp_rank))
    }

    /// All blocks as JSON router events, which recreate the state in an empty tree.
    ///
    /// Chains are dumped as stored events. A block that is not held but is needed by its successors
    /// is stored, and then removed by an event at the end of its worker's events.
    fn dump_tree_as_events(&self, py: Python<'_>) -> Vec<String> {
        py.detach(|| {
            kvflash_core::catalog::dump_events(&self.index).map(|event| event.to_json()).collect()
        })
    }

    /// Blocks that a worker holds, all tiers.
    fn block_count(&self, worker_id: u64, dp_rank: u32) -> usize {
        self.index.blocks(Worker::new(worker_id, dp_rank))
    }
}
