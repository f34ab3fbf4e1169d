//! The standalone router.

use std::sync::Arc;

use axum::body::Body;
use axum::http::{Request, header};
use http_body_util::BodyExt;
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use kvflash_core::catalog;
use kvflash_core::clock::SystemClock;
use kvflash_core::error::Error;
use kvflash_core::ids::InstanceId;
use kvflash_core::select::{self, Selection};
use kvflash_core::settings::Concern;
use kvflash_serve::router::{RouterApp, RouterOptions};
use kvflash_serve::{Face, Reject, RouterSettings};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use super::bookings::Bookings;
use super::buffer::Bytes;
use super::catalog::Catalog;
use super::decider::{Decider, Decisions, Desk};
use super::error::{Fault, Raised, released};
use super::policy_desk::PolicyDesk;
use super::select::routing;
use super::service::Service;
use super::settings::{finish, given, http};

/// The routing decision as an HTTP service in this process, documented in docs/router.md.
///
/// Raises:
///     ConfigError: An invalid setting, by its flag.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct Router {
    catalog: Arc<catalog::Catalog>,
    app: RouterApp,
    /// Whether engines' events are followed: they are on, caches have a weight, and no other indexer
    /// is asked.
    #[pyo3(get)]
    uses_events: bool,
    service: Arc<Service>,
}

/// The same decisions without HTTP.
struct InProcess {
    app: RouterApp,
    service: Arc<Service>,
}

impl Decisions for InProcess {
    fn find(&self, model: Option<&str>, pinned: Option<u64>) -> Result<Desk, Error> {
        let (selector, queue) = self.app.find(model, pinned)?;
        Ok(Desk { selector, queue })
    }

    fn look_up(&self, desk: &Desk, request: &mut select::Request) {
        if self.app.is_remote() && !self.service.shutdown.is_stopped() {
            self.service.block_on(self.app.look_up(&desk.selector, request));
        }
    }

    fn note(
        &self,
        request: &select::Request,
        is_booked: bool,
        outcome: Result<&Selection, &Error>,
    ) {
        self.app.note(request, is_booked, outcome);
    }

    fn is_slow(&self) -> bool {
        self.app.is_slow()
    }
}

#[pymethods]
impl Router {
    #[new]
    #[pyo3(signature = (*, policy_desk=None, **settings))]
    fn new(
        py: Python<'_>,
        policy_desk: Option<Py<PolicyDesk>>,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> Raised<Self> {
        let mut given = given(settings)?;
        let own = RouterSettings::take(&mut given)?;
        let http = http(&mut given, Face::Control)?;
        let (mut routing, limits) = routing(&mut given, policy_desk.as_ref())?;
        finish(given)?;
        routing.selector.router.load.max_requests = own.max_requests;
        let options = RouterOptions { routing, http, own };
        let uses_events = options.routing.uses_events();
        let (threads, drain, http) = (options.threads, options.drain_timeout, options.http.clone());
        let clock = Arc::new(SystemClock::default());
        let catalog = Arc::new(catalog::Catalog::new(limits, clock.clone()));
        released(py, || {
            let app = RouterApp::new(options, Arc::clone(&catalog), clock)?;
            let service = Service::new(threads, &http, drain)?;
            Ok(Self { catalog, app, uses_events, service: Arc::new(service) })
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

    /// The same decisions for an event loop of this process; creates a new object.
    #[getter]
    fn decider(&self) -> Raised<Decider> {
        let decisions = InProcess { app: self.app.clone(), service: Arc::clone(&self.service) };
        Ok(Decider::new(Arc::new(decisions))?)
    }

    /// Set additional lines for ``/metrics``, in the OpenMetrics text format.
    fn set_more_metrics(&self, text: String) {
        self.app.set_more_metrics(text);
    }

    /// Set the caller's warnings for ``/health``; replaces earlier ones.
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

    /// How many times a worker was registered or removed. Cost: O(1).
    fn worker_changes(&self) -> u64 {
        self.app.worker_changes()
    }

    /// The workers that are registered now.
    ///
    /// Returns:
    ///     ``(worker_id, model_name, tenant_id, url, joined)``, by model; ``joined`` changes when a
    ///     worker joins again.
    ///
    /// Cost: O(workers); releases the GIL.
    fn registered(&self, py: Python<'_>) -> Vec<(u64, String, String, Option<String>, u64)> {
        py.detach(|| self.app.registered())
    }

    /// Add or change a worker of discovery.
    ///
    /// Args:
    ///     worker: As :meth:`Frontend.put_worker` takes it, plus its ``url`` for gateways, and the
    ///         ``state`` in which it joins. Its plane is not used here.
    ///
    /// Returns:
    ///     Its instance id.
    ///
    /// Raises:
    ///     ConfigError: Names the field at fault.
    ///     ConflictError: The id of a registered worker, or a block size other than the model's.
    ///     OverloadedError: The limit of workers, ranks or models is reached.
    fn put_worker(&self, py: Python<'_>, worker: &str) -> Raised<InstanceId> {
        released(py, || self.app.put_worker(worker))
    }

    /// As :meth:`Frontend.set_worker_state`.
    fn set_worker_state(&self, py: Python<'_>, instance_id: InstanceId, state: &str) -> Raised<()> {
        released(py, || self.app.set_worker_state(instance_id, state))
    }

    /// Remove a worker of discovery, its blocks and its requests; NotFoundError for any other.
    fn remove_worker(&self, py: Python<'_>, instance_id: InstanceId) -> Raised<()> {
        released(py, || self.app.remove_worker(instance_id))
    }

    /// Bind and serve in the background. Returns the bound port.
    ///
    /// Raises:
    ///     ConfigError: The address can't be bound.
    fn start(&self, py: Python<'_>, host: &str, port: u16) -> Raised<u16> {
        released(py, || {
            self.app.restore()?;
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

    /// Call a route without HTTP; returns the response as JSON.
    ///
    /// Also works before the start, and until the stop. Releases the GIL; blocks as long as the
    /// route takes, with a remote indexer up to its deadline.
    ///
    /// Args:
    ///     method: For example ``"POST"``.
    ///     path: For example ``"/reserve"``.
    ///     body: JSON; may be empty.
    ///
    /// Raises:
    ///     InvalidArgumentError: No such method or path, or HTTP status 400.
    ///     KvflashError: Any other HTTP error status, by its cause.
    ///     ClosedError: It is stopped.
    fn call(
        &self,
        py: Python<'_>,
        method: &str,
        path: &str,
        body: &Bound<'_, PyAny>,
    ) -> Raised<Py<PyBytes>> {
        if self.service.shutdown.is_stopped() {
            return Err(Fault::from(Error::Closed("the router is stopped".to_owned())));
        }
        let body = Bytes::of(body.clone())?;
        let bytes = bytes::Bytes::copy_from_slice(body.as_slice());
        let answer = py.detach(|| {
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
                    // First: a waiting call must not touch its timers, which end with the runtime.
                    () = stopped.wait() => {
                        return Err(Error::Closed("the router is stopped".to_owned()));
                    }
                    Ok(response) = routes.call(request) => response,
                };
                let refused = Reject::of(&response);
                let body = response.into_body().collect().await;
                let body = body.map_err(|error| Error::Closed(error.to_string()))?.to_bytes();
                refused.map_or(Ok(body), Err)
            })
        });
        Ok(PyBytes::new(py, &answer?).unbind())
    }

    /// Stop serving; open calls get the drain time. Blocks until done.
    fn stop(&self, py: Python<'_>) {
        py.detach(|| self.service.stop());
    }
}
