//! The indexer service.

use std::sync::Arc;
use std::time::Duration;

use kvflash_core::catalog::{self, CatalogOptions, EngineFacts, Identity, ModelKey, Registration};
use kvflash_core::clock::SystemClock;
use kvflash_core::error::Error;
use kvflash_core::ids::Worker;
use kvflash_serve::Shutdown;
use kvflash_serve::indexer::{IndexerApp, IndexerOptions, query_tokens};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::buffer::tokens;
use super::catalog::Catalog;
use super::error::{OrRaise, raise};
use super::prompt_keys::{PromptKeys, digests, media};
use super::service::Service;

/// The standalone indexer's HTTP service in this process.
///
/// Args:
///     threads: Threads that serve.
///     max_body_bytes: Largest request body.
///     max_blocks: Blocks that one index may hold; 0 = no limit.
///     index_memory_bytes: Memory that one index may occupy, bytes; 0 = no limit.
///     peers: Peers to recover from, ``http://host:port``: the first healthy one serves.
///         Engines are not read before that is over.
///     min_initial_workers: Workers that must have registered before GET /ready says so.
///     test_endpoints: Serve POST /test/pause_listener and /test/resume_listener.
///     drain_timeout_s: Time that open requests get at the stop, seconds.
///     metrics_prefix: What the names in GET /metrics begin with.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct Indexer {
    catalog: Arc<catalog::Catalog>,
    options: IndexerOptions,
    service: Service,
}

#[pymethods]
impl Indexer {
    #[new]
    #[pyo3(signature = (
        *, threads=4, max_body_bytes=8_388_608, max_blocks=33_554_432, index_memory_bytes=0,
        peers=Vec::new(), min_initial_workers=0, test_endpoints=false, drain_timeout_s=5.0,
        metrics_prefix="kvflash"
    ))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        threads: usize,
        max_body_bytes: usize,
        max_blocks: usize,
        index_memory_bytes: usize,
        peers: Vec<String>,
        min_initial_workers: usize,
        test_endpoints: bool,
        drain_timeout_s: f64,
        metrics_prefix: &str,
    ) -> PyResult<Self> {
        let options =
            CatalogOptions { max_blocks, index_memory_bytes, ..CatalogOptions::default() };
        let drain = seconds(py, "--drain-timeout", drain_timeout_s)?;
        let catalog = Arc::new(catalog::Catalog::new(options, Arc::new(SystemClock::default())));
        if !peers.is_empty() {
            // Engines that register before the start wait for the recovery, too.
            catalog.hold();
        }
        Ok(Self {
            catalog,
            options: IndexerOptions {
                max_body_bytes,
                peers,
                min_initial_workers,
                test_endpoints,
                metrics_prefix: metrics_prefix.to_owned(),
            },
            service: Service::new(threads, Shutdown::default(), drain).or_raise(py)?,
        })
    }

    /// What knows its models, engines and their blocks.
    #[getter]
    fn catalog(&self) -> Catalog {
        Catalog { inner: Arc::clone(&self.catalog) }
    }

    /// Bind and serve in the background. Returns the bound port.
    ///
    /// Raises:
    ///     ConfigError: The address can't be bound, or metrics_prefix begins no name.
    fn start(&self, py: Python<'_>, host: &str, port: u16) -> PyResult<u16> {
        py.detach(|| {
            let app = self
                .service
                .enter(|| IndexerApp::service(Arc::clone(&self.catalog), self.options.clone()))?;
            self.service.start(host, port, app).map(|address| address.port())
        })
        .or_raise(py)
    }

    /// Register a publisher, as POST /register does.
    ///
    /// Args:
    ///     instance_id: The engine's number, u64.
    ///     endpoint: Where it publishes: ``tcp://host:port``, ``ipc://path`` or ``inproc://name``.
    ///     model_name: Model that it serves.
    ///     block_size: Tokens in a block of its, at least 1.
    ///     tenant_id: Tenant of the model.
    ///     dp_rank: Data parallel rank, u32.
    ///     replay_endpoint: Where it replays; None if it does not.
    ///     lora_name: Adapter of events and queries that name none.
    ///     additional_salt: Salt of events and queries that name none.
    ///     capacity_blocks: Blocks that the device of a rank has, at least 1.
    ///     attention_chunk_size: Tokens of a chunk of the engine's chunked local attention, at
    ///         least 1. Without it a prefix counts only where all its chunks are held.
    ///     offload_chunk: Tokens that the engine copies to a farther tier at once; a multiple of
    ///         block_size. Without it, the most tokens that one event named there.
    ///
    /// Raises:
    ///     ConflictError: Registered already, or another block size, adapter or salt than the
    ///         index's.
    ///     InvalidArgumentError: Block size or capacity below 1, an endpoint that is none, no
    ///         model name, or a chunk out of range; names the field.
    ///     OverloadedError: The limit of publishers or models is reached.
    #[pyo3(signature = (instance_id, endpoint, *, model_name, block_size, tenant_id="default", dp_rank=0, replay_endpoint=None, lora_name=None, additional_salt=None, capacity_blocks=None, attention_chunk_size=None, offload_chunk=None))]
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
        lora_name: Option<String>,
        additional_salt: Option<String>,
        capacity_blocks: Option<u64>,
        attention_chunk_size: Option<u32>,
        offload_chunk: Option<u32>,
    ) -> PyResult<()> {
        let registration = Registration {
            worker: Worker::new(instance_id, dp_rank),
            key: ModelKey { model_name, tenant_id: tenant_id.to_owned() },
            block_size: Some(block_size),
            endpoint,
            replay_endpoint,
            capacity_blocks,
            identity: Identity { lora_name, cache_salt: additional_salt },
            facts: EngineFacts { attention_chunk_size, offload_chunk },
        };
        py.detach(|| self.catalog.register(registration)).or_raise(py).map(|_| ())
    }

    /// Remove an instance or one rank of it, as POST /unregister does.
    ///
    /// Raises:
    ///     NotFoundError: Nothing fits.
    #[pyo3(signature = (instance_id, *, model_name, tenant_id=None, dp_rank=None))]
    fn unregister(
        &self,
        py: Python<'_>,
        instance_id: u64,
        model_name: &str,
        tenant_id: Option<&str>,
        dp_rank: Option<u32>,
    ) -> PyResult<()> {
        py.detach(|| self.catalog.unregister(instance_id, model_name, tenant_id, dp_rank))
            .or_raise(py)
            .map(|_| ())
    }

    /// The answer of POST /query, as JSON.
    ///
    /// Args:
    ///     token_ids: Tokens of the prompt, u32; shape [tokens].
    ///     model_name: Model to ask about.
    ///     tenant_id: Its tenant.
    ///     lora_name: Adapter; None = the index's, "" = none.
    ///     lora_path: Path of the adapter as the engine was given it.
    ///     cache_salt: Salt; None = the index's, "" = none.
    ///     mm: Multimodal items, as for compute_block_hash_for_seq; shape [items].
    ///     embeds: Digests of the prompt's embeddings, as there; shape [blocks].
    ///
    /// Raises:
    ///     InvalidArgumentError: A token outside u32, by index, or a wrong item or digest, by index
    ///         and field.
    ///     NotFoundError: Unknown model and tenant.
    #[pyo3(signature = (token_ids, *, model_name, tenant_id="default", lora_name=None, lora_path=None, cache_salt=None, mm=None, embeds=None))]
    #[allow(clippy::too_many_arguments)]
    fn query(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        model_name: &str,
        tenant_id: &str,
        lora_name: Option<String>,
        lora_path: Option<String>,
        cache_salt: Option<String>,
        mm: Option<&Bound<'_, PyAny>>,
        embeds: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyBytes>> {
        let ids = tokens("token_ids", token_ids)?;
        let ids = ids.as_slice();
        let key = (model_name, tenant_id);
        let (media, embeds) = (media(mm)?, digests(embeds)?);
        let keys = PromptKeys { lora_name, lora_path, cache_salt, media, embeds };
        py.detach(|| query_tokens(&self.catalog, key, &ids, &keys.keys()))
            .or_raise(py)
            .map(|json| PyBytes::new(py, &json).unbind())
    }

    /// Stop serving; open requests get the drain time. Blocks until done.
    fn stop(&self, py: Python<'_>) {
        py.detach(|| self.service.stop());
    }
}

pub(super) fn seconds(py: Python<'_>, name: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value).map_err(|_| {
        let message = format!("{name} must be a number of seconds of at least 0, got {value}");
        raise(py, &Error::Config(message))
    })
}
