//! The event transport's side of the catalog: orders out, frames in.

use std::iter::once;
use std::sync::Arc;
use std::time::Duration;

use kvflash_core::catalog::{
    self, CatalogOptions, Command, EngineFacts, FrameOutcome, Identity, ListenerStatus, MAGIC,
    ModelKey, Registration, Source,
};
use kvflash_core::clock::SystemClock;
use kvflash_core::error::Error;
use kvflash_core::ids::Worker;
use kvflash_core::repair::Feed;
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use super::buffer::Bytes;
use super::error::{Fault, Raised, invalid};

/// Orders for the event transport, and the frames that it delivers.
///
/// Every service has one (``Indexer.catalog``, ``Frontend.catalog``). A standalone one serves no
/// queries; a worker uses it as its local index. Safe to use from many threads.
///
/// Args:
///     max_blocks: Blocks that one index may hold; further stores are refused. 0: no limit.
///     index_memory_bytes: Memory that one index may occupy; near it the least recently stored
///         blocks are dropped. 0: no limit.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct Catalog {
    pub(super) inner: Arc<catalog::Catalog>,
}

type Order = (&'static str, u64, String, Option<String>);
/// Model and tenant, instance, rank, blocks, digest, last batch.
type Told = ((String, String), u64, u32, usize, u64, Option<u64>);
type Verdict = (usize, &'static str, u64, u64);

fn sequence(bytes: &[u8]) -> Raised<u64> {
    bytes.try_into().map(u64::from_be_bytes).map_err(|_| {
        let message = format!("a sequence number has 8 bytes, got {}", bytes.len());
        Fault::from(Error::decode(0, message))
    })
}

/// Sequence number and payload of a message `[.., sequence, payload]`; engines differ in the parts
/// before. `None` for a message that is not a frame.
pub(super) fn parts<'py>(parts: &Bound<'py, PyList>) -> Option<(u64, Bytes<'py>)> {
    let before = parts.len().checked_sub(2)?;
    let head = Bytes::of(parts.get_item(before).ok()?).ok()?;
    let sequence = head.as_slice().try_into().map(u64::from_be_bytes).ok()?;
    Some((sequence, Bytes::of(parts.get_item(before + 1).ok()?).ok()?))
}

/// A publisher over ZMQ of which nothing more is known.
pub(super) fn registration(
    worker: Worker,
    key: ModelKey,
    block_size: u32,
    endpoint: String,
    replay_endpoint: Option<String>,
) -> Registration {
    Registration {
        worker,
        key,
        block_size: Some(block_size),
        endpoint,
        replay_endpoint,
        capacity_blocks: None,
        identity: Identity::default(),
        facts: EngineFacts::default(),
        source: Source::Zmq,
    }
}

/// Dump bytes returned at once. They are copied with the GIL held: about 0.1 ms.
const CHUNK_BYTES: usize = 1 << 20;

/// The bytes of a dump in chunks of up to 1 MiB; their concatenation is the input of ``restore``.
///
/// The first chunk is the format marker and the last one the end marker; the chunks in between may
/// be concatenated with those of other dumps.
///
/// Consistency: each publisher's share is from the moment when its first chunk was requested.
/// Cost: 16 bytes per block; a publisher's frames wait while its share is created. Releases the
/// GIL, except to copy a chunk.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct CatalogDump {
    left: Mutex<Left>,
}

/// The rest of a dump: of the current part, and the parts after it.
struct Left {
    encoded: bytes::Bytes,
    parts: Box<dyn Iterator<Item = bytes::Bytes> + Send>,
}

impl Left {
    fn next(&mut self) -> Option<bytes::Bytes> {
        if self.encoded.is_empty() {
            self.encoded = self.parts.next()?;
        }
        Some(self.encoded.split_to(CHUNK_BYTES.min(self.encoded.len())))
    }
}

#[pymethods]
impl CatalogDump {
    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> Option<Py<PyBytes>> {
        let chunk = py.detach(|| self.left.lock().next())?;
        Some(PyBytes::new(py, &chunk).unbind())
    }
}

#[pymethods]
impl Catalog {
    #[new]
    #[pyo3(signature = (*, max_blocks=33_554_432, index_memory_bytes=0))]
    fn new(max_blocks: usize, index_memory_bytes: usize) -> Self {
        let options =
            CatalogOptions { max_blocks, index_memory_bytes, ..CatalogOptions::default() };
        let inner = catalog::Catalog::new(options, Arc::new(SystemClock::default()));
        Self { inner: Arc::new(inner) }
    }

    /// Register a publisher.
    ///
    /// Returns:
    ///     Its number. A worker that is already registered at the same ``nats://`` or
    ///     ``jetstream://`` endpoint keeps its number.
    ///
    /// Raises:
    ///     ConflictError: Already registered at another endpoint, or with another block size.
    ///     InvalidArgumentError: An invalid endpoint, name or block size.
    ///     OverloadedError: The limit of publishers or models is reached.
    #[pyo3(signature = (instance_id, endpoint, *, model_name, block_size, tenant_id="default", dp_rank=0, replay_endpoint=None))]
    #[allow(clippy::too_many_arguments)]
    fn register(
        &self,
        py: Python<'_>,
        instance_id: u64,
        endpoint: String,
        model_name: String,
        block_size: u32,
        tenant_id: &str,
        dp_rank: u32,
        replay_endpoint: Option<String>,
    ) -> Raised<u64> {
        let (worker, tenant_id) = (Worker::new(instance_id, dp_rank), tenant_id.to_owned());
        let key = ModelKey { model_name, tenant_id };
        let registration = registration(worker, key, block_size, endpoint, replay_endpoint);
        Ok(py.detach(|| self.inner.register(registration))?.id)
    }

    /// Unregister an instance, or one rank of it, in any model, and drop its blocks.
    ///
    /// Returns:
    ///     False if it was unknown.
    #[pyo3(signature = (instance_id, dp_rank=None))]
    fn expel(&self, py: Python<'_>, instance_id: u64, dp_rank: Option<u32>) -> bool {
        py.detach(|| self.inner.expel(instance_id, dp_rank))
    }

    /// Forget a worker's blocks and stream position, before a dump replaces both.
    ///
    /// Returns:
    ///     False if it was unknown.
    fn forget(&self, py: Python<'_>, instance_id: u64, dp_rank: u32) -> bool {
        py.detach(|| self.inner.forget_worker(Worker::new(instance_id, dp_rank)))
    }

    /// (instance id, dp rank) of all workers that are registered or named by a dump.
    fn workers(&self) -> Vec<(u64, u32)> {
        let workers = self.inner.known_workers().into_iter();
        workers.map(|worker| (worker.instance_id, worker.dp_rank)).collect()
    }

    /// The publisher's process has restarted: forget its blocks and count from 0.
    fn restarted(&self, py: Python<'_>, publisher: u64) {
        if let Some(publisher) = self.inner.publisher(publisher) {
            py.detach(|| publisher.restarted());
        }
    }

    /// All blocks, with every publisher's stream position, as GET /dump's snapshot.
    ///
    /// Args:
    ///     instance_id: Only this instance.
    #[pyo3(signature = (instance_id=None))]
    fn dump(&self, py: Python<'_>, instance_id: Option<u64>) -> CatalogDump {
        let mut parts = py.detach(|| catalog::parts(&self.inner));
        parts.retain(|part| instance_id.is_none_or(|id| part.worker.instance_id == id));
        let parts = parts.into_iter().map(|part| part.encode().into());
        let parts = Box::new(parts.chain(once(bytes::Bytes::from_static(&[0; 8]))));
        let encoded = bytes::Bytes::from_static(&MAGIC);
        CatalogDump { left: Mutex::new(Left { encoded, parts }) }
    }

    /// Restore a dump: blocks and stream positions of publishers that have none yet.
    ///
    /// Returns:
    ///     ``(publishers, blocks, reasons)``: restored publishers, restored blocks, and the first
    ///     reasons for omissions.
    ///
    /// Raises:
    ///     DecodeError: Not a dump, or truncated; complete parts before the error are kept.
    ///
    /// Cost: O(blocks); releases the GIL.
    fn restore(&self, py: Python<'_>, dump: &[u8]) -> Raised<(usize, usize, Vec<String>)> {
        let restored = py.detach(|| catalog::restore(&self.inner, &mut &*dump, &mut |_| {}));
        let progress = restored.map_err(|error| Error::decode(0, error.to_string()))?;
        Ok((progress.publishers, progress.blocks, progress.skipped))
    }

    /// A summary of each worker's blocks; equal states have equal digests.
    ///
    /// Returns:
    ///     ``((model, tenant), instance id, dp rank, blocks, digest, last sequence number)``, in
    ///     order.
    ///
    /// Cost: O(n log n) for n blocks of a worker; releases the GIL.
    fn digests(&self, py: Python<'_>) -> Vec<Told> {
        py.detach(|| {
            let parts = catalog::parts(&self.inner);
            let told = parts.iter().flat_map(|part| {
                let ModelKey { model_name, tenant_id } = &part.model.key;
                part.digests().into_iter().map(|told| {
                    let model = (model_name.clone(), tenant_id.clone());
                    let Worker { instance_id, dp_rank } = told.worker;
                    (model, instance_id, dp_rank, told.blocks, told.digest, told.last_sequence)
                })
            });
            told.collect()
        })
    }

    /// Wait for the next order; without a timeout, forever.
    ///
    /// Returns:
    ///     ``("subscribe", publisher, endpoint, replay_endpoint)``; the same with ``"hold"``:
    ///     connect, but read nothing before ``("resume", publisher, "", None)``; ``("pause",
    ///     publisher, "", None)``: stop reading; ``("unsubscribe", publisher, "", None)``; or None
    ///     after ``timeout_s`` seconds, or after :meth:`close_orders`.
    #[pyo3(signature = (timeout_s=None))]
    fn next_order(&self, py: Python<'_>, timeout_s: Option<f64>) -> Option<Order> {
        let timeout = timeout_s.map(|timeout_s| {
            let timeout = Duration::try_from_secs_f64(timeout_s.max(0.0)).unwrap_or(Duration::MAX);
            timeout.min(Duration::from_secs(3_600))
        });
        let bare = |kind, publisher| (kind, publisher, String::new(), None);
        py.detach(|| self.inner.commands.next(timeout)).map(|command| match command {
            Command::Subscribe { publisher, endpoint, replay_endpoint, is_held } => {
                let kind = if is_held { "hold" } else { "subscribe" };
                (kind, publisher, endpoint, replay_endpoint)
            }
            Command::Resume(publisher) => bare("resume", publisher),
            Command::Pause(publisher) => bare("pause", publisher),
            Command::Unsubscribe(publisher) => bare("unsubscribe", publisher),
        })
    }

    /// End :meth:`next_order`: waiting and later calls return None at once.
    fn close_orders(&self) {
        self.inner.commands.close();
    }

    /// Apply messages in order.
    ///
    /// Args:
    ///     publisher: Number of the publisher.
    ///     messages: Multipart messages as lists; the last two parts are sequence (8 bytes, big
    ///         endian) and payload: bytes, or objects with a buffer such as ``zmq.Frame``.
    ///     replayed: Whether they come from a replay.
    ///
    /// Returns:
    ///     ``(consumed, outcome, first, last)``: ``applied`` if all were taken; ``gap`` if message
    ///     ``consumed`` shows that batches ``first..=last`` are missing: repair, then pass it
    ///     again; ``closed`` if the publisher is unregistered.
    ///
    /// Cost: one GIL release for all messages.
    #[pyo3(signature = (publisher, messages, *, replayed=false))]
    fn take(
        &self,
        py: Python<'_>,
        publisher: u64,
        messages: &Bound<'_, PyList>,
        replayed: bool,
    ) -> Raised<Verdict> {
        let Some(publisher) = self.inner.publisher(publisher) else {
            return Ok((0, "closed", 0, 0));
        };
        let all = messages.len();
        let mut owned: Vec<(usize, u64, Bytes<'_>)> = Vec::with_capacity(all);
        let mut malformed = Vec::new();
        for (at, message) in messages.iter().enumerate() {
            match parts(&message.cast_into::<PyList>().map_err(PyErr::from)?) {
                Some((sequence, payload)) => owned.push((at, sequence, payload)),
                None => malformed.push(at),
            }
        }
        let frames: Vec<(usize, u64, &[u8])> = owned
            .iter()
            .map(|(at, sequence, payload)| (*at, *sequence, payload.as_slice()))
            .collect();
        Ok(py.detach(|| {
            // Only those before the message that is to be passed again.
            let count = |end: usize| {
                let passed = malformed.iter().filter(|at| **at < end).count();
                publisher.count_malformed_messages(passed as u64);
            };
            for (at, sequence, payload) in frames {
                let outcome = if replayed {
                    publisher.replayed(sequence, payload)
                } else {
                    publisher.live(sequence, payload)
                };
                match outcome {
                    FrameOutcome::Applied => {}
                    FrameOutcome::Gap { from, to } => {
                        count(at);
                        return (at, "gap", from, to);
                    }
                    FrameOutcome::Closed => return (at, "closed", 0, 0),
                }
            }
            count(all);
            (all, "applied", 0, 0)
        }))
    }

    /// Give up on missing batches: the stream continues at ``sequence``.
    fn give_up(&self, py: Python<'_>, publisher: u64, sequence: u64) {
        if let Some(publisher) = self.inner.publisher(publisher) {
            py.detach(|| publisher.give_up(sequence));
        }
    }

    /// After a reconnect: check that this is still the stream that was applied so far.
    ///
    /// Args:
    ///     publisher: Number of the publisher.
    ///     message: First ``(sequence, payload)`` of a replay from the last applied sequence
    ///         number; None if the engine had nothing to replay.
    ///
    /// Returns:
    ///     False if the engine has restarted; its blocks are then already forgotten.
    #[pyo3(signature = (publisher, message=None))]
    fn verify(
        &self,
        py: Python<'_>,
        publisher: u64,
        message: Option<(Bound<'_, PyBytes>, Bound<'_, PyBytes>)>,
    ) -> Raised<bool> {
        let Some(publisher) = self.inner.publisher(publisher) else { return Ok(true) };
        let first = match &message {
            Some((head, payload)) => Some((sequence(head.as_bytes())?, payload.as_bytes())),
            None => None,
        };
        Ok(py.detach(|| publisher.verify(first)))
    }

    /// ``(next expected, last applied)`` sequence number; None if the publisher is unregistered.
    fn position(&self, publisher: u64) -> Option<(u64, Option<u64>)> {
        self.inner.publisher(publisher).map(|publisher| publisher.position())
    }

    /// Limit the sockets of this process: further publishers that need one are refused.
    fn limit_sockets(&self, py: Python<'_>, most: usize) {
        py.detach(|| self.inner.limit_sockets(most));
    }

    /// Report the socket's state: pending, active, paused or failed.
    #[pyo3(signature = (publisher, status, error=None))]
    fn set_status(&self, publisher: u64, status: &str, error: Option<String>) -> Raised<()> {
        let status = ListenerStatus::from_name(status).ok_or_else(|| {
            invalid(format!("status must be pending, active, paused or failed, got {status:?}"))
        })?;
        if let Some(publisher) = self.inner.publisher(publisher) {
            publisher.set_status(status, error);
        }
        Ok(())
    }
}
