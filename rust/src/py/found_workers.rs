//! Workers that an indexer discovers.

use kvflash_core::catalog::ModelKey;
use kvflash_core::ids::InstanceId;
use pyo3::prelude::*;

use super::catalog::Catalog;
use super::error::{Raised, released};

/// Engines whose events a catalog follows without registration.
///
/// Args:
///     catalog: Receives the events.
///     model_name: Model of engines that are known only by address.
///     tenant_id: Their tenant; prefill-only workers have ``prefill``.
///     block_size: Tokens in a block of theirs; None: from their events.
///     max_workers: Limit of workers.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct FoundWorkers {
    inner: kvflash_serve::FoundWorkers,
}

#[pymethods]
impl FoundWorkers {
    #[new]
    #[pyo3(signature = (catalog, *, model_name, tenant_id="default", block_size=None, max_workers=4_096))]
    fn new(
        catalog: &Catalog,
        model_name: String,
        tenant_id: &str,
        block_size: Option<u32>,
        max_workers: usize,
    ) -> Self {
        let key = ModelKey { model_name, tenant_id: tenant_id.to_owned() };
        let catalog = std::sync::Arc::clone(&catalog.inner);
        Self { inner: kvflash_serve::FoundWorkers::new(catalog, key, block_size, max_workers) }
    }

    /// Follow an engine, ``URL[,events=...][,replay=...][,id=N][,dp=N][,role=...]``; returns its
    /// number.
    ///
    /// Raises:
    ///     ConfigError: Names the field, what is legal and what came.
    ///     ConflictError: The number is taken, or the block size differs from the model's.
    ///     OverloadedError: The limit is reached.
    fn add_worker(&self, py: Python<'_>, spec: &str) -> Raised<InstanceId> {
        released(py, || self.inner.add(spec))
    }

    /// Follow a discovered worker, or apply its changes; returns its number.
    ///
    /// Args:
    ///     worker: As :meth:`Frontend.put_worker` takes it.
    ///
    /// Raises:
    ///     ConfigError: Names the field, what is legal and what came.
    ///     ConflictError: The block size differs from the model's.
    ///     OverloadedError: The limit is reached.
    fn put_worker(&self, py: Python<'_>, worker: &str) -> Raised<InstanceId> {
        released(py, || self.inner.put(worker))
    }

    /// As :meth:`Frontend.set_worker_state`; its events are followed either way.
    fn set_worker_state(&self, py: Python<'_>, instance_id: InstanceId, state: &str) -> Raised<()> {
        released(py, || self.inner.set_state(instance_id, state))
    }

    /// Stop following a worker, and forget its blocks; NotFoundError if it is not followed.
    fn remove_worker(&self, py: Python<'_>, instance_id: InstanceId) -> Raised<()> {
        released(py, || self.inner.remove(instance_id))
    }
}
