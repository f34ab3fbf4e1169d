//! The frontend service.

use std::path::PathBuf;
use std::sync::Arc;

use kvflash_core::catalog;
use kvflash_core::clock::SystemClock;
use kvflash_core::fair::FairConfig;
use kvflash_core::ids::InstanceId;
use kvflash_serve::frontend::{EngineSpec, FairnessOptions, FrontendApp, FrontendOptions};
use kvflash_serve::{RemoteIndexerOptions, Shutdown, Tls};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::bookings::Bookings;
use super::catalog::Catalog;
use super::error::OrRaise;
use super::indexer::seconds;
use super::select::Routing;
use super::service::Service;

/// The OpenAI-compatible frontend in this process.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct Frontend {
    catalog: Arc<catalog::Catalog>,
    app: FrontendApp,
    service: Service,
}

#[pymethods]
impl Frontend {
    #[new]
    #[pyo3(signature = (
        *, kv_cache_block_size=None, serve_indexer=false, remote_indexer=None,
        remote_indexer_deadline_s=0.05, tokenizer=None, tokenizer_cache_bytes=268_435_456,
        worker_api_key=None, threads=2, max_body_bytes=33_554_432, max_concurrent_requests=4_096,
        max_workers=4_096, max_attempts=5, body_timeout_s=60.0, connect_timeout_s=2.0,
        first_byte_timeout_s=600.0, tokenize_timeout_s=2.0, stream_idle_timeout_s=300.0,
        health_interval_s=2.0, drain_timeout_s=30.0, enforce_disagg="off", waits_for="",
        min_initial_workers=0, fairness=None, fairness_weights=Vec::new(),
        fairness_queue_limit=1_024, fairness_queue_timeout_s=60.0, fairness_max_running=256,
        fairness_cached_share=0.0, track_output_blocks=false, tls_cert_path=None,
        tls_key_path=None, metrics_prefix="kvflash", has_broker_events=false,
        **settings
    ))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        kv_cache_block_size: Option<u32>,
        serve_indexer: bool,
        remote_indexer: Option<String>,
        remote_indexer_deadline_s: f64,
        tokenizer: Option<PathBuf>,
        tokenizer_cache_bytes: usize,
        worker_api_key: Option<String>,
        threads: usize,
        max_body_bytes: usize,
        max_concurrent_requests: usize,
        max_workers: usize,
        max_attempts: usize,
        body_timeout_s: f64,
        connect_timeout_s: f64,
        first_byte_timeout_s: f64,
        tokenize_timeout_s: f64,
        stream_idle_timeout_s: f64,
        health_interval_s: f64,
        drain_timeout_s: f64,
        enforce_disagg: &str,
        waits_for: &str,
        min_initial_workers: usize,
        fairness: Option<&str>,
        fairness_weights: Vec<(String, f64)>,
        fairness_queue_limit: usize,
        fairness_queue_timeout_s: f64,
        fairness_max_running: usize,
        fairness_cached_share: f64,
        track_output_blocks: bool,
        tls_cert_path: Option<PathBuf>,
        tls_key_path: Option<PathBuf>,
        metrics_prefix: &str,
        has_broker_events: bool,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let tls = Tls::read(tls_cert_path.as_deref(), tls_key_path.as_deref()).or_raise(py)?;
        let Routing {
            mut router,
            policies,
            settings,
            overlap,
            thresholds,
            queue,
            journal_bytes,
            logs_decisions,
            limits,
            ..
        } = Routing::of(py, settings)?;
        router.block_size = kv_cache_block_size.unwrap_or(0);
        router.track_output_blocks = track_output_blocks;
        router.max_requests = max_concurrent_requests;
        let fairness = match fairness {
            Some(discipline) => {
                let wait = seconds(py, "--fairness-queue-timeout", fairness_queue_timeout_s)?;
                let queue = FairConfig {
                    discipline: discipline.parse().or_raise(py)?,
                    cached_share: fairness_cached_share,
                    max_queued: max_concurrent_requests,
                    max_queued_per_client: fairness_queue_limit,
                    max_wait_ms: wait.as_millis() as u64,
                    ..FairConfig::default()
                };
                let (max_running, weights) = (fairness_max_running, fairness_weights);
                Some(FairnessOptions { queue, max_running, weights })
            }
            None => None,
        };
        let deadline = seconds(py, "--remote-indexer-deadline", remote_indexer_deadline_s)?;
        let remote_indexer = remote_indexer.map(|url| RemoteIndexerOptions { url, deadline });
        let options = FrontendOptions {
            fairness,
            router,
            policies,
            settings,
            overlap,
            thresholds,
            queue,
            decision_journal_bytes: journal_bytes,
            logs_decisions,
            remote_indexer,
            serve_indexer,
            tokenizer,
            tokenizer_cache_bytes,
            worker_api_key,
            max_body_bytes,
            max_concurrent_requests,
            max_workers,
            max_attempts,
            body_timeout: seconds(py, "--body-timeout", body_timeout_s)?,
            connect_timeout: seconds(py, "--connect-timeout", connect_timeout_s)?,
            first_byte_timeout: seconds(py, "--first-byte-timeout", first_byte_timeout_s)?,
            stream_idle_timeout: seconds(py, "--stream-idle-timeout", stream_idle_timeout_s)?,
            enforce_disagg: enforce_disagg.parse().or_raise(py)?,
            metrics_prefix: metrics_prefix.to_owned(),
            has_broker_events,
            waits_for: waits_for.to_owned(),
            min_initial_workers,
            tokenize_timeout: seconds(py, "--tokenize-timeout", tokenize_timeout_s)?,
            health_interval: seconds(py, "--health-interval", health_interval_s)?,
            tls: tls.clone(),
        };
        let drain = seconds(py, "--drain-timeout", drain_timeout_s)?;
        let clock = Arc::new(SystemClock::default());
        let catalog = Arc::new(catalog::Catalog::new(limits, clock.clone()));
        py.detach(|| {
            let shutdown = Shutdown::default();
            let app = FrontendApp::new(options, Arc::clone(&catalog), clock, shutdown.clone())?;
            let service = Service::new(threads, shutdown, drain)?.over(tls);
            Ok(Self { catalog, app, service })
        })
        .or_raise(py)
    }

    /// What knows its models, engines and their blocks.
    #[getter]
    fn catalog(&self) -> Catalog {
        Catalog { inner: Arc::clone(&self.catalog) }
    }

    /// What it tells replicas, and what they tell it.
    #[getter]
    fn bookings(&self) -> Bookings {
        let app = self.app.clone();
        Bookings::new(app.outbox(), Box::new(move |call| app.any_selector(call)))
    }

    /// What ``/metrics`` tells besides its own: lines of the OpenMetrics text format.
    fn set_more_metrics(&self, text: String) {
        self.app.set_more_metrics(text);
    }

    /// What makes matching fail and only the caller knows, for ``/health``; replaces others.
    fn set_warnings(&self, warnings: Vec<String>) {
        self.app.set_warnings(warnings);
    }

    /// Ask this indexer from now on; none while there is None. Where it was not named at first.
    ///
    /// Raises:
    ///     ConfigError: It is no ``http://host:port``.
    #[pyo3(signature = (url))]
    fn set_remote_indexer(&self, py: Python<'_>, url: Option<&str>) -> PyResult<()> {
        self.app.set_remote_indexer(url).or_raise(py)
    }

    /// Check a spec as :meth:`add_worker` takes it; nothing is added.
    ///
    /// Raises:
    ///     ConfigError: A bad spec; names the field, what is legal and what came.
    #[staticmethod]
    fn check_worker(py: Python<'_>, spec: &str) -> PyResult<()> {
        spec.parse::<EngineSpec>().map(drop).or_raise(py)
    }

    /// Add an engine: ``URL[,events=tcp://...][,replay=tcp://...][,id=N][,dp=N][,role=prefill|decode]``.
    ///
    /// Returns:
    ///     Its instance id.
    ///
    /// Raises:
    ///     ConfigError: A bad spec.
    ///     ConflictError: The id or address is there already.
    fn add_worker(&self, py: Python<'_>, spec: &str) -> PyResult<u64> {
        let spec: EngineSpec = spec.parse().or_raise(py)?;
        py.detach(|| self.service.enter(|| self.app.add(spec))).or_raise(py)
    }

    /// Add a worker of the runtime, or change it.
    ///
    /// Args:
    ///     worker: JSON: ``{"id", "plane": {"kind": "tcp", "address"} | {"kind": "http", "url"},
    ///         "endpoint": "namespace/component/endpoint", "card": the model card, "events":
    ///         {dp rank: {"endpoint", "replay_endpoint"}}}``. An endpoint ``nats://`` is subscribed
    ///         to, and a stream's ``jetstream://`` heard by its follower, with has_broker_events
    ///         only. The same worker with other events keeps its connections and load; with
    ///         another card or address it is a new one.
    ///
    /// Returns:
    ///     Its instance id.
    ///
    /// Raises:
    ///     ConfigError: Names the field at fault or the tokenizer's file.
    ///     ConflictError: The id belongs to an engine that was added by hand.
    ///     OverloadedError: The limit of workers or tokenizers is reached.
    ///
    /// Cost: the first worker of a model loads its tokenizer, up to seconds; releases the GIL.
    fn put_worker(&self, py: Python<'_>, worker: &str) -> PyResult<InstanceId> {
        py.detach(|| self.service.enter(|| self.app.put_worker(worker))).or_raise(py)
    }

    /// Remove a worker: no new requests, its blocks are forgotten; requests in flight go on.
    ///
    /// Raises:
    ///     NotFoundError: There is none.
    fn remove_worker(&self, py: Python<'_>, instance_id: InstanceId) -> PyResult<()> {
        py.detach(|| self.app.remove_worker(instance_id)).or_raise(py)
    }

    /// Take a runtime worker's own report of its load.
    ///
    /// Args:
    ///     report: JSON: ``{"id", "dp_rank", "kv_used_blocks", "kv_total_blocks",
    ///         "active_decode_blocks", "active_prefill_tokens"}``; what is missing is not known.
    ///
    /// Raises:
    ///     ConfigError: Names the field at fault.
    ///     NotFoundError: No such worker.
    fn report_load(&self, py: Python<'_>, report: &str) -> PyResult<()> {
        py.detach(|| self.app.report_load(report)).or_raise(py)
    }

    /// Bind and serve in the background. Returns the bound port.
    ///
    /// Raises:
    ///     ConfigError: The address can't be bound.
    fn start(&self, py: Python<'_>, host: &str, port: u16) -> PyResult<u16> {
        py.detach(|| {
            let address = self.service.start(host, port, self.app.router())?;
            let app = self.app.clone();
            self.service.every_second(move || {
                app.expire();
            });
            Ok(address.port())
        })
        .or_raise(py)
    }

    /// Stop serving; open requests get the drain time. Blocks until done.
    fn stop(&self, py: Python<'_>) {
        py.detach(|| self.service.stop());
    }
}
