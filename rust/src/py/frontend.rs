//! The frontend service.

use std::sync::Arc;

use kvflash_core::catalog;
use kvflash_core::clock::SystemClock;
use kvflash_core::ids::InstanceId;
use kvflash_core::settings::Concern;
use kvflash_serve::frontend::{EngineSpec, FairnessOptions, FrontendApp, FrontendOptions};
use kvflash_serve::{Face, FairnessSettings, FrontendSettings};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::bookings::Bookings;
use super::catalog::Catalog;
use super::error::{Raised, released};
use super::policy_desk::PolicyDesk;
use super::select::routing;
use super::service::Service;
use super::settings::{finish, given, http};

/// The OpenAI-compatible frontend in this process; it does not listen yet.
///
/// Args:
///     policy_desk: Desk that asks a policy in Python.
///     has_broker_events: Whether events over a broker are received.
///     waits_for: Where workers are expected from, for the response before any have joined.
///     settings: Under the keys of ``settings_table``.
///
/// Raises:
///     ConfigError: An invalid setting.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct Frontend {
    catalog: Arc<catalog::Catalog>,
    app: FrontendApp,
    /// Whether engines' events are followed: they are on, caches have a weight, and no other indexer
    /// is asked.
    #[pyo3(get)]
    uses_events: bool,
    service: Service,
}

#[pymethods]
impl Frontend {
    #[new]
    #[pyo3(signature = (*, policy_desk=None, has_broker_events=false, waits_for="", **settings))]
    fn new(
        py: Python<'_>,
        policy_desk: Option<Py<PolicyDesk>>,
        has_broker_events: bool,
        waits_for: &str,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> Raised<Self> {
        let mut given = given(settings)?;
        let own = FrontendSettings::take(&mut given)?;
        let fairness = FairnessSettings::take(&mut given)?;
        let http = http(&mut given, Face::Api)?;
        let (mut routing, limits) = routing(&mut given, policy_desk.as_ref())?;
        finish(given)?;
        routing.selector.router.load.max_requests = own.max_concurrent_requests;
        let options = FrontendOptions {
            fairness: FairnessOptions::of(fairness, own.max_concurrent_requests)?,
            routing,
            enforce_disagg: own.enforce_disagg.parse()?,
            has_broker_events,
            waits_for: waits_for.to_owned(),
            http,
            own,
        };
        let uses_events = options.routing.uses_events();
        let (threads, drain, http) = (options.threads, options.drain_timeout, options.http.clone());
        let clock = Arc::new(SystemClock::default());
        let catalog = Arc::new(catalog::Catalog::new(limits, clock.clone()));
        released(py, || {
            let app = FrontendApp::new(options, Arc::clone(&catalog), clock)?;
            let service = Service::new(threads, &http, drain)?;
            Ok(Self { catalog, app, uses_events, service })
        })
    }

    /// The catalog of its models, engines and their blocks.
    #[getter]
    fn catalog(&self) -> Catalog {
        Catalog { inner: Arc::clone(&self.catalog) }
    }

    /// The bookings shared with replicas.
    #[getter]
    fn bookings(&self) -> Bookings {
        let app = self.app.clone();
        Bookings::new(app.outbox(), Box::new(move || app.selectors()))
    }

    /// Set additional lines for ``/metrics``, in the OpenMetrics text format.
    fn set_more_metrics(&self, text: String) {
        self.app.set_more_metrics(text);
    }

    /// Set the caller's warnings about failed matching for ``/health``; replaces earlier ones.
    fn set_warnings(&self, warnings: Vec<String>) {
        self.app.set_warnings(warnings);
    }

    /// Use this indexer from now on; None: use none. Only if settings name no indexer.
    ///
    /// Raises:
    ///     ConfigError: Not ``http://host:port``.
    #[pyo3(signature = (url))]
    fn set_remote_indexer(&self, url: Option<&str>) -> Raised<()> {
        Ok(self.app.set_remote_indexer(url)?)
    }

    /// Check a spec for :meth:`add_worker`; nothing is added.
    ///
    /// Raises:
    ///     ConfigError: An invalid spec; names the field, what is legal and what came.
    #[staticmethod]
    fn check_worker(spec: &str) -> Raised<()> {
        Ok(spec.parse::<EngineSpec>().map(drop)?)
    }

    /// Add an engine: ``URL[,events=tcp://...][,replay=tcp://...][,id=N][,dp=N][,role=prefill|decode]``.
    ///
    /// Returns:
    ///     Its instance id.
    ///
    /// Raises:
    ///     ConfigError: An invalid spec.
    ///     ConflictError: The id or address is already in use.
    fn add_worker(&self, py: Python<'_>, spec: &str) -> Raised<u64> {
        let spec: EngineSpec = spec.parse()?;
        released(py, || self.service.enter(|| self.app.add(spec)))
    }

    /// Add or change a worker of the runtime.
    ///
    /// Args:
    ///     worker: JSON: ``{"id", "plane": {"kind": "tcp", "address"} | {"kind": "http", "url"},
    ///         "endpoint": "namespace/component/endpoint", "card": the model card, "events": {dp
    ///         rank: {"endpoint", "replay_endpoint"}}}``. With has_broker_events, a ``nats://``
    ///         endpoint is subscribed to, and the stream's follower delivers a ``jetstream://``
    ///         one. A worker with changed events keeps its connections and load; with another card
    ///         or address it is a new worker.
    ///
    /// Returns:
    ///     Its instance id.
    ///
    /// Raises:
    ///     ConfigError: Names the field at fault or the tokenizer's file.
    ///     ConflictError: The id belongs to an engine that was added with add_worker.
    ///     OverloadedError: The limit of workers or tokenizers is reached.
    ///
    /// Cost: the first worker of a model loads its tokenizer, up to seconds; releases the GIL.
    fn put_worker(&self, py: Python<'_>, worker: &str) -> Raised<InstanceId> {
        released(py, || self.service.enter(|| self.app.put_worker(worker)))
    }

    /// Take a worker out of service, or back into it; its blocks and running requests stay.
    ///
    /// Args:
    ///     instance_id: The worker.
    ///     state: ``active`` or ``draining``.
    ///
    /// Raises:
    ///     ConfigError: An unknown state.
    ///     NotFoundError: An unknown worker.
    fn set_worker_state(&self, py: Python<'_>, instance_id: InstanceId, state: &str) -> Raised<()> {
        released(py, || self.app.set_worker_state(instance_id, state))
    }

    /// Remove a worker: it gets no new requests, its blocks are forgotten; running requests go on.
    ///
    /// Raises:
    ///     NotFoundError: An unknown worker.
    fn remove_worker(&self, py: Python<'_>, instance_id: InstanceId) -> Raised<()> {
        released(py, || self.app.remove_worker(instance_id))
    }

    /// Apply a runtime worker's report of its load.
    ///
    /// Args:
    ///     report: JSON: ``{"id", "dp_rank", "kv_used_blocks", "kv_total_blocks",
    ///         "active_decode_blocks", "active_prefill_tokens"}``; missing fields are unknown.
    ///
    /// Raises:
    ///     ConfigError: Names the field at fault.
    ///     NotFoundError: An unknown worker.
    fn report_load(&self, py: Python<'_>, report: &str) -> Raised<()> {
        released(py, || self.app.report_load(report))
    }

    /// Bind and serve in the background. Returns the bound port.
    ///
    /// Raises:
    ///     ConfigError: The address can't be bound.
    fn start(&self, py: Python<'_>, host: &str, port: u16) -> Raised<u16> {
        released(py, || {
            self.service.enter(|| self.app.restore())?;
            let (app, expiring, saving) = (self.app.clone(), self.app.clone(), self.app.clone());
            let is_ready = move || app.is_ready();
            let port = self.service.start(host, port, self.app.router(), is_ready)?;
            self.service.every_second(move || _ = expiring.expire());
            self.service.every_second(move || saving.save_again());
            Ok(port)
        })
    }

    /// Whether clients reach it; False while another process at its port serves them.
    fn is_listening(&self) -> bool {
        self.service.is_listening()
    }

    /// Report in the readiness check that it is about to stop; it still accepts requests.
    fn announce_stop(&self) {
        self.service.shutdown.announce();
    }

    /// Stop serving; open requests get the drain time. Blocks until done.
    fn stop(&self, py: Python<'_>) {
        py.detach(|| self.service.stop());
    }
}
