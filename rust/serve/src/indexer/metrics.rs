//! The indexer's counters and values read at each scrape, all under `kvflash_kvindexer_`.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use kvflash_core::catalog::{Catalog, Code, ListenerStatus, ModelKey, Report, TrustState};
use kvflash_core::named;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::startup::Startup;
use crate::body::Intake;
use crate::metrics::{add, exposition, seconds_histogram};
use crate::page::{Labels, Page, Pages, and, column, label, of_model};

/// Endpoints are the routes of the API, never a client's input.
type Row<const COUNT: usize> = [(&'static str, Cow<'static, str>); COUNT];

/// The metrics of one indexer.
pub(super) struct IndexerMetrics {
    registry: Registry,
    requests: Family<Row<2>, Counter>,
    errors: Family<Row<2>, Counter>,
    seconds: Family<Row<1>, Histogram, fn() -> Histogram>,
    /// Metrics of the most frequent endpoints, looked up once.
    questions: [OnceLock<(Counter, Histogram)>; Endpoint::ALL.len()],
}

named! {
    /// Endpoints called for each prompt, named by their paths.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Endpoint {
        Query = "/query",
        QueryByHash = "/query_by_hash",
    }
}

impl IndexerMetrics {
    /// Creates the metrics; `intake` registers its own.
    pub fn new(
        catalog: Arc<Catalog>,
        startup: Arc<Startup>,
        intake: impl FnOnce(&mut Registry) -> Intake,
    ) -> (Self, Intake) {
        let mut registry = Registry::with_prefix("kvflash_kvindexer");
        let registered = &mut registry;
        let help = "HTTP requests answered";
        let requests = add(registered, "requests", help, Family::default());
        let help = "HTTP requests answered with an error";
        let errors = add(registered, "errors", help, Family::default());
        let seconds = Family::new_with_constructor(seconds_histogram as fn() -> Histogram);
        let help = "Time from a request's head to its answer's head";
        let seconds = add(registered, "request_duration_seconds", help, seconds);
        registered.register_collector(Box::new(Pages(move |page: &mut Page<'_>| {
            let reports = catalog.reports(|_| true);
            write_services(&catalog, &startup, page, &reports)?;
            write_indexes(&catalog, page)?;
            write_workers(page, &reports)?;
            write_trust(&catalog, page, &reports)
        })));
        let intake = intake(registered);
        (Self { registry, requests, errors, seconds, questions: Default::default() }, intake)
    }

    /// The exposition text, with the catalog's current values; names begin with `prefix`.
    pub fn expose(&self, prefix: &str) -> Response {
        // Thousands of workers take tens of milliseconds: other connections continue meanwhile.
        tokio::task::block_in_place(|| exposition([&self.registry], "", prefix))
    }

    /// Counts a POST to one of these endpoints.
    pub fn count_question(&self, endpoint: Endpoint, status: u16, started: Instant) {
        if status >= 400 {
            return self.count(endpoint.name(), "POST", status, started);
        }
        let (requests, seconds) = self.questions[endpoint as usize].get_or_init(|| {
            let path = [("endpoint", endpoint.name().into())];
            let seconds = self.seconds.get_or_create_owned(&path);
            let [path] = path;
            (self.requests.get_or_create_owned(&[path, ("method", "POST".into())]), seconds)
        });
        requests.inc();
        seconds.observe(started.elapsed().as_secs_f64());
    }

    fn count(&self, path: &str, method: &'static str, status: u16, started: Instant) {
        let path = ("endpoint", Cow::Owned(path.to_owned()));
        self.requests.get_or_create(&[path.clone(), ("method", method.into())]).inc();
        let class = match status {
            400..=499 => Some("4xx"),
            500..=599 => Some("5xx"),
            _ => None,
        };
        if let Some(class) = class {
            self.errors.get_or_create(&[path.clone(), ("status_class", class.into())]).inc();
        }
        self.seconds.get_or_create(&[path]).observe(started.elapsed().as_secs_f64());
    }
}

/// A layer that counts every request; those without a route as `other`.
pub(super) async fn count(
    State(metrics): State<Arc<IndexerMetrics>>,
    request: Request,
    next: Next,
) -> Response {
    let started = Instant::now();
    let endpoint = request.extensions().get::<MatchedPath>().cloned();
    // Clients may send any word as the method.
    let known = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"];
    let method = known.into_iter().find(|name| request.method() == name).unwrap_or("other");
    let response = next.run(request).await;
    let endpoint = endpoint.as_ref().map_or("other", MatchedPath::as_str);
    metrics.count(endpoint, method, response.status().as_u16(), started);
    response
}

fn of_worker(report: &Report) -> Labels {
    let worker = report.view.worker;
    let of_instance = and(&of_model(&report.model.key), "instance_id", worker.instance_id);
    and(&of_instance, "dp_rank", worker.dp_rank)
}

fn write_services(
    catalog: &Catalog,
    startup: &Startup,
    page: &mut Page<'_>,
    reports: &[Report],
) -> fmt::Result {
    let models: BTreeSet<&ModelKey> = reports.iter().map(|r| &r.model.key).collect();
    let instances: BTreeSet<u64> = reports.iter().map(|r| r.view.worker.instance_id).collect();
    let help = "1 once GET /ready answers 200: the start is complete";
    page.gauge("ready", help, u32::from(startup.is_ready(catalog)))?;
    let help = "Blocks recovered from a peer, of all workers together";
    page.gauge("recovered_blocks", help, startup.recovered_blocks())?;
    page.gauge("models", "Models and tenants that have a registered worker", models.len())?;
    page.gauge("workers", "Registered instances", instances.len())?;
    let listeners = ListenerStatus::ALL.map(|status| {
        let count = reports.iter().filter(|report| report.view.status == status).count();
        (label("status", status.name()), count)
    });
    page.gauges("listeners", "Event sockets by status", listeners)?;
    let counts = catalog.event_counts();
    let counts = counts.entries().map(|(kind, value)| (label("kind", kind), value));
    page.counters("events", "Engine events since the start, by kind", counts)
}

fn write_indexes(catalog: &Catalog, page: &mut Page<'_>) -> fmt::Result {
    page.indexes(catalog)?;
    let groups = catalog.models();
    let groups: Vec<_> =
        groups.iter().map(|model| (of_model(&model.key), model.groups.stats())).collect();
    let help = "Block names held for further cache groups, one per worker and tier that holds it";
    page.gauges("index_names", help, column(&groups, |stats| stats.names))?;
    let help = "Memory of the table of block names";
    page.gauges("index_names_bytes", help, column(&groups, |stats| stats.bytes))?;
    let help =
        "Memory of the cache of prompts' block names; the least used are dropped at its limit";
    page.gauge("name_cache_bytes", help, catalog.name_cache_stats().held_bytes)?;
    let options = catalog.options();
    let help = "Memory that one index may occupy; 0 = no limit";
    page.gauge("index_limit_bytes", help, options.index_memory_bytes)?;
    let help = "Blocks that one index may hold; 0 = no limit";
    page.gauge("index_limit_blocks", help, options.max_blocks)
}

fn write_workers(page: &mut Page<'_>, reports: &[Report]) -> fmt::Result {
    let reports: Vec<_> = reports.iter().map(|report| (of_worker(report), &report.view)).collect();
    let ages = reports
        .iter()
        .filter_map(|(of, view)| Some((of.clone(), view.last_event_age_ms? as f64 / 1000.0)));
    let help = "Time since the last batch of a worker; idle engines publish none";
    page.gauges("worker_last_event_age_seconds", help, ages)?;
    let missing = column(&reports, |view| view.evidence.missing_batches);
    let help = "Missing batches that are being requested from the engine";
    page.gauges("worker_missing_batches", help, missing)?;
    let held = column(&reports, |view| view.evidence.device_blocks);
    let help = "Blocks credited on a worker's device; the fullest of its ranks";
    page.gauges("worker_device_blocks", help, held)?;
    let capacities =
        reports.iter().filter_map(|(of, view)| Some((of.clone(), view.capacity_blocks?)));
    let help = "Blocks of a worker's device, where its registration gave the number";
    page.gauges("worker_capacity_blocks", help, capacities)
}

fn write_trust(catalog: &Catalog, page: &mut Page<'_>, reports: &[Report]) -> fmt::Result {
    let states = reports.iter().flat_map(|report| {
        TrustState::ALL.map(|state| {
            let is_it = u32::from(report.trust.state == state);
            (and(&of_worker(report), "state", state.name()), is_it)
        })
    });
    let help = "1 for the state of a worker's trust, 0 for the others";
    page.gauges("worker_trust", help, states)?;
    let state = |key: &ModelKey, state: TrustState| and(&of_model(key), "state", state.name());
    let reason = |key: &ModelKey, code: Code| and(&of_model(key), "reason", code.name());
    let (mut states, mut reasons) = (BTreeMap::<Labels, u32>::new(), BTreeMap::new());
    for model in catalog.models() {
        states.extend(TrustState::ALL.map(|one| (state(&model.key, one), 0)));
        reasons.extend(Code::ALL.map(|code| (reason(&model.key, code), 0_u32)));
    }
    for report in reports {
        let key = &report.model.key;
        *states.entry(state(key, report.trust.state)).or_default() += 1;
        for code in report.trust.codes().iter() {
            *reasons.entry(reason(key, code)).or_default() += 1;
        }
    }
    page.gauges("trust_listeners", "Event sockets by state of trust", states)?;
    let help = "Event sockets by reason against trusting them; one may have several";
    page.gauges("trust_reasons", help, reasons)
}
