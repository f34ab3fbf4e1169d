//! The indexer service.

use std::sync::{Arc, OnceLock};

use kvflash_core::catalog::{self, CatalogOptions, EngineFacts, Identity, ModelKey, Registration};
use kvflash_core::clock::SystemClock;
use kvflash_core::ids::Worker;
use kvflash_core::select::IndexSettings;
use kvflash_core::settings::Concern;
use kvflash_serve::indexer::{IndexerApp, IndexerOptions, query_tokens};
use kvflash_serve::{Face, Http};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use super::buffer::tokens;
use super::catalog::{Catalog, registration};
use super::error::{Raised, released};
use super::prompt_keys::{PromptKeys, digests, media};
use super::service::Service;
use super::settings::{finish, given, http};

/// The standalone indexer's HTTP service in this process; it does not listen yet.
///
/// Args:
///     settings: Under the keys of ``settings_table``; those of the index, ``peers`` and others.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct Indexer {
    catalog: Arc<catalog::Catalog>,
    options: IndexerOptions,
    http: Http,
    service: Service,
    /// Set by the start.
    app: OnceLock<IndexerApp>,
}

#[pymethods]
impl Indexer {
    #[new]
    #[pyo3(signature = (**settings))]
    fn new(settings: Option<&Bound<'_, PyDict>>) -> Raised<Self> {
        let mut given = given(settings)?;
        let options = IndexerOptions::take(&mut given)?;
        let http = http(&mut given, Face::Control)?;
        let index = IndexSettings::take(&mut given)?;
        finish(given)?;
        let IndexSettings { max_blocks, index_memory_bytes } = index;
        let limits = CatalogOptions { max_blocks, index_memory_bytes, ..CatalogOptions::default() };
        let catalog = Arc::new(catalog::Catalog::new(limits, Arc::new(SystemClock::default())));
        if !options.peers.is_empty() {
            // Engines that register before the start also wait for the recovery.
            catalog.hold();
        }
        let drain = options.drain_timeout_s;
        let service = Service::new(options.threads, &http, drain)?;
        Ok(Self { catalog, options, http, service, app: OnceLock::new() })
    }

    /// The catalog of its models, engines and their blocks.
    #[getter]
    fn catalog(&self) -> Catalog {
        Catalog { inner: Arc::clone(&self.catalog) }
    }

    /// Bind and serve in the background. Returns the bound port.
    ///
    /// Raises:
    ///     ConfigError: The address can't be bound, or metrics_prefix is not a valid metric name
    ///         prefix.
    fn start(&self, py: Python<'_>, host: &str, port: u16) -> Raised<u16> {
        released(py, || {
            let app = self.service.enter(|| {
                IndexerApp::new(Arc::clone(&self.catalog), self.options.clone(), &self.http)
            })?;
            // It starts once.
            let _ = self.app.set(app.clone());
            let saving = app.clone();
            let port = self.service.start(host, port, app.clone(), move || app.is_ready())?;
            self.service.every_second(move || saving.save_again());
            Ok(port)
        })
    }

    /// Whether it has recovered from a peer and has its initial workers, as GET /ready reports it.
    fn is_ready(&self, py: Python<'_>) -> bool {
        py.detach(|| self.app.get().is_some_and(IndexerApp::is_ready))
    }

    /// Whether clients reach it; False while another process at its port serves them.
    fn is_listening(&self) -> bool {
        self.service.is_listening()
    }

    /// Report in the readiness check that it is about to stop; it still accepts requests.
    fn announce_stop(&self) {
        self.service.shutdown.announce();
    }

    /// Register a publisher, as POST /register does.
    ///
    /// Args:
    ///     instance_id: The engine's number, u64.
    ///     endpoint: Where it publishes: ``tcp://host:port`` or ``ipc://path``.
    ///     model_name: Model that it serves.
    ///     block_size: Tokens in a block of this engine, at least 1.
    ///     tenant_id: Tenant of the model.
    ///     dp_rank: Data parallel rank, u32.
    ///     replay_endpoint: Where it replays; None without a replay.
    ///     lora_name: Adapter of events and queries that name none.
    ///     additional_salt: Salt of events and queries that name none.
    ///     capacity_blocks: Device blocks per rank, at least 1.
    ///     attention_chunk_size: Tokens in a chunk of the engine's chunked local attention, at
    ///         least 1. Default: a prefix counts only if all its chunks are held.
    ///     offload_chunk: Tokens that the engine copies to a slower tier at once; a multiple of
    ///         block_size. Default: the largest number of tokens in one event of that tier.
    ///
    /// Raises:
    ///     ConflictError: Already registered, or with another block size, adapter or salt than the
    ///         index has.
    ///     InvalidArgumentError: Block size or capacity below 1, an invalid endpoint, no model
    ///         name, or a chunk out of range; names the field.
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
    ) -> Raised<()> {
        let (worker, tenant_id) = (Worker::new(instance_id, dp_rank), tenant_id.to_owned());
        let key = ModelKey { model_name, tenant_id };
        let registration = Registration {
            capacity_blocks,
            identity: Identity { lora_name, cache_salt: additional_salt },
            facts: EngineFacts { attention_chunk_size, offload_chunk },
            ..registration(worker, key, block_size, endpoint, replay_endpoint)
        };
        released(py, || self.catalog.register(registration)).map(drop)
    }

    /// Remove an instance or one rank of it, as POST /unregister does.
    ///
    /// Raises:
    ///     NotFoundError: No publisher matches.
    #[pyo3(signature = (instance_id, *, model_name, tenant_id=None, dp_rank=None))]
    fn unregister(
        &self,
        py: Python<'_>,
        instance_id: u64,
        model_name: &str,
        tenant_id: Option<&str>,
        dp_rank: Option<u32>,
    ) -> Raised<()> {
        py.detach(|| self.catalog.unregister(instance_id, model_name, tenant_id, dp_rank))?;
        Ok(())
    }

    /// The response of POST /query, as JSON.
    ///
    /// Args:
    ///     token_ids: Tokens of the prompt, u32; shape [tokens].
    ///     model_name: Model to ask about.
    ///     tenant_id: Its tenant.
    ///     lora_name: Adapter; None: the index's, "": no adapter.
    ///     lora_path: Path of the adapter as passed to the engine.
    ///     cache_salt: Salt; None: the index's, "": no salt.
    ///     mm: Multimodal items, as for compute_block_hash_for_seq; shape [items].
    ///     embeds: Digests of the prompt's embeddings, likewise; shape [blocks].
    ///
    /// Raises:
    ///     InvalidArgumentError: A token outside u32, by index, or an invalid item or digest, by
    ///         index and field.
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
    ) -> Raised<Py<PyBytes>> {
        let ids = tokens("token_ids", token_ids)?;
        let ids = ids.as_slice();
        let key = (model_name, tenant_id);
        let (media, embeds) = (media(mm)?, digests(embeds)?);
        let keys = PromptKeys { lora_name, lora_path, cache_salt, media, embeds };
        let json = py.detach(|| query_tokens(&self.catalog, key, ids, &keys.keys()))?;
        Ok(PyBytes::new(py, &json).unbind())
    }

    /// Stop serving; open requests get the drain time. Blocks until done.
    fn stop(&self, py: Python<'_>) {
        py.detach(|| self.service.stop());
    }
}
