//! The index for engines without events: it predicts that a worker holds what was sent there
//! recently.

use kvflash_core::hash;
use kvflash_core::ids::Worker;
use kvflash_core::index::{Limits, Options, RadixIndex};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::buffer::{hashes, tokens};
use super::error::Raised;
use super::index;
use super::overlap::{OverlapScores, predictions};
use super::query::{SHORT_TOKENS, Shape, detached, overlaps};
use super::time::{Time, ttl_ms};

/// Predicts which worker holds which blocks, from where requests were sent.
///
/// For engines that publish no events. A block counts for ``ttl_s`` seconds after the last request
/// that contained it was sent to the worker; queries do not extend this. Evictions in the engine go
/// unnoticed. Methods never wait; results can be awaited all the same (see OverlapScores).
///
/// Consistency: a query sees every decision whose call returned before it began, and none that had
/// expired by then. Safe to use from many threads.
///
/// Args:
///     block_size: Tokens in a block of the engines.
///     ttl_s: Seconds for which a prediction is valid; from 0.001.
///     capacity_blocks: Predicted blocks per worker; above it the oldest are dropped. 0: no limit.
///     clock: Returns monotonic seconds, for tests and simulations; default: the machine's
///         monotonic clock.
///
/// Raises:
///     InvalidArgumentError: Block size 0, or a time out of range.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct ApproxKvIndexer {
    index: RadixIndex,
    block_size: u32,
    time: Time,
}

#[pymethods]
impl ApproxKvIndexer {
    #[new]
    #[pyo3(signature = (block_size, ttl_s=120.0, *, capacity_blocks=0, clock=None))]
    fn new(
        block_size: u32,
        ttl_s: f64,
        capacity_blocks: usize,
        clock: Option<Py<PyAny>>,
    ) -> Raised<Self> {
        let block_size = hash::check_block_size(block_size)?;
        let predicted_ttl_ms = ttl_ms(ttl_s)?;
        let limits = Limits { predicted_ttl_ms, capacity_blocks, ..Limits::default() };
        let options = Options { limits, hash_seed: rand::random(), ..Options::default() };
        Ok(Self { index: RadixIndex::new(options), block_size, time: Time::new(clock) })
    }

    /// Tokens in a block.
    fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Record that a request was sent to a worker, which will soon hold its prompt.
    ///
    /// Returns:
    ///     Blocks that were not predicted for this worker before.
    ///
    /// Raises:
    ///     InvalidArgumentError: A token outside u32, by index and value.
    #[pyo3(signature = (token_ids, worker_id, dp_rank=0, lora_name=None, cache_salt=None))]
    fn process_routing_decision_for_request(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        worker_id: u64,
        dp_rank: u32,
        lora_name: Option<&str>,
        cache_salt: Option<&str>,
    ) -> Raised<usize> {
        let shape = Shape::new(self.block_size, lora_name, cache_salt);
        let ids = tokens("token_ids", token_ids)?;
        let ids = ids.as_slice();
        let worker = Worker::new(worker_id, dp_rank);
        self.time.tell(py, &self.index)?;
        Ok(py.detach(|| shape.hashed(ids, |locals| self.index.predict(worker, shape.seed, locals))))
    }

    /// Count, per worker, the leading blocks predicted.
    ///
    /// Args:
    ///     local_hashes: Local block hashes in prompt order.
    ///     early_exit: Has no effect here.
    #[pyo3(signature = (local_hashes, early_exit=false))]
    fn find_matches(
        &self,
        py: Python<'_>,
        local_hashes: &Bound<'_, PyAny>,
        early_exit: bool,
    ) -> Raised<OverlapScores> {
        // Accepted for callers that pass it to every index; predictions are always counted in full.
        let _ = early_exit;
        let locals = hashes("local_hashes", local_hashes)?;
        self.time.tell(py, &self.index)?;
        Ok(overlaps(py, &self.index, locals.as_slice(), false, predictions))
    }

    /// Hash a prompt and count, per worker, the leading blocks predicted.
    #[pyo3(signature = (token_ids, lora_name=None, cache_salt=None))]
    fn find_matches_for_request(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        lora_name: Option<&str>,
        cache_salt: Option<&str>,
    ) -> Raised<OverlapScores> {
        let shape = Shape::new(self.block_size, lora_name, cache_salt);
        let ids = tokens("token_ids", token_ids)?;
        let ids = ids.as_slice();
        self.time.tell(py, &self.index)?;
        Ok(detached(py, ids.len() > SHORT_TOKENS, || {
            shape.overlaps(&self.index, ids, (&[], &[]), predictions)
        }))
    }

    /// Forget all ranks of an instance. Returns the number of ranks.
    fn remove_worker(&self, py: Python<'_>, worker_id: u64) -> usize {
        py.detach(|| self.index.remove_instance(worker_id))
    }

    /// Drop the predictions of an instance (or one rank), which stays registered.
    #[pyo3(signature = (worker_id, dp_rank=None))]
    fn clear_all_blocks(&self, py: Python<'_>, worker_id: u64, dp_rank: Option<u32>) {
        py.detach(|| index::clear(&self.index, worker_id, dp_rank));
    }

    /// Known workers as (worker id, dp rank), ascending.
    fn workers(&self, py: Python<'_>) -> Vec<(u64, u32)> {
        py.detach(|| index::workers(&self.index))
    }

    /// Sizes and counters, as KvIndexer.stats; ``predicted`` counts blocks per worker.
    fn stats<'py>(&self, py: Python<'py>) -> Raised<Bound<'py, PyDict>> {
        self.time.tell(py, &self.index)?;
        index::stats(py, &self.index)
    }
}
