//! Routes of the router.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Extension, Router};
use kvflash_core::catalog::Catalog;
use kvflash_core::clock::Clock;
use kvflash_core::error::{Error, Result as KvResult};
use kvflash_core::ids::Worker;
use kvflash_core::select::StartGate;
use parking_lot::RwLock;
use serde::Serialize;
use serde_json::json;

use super::super::aside::Aside;
use super::super::busy::{Change, list};
use super::super::indexer::form::{Form, Params, refuse_encoded};
use super::super::indexer::query_routes;
use super::super::indexer::request::WorkersFilter;
use super::super::lock::Subject;
use super::super::metrics::{CommonMetrics, new_registry};
use super::super::page::Page;
use super::super::reject::PlainReject;
use super::super::state_file::Registrations;
use super::super::worker_state::{Patch, PathText, text_of, worker_id, worker_key};
use super::super::{Peer, Reject, openapi};
use super::answer::{health, readiness, warnings, worker_entries, worker_entry};
use super::app::{App, RouterOptions};
use super::choose::Chosen;
use super::fleet::Fleet;
use super::method::{Message, obey};
use super::metrics::{RouterMetrics, write_fleet};
use super::request::{Choose, LoadReport, Named, NewWorker};

/// Longest name for GET /why and in a header.
const MAX_NAME_BYTES: usize = kvflash_core::select::MAX_REQUEST_ID_BYTES;

/// The standalone router: register workers with it, serve [`RouterApp::router`].
#[derive(Clone)]
pub struct RouterApp {
    pub(super) app: Arc<App>,
    routes: Router,
}

impl RouterApp {
    /// A router without workers.
    ///
    /// # Errors
    /// As [`RouterOptions::check`]; `Config` for an invalid address of a remote indexer.
    pub fn new(
        options: RouterOptions,
        catalog: Arc<Catalog>,
        clock: Arc<dyn Clock>,
    ) -> KvResult<Self> {
        options.check()?;
        let mut registry = new_registry();
        let metrics = RouterMetrics::register(&mut registry);
        let remote = options.routing.register(&options.http, &clock, &mut registry)?;
        let intake = options.http.intake(options.max_body_bytes, &mut registry);
        let common = CommonMetrics::new(registry);
        let fleet =
            Fleet::new(options.routing.clone(), options.max_workers, Arc::clone(&catalog), clock);
        let wanted = options.routing.min_initial_workers;
        let app = App {
            options,
            catalog,
            fleet,
            common,
            metrics,
            remote,
            start: StartGate::new(wanted, "have registered", "--min-initial-workers"),
            outside_warnings: RwLock::default(),
            aside: Aside::default(),
            intake,
            registrations: Registrations::default(),
        };
        let app = Arc::new(app);
        Ok(Self { routes: routes(&app)?, app })
    }

    /// Restores the content of `--state-file`, once, after the workers from flags were added.
    ///
    /// # Errors
    /// `Config`, naming the file.
    pub fn restore(&self) -> KvResult<()> {
        let app = &self.app;
        let again =
            |new: NewWorker| app.fleet.add(new).map(drop).map_err(|error| error.to_string());
        app.registrations.restore(app.options.http.state_file.as_deref(), again)
    }

    /// Whether it has the workers to decide, as `GET /ready` reports it.
    pub fn is_ready(&self) -> bool {
        readiness(&self.app).0
    }

    /// Saves registrations that could not be saved before; call it on a timer. It writes to a file.
    pub fn save_again(&self) {
        self.app.registrations.try_again();
    }

    /// Frees inactive reservations; call it on a timer.
    pub fn expire(&self) -> usize {
        let expired = self.app.fleet.expire();
        self.app.metrics.load_expired.inc_by(expired as u64);
        expired
    }

    /// The routes, ready for [`super::super::serve`].
    pub fn router(&self) -> Router {
        self.routes.clone()
    }
}

fn routes(app: &Arc<App>) -> KvResult<Router> {
    let routes = Router::new()
        .route("/", post(method))
        .route("/workers", get(workers).post(add_worker))
        .route("/workers/{id}", get(tell_worker).patch(change_worker).delete(remove_worker))
        .route("/select", post(select))
        .route("/reserve", post(reserve))
        .route("/prefill_complete", post(prefill_complete))
        .route("/touch", post(touch))
        .route("/free", post(free))
        .route("/potential_loads", post(potential_loads))
        .route("/report_load", post(report_load))
        .route("/busy_threshold", get(thresholds).post(set_thresholds))
        .route("/explain", post(explain))
        .route("/why/{request_id}", get(why))
        .route("/health", get(tell_health))
        .route("/live", get(async || StatusCode::OK))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics));
    let mut router = openapi::complete(routes, openapi::ROUTER).with_state(Arc::clone(app));
    if app.options.routing.serve_indexer {
        router = router.merge(query_routes(&app.catalog, &app.intake, &app.options.http)?);
    }
    let router = router.layer(from_fn(refuse_encoded));
    Ok(router.layer(from_fn_with_state(Arc::clone(app), count)))
}

async fn count(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let matched = request.extensions().get::<MatchedPath>().cloned();
    let response = next.run(request).await;
    let endpoint = matched.map_or("other".into(), |path| path.as_str().to_owned().into());
    app.common.count(endpoint, &response, started);
    response
}

type Answer = Result<Response, PlainReject>;

async fn chosen(app: &App, headers: &HeaderMap, body: Body) -> Result<Chosen, Reject> {
    Ok(Chosen::advised(app, app.parse(headers, body).await?).await?)
}

fn reply(body: &impl Serialize) -> Response {
    Form::Json.respond(StatusCode::OK, body)
}

/// In the format that the client accepts.
fn reply_to(headers: &HeaderMap, body: &impl Serialize) -> Response {
    Form::of_answer(headers).respond(StatusCode::OK, body)
}

async fn add_worker(
    State(app): State<Arc<App>>,
    peer: Option<Extension<Peer>>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    let mut new: NewWorker = app.parse(&headers, body).await?;
    new.registrant = peer.map(|Extension(Peer(address))| address.ip());
    // Workers from flags are added again at the next start.
    let kept = new.registrant.map(|_| new.clone());
    if kept.is_some() {
        new.check_places(&app.options.http.worker_allow).await?;
    }
    let mut change = app.registrations.change();
    let (pool, member) = app.fleet.add(new)?;
    if let Some(kept) = kept {
        change.put(&worker_key(member.id), &kept);
    }
    drop(change);
    let entry = worker_entry(&app, &pool, &member);
    let response = Form::of_answer(&headers).respond(StatusCode::CREATED, &entry);
    Ok(Subject::mark(response, member.id, member.url.as_deref().unwrap_or("no url")))
}

async fn workers(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    Params(filter): Params<WorkersFilter>,
) -> Response {
    let entries = || worker_entries(&app, filter.model_name.as_deref());
    app.aside.make(|| reply_to(&headers, &entries())).await
}

async fn tell_worker(State(app): State<Arc<App>>, headers: HeaderMap, id: PathText) -> Answer {
    let (pool, member) = app.fleet.known(worker_id(id)?)?;
    Ok(reply_to(&headers, &worker_entry(&app, &pool, &member)))
}

async fn change_worker(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    id: PathText,
    body: Body,
) -> Answer {
    // Read the body first: an unread body ends the connection.
    let Patch { state } = app.parse(&headers, body).await?;
    let id = worker_id(id)?;
    let mut change = app.registrations.change();
    app.fleet.set_state(id, state)?;
    change.amend(&worker_key(id), "state", state);
    drop(change);
    let (pool, member) = app.fleet.known(id)?;
    Ok(reply_to(&headers, &worker_entry(&app, &pool, &member)))
}

async fn remove_worker(State(app): State<Arc<App>>, id: PathText) -> Answer {
    let id = worker_id(id)?;
    let mut change = app.registrations.change();
    app.fleet.remove(id)?;
    change.remove(&worker_key(id));
    Ok(reply(&json!({ "status": "ok", "worker_id": id })))
}

async fn select(State(app): State<Arc<App>>, headers: HeaderMap, body: Body) -> Answer {
    let chosen = chosen(&app, &headers, body).await?;
    Ok(reply_to(&headers, &chosen.query(&app)?))
}

async fn reserve(
    State(app): State<Arc<App>>,
    peer: Option<Extension<Peer>>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    let mut request: Choose = app.parse(&headers, body).await?;
    request.caller = peer.map(|Extension(Peer(address))| address.ip());
    let chosen = Chosen::advised(&app, request).await?;
    Ok(reply_to(&headers, &chosen.reserve(&app).await?))
}

async fn explain(State(app): State<Arc<App>>, headers: HeaderMap, body: Body) -> Answer {
    let chosen = chosen(&app, &headers, body).await?;
    app.aside.make(|| Ok(reply_to(&headers, &chosen.explain(&app)?))).await
}

async fn potential_loads(State(app): State<Arc<App>>, headers: HeaderMap, body: Body) -> Answer {
    let chosen = Chosen::understand(&app, app.parse(&headers, body).await?).await?;
    let loads = chosen.potential_loads()?;
    let (count, tokens) = chosen.pending();
    let answer = json!({ "loads": loads, "pending_count": count, "pending_isl_tokens": tokens });
    Ok(reply_to(&headers, &answer))
}

async fn prefill_complete(State(app): State<Arc<App>>, headers: HeaderMap, body: Body) -> Answer {
    let named: Named = app.parse(&headers, body).await?;
    let mut outcome = Err(unknown(&named.request_id));
    for pool in app.pools_of(&named) {
        pool.selector.note_used(&named.request_id, named.usage());
        if pool.selector.mark_prefill_completed(&named.request_id).is_ok() {
            outcome = Ok(());
        }
    }
    outcome?;
    Ok(reply_to(&headers, &json!({ "status": "ok" })))
}

async fn touch(State(app): State<Arc<App>>, headers: HeaderMap, body: Body) -> Answer {
    let named: Named = app.parse(&headers, body).await?;
    let pools = app.pools_of(&named);
    if let Some(tokens) = named.generated_tokens {
        pools.iter().for_each(|pool| pool.selector.note_generated(&named.request_id, tokens));
    }
    match pools.iter().filter(|pool| pool.selector.touch(&named.request_id)).count() {
        0 => Err(unknown(&named.request_id).into()),
        _ => Ok(reply_to(&headers, &json!({ "status": "ok" }))),
    }
}

async fn free(State(app): State<Arc<App>>, headers: HeaderMap, body: Body) -> Answer {
    let named: Named = app.parse(&headers, body).await?;
    let pools = app.pools_of(&named);
    for pool in &pools {
        pool.selector.note_used(&named.request_id, named.usage());
    }
    let freed = pools.iter().filter(|pool| pool.selector.free(&named.request_id)).count();
    Ok(reply_to(&headers, &json!({ "status": "ok", "freed": freed > 0 })))
}

fn unknown(request_id: &str) -> Error {
    Error::NotFound(format!(
        "request_id {request_id:?} is not active: never reserved, freed, expired, or its worker left"
    ))
}

async fn report_load(State(app): State<Arc<App>>, headers: HeaderMap, body: Body) -> Answer {
    let report: LoadReport = app.parse(&headers, body).await?;
    let worker = Worker::new(report.worker_id, report.dp_rank);
    let (pool, member) = app.fleet.known(report.worker_id)?;
    if report.dp_rank >= member.dp_size {
        let (id, rank) = (report.worker_id, report.dp_rank);
        let message = format!("worker {id} has no dp_rank {rank}");
        return Err(Error::NotFound(message).into());
    }
    let metrics = report.engine_metrics()?;
    let is_kept = match report.router_id {
        Some(router_id) => {
            let now_ms = pool.selector.now_ms();
            pool.selector.busy.share(router_id, worker, report.share()?, now_ms)
        }
        None => pool.selector.busy.report(worker, &report.report()),
    };
    if !is_kept {
        let message =
            format!("1024 other routers already report loads of worker {worker}, the limit");
        return Err(Error::Overloaded(message).into());
    }
    if !metrics.is_empty() {
        pool.selector.engines.update(worker, metrics);
    }
    Ok(reply_to(&headers, &json!({ "status": "ok" })))
}

async fn thresholds(State(app): State<Arc<App>>) -> Response {
    let pools = app.fleet.pools();
    let tables = pools.iter().map(|pool| (pool.key.model_name.as_str(), &pool.selector.busy));
    reply(&list(tables))
}

async fn set_thresholds(State(app): State<Arc<App>>, headers: HeaderMap, body: Body) -> Answer {
    let body = app.read(body).await?;
    Change::check_type(&headers)?;
    let change = Change::parse(&body)?;
    let pools = app.fleet.fitting(Some(&change.model), None);
    Ok(reply(&change.apply(pools.iter().map(|pool| &pool.selector.busy))?))
}

async fn why(State(app): State<Arc<App>>, headers: HeaderMap, request_id: PathText) -> Answer {
    let found = || {
        let request_id = text_of("request_id", request_id)?;
        let now_ms = app.fleet.common.clock.now_ms();
        let records = app.fleet.common.journal.find(&request_id);
        let decisions: Vec<_> = records.iter().map(|record| record.whole(now_ms)).collect();
        if decisions.is_empty() {
            return Err(Error::NotFound(format!(
                "no decision is stored for request_id {request_id:?}: only reserved requests have one, and newer \
                 ones replace the oldest (--decision-journal)"
            ))
            .into());
        }
        Ok(reply_to(&headers, &json!({ "request_id": request_id, "decisions": decisions })))
    };
    app.aside.make(found).await
}

async fn method(
    State(app): State<Arc<App>>,
    peer: Option<Extension<Peer>>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    let message: Message = app.parse(&headers, body).await?;
    let name = headers.get("x-request-id").and_then(|value| value.to_str().ok());
    let name = name.filter(|name| name.len() <= MAX_NAME_BYTES).map(str::to_owned);
    let caller = peer.map(|Extension(Peer(address))| address.ip());
    Ok(reply_to(&headers, &obey(&app, message, name, caller).await?))
}

async fn tell_health(State(app): State<Arc<App>>) -> Response {
    app.aside.make_for_probe(|| reply(&health(&app))).await
}

async fn ready(State(app): State<Arc<App>>) -> Response {
    let (is_ready, answer) = readiness(&app);
    if is_ready {
        return reply(&answer);
    }
    Form::not_ready(&answer)
}

pub(super) async fn metrics(State(app): State<Arc<App>>) -> Response {
    let (of, prefix) = (Arc::clone(&app), &app.options.metrics_prefix);
    let read = move |page: &mut Page<'_>| {
        page.state(readiness(&of).0, warnings(&of).len())?;
        write_fleet(&of.fleet, page)
    };
    app.common.expose(&app.catalog, &app.fleet.common.journal, prefix, read).await
}
