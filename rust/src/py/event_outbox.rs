//! A publisher's work before its sockets: check, encode, number, keep for replay.

use std::time::{Duration, Instant};

use kvflash_publish::blocks::Blocks;
use kvflash_publish::items::Part;
use kvflash_publish::outbox::Settings;
use kvflash_publish::publisher::Publisher;
use kvflash_publish::replay::Request;
use kvflash_publish::wire::Shape;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyBool, PyBytes, PyDict, PyString};

use super::buffer::{hashes, tokens};
use super::error::{Fault, Raised, invalid};
use super::kv_indexer::one_hash;

/// Sequence number (or the end marker) and payload.
type Batch = (u64, Py<PyBytes>);

fn refused(field: &str, must: &str, value: &Bound<'_, PyAny>) -> Fault {
    let shown = value.repr().map_or_else(|_| "?".to_owned(), |text| text.to_string());
    invalid(format!("{field} must be {must}, got {shown}"))
}

/// A name; "" means none.
fn name(field: &str, value: Option<&Bound<'_, PyAny>>) -> Raised<Option<String>> {
    let Some(value) = value else { return Ok(None) };
    let text = value.cast::<PyString>().map_err(|_| refused(field, "text", value))?;
    Ok(Some(text.to_string()).filter(|text| !text.is_empty()))
}

/// An engine's number of a LoRA adapter; 0 means none.
fn lora_number(value: Option<&Bound<'_, PyAny>>) -> Raised<u64> {
    let Some(value) = value else { return Ok(0) };
    let number = value.extract().ok().filter(|_| !value.is_instance_of::<PyBool>());
    number.ok_or_else(|| refused("lora_id", "an integer in 0..=9223372036854775807", value))
}

#[derive(FromPyObject)]
struct MediaInfo<'py> {
    #[pyo3(item)]
    mm_objects: Vec<Bound<'py, PyAny>>,
}

#[derive(FromPyObject)]
struct MediaObject {
    #[pyo3(item)]
    mm_hash: u64,
    #[pyo3(item, default)]
    offsets: Option<Vec<[i64; 2]>>,
}

/// The parts of a block that multimodal items cover.
fn media(block: usize, info: &Bound<'_, PyAny>, block_size: u32) -> Raised<Vec<Part>> {
    let mut parts = Vec::new();
    if !info.is_truthy()? {
        return Ok(parts);
    }
    let wanted =
        "None or {\"mm_objects\": [{\"mm_hash\": u64, \"offsets\": [[start, end], ...]}, ...]}";
    let refuse = || refused(&format!("block_mm_infos[{block}]"), wanted, info);
    let objects = info.extract::<MediaInfo<'_>>().map_err(|_| refuse())?.mm_objects;
    for (item, object) in objects.iter().enumerate() {
        let MediaObject { mm_hash: hash, offsets } = object.extract().map_err(|_| refuse())?;
        // Without offsets the item fills the block.
        let whole = vec![[0, i64::from(block_size)]];
        let offsets = offsets.filter(|offsets| !offsets.is_empty()).unwrap_or(whole);
        parts.extend(offsets.into_iter().map(|[start, end]| Part { item, hash, start, end }));
    }
    Ok(parts)
}

/// The events of one data parallel rank on their way to Python's sockets.
///
/// Any thread puts events. One thread polls ``fileno`` and its sockets for at most ``wait_ms``,
/// hands requests to ``ask``, and sends what ``take`` and ``replies`` return, until ``is_over``.
///
/// Args:
///     block_size: Tokens in a block, at least 1.
///     shape: Event format: ``tagged``, the maps of vLLM 0.27, ``positional``, the arrays of 0.22,
///         or ``own``, maps with ``cache_salt`` in place of a first extra key.
///     dp_rank: Rank in every batch.
///     tick_s: How long the first event of a batch waits for more events.
///     event_bytes_max: Size limit of an event with several blocks.
///     batch_bytes_max: A batch is closed at this many bytes, or 1,024 events.
///     pending_bytes_max: Encoded events that may wait; above it calls block.
///     ring_batches: Batches kept for replay.
///     ring_bytes: Memory for these batches; the oldest are dropped first.
///
/// Raises:
///     InvalidArgumentError: The block size is 0.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct EventOutbox {
    inner: Publisher,
    block_size: u32,
}

#[pymethods]
impl EventOutbox {
    #[new]
    #[pyo3(signature = (
        block_size, *, shape="own", dp_rank=None, tick_s=0.001, event_bytes_max=8_388_608,
        batch_bytes_max=1_048_576, pending_bytes_max=16_777_216, ring_batches=10_000,
        ring_bytes=67_108_864
    ))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        block_size: u32,
        shape: &str,
        dp_rank: Option<u32>,
        tick_s: f64,
        event_bytes_max: usize,
        batch_bytes_max: usize,
        pending_bytes_max: usize,
        ring_batches: usize,
        ring_bytes: usize,
    ) -> Raised<Self> {
        let tick = Duration::try_from_secs_f64(tick_s)
            .map_err(|error| invalid(format!("tick_s: {error}")))?;
        let shape = match shape {
            "own" => Shape::Own,
            "tagged" => Shape::Tagged,
            "positional" => Shape::Positional,
            _ => {
                return Err(invalid(format!(
                    "shape must be own, tagged or positional, got {shape:?}"
                )));
            }
        };
        let settings = Settings {
            dp_rank,
            tick,
            batch_bytes_max,
            pending_bytes_max,
            ring_batches,
            ring_bytes,
        };
        Ok(Self {
            inner: Publisher::new(shape, block_size, event_bytes_max, settings)?,
            block_size,
        })
    }

    /// Queue stored blocks; see ``KvEventPublisher.publish_stored``.
    ///
    /// Returns:
    ///     A message about dropped blocks, if any.
    #[pyo3(signature = (
        token_ids, num_block_tokens, block_hashes, lora_id=None, parent_hash=None,
        block_mm_infos=None, *, lora_name=None, cache_salt=None, medium=None
    ))]
    #[allow(clippy::too_many_arguments)]
    fn store(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        num_block_tokens: &Bound<'_, PyAny>,
        block_hashes: &Bound<'_, PyAny>,
        lora_id: Option<&Bound<'_, PyAny>>,
        parent_hash: Option<&Bound<'_, PyAny>>,
        block_mm_infos: Option<&Bound<'_, PyAny>>,
        lora_name: Option<&Bound<'_, PyAny>>,
        cache_salt: Option<&Bound<'_, PyAny>>,
        medium: Option<&Bound<'_, PyAny>>,
    ) -> Raised<Option<String>> {
        let block_hashes = hashes("block_hashes", block_hashes)?;
        let sizes = tokens("num_block_tokens", num_block_tokens)?;
        let sizes: Vec<usize> = sizes.as_slice().iter().map(|&size| size as usize).collect();
        let token_ids = tokens("token_ids", token_ids)?;
        let parent_hash = parent_hash.map(one_hash).transpose()?;
        let items = block_mm_infos.map(|infos| {
            let each = infos.try_iter().map_err(|_| refused("block_mm_infos", "a list", infos))?;
            let each = each.enumerate();
            each.map(|(block, info)| media(block, &info?, self.block_size))
                .collect::<Raised<Vec<_>>>()
        });
        let items = items.transpose()?;
        let lora_name = name("lora_name", lora_name)?;
        let cache_salt = name("cache_salt", cache_salt)?;
        let medium = name("medium", medium)?;
        let blocks = Blocks {
            token_ids: token_ids.as_slice(),
            sizes: Some(&sizes),
            block_hashes: block_hashes.as_slice(),
            parent_hash,
            lora_id: lora_number(lora_id)?,
            lora_name: lora_name.as_deref(),
            cache_salt: cache_salt.as_deref(),
            medium: medium.as_deref(),
            items: None,
        };
        Ok(py.detach(|| self.inner.store(&blocks, items.as_deref()))?)
    }

    /// Queue removed blocks.
    #[pyo3(signature = (block_hashes, *, medium=None))]
    fn remove(
        &self,
        py: Python<'_>,
        block_hashes: &Bound<'_, PyAny>,
        medium: Option<&Bound<'_, PyAny>>,
    ) -> Raised<()> {
        let hashes = hashes("block_hashes", block_hashes)?;
        let (block_hashes, medium) = (hashes.as_slice(), name("medium", medium)?);
        Ok(py.detach(|| self.inner.remove(block_hashes, medium.as_deref()))?)
    }

    /// Queue that the cache is empty.
    fn clear(&self, py: Python<'_>) -> Raised<()> {
        Ok(py.detach(|| self.inner.clear())?)
    }

    /// Queue encoded events, which stay together.
    ///
    /// Raises:
    ///     ClosedError: It is closed, or belongs to the parent of a forked process.
    fn put(&self, py: Python<'_>, events: Vec<Vec<u8>>) -> Raised<()> {
        Ok(py.detach(|| self.inner.outbox.put(events))?)
    }

    /// Close the batch of the waiting events; never waits.
    fn cut(&self, py: Python<'_>) {
        py.detach(|| self.inner.outbox.cut());
    }

    /// Wait until everything queued before is sent; False if that took longer.
    fn flush(&self, py: Python<'_>, timeout_s: f64) -> Raised<bool> {
        let timeout = Duration::try_from_secs_f64(timeout_s.max(0.0)).unwrap_or(Duration::MAX);
        let timeout = timeout.min(Duration::from_secs(86_400));
        Ok(py.detach(|| self.inner.outbox.flush(timeout))? == 0)
    }

    /// Accept no more; the thread sends what is queued. Raises ClosedError in a fork.
    fn close(&self, py: Python<'_>) -> Raised<()> {
        Ok(py.detach(|| self.inner.outbox.close())?)
    }

    /// A descriptor that is readable when the thread has work.
    fn fileno(&self) -> i32 {
        self.inner.outbox.descriptor()
    }

    /// How long the thread may wait; None: until the descriptor is readable.
    fn wait_ms(&self) -> Option<u64> {
        let wait = self.inner.outbox.wait(Instant::now())?;
        // Rounded up, because zero would busy-wait.
        Some(wait.as_micros().div_ceil(1_000) as u64)
    }

    /// Number and payload of the next batch; the previous one then counts as sent.
    fn take(&self, py: Python<'_>) -> Option<Batch> {
        let (number, payload) = py.detach(|| self.inner.outbox.take(Instant::now()))?;
        Some((number, PyBytes::new(py, &payload).unbind()))
    }

    /// Process a request ``[client, b"", number]`` for a replay; False if it is not one.
    fn ask(&self, frames: Vec<Vec<u8>>) -> bool {
        self.inner.outbox.ask(&frames) != Request::Malformed
    }

    /// ``[client, number, payload]`` of the batches to replay now.
    fn replies(&self, py: Python<'_>) -> Vec<[Py<PyBytes>; 3]> {
        let bytes = |bytes: &[u8]| PyBytes::new(py, bytes).unbind();
        let replies = self.inner.outbox.replies();
        let frames = replies.iter().map(|reply| {
            let [client, _, _, number, payload] = reply.frames(b"");
            [bytes(client), bytes(number), bytes(payload)]
        });
        frames.collect()
    }

    /// Whether it is closed and everything is handed over.
    fn is_over(&self) -> bool {
        self.inner.outbox.is_over()
    }

    /// The thread has ended, for whatever reason; release all waiting calls.
    fn end(&self, py: Python<'_>) {
        py.detach(|| self.inner.outbox.end());
    }

    /// Counters and gauges; names include units.
    fn stats<'py>(&self, py: Python<'py>) -> Raised<Bound<'py, PyDict>> {
        let stats = self.inner.stats();
        let out = stats.outbox;
        Ok([
            ("stored_blocks_total", stats.stored_blocks),
            ("removed_blocks_total", stats.removed_blocks),
            ("dropped_blocks_total", stats.dropped_blocks),
            ("open_item_blocks", stats.open_item_blocks),
            ("events_total", out.events),
            ("batches_total", out.batches),
            ("pending_events", out.pending_events),
            ("pending_bytes", out.pending_bytes),
            ("ring_batches", out.ring_batches),
            ("ring_bytes", out.ring_bytes),
            ("replays_total", out.replays),
            ("replays_refused_total", out.replays_refused),
        ]
        .into_py_dict(py)?)
    }
}
