//! The standalone router.

use std::path::PathBuf;
use std::sync::Arc;

use axum::body::Body;
use axum::http::{Request, header};
use http_body_util::BodyExt;
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::bookings::Bookings;
use super::buffer::Bytes;
use super::catalog::Catalog;
use super::error::{OrRaise, raise};
use super::indexer::seconds;
use super::policies::Chosen;
use super::policy_desk::PolicyDesk;
use super::select::{Foresight, queue_options};
use super::service::Service;
use crate::catalog;
use crate::clock::SystemClock;
use crate::error::Error;
use crate::http::router::{RouterApp, RouterOptions};
use crate::http::{RemoteIndexerOptions, Shutdown, Tls};
use crate::policy::KvScale;
use crate::router::{RouterConfig, TierWeights};
use crate::select::{SelectorConfig, Thresholds};

/// The routing decision as an HTTP service in this process.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct Router {
    catalog: Arc<catalog::Catalog>,
    app: RouterApp,
    service: Service,
}

#[pymethods]
impl Router {
    #[new]
    #[pyo3(signature = (
        *, policy=None, policy_desk=None, policy_profile=None, shadow_policies=Vec::new(), overlap_score_weight=1.0,
        temperature=0.0, block_size=None,
        track_active_blocks=true, assume_kv_reuse=true, track_prefill_tokens=true,
        active_request_expiry_s=300.0, seed=None,
        use_kv_events=true, predicted_ttl_s=5.0, router_ttl_s=120.0, router_max_tree_size=1_048_576,
        router_prune_target_ratio=0.8, active_decode_blocks_threshold=None,
        active_prefill_tokens_threshold=None, active_prefill_tokens_threshold_frac=None,
        decision_journal_bytes=16_777_216, threads=2, max_body_bytes=8_388_608,
        max_requests=65_536, max_workers=4_096, max_blocks=33_554_432, index_memory_bytes=0,
        min_initial_workers=0, serve_indexer=false, remote_indexer=None,
        remote_indexer_deadline_s=0.05, body_timeout_s=60.0, drain_timeout_s=5.0,
        overlap_score_credit=1.0, overlap_score_credit_decay=0.0, prefill_load_scale=1.0,
        active_request_weight=0.0, router_queue_threshold=None, router_queue_policy="fcfs", router_queue_limit=1_024,
        router_queue_timeout_s=60.0, router_queue_batched_tokens=10_000_000, track_output_blocks=false,
        host_cache_hit_weight=0.75, disk_cache_hit_weight=0.25, prefill_tokens_per_s=None, session_affinity_ttl_s=None, tls_cert_path=None, tls_key_path=None
    ))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        policy: Option<&str>,
        policy_desk: Option<PyRef<'_, PolicyDesk>>,
        policy_profile: Option<&str>,
        shadow_policies: Vec<String>,
        overlap_score_weight: f64,
        temperature: f64,
        block_size: Option<u32>,
        track_active_blocks: bool,
        assume_kv_reuse: bool,
        track_prefill_tokens: bool,
        active_request_expiry_s: f64,
        seed: Option<u64>,
        use_kv_events: bool,
        predicted_ttl_s: f64,
        router_ttl_s: f64,
        router_max_tree_size: usize,
        router_prune_target_ratio: f64,
        active_decode_blocks_threshold: Option<f64>,
        active_prefill_tokens_threshold: Option<u64>,
        active_prefill_tokens_threshold_frac: Option<f64>,
        decision_journal_bytes: usize,
        threads: usize,
        max_body_bytes: usize,
        max_requests: usize,
        max_workers: usize,
        max_blocks: usize,
        index_memory_bytes: usize,
        min_initial_workers: usize,
        serve_indexer: bool,
        remote_indexer: Option<String>,
        remote_indexer_deadline_s: f64,
        body_timeout_s: f64,
        drain_timeout_s: f64,
        overlap_score_credit: f64,
        overlap_score_credit_decay: f64,
        prefill_load_scale: f64,
        active_request_weight: f64,
        router_queue_threshold: Option<f64>,
        router_queue_policy: &str,
        router_queue_limit: usize,
        router_queue_timeout_s: f64,
        router_queue_batched_tokens: u64,
        track_output_blocks: bool,
        host_cache_hit_weight: f64,
        disk_cache_hit_weight: f64,
        prefill_tokens_per_s: Option<f64>,
        session_affinity_ttl_s: Option<u64>,
        tls_cert_path: Option<PathBuf>,
        tls_key_path: Option<PathBuf>,
    ) -> PyResult<Self> {
        let tls = Tls::read(tls_cert_path.as_deref(), tls_key_path.as_deref()).or_raise(py)?;
        let queue = queue_options(
            py,
            router_queue_threshold,
            router_queue_policy,
            router_queue_limit,
            router_queue_timeout_s,
            router_queue_batched_tokens,
        )?;
        let expiry = seconds(py, "--active-request-expiry", active_request_expiry_s)?;
        let foresight = Foresight::new(
            py,
            use_kv_events,
            predicted_ttl_s,
            router_ttl_s,
            router_max_tree_size,
            router_prune_target_ratio,
        )?;
        let seed = seed.unwrap_or_else(rand::random);
        let desk = policy_desk.as_deref();
        let chosen = Chosen::new(
            policy,
            policy_profile,
            &shadow_policies,
            desk,
            session_affinity_ttl_s,
            seed,
        );
        let Chosen { built_in, policies, settings } = chosen.or_raise(py)?;
        let router = RouterConfig {
            policy: built_in,
            overlap_score_weight,
            scale: KvScale {
                overlap_score_credit,
                overlap_score_credit_decay,
                prefill_load_scale,
                active_request_weight,
            },
            prefill_tokens_per_s,
            tiers: TierWeights { host: host_cache_hit_weight, disk: disk_cache_hit_weight },
            temperature,
            block_size: block_size.unwrap_or(0),
            track_active_blocks,
            track_output_blocks,
            assume_kv_reuse,
            track_prefill_tokens,
            expiry_ms: expiry.as_millis() as u64,
            max_requests,
            seed,
        };
        let deadline = seconds(py, "--remote-indexer-deadline", remote_indexer_deadline_s)?;
        let remote_indexer = remote_indexer.map(|url| RemoteIndexerOptions { url, deadline });
        let options = RouterOptions {
            selector: SelectorConfig {
                router,
                overlap: foresight.overlap,
                thresholds: Thresholds {
                    active_decode_blocks: active_decode_blocks_threshold,
                    active_prefill_tokens: active_prefill_tokens_threshold,
                    active_prefill_tokens_frac: active_prefill_tokens_threshold_frac,
                },
                queue: queue.as_ref().map(|queue| queue.threshold),
                journal_bytes: decision_journal_bytes,
            },
            policies,
            settings,
            queue,
            use_kv_events,
            remote_indexer,
            serve_indexer,
            max_body_bytes,
            body_timeout: seconds(py, "--body-timeout", body_timeout_s)?,
            max_workers,
            min_initial_workers,
        };
        let drain = seconds(py, "--drain-timeout", drain_timeout_s)?;
        let clock = Arc::new(SystemClock::default());
        let limits = foresight.limit(max_blocks, index_memory_bytes);
        let catalog = Arc::new(catalog::Catalog::new(limits, clock.clone()));
        py.detach(|| {
            let app = RouterApp::new(options, Arc::clone(&catalog), clock)?;
            let service = Service::new(threads, Shutdown::default(), drain)?.over(tls);
            Ok(Self { catalog, app, service })
        })
        .or_raise(py)
    }

    #[getter]
    fn catalog(&self) -> Catalog {
        Catalog { inner: Arc::clone(&self.catalog) }
    }

    #[getter]
    fn bookings(&self) -> Bookings {
        let app = self.app.clone();
        Bookings::new(app.outbox(), Box::new(move |call| app.any_selector(call)))
    }

    fn set_more_metrics(&self, text: String) {
        self.app.set_more_metrics(text);
    }

    fn worker_changes(&self) -> u64 {
        self.app.worker_changes()
    }

    fn registered(&self, py: Python<'_>) -> Vec<(u64, String, String, Option<String>, u64)> {
        py.detach(|| {
            let rows = self.app.registered().into_iter();
            rows.map(|row| (row.worker_id, row.model_name, row.tenant_id, row.url, row.joined))
                .collect()
        })
    }

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

    fn call(
        &self,
        py: Python<'_>,
        method: &str,
        path: &str,
        body: &Bound<'_, PyAny>,
    ) -> PyResult<(u16, Py<PyBytes>)> {
        if self.service.shutdown.is_stopped() {
            return Err(raise(py, &Error::Closed("the router is stopped".to_owned())));
        }
        let body = Bytes::of(body.clone())?;
        let bytes = bytes::Bytes::copy_from_slice(body.as_slice());
        let (status, answer) = py
            .detach(|| {
                let request = Request::builder()
                    .method(method)
                    .uri(path)
                    .header(header::CONTENT_TYPE, "application/json")
                    .body(Body::from(bytes))
                    .map_err(|error| Error::invalid(format!("{method} {path}: {error}")))?;
                let routes = TowerToHyperService::new(self.app.router());
                let stopped = self.service.shutdown.clone();
                self.service.block_on(async move {
                    let response = tokio::select! {
                        biased;
                        Ok(response) = routes.call(request) => response,
                        // One that waits for room would outlive the timers that end its wait.
                        () = stopped.wait() => {
                            return Err(Error::Closed("the router is stopped".to_owned()));
                        }
                    };
                    let status = response.status().as_u16();
                    let body = response.into_body().collect().await;
                    body.map(|body| (status, body.to_bytes()))
                        .map_err(|error| Error::Closed(error.to_string()))
                })
            })
            .or_raise(py)?;
        Ok((status, PyBytes::new(py, &answer).unbind()))
    }

    fn stop(&self, py: Python<'_>) {
        py.detach(|| self.service.stop());
    }
}
