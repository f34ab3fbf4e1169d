//! Workers that an indexer finds.

use kvflash_core::catalog::ModelKey;
use kvflash_core::ids::InstanceId;
use kvflash_serve::indexer;
use pyo3::prelude::*;

use super::catalog::Catalog;
use super::error::OrRaise;

/// Engines whose events a catalog follows though nobody registers them.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct FoundWorkers {
    inner: indexer::FoundWorkers,
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
        Self { inner: indexer::FoundWorkers::new(catalog, key, block_size, max_workers) }
    }

    fn add_worker(&self, py: Python<'_>, spec: &str) -> PyResult<InstanceId> {
        py.detach(|| self.inner.add(spec)).or_raise(py)
    }

    fn put_worker(&self, py: Python<'_>, worker: &str) -> PyResult<InstanceId> {
        py.detach(|| self.inner.put(worker)).or_raise(py)
    }

    fn remove_worker(&self, py: Python<'_>, instance_id: InstanceId) -> PyResult<()> {
        py.detach(|| self.inner.remove(instance_id)).or_raise(py)
    }
}
