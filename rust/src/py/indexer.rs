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

    #[getter]
    fn catalog(&self) -> Catalog {
        Catalog { inner: Arc::clone(&self.catalog) }
    }

    fn start(&self, py: Python<'_>, host: &str, port: u16) -> PyResult<u16> {
        py.detach(|| {
            let app = self
                .service
                .enter(|| IndexerApp::service(Arc::clone(&self.catalog), self.options.clone()))?;
            self.service.start(host, port, app).map(|address| address.port())
        })
        .or_raise(py)
    }

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
