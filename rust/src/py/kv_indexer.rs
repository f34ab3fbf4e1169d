//! The index with a block size: events in, overlaps of prompts out.

use std::path::PathBuf;

use kvflash_core::catalog::{apply_router_event, dump_events, store_blocks};
use kvflash_core::codec::router::RouterEvent;
use kvflash_core::error::Error;
use kvflash_core::hash;
use kvflash_core::ids::{InstanceId, Worker};
use kvflash_core::index::{Block, CountMode, Limits, Match, Options, RadixIndex};
use pyo3::prelude::*;
use pyo3::pybacked::{PyBackedBytes, PyBackedStr};
use pyo3::types::{PyDict, PyList};

use super::buffer::{Room, hashes, tokens};
use super::error::{Raised, invalid, released};
use super::index;
use super::overlap::{OverlapScores, facts};
use super::prompt_keys::{digests, media};
use super::query::{SHORT_TOKENS, Shape, detached, matches, overlaps};
use super::snapshot;
use super::time::{Time, ttl_ms};

/// Which worker holds which blocks, as reported by engines.
///
/// Compatible with NVIDIA Dynamo's class of this name. Its methods are synchronous, because they
/// never wait; results of queries can be awaited all the same (see OverlapScores).
///
/// Consistency: a query sees every change whose call returned before it began; it never waits for
/// writers. Safe to use from many threads.
///
/// Args:
///     block_size: Tokens in a block of the engines.
///     count_mode: Meaning of a repeated store of a name: ``copies``: the block is held until it
///         was removed as often, as vLLM publishes; ``set``: no effect.
///     max_blocks: Blocks that the index may hold; further stores are refused. 0: no limit.
///     capacity_blocks: Blocks kept per worker; above it the least recently stored ones are
///         dropped. 0: no limit.
///     max_bytes: Memory that the index may occupy; near it the least recently stored blocks of all
///         workers are dropped. 0: no limit; the minimum is 512 KiB.
///     ttl_s: Seconds for which a block is kept after its worker last stored it, or any block after
///         it; from 0.001. It is removed at most 1/64 of that and 2 ms later. None: until it is
///         removed.
///     clock: Returns monotonic seconds, for ``ttl_s`` in tests and simulations; default: the
///         machine's monotonic clock.
///
/// Raises:
///     InvalidArgumentError: Block size 0, an unknown count mode, a time out of range, or a clock
///         without ``ttl_s``.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct KvIndexer {
    index: RadixIndex,
    block_size: u32,
    /// Set if blocks expire.
    time: Option<Time>,
}

/// A router event's JSON, from a dump or as received.
#[derive(FromPyObject)]
enum Json {
    Text(PyBackedStr),
    Bytes(PyBackedBytes),
}

impl Json {
    fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Text(text) => text.as_bytes(),
            Self::Bytes(bytes) => bytes,
        }
    }
}

impl KvIndexer {
    /// The index with expired blocks removed.
    fn at_now(&self, py: Python<'_>) -> Raised<&RadixIndex> {
        if let Some(time) = &self.time {
            time.tell(py, &self.index)?;
        }
        Ok(&self.index)
    }
}

#[pymethods]
impl KvIndexer {
    #[new]
    #[pyo3(signature = (
        block_size, *, count_mode="copies", max_blocks=0, capacity_blocks=0, max_bytes=0, ttl_s=None,
        clock=None
    ))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        block_size: u32,
        count_mode: &str,
        max_blocks: usize,
        capacity_blocks: usize,
        max_bytes: usize,
        ttl_s: Option<f64>,
        clock: Option<Py<PyAny>>,
    ) -> Raised<Self> {
        let block_size = hash::check_block_size(block_size)?;
        let count_mode = CountMode::from_name(count_mode).ok_or_else(|| {
            invalid(format!("count_mode must be \"copies\" or \"set\", got {count_mode:?}"))
        })?;
        if clock.is_some() && ttl_s.is_none() {
            return Err(invalid("clock needs ttl_s, which is missing"));
        }
        let ttl_ms = ttl_s.map(ttl_ms).transpose()?.unwrap_or(0);
        let limits = Limits { max_blocks, capacity_blocks, max_bytes, ttl_ms, ..Limits::default() };
        let options = Options { count_mode, limits, hash_seed: rand::random() };
        let time = (ttl_ms > 0).then(|| Time::new(clock));
        Ok(Self { index: RadixIndex::new(options), block_size, time })
    }

    /// Tokens in a block.
    fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Apply one event of a worker; see RadixTree.apply_event.
    fn apply_event(
        &self,
        py: Python<'_>,
        worker_id: u64,
        kv_cache_event_bytes: &[u8],
    ) -> Raised<()> {
        let index = self.at_now(py)?;
        released(py, || index::apply_event(index, worker_id, kv_cache_event_bytes))
    }

    /// Apply router events in order, with one release of the GIL.
    ///
    /// Args:
    ///     events: JSON as ``dump_tree_as_events`` and GET /dump give them: ``{"worker_id",
    ///         "event", "storage_tier"}``.
    ///
    /// Returns:
    ///     The number of events: all.
    ///
    /// Raises:
    ///     DecodeError: Not such an event; names its place in the list. Earlier events stay
    ///         applied.
    ///     InvalidArgumentError: As apply_event, likewise.
    fn apply_events(&self, py: Python<'_>, events: Vec<Json>) -> Raised<usize> {
        let index = self.at_now(py)?;
        released(py, || {
            for (at, json) in events.iter().enumerate() {
                let event = RouterEvent::from_json(json.as_bytes());
                let applied = event.and_then(|event| apply_router_event(index, &event));
                applied.map_err(|error| match error {
                    Error::Decode { offset, reason } => {
                        Error::decode(offset, format!("events[{at}]: {reason}"))
                    }
                    other => Error::invalid(format!("events[{at}]: {other}")),
                })?;
            }
            Ok(events.len())
        })
    }

    /// Record that a worker holds a chain of blocks.
    ///
    /// Args:
    ///     worker_id: The engine instance.
    ///     block_hashes: The engine's names of the blocks, in prompt order; 64 bits.
    ///     local_hashes: Local block hashes, one per block.
    ///     parent_hash: The engine's name of the block before the first; None at a prompt's start.
    ///     dp_rank: Data-parallel rank within the instance.
    ///     tier: device, host_pinned, disk, external, or an engine's synonym.
    ///     lora_name: Adapter that the local hashes include; part of dumps.
    ///     cache_salt: Salt that they include; part of dumps.
    ///
    /// Returns:
    ///     Blocks that were not held under these names before.
    ///
    /// Raises:
    ///     InvalidArgumentError: Lists of different length, an unknown parent, or a repeated block;
    ///         nothing is stored.
    ///
    /// Cost: O(blocks); releases the GIL. Buffers of 64-bit integers are not copied.
    #[pyo3(signature = (
        worker_id, block_hashes, local_hashes, parent_hash=None, dp_rank=0, tier="device", *,
        lora_name=None, cache_salt=None
    ))]
    #[allow(clippy::too_many_arguments)]
    fn store(
        &self,
        py: Python<'_>,
        worker_id: u64,
        block_hashes: &Bound<'_, PyAny>,
        local_hashes: &Bound<'_, PyAny>,
        parent_hash: Option<&Bound<'_, PyAny>>,
        dp_rank: u32,
        tier: &str,
        lora_name: Option<&str>,
        cache_salt: Option<&str>,
    ) -> Raised<u32> {
        let (worker, tier) = (Worker::new(worker_id, dp_rank), index::tier(tier)?);
        let names = hashes("block_hashes", block_hashes)?;
        let locals = hashes("local_hashes", local_hashes)?;
        let parent = parent_hash.map(one_hash).transpose()?;
        let (names, locals) = (names.as_slice(), locals.as_slice());
        if names.len() != locals.len() {
            let (names, locals) = (names.len(), locals.len());
            return Err(invalid(format!(
                "block_hashes and local_hashes must be of one length, got {names} and {locals}"
            )));
        }
        let seed = hash::identity_seed(lora_name, cache_salt);
        let index = self.at_now(py)?;
        released(py, || {
            let blocks: Vec<Block> = names
                .iter()
                .zip(locals)
                .map(|(&engine_hash, &local_hash)| Block { engine_hash, local_hash })
                .collect();
            let outcome = store_blocks(index, worker, tier, parent, seed, &blocks)?;
            Ok(outcome.added + outcome.moved)
        })
    }

    /// Record that a worker evicted blocks, by name; unknown names are skipped.
    ///
    /// Returns:
    ///     Blocks that were held and are now removed.
    #[pyo3(signature = (worker_id, block_hashes, dp_rank=0, tier="device"))]
    fn remove(
        &self,
        py: Python<'_>,
        worker_id: u64,
        block_hashes: &Bound<'_, PyAny>,
        dp_rank: u32,
        tier: &str,
    ) -> Raised<u32> {
        let (worker, tier) = (Worker::new(worker_id, dp_rank), index::tier(tier)?);
        let names = hashes("block_hashes", block_hashes)?;
        let (index, names) = (self.at_now(py)?, names.as_slice());
        Ok(py.detach(|| index.remove(worker, tier, names).removed))
    }

    /// Count, per worker, the leading blocks that it holds.
    ///
    /// Args:
    ///     local_hashes: Local block hashes in prompt order.
    ///     early_exit: Stop when only one worker is left, and report the depth reached so far.
    ///
    /// Raises:
    ///     InvalidArgumentError: A hash outside 64 bits, by index and value.
    ///
    /// Cost: one probe per branching point plus a comparison of the blocks; releases the GIL for
    /// long prompts.
    #[pyo3(signature = (local_hashes, early_exit=false))]
    fn find_matches(
        &self,
        py: Python<'_>,
        local_hashes: &Bound<'_, PyAny>,
        early_exit: bool,
    ) -> Raised<OverlapScores> {
        let locals = hashes("local_hashes", local_hashes)?;
        Ok(overlaps(py, self.at_now(py)?, locals.as_slice(), early_exit, facts))
    }

    /// Hash a prompt and count, per worker, the leading blocks that it holds.
    ///
    /// Args:
    ///     token_ids: Token ids, u32; buffers of unsigned 32-bit integers are not copied.
    ///     lora_name: LoRA adapter of the prompt.
    ///     cache_salt: Cache salt of the prompt.
    ///     mm: Multimodal items, as for compute_block_hash_for_seq; shape [items].
    ///     embeds: Digests of the prompt's embeddings, likewise; shape [blocks].
    ///
    /// Raises:
    ///     InvalidArgumentError: A token outside u32, by index and value, or an invalid item or
    ///         digest, by index and field.
    ///
    /// Cost: O(tokens), plus that of find_matches; releases the GIL for long prompts.
    #[pyo3(signature = (token_ids, lora_name=None, cache_salt=None, *, mm=None, embeds=None))]
    fn find_matches_for_request(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        lora_name: Option<&str>,
        cache_salt: Option<&str>,
        mm: Option<&Bound<'_, PyAny>>,
        embeds: Option<&Bound<'_, PyAny>>,
    ) -> Raised<OverlapScores> {
        let (media, embeds) = (media(mm)?, digests(embeds)?);
        let shape = Shape::new(self.block_size, lora_name, cache_salt);
        let ids = tokens("token_ids", token_ids)?;
        let ids = ids.as_slice();
        let index = self.at_now(py)?;
        Ok(detached(py, ids.len() > SHORT_TOKENS, || {
            shape.overlaps(index, ids, (&media, &embeds), facts)
        }))
    }

    /// As find_matches_for_request for many prompts, with one release of the GIL.
    ///
    /// Returns:
    ///     One result per prompt, in order; they may reflect different moments.
    ///
    /// Cost: that of find_matches_for_request for each prompt; common work is shared by some
    /// dozens.
    #[pyo3(signature = (requests, lora_name=None, cache_salt=None))]
    fn find_many(
        &self,
        py: Python<'_>,
        requests: &Bound<'_, PyList>,
        lora_name: Option<&str>,
        cache_salt: Option<&str>,
    ) -> Raised<Vec<OverlapScores>> {
        let shape = Shape::new(self.block_size, lora_name, cache_salt);
        let ids =
            requests.iter().map(|one| tokens("token_ids", &one)).collect::<Raised<Vec<_>>>()?;
        let ids: Vec<_> = ids.iter().map(|one| one.as_slice()).collect();
        let index = self.at_now(py)?;
        Ok(py.detach(|| shape.overlaps_of_many(index, &ids, facts)))
    }

    /// The ``k`` workers with the deepest match: (worker id, dp rank, blocks).
    ///
    /// Deepest first, ties in ascending order of worker; device only.
    fn top(
        &self,
        py: Python<'_>,
        local_hashes: &Bound<'_, PyAny>,
        k: usize,
    ) -> Raised<Vec<(u64, u32, u32)>> {
        let locals = hashes("local_hashes", local_hashes)?;
        Ok(matches(py, self.at_now(py)?, locals.as_slice(), false, |found| {
            found.keep_top(k);
            let deepest = found.as_slice().iter().filter(|found| found.device > 0);
            deepest
                .map(|found| (found.worker.instance_id, found.worker.dp_rank, found.device))
                .collect()
        }))
    }

    /// As find_matches, into the caller's memory, without creating objects.
    ///
    /// Args:
    ///     local_hashes: Local block hashes in prompt order.
    ///     worker_ids: Writable, contiguous buffer of u64 for the instances.
    ///     dp_ranks: Likewise, of u32, for their ranks.
    ///     depths: Likewise, of u32, for the leading blocks on the device.
    ///
    /// Returns:
    ///     Number of entries written, in no particular order. If the shortest buffer is too small,
    ///     only the deepest matches are written.
    ///
    /// Raises:
    ///     InvalidArgumentError: A buffer of another type, or a read-only one.
    fn find_matches_into(
        &self,
        py: Python<'_>,
        local_hashes: &Bound<'_, PyAny>,
        worker_ids: &Bound<'_, PyAny>,
        dp_ranks: &Bound<'_, PyAny>,
        depths: &Bound<'_, PyAny>,
    ) -> Raised<usize> {
        let locals = hashes("local_hashes", local_hashes)?;
        let ids = Room::<u64>::of("worker_ids", worker_ids)?;
        let ranks = Room::<u32>::of("dp_ranks", dp_ranks)?;
        let depths = Room::<u32>::of("depths", depths)?;
        let room = ids.len().min(ranks.len()).min(depths.len());
        Ok(matches(py, self.at_now(py)?, locals.as_slice(), false, |found| {
            let held = |found: &&Match| found.device > 0;
            if found.as_slice().iter().filter(held).count() > room {
                found.keep_top(room);
            }
            let mut count = 0;
            for found in found.as_slice().iter().filter(held) {
                ids.write(count, found.worker.instance_id);
                ranks.write(count, found.worker.dp_rank);
                depths.write(count, found.device);
                count += 1;
            }
            count
        }))
    }

    /// Forget all ranks of an instance. Returns the number of ranks.
    fn remove_worker(&self, py: Python<'_>, worker_id: u64) -> usize {
        py.detach(|| self.index.remove_instance(worker_id))
    }

    /// Drop the blocks of an instance (or one rank), which stays registered. Returns their number.
    #[pyo3(signature = (worker_id, dp_rank=None))]
    fn clear_all_blocks(
        &self,
        py: Python<'_>,
        worker_id: u64,
        dp_rank: Option<u32>,
    ) -> Raised<usize> {
        let index = self.at_now(py)?;
        Ok(py.detach(|| index::clear(index, worker_id, dp_rank)))
    }

    /// All blocks as JSON router events, for ``apply_events``; see RadixTree.
    fn dump_tree_as_events(&self, py: Python<'_>) -> Raised<Vec<String>> {
        let index = self.at_now(py)?;
        Ok(py.detach(|| dump_events(index).map(|event| event.to_json()).collect()))
    }

    /// Write all blocks to a file, atomically.
    ///
    /// The data is written beside ``path``, then renamed over it.
    ///
    /// Returns:
    ///     Written ``workers``, ``blocks`` and ``bytes``.
    ///
    /// Raises:
    ///     OSError: The file system's error; ``path`` is unchanged.
    ///     InvalidArgumentError: ``path`` does not name a file.
    ///
    /// Consistency: each worker is saved as of one moment, workers as of different ones. Queries go
    /// on; events wait while the names of one worker are copied.
    ///
    /// Cost: 16 bytes per block, and memory for two copies of the largest worker; releases the GIL.
    fn save_snapshot<'py>(&self, py: Python<'py>, path: PathBuf) -> Raised<Bound<'py, PyDict>> {
        snapshot::save(py, self.at_now(py)?, self.block_size, &path)
    }

    /// Load a snapshot from a file, before events of its workers are applied.
    ///
    /// Returns:
    ///     ``workers`` and ``blocks`` that were loaded; ``lost``: (worker id, dp rank, cause) of
    ///     workers that were not loaded: damaged, truncated, refused by the index, or already
    ///     holding blocks; ``cut``: whether the file ended early; ``created_ms``: when it was
    ///     saved, in milliseconds since 1970.
    ///
    /// Raises:
    ///     InvalidArgumentError: Not a snapshot, a damaged header, another version or block size;
    ///         names field, expected and found. Nothing is loaded.
    ///     OSError: The file system's error.
    ///
    /// Cost: O(blocks), and memory for the largest worker; releases the GIL.
    fn load_snapshot<'py>(&self, py: Python<'py>, path: PathBuf) -> Raised<Bound<'py, PyDict>> {
        snapshot::restore(py, self.at_now(py)?, self.block_size, &path)
    }

    /// Known workers as (worker id, dp rank), ascending.
    fn workers(&self, py: Python<'_>) -> Vec<(InstanceId, u32)> {
        py.detach(|| index::workers(&self.index))
    }

    /// Blocks that a worker holds, all tiers.
    #[pyo3(signature = (worker_id, dp_rank=0))]
    fn block_count(&self, py: Python<'_>, worker_id: u64, dp_rank: u32) -> Raised<usize> {
        let index = self.at_now(py)?;
        Ok(py.detach(|| index.blocks(Worker::new(worker_id, dp_rank))))
    }

    /// Sizes and counters; monotonic ones end in ``_total``, ``bytes`` is its memory.
    fn stats<'py>(&self, py: Python<'py>) -> Raised<Bound<'py, PyDict>> {
        index::stats(py, self.at_now(py)?)
    }
}

pub(super) fn one_hash(value: &Bound<'_, PyAny>) -> Raised<u64> {
    let list = PyList::new(value.py(), [value])?;
    hashes("parent_hash", list.as_any()).map(|one| one.as_slice()[0])
}
