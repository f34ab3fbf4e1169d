//! The indexer's counters and values read at each scrape, all under `kvflash_kvindexer_`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use kvflash_core::catalog::{Catalog, Code, ListenerStatus, ModelKey, Report, TrustState};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeGaugeValue, EncodeLabelSet, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::super::metrics::{escape, exposition, seconds_histogram};
use super::startup::Startup;

/// Endpoints are the routes of the API, never a client's input.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabel {
    endpoint: String,
    method: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ErrorLabel {
    endpoint: String,
    status_class: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EndpointLabel {
    endpoint: String,
}

#[derive(Debug, Clone)]
struct Seconds;

impl MetricConstructor<Histogram> for Seconds {
    fn new_metric(&self) -> Histogram {
        seconds_histogram()
    }
}

/// The metrics of one indexer.
pub(super) struct IndexerMetrics {
    registry: Registry,
    requests: Family<RequestLabel, Counter>,
    errors: Family<ErrorLabel, Counter>,
    seconds: Family<EndpointLabel, Histogram, Seconds>,
    /// Metrics of the most frequent endpoints, looked up once.
    questions: [OnceLock<(Counter, Histogram)>; Endpoint::ALL.len()],
}

/// Endpoints called for each prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Endpoint {
    Query,
    QueryByHash,
}

impl Endpoint {
    pub const ALL: [Self; 2] = [Self::Query, Self::QueryByHash];

    pub const fn path(self) -> &'static str {
        match self {
            Self::Query => "/query",
            Self::QueryByHash => "/query_by_hash",
        }
    }
}

impl IndexerMetrics {
    /// Creates the metrics; `more` registers further ones.
    pub fn new<T>(
        catalog: Arc<Catalog>,
        startup: Arc<Startup>,
        more: impl FnOnce(&mut Registry) -> T,
    ) -> (Self, T) {
        let mut registry = Registry::with_prefix("kvflash_kvindexer");
        let (requests, errors) = (Family::default(), Family::default());
        let seconds = Family::new_with_constructor(Seconds);
        registry.register("requests", "HTTP requests answered", requests.clone());
        registry.register("errors", "HTTP requests answered with an error", errors.clone());
        registry.register_with_unit(
            "request_duration",
            "Time from a request's head to its answer's head",
            Unit::Seconds,
            seconds.clone(),
        );
        registry.register_collector(Box::new(Figures { catalog, startup }));
        let more = more(&mut registry);
        (Self { registry, requests, errors, seconds, questions: Default::default() }, more)
    }

    /// The exposition text, with the catalog's current values; names begin with `prefix`.
    pub fn expose(&self, prefix: &str) -> Response {
        // Thousands of workers take tens of milliseconds: other connections continue meanwhile.
        tokio::task::block_in_place(|| exposition(&self.registry, prefix))
    }

    /// Counts a POST to one of these endpoints.
    pub fn count_question(&self, endpoint: Endpoint, status: u16, started: Instant) {
        if status >= 400 {
            return self.count(endpoint.path(), "POST", status, started);
        }
        let (requests, seconds) = self.questions[endpoint as usize].get_or_init(|| {
            let endpoint = endpoint.path().to_owned();
            let label = RequestLabel { endpoint: endpoint.clone(), method: "POST" };
            let seconds = self.seconds.get_or_create(&EndpointLabel { endpoint }).clone();
            (self.requests.get_or_create(&label).clone(), seconds)
        });
        requests.inc();
        seconds.observe(started.elapsed().as_secs_f64());
    }

    fn count(&self, endpoint: &str, method: &'static str, status: u16, started: Instant) {
        let endpoint = endpoint.to_owned();
        let label = RequestLabel { endpoint: endpoint.clone(), method };
        self.requests.get_or_create(&label).inc();
        let status_class = match status {
            400..=499 => Some("4xx"),
            500..=599 => Some("5xx"),
            _ => None,
        };
        if let Some(status_class) = status_class {
            let label = ErrorLabel { endpoint: endpoint.clone(), status_class };
            self.errors.get_or_create(&label).inc();
        }
        let label = EndpointLabel { endpoint };
        self.seconds.get_or_create(&label).observe(started.elapsed().as_secs_f64());
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
    let method = match request.method().as_str() {
        "GET" => "GET",
        "HEAD" => "HEAD",
        "POST" => "POST",
        "PUT" => "PUT",
        "DELETE" => "DELETE",
        "OPTIONS" => "OPTIONS",
        "PATCH" => "PATCH",
        _ => "other",
    };
    let response = next.run(request).await;
    let endpoint = endpoint.as_ref().map_or("other", MatchedPath::as_str);
    metrics.count(endpoint, method, response.status().as_u16(), started);
    response
}

/// Values read from the catalog at each scrape, so that departed workers are not included.
#[derive(Debug)]
struct Figures {
    catalog: Arc<Catalog>,
    startup: Arc<Startup>,
}

struct Tally<const KINDS: usize>([u32; KINDS]);

impl<const KINDS: usize> Default for Tally<KINDS> {
    fn default() -> Self {
        Self([0; KINDS])
    }
}

type Label<'a> = (&'a str, String);

/// Writes one metric after the other.
struct Page<'a>(DescriptorEncoder<'a>);

impl Page<'_> {
    fn gauges<V: EncodeGaugeValue>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<Unit>,
        rows: impl IntoIterator<Item = (Vec<Label<'static>>, V)>,
    ) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, unit.as_ref(), MetricType::Gauge)?;
        for (labels, value) in rows {
            metric.encode_family(&labels)?.encode_gauge(&value)?;
        }
        Ok(())
    }

    fn counters(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = (Vec<Label<'static>>, u64)>,
    ) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, value) in rows {
            let mut row = metric.encode_family(&labels)?;
            row.encode_counter::<NoLabelSet, _, f64>(&value, None)?;
        }
        Ok(())
    }
}

fn of_model(key: &ModelKey) -> Vec<Label<'static>> {
    vec![("model", escape(&key.model_name)), ("tenant", escape(&key.tenant_id))]
}

fn of_worker(report: &Report) -> Vec<Label<'static>> {
    let worker = report.view.worker;
    let mut labels = of_model(&report.model.key);
    labels.push(("instance_id", worker.instance_id.to_string()));
    labels.push(("dp_rank", worker.dp_rank.to_string()));
    labels
}

fn and(mut labels: Vec<Label<'static>>, key: &'static str, value: &str) -> Vec<Label<'static>> {
    labels.push((key, value.to_owned()));
    labels
}

impl Collector for Figures {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut page = Page(encoder);
        let reports = self.catalog.reports(|_| true);
        self.services(&mut page, &reports)?;
        self.indexes(&mut page)?;
        Self::workers(&mut page, &reports)?;
        self.trust(&mut page, &reports)
    }
}

impl Figures {
    fn services(&self, page: &mut Page<'_>, reports: &[Report]) -> fmt::Result {
        let models: BTreeSet<&ModelKey> = reports.iter().map(|r| &r.model.key).collect();
        let instances: BTreeSet<u64> = reports.iter().map(|r| r.view.worker.instance_id).collect();
        let all = |count: usize| [(Vec::new(), count)];
        let is_ready = usize::from(self.startup.is_ready(&self.catalog));
        let help = "1 once GET /ready answers 200: the start is complete";
        page.gauges("ready", help, None, all(is_ready))?;
        let help = "Blocks recovered from a peer, of all workers together";
        page.gauges("recovered_blocks", help, None, all(self.startup.recovered_blocks()))?;
        let help = "Models and tenants that have a registered worker";
        page.gauges("models", help, None, all(models.len()))?;
        page.gauges("workers", "Registered instances", None, all(instances.len()))?;
        let statuses = [
            (ListenerStatus::Pending, "pending"),
            (ListenerStatus::Active, "active"),
            (ListenerStatus::Paused, "paused"),
            (ListenerStatus::Failed, "failed"),
        ];
        let listeners = statuses.into_iter().map(|(status, name)| {
            let count = reports.iter().filter(|report| report.view.status == status).count();
            (and(Vec::new(), "status", name), count)
        });
        page.gauges("listeners", "Event sockets by status", None, listeners)?;
        let counts = self.catalog.event_counts();
        page.counters(
            "events",
            "Engine events since the start, by kind",
            counts.entries().map(|(kind, value)| (and(Vec::new(), "kind", kind), value)),
        )
    }

    fn indexes(&self, page: &mut Page<'_>) -> fmt::Result {
        let models: Vec<_> = self
            .catalog
            .models()
            .into_iter()
            .map(|model| (of_model(&model.key), model.index.stats()))
            .collect();
        let rows = |figure: fn(&kvflash_core::index::IndexStats) -> usize| {
            models.iter().map(move |(labels, stats)| (labels.clone(), figure(stats)))
        };
        let help = "Blocks held, one per worker and tier that holds it";
        page.gauges("index_blocks", help, None, rows(|stats| stats.memberships))?;
        let help = "Different blocks held by any worker";
        page.gauges("index_unique_blocks", help, None, rows(|stats| stats.unique_blocks))?;
        let help = "Memory of the index";
        page.gauges("index", help, Some(Unit::Bytes), rows(|stats| stats.bytes))?;
        let groups = || {
            self.catalog
                .models()
                .into_iter()
                .map(|model| (of_model(&model.key), model.groups.stats()))
        };
        let help =
            "Block names held for further cache groups, one per worker and tier that holds it";
        page.gauges("index_names", help, None, groups().map(|(of, stats)| (of, stats.names)))?;
        let help = "Memory of the table of block names";
        let bytes = groups().map(|(of, stats)| (of, stats.bytes));
        page.gauges("index_names", help, Some(Unit::Bytes), bytes)?;
        let help =
            "Memory of the cache of prompts' block names; the least used are dropped at its limit";
        let cache = [(Vec::new(), self.catalog.name_cache_stats().held_bytes)];
        page.gauges("name_cache", help, Some(Unit::Bytes), cache)?;
        page.counters(
            "index_evicted_blocks",
            "Blocks that the index dropped at a limit, although their workers may still hold them",
            models.iter().map(|(labels, stats)| (labels.clone(), stats.evicted_blocks_total)),
        )?;
        let options = self.catalog.options();
        let all = |limit: usize| [(Vec::new(), limit)];
        let help = "Memory that one index may occupy; 0 = no limit";
        page.gauges("index_limit", help, Some(Unit::Bytes), all(options.index_memory_bytes))?;
        let help = "Blocks that one index may hold; 0 = no limit";
        page.gauges("index_limit_blocks", help, None, all(options.max_blocks))
    }

    fn workers(page: &mut Page<'_>, reports: &[Report]) -> fmt::Result {
        let ages = reports.iter().filter_map(|report| {
            let age_ms = report.view.last_event_age_ms?;
            Some((of_worker(report), age_ms as f64 / 1000.0))
        });
        let help = "Time since the last batch of a worker; idle engines publish none";
        page.gauges("worker_last_event_age", help, Some(Unit::Seconds), ages)?;
        let help = "Missing batches that are being requested from the engine";
        let missing = reports.iter().map(|r| (of_worker(r), r.view.evidence.missing_batches));
        page.gauges("worker_missing_batches", help, None, missing)?;
        let help = "Blocks credited on a worker's device; the fullest of its ranks";
        let held = reports.iter().map(|r| (of_worker(r), r.view.evidence.device_blocks));
        page.gauges("worker_device_blocks", help, None, held)?;
        let capacities = reports
            .iter()
            .filter_map(|report| Some((of_worker(report), report.view.capacity_blocks?)));
        let help = "Blocks of a worker's device, where its registration gave the number";
        page.gauges("worker_capacity_blocks", help, None, capacities)
    }

    fn trust(&self, page: &mut Page<'_>, reports: &[Report]) -> fmt::Result {
        let states = reports.iter().flat_map(|report| {
            TrustState::ALL.map(|state| {
                let is_it = u32::from(report.trust.state == state);
                (and(of_worker(report), "state", state.name()), is_it)
            })
        });
        let help = "1 for the state of a worker's trust, 0 for the others";
        page.gauges("worker_trust", help, None, states)?;
        let mut tallies: BTreeMap<ModelKey, (Tally<3>, Tally<{ Code::ALL.len() }>)> = self
            .catalog
            .models()
            .iter()
            .map(|model| (model.key.clone(), Default::default()))
            .collect();
        for report in reports {
            let (states, reasons) = tallies.entry(report.model.key.clone()).or_default();
            states.0[report.trust.state as usize] += 1;
            for code in report.trust.codes().iter() {
                reasons.0[code as usize] += 1;
            }
        }
        let states = tallies.iter().flat_map(|(key, (states, _))| {
            let count = |state: TrustState| states.0[state as usize];
            TrustState::ALL.map(|s| (and(of_model(key), "state", s.name()), count(s)))
        });
        page.gauges("trust_listeners", "Event sockets by state of trust", None, states)?;
        let reasons = tallies.iter().flat_map(|(key, (_, reasons))| {
            let count = |code: Code| reasons.0[code as usize];
            Code::ALL.iter().map(move |c| (and(of_model(key), "reason", c.name()), count(*c)))
        });
        let help = "Event sockets by reason against trusting them; one may have several";
        page.gauges("trust_reasons", help, None, reasons)
    }
}
