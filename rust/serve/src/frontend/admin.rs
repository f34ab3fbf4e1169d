//! Operators' endpoints: health, models, busy thresholds, and explanations of routing.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Json;
use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use kvflash_core::catalog::{Code, Report, Trust, TrustState, Unheard};
use kvflash_core::ids::Worker;
use kvflash_core::select::{MAX_REQUEST_ID_BYTES, ReuseView, WorkerReason};
use serde::Deserialize;
use serde_json::{Value, json};

use super::super::busy::{Change, list};
use super::app::{App, Name};
use super::engine::{Engine, Pool};
use super::options::Aliases;
use crate::body::{Received, discard};
use crate::cause::{Topic, Unready, Warning};
use crate::gateway::api::Row;
use crate::gateway::backend::worker::Prefill;
use crate::gateway::book;
use crate::gateway::call::Head;
use crate::gateway::plan::{Part, Plan};
use crate::metrics::CauseLabel;
use crate::reject::PlainReject;
use crate::worker_state::{PathText, text_of};
use crate::{Caller, Reject};

/// 200 while at least one worker can serve, else 503; the body has the state of each. Prefill-only
/// workers can't serve by themselves.
pub(super) async fn health(State(app): State<Arc<App>>) -> Response {
    app.aside.make_for_probe(|| tell_health(&app)).await
}

fn tell_health(app: &App) -> Response {
    let engines = app.fleet.engines();
    let healthy = engines.iter().filter(|engine| engine.is_healthy()).count();
    let reasons = book::reasons(app);
    let reports = app.catalog.reports(|_| true);
    // The blocks of a worker can't be matched: it does not fit its model, or its events can't be
    // received or read.
    let is_unmatched = engines.iter().any(|engine| engine.notes.lock().error().is_some())
        || reports.iter().any(|report| report.trust.state == TrustState::Stale);
    let (status, word) = match (healthy, engines.len()) {
        _ if app.fleet.decoding().1 == 0 || app.without_prefill().is_err() => {
            (StatusCode::SERVICE_UNAVAILABLE, "unavailable")
        }
        (healthy, all) if healthy < all || is_unmatched || !reasons.is_empty() => {
            (StatusCode::OK, "degraded")
        }
        _ => (StatusCode::OK, "healthy"),
    };
    let warnings = warnings(app, &engines, reports, &reasons);
    let body = json!({
        "status": word,
        "workers": engines.len(),
        "healthy_workers": healthy,
        "draining_workers": app.fleet.draining(),
        "requests_in_flight": app.in_flight(),
        "router_policy": app.options.routing.policy_name(),
        "tokenizers": app.tokenizers.loaded().iter().map(|text| text.health()).collect::<Vec<_>>(),
        "warnings": Warning::texts(&warnings),
        "causes": warnings,
        "reasons": reasons,
        "reuse": reuse(app, &engines),
        "index_incomplete": incomplete(app),
        "parity": app.compared().view(),
    });
    (status, Json(body)).into_response()
}

/// Workers that may hold blocks unknown to the index, and the reasons.
fn incomplete(app: &App) -> BTreeMap<String, Value> {
    let each = |(worker, why): (Worker, Unheard)| {
        (worker.to_string(), json!({ "code": why.name(), "message": why.message() }))
    };
    book::unheard(app).into_iter().map(each).collect()
}

/// The reuse of every worker that may decode or prefill.
fn reuse(app: &App, engines: &[Arc<Engine>]) -> BTreeMap<String, Value> {
    let mut views = BTreeMap::new();
    for pool in app.fleet.pools() {
        views.extend(pool.selector.reuse.views());
    }
    let ranks = |engine: &Arc<Engine>| {
        let id = engine.id;
        (0..engine.spec.dp_size).map(move |rank| Worker::new(id, rank))
    };
    let workers = engines.iter().flat_map(ranks);
    workers
        .map(|worker| (worker.to_string(), book::reuse_json(views.get(&worker).copied())))
        .collect()
}

/// 200 if requests are accepted: enough workers were healthy at the start, and one is now. For load
/// balancers; `/health` has the state of each worker.
pub(super) async fn ready(State(app): State<Arc<App>>) -> Response {
    let why = not_ready(&app);
    let status = why.as_ref().map_or(StatusCode::OK, |_| StatusCode::SERVICE_UNAVAILABLE);
    let incomplete: Vec<String> =
        book::unheard(&app).into_keys().map(|worker| worker.to_string()).collect();
    let (code, reason) = why.unzip();
    let body = json!({
        "ready": reason.is_none(),
        "code": code,
        "reason": reason,
        "index_incomplete": incomplete,
    });
    (status, Json(body)).into_response()
}

/// Why requests are not accepted now.
pub(super) fn not_ready(app: &App) -> Option<(Unready, String)> {
    let decoding = app.fleet.decoding();
    let (code, reason) = match app.started() {
        _ if app.options.http.shutdown().is_announced() => {
            (Unready::Stopping, "the frontend is shutting down")
        }
        Err(error) => return Some((Unready::Starting, error.to_string())),
        Ok(()) if decoding.0 == 0 => (Unready::NoDecodeWorker, "no decode worker is healthy"),
        Ok(()) if decoding.1 == 0 => {
            (Unready::AllDraining, "all healthy decode workers are draining")
        }
        Ok(()) if app.without_prefill().is_err() => {
            (Unready::NoPrefillWorker, "--enforce-disagg is set, and no prefill worker is healthy")
        }
        Ok(()) if app.options.ready_fails_when_full && app.is_full() => {
            let limit = app.options.max_concurrent_requests;
            let reason = format!(
                "the limit of requests in flight is reached: {limit} (--max-concurrent-requests)"
            );
            return Some((Unready::Full, reason));
        }
        Ok(()) => return None,
    };
    Some((code, reason.to_owned()))
}

/// An engine that has stored nothing after this many requests is assumed to publish no events.
const SILENT_REQUESTS: u64 = 20;

/// How many warnings `GET /health` shows.
pub(super) fn warnings_count(app: &App) -> usize {
    let reports = app.catalog.reports(|_| true);
    warnings(app, &app.fleet.engines(), reports, &book::reasons(app)).len()
}

/// Causes of silently failing prefix matching.
fn warnings(
    app: &App,
    engines: &[Arc<Engine>],
    reports: Vec<Report>,
    reasons: &[WorkerReason],
) -> Vec<Warning> {
    let mut warnings = Warning::common(
        &app.outside_warnings,
        &app.registrations,
        &app.options.routing,
        &app.options.http,
        app.remote.as_ref(),
    );
    let heard: HashSet<_> = reports.iter().map(|report| report.view.worker.instance_id).collect();
    let engines: BTreeMap<_, _> = engines.iter().map(|engine| (engine.id, engine)).collect();
    warnings.extend(reasons.iter().map(|WorkerReason { code, worker, message, fix }| {
        let end = if message.ends_with(['.', '?']) { "" } else { "." };
        let message = format!("{message}{end} Fix: {fix}");
        Warning { code: Topic::Reason(code), worker: Some(worker.clone()), message, fix }
    }));
    warnings.extend(app.fleet.refused());
    let parity = app.compared().warnings().into_iter();
    warnings.extend(parity.map(|message| Warning::new(Topic::TokensDiffer, message)));
    for model in app.fleet.without_decode() {
        let message = format!("model {model} has prefill workers, but no decode worker");
        warnings.push(Warning::new(Topic::NoDecodeWorker, message));
    }
    for model in app.without_prefill().unwrap_or_else(|all| all) {
        let message = format!(
            "model {model}: no prefill worker is healthy, and --enforce-disagg refuses requests without one; start \
             or repair a prefill worker, or allow decode workers to prefill (--enforce-disagg off)"
        );
        warnings.push(Warning::new(Topic::NoPrefillWorker, message));
    }
    let served: HashSet<String> = app.fleet.served().into_iter().map(|(name, _)| name).collect();
    for (alias, models) in app.aliases.iter().flat_map(Aliases::all) {
        let missing: Vec<&str> = models.filter(|model| !served.contains(*model)).collect();
        let what = match missing.len() {
            0 => continue,
            1 => "model",
            _ => "models",
        };
        let message = format!("alias {alias}: no worker serves its {what} {}", missing.join(", "));
        warnings.push(Warning::new(Topic::AliasNotServed, message));
    }
    let pools = app.fleet.pools();
    for model in app.texts.models().filter(|model| pools.iter().all(|pool| pool.name != *model)) {
        let message = format!("--tokenizer {model}=...: no worker serves a model of that name");
        warnings.push(Warning::new(Topic::TokenizerNotUsed, message));
    }
    let untold = app.metrics.untokenized.get(&CauseLabel { cause: "template" });
    if let Some(count) = untold.map(|count| count.get()).filter(|count| *count > 0) {
        let message = format!(
            "the tokenizer's folder has no chat template, so chats are routed by load ({count} so far). Add \
             chat_template.jinja to it, or set --tokenizer to the model's own folder"
        );
        warnings.push(Warning::new(Topic::ChatTemplate, message));
    }
    for engine in engines.values() {
        if let Some(why) = engine.notes.lock().error() {
            warnings.push(Warning::of(engine.id, Topic::WorkerError, why));
        }
        if let Some(why) = &engine.ids.lock().why {
            let what = format!("token ids are no longer sent: {why}");
            warnings.push(Warning::of(engine.id, Topic::TokenIdsRefused, what));
        }
        if app.routes_by_events() && !heard.contains(&engine.id) {
            warnings.extend(unheard(app, engine));
        }
    }
    let mismatches = app.metrics.token_mismatches.get();
    if mismatches > 0 {
        let message = format!(
            "in {mismatches} answers the engine counted a different number of prompt tokens than the frontend: its \
             --tokenizer or chat template differs from the engine's, so prompts that the frontend renders never \
             match; set --tokenizer to the folder of the model that the engine serves"
        );
        warnings.push(Warning::new(Topic::TokenCountsDiffer, message));
    }
    for text in app.tokenizers.loaded() {
        warnings.extend(text.warning().map(|why| Warning::new(Topic::ChatTemplate, why)));
        let report = text.model.tokenizer.encoder();
        if report.mismatches_total > 0 {
            let message = format!(
                "the tokenizer in {}: {} of {} prompts got different ids when they were encoded again; please \
                 report it",
                text.folder.display(),
                report.mismatches_total,
                report.checks_total
            );
            warnings.push(Warning::new(Topic::EncoderDiffers, message));
        }
    }
    for Report { view, trust, .. } in reports {
        let worker = view.worker;
        let engine = engines.get(&worker.instance_id);
        let requests = engine.map_or(0, |engine| engine.requests.load(Ordering::Relaxed));
        if view.counts.batches == 0 && requests >= SILENT_REQUESTS {
            warnings.push(silent(worker, requests, &view.endpoint));
        }
        for (count, code, what) in [
            (
                view.counts.block_size_mismatch,
                Code::BlockSizeMismatch,
                "stored events have a block size that differs from the index's",
            ),
            (view.counts.undecodable, Code::Undecodable, "event frames could not be decoded"),
            (
                view.counts.refused_blocks,
                Code::RefusedBlocks,
                "blocks were refused: the index is full",
            ),
        ] {
            if count > 0 {
                warnings.push(Warning::of(worker, code, format!("{count} {what}")));
            }
        }
        // Batches from before the first one received are lost, too, but no block is credited wrongly.
        let lost = trust.reasons.iter().filter(|reason| reason.code == Code::LostBatches.name());
        warnings.extend(lost.map(|lost| Warning::of_trust(worker, lost)));
        if let Some(error) = view.last_error {
            let what = format!("events at {}: {error}", view.endpoint);
            warnings.push(Warning::of(worker, Topic::EventSocket, what));
        }
    }
    warnings
}

/// Why the cache of an engine without a registered publisher is unknown.
fn unheard(app: &App, engine: &Engine) -> Option<Warning> {
    let id = engine.id;
    let lost = "so its cache is unknown and earns no credit";
    let Some(events) = app.fleet.events_of(id).into_values().next() else {
        let server = engine.notes.lock().server.as_ref().map(|server| server.note.clone());
        let (code, how) = match server {
            _ if engine.member.is_some() => {
                (Topic::EventsNotAnnounced, "announced no events".to_owned())
            }
            Some(note) => (Topic::EventsNotGiven, format!("given without events=, and {note}")),
            None => (Topic::EventsNotGiven, "given without events=".to_owned()),
        };
        return Some(Warning::of(id, code, format!("{how}, {lost}")));
    };
    let endpoint = &events.endpoint;
    if events.is_brokered() && !app.options.has_broker_events {
        let what = format!(
            "its events are at {endpoint}, which needs --event-plane nats on this frontend, {lost}"
        );
        return Some(Warning::of(id, Topic::EventsNeedBroker, what));
    }
    let requests = engine.requests.load(Ordering::Relaxed);
    (events.is_in_stream() && requests >= SILENT_REQUESTS).then(|| silent(id, requests, endpoint))
}

fn silent(worker: impl Display, requests: u64, endpoint: &str) -> Warning {
    let what = format!(
        "took {requests} requests but published nothing at {endpoint}; are KV events enabled in the engine (vLLM: \
         --kv-events-config)?"
    );
    Warning::of(worker, Topic::NothingPublished, what)
}

/// GET /v1/models, in OpenAI's format.
pub(super) async fn models(State(app): State<Arc<App>>) -> Response {
    let list = || json!({ "object": "list", "data": cards(&app).collect::<Vec<_>>() });
    app.aside.make(|| Json(list()).into_response()).await
}

/// The names for clients, in the format of OpenAI's API.
fn cards(app: &App) -> impl Iterator<Item = Value> {
    // Once per model, not per adapter. In reverse, so that decode workers take precedence over
    // prefill workers.
    let pools = app.fleet.pools();
    let limit = |pool: &Arc<Pool>| (pool.name.clone(), pool.members().max_model_len());
    let limits: HashMap<String, Option<u64>> = pools.iter().rev().map(limit).collect();
    app.names().into_iter().map(move |Name { name, root, base, parent }| {
        json!({
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "kvflash",
            "root": root,
            "parent": parent,
            "max_model_len": limits.get(&base),
        })
    })
}

/// GET /v1/models/{id}, where the id may contain slashes.
pub(super) async fn model(State(app): State<Arc<App>>, id: PathText) -> Result<Response, Reject> {
    let id = text_of("model id", id)?;
    app.aside.make(|| tell_model(&app, &id)).await
}

fn tell_model(app: &App, id: &str) -> Result<Response, Reject> {
    let Some(card) = cards(app).find(|card| card["id"] == id) else {
        let model = app.aliases.iter().flat_map(Aliases::all).find(|(alias, _)| *alias == id);
        let model = model.and_then(|(_, mut models)| models.next());
        return Err(app.not_served(id, model).into());
    };
    Ok(Json(card).into_response())
}

/// GET /busy_threshold: the current thresholds, by model.
pub(super) async fn thresholds(State(app): State<Arc<App>>) -> Response {
    let pools = app.fleet.pools();
    let tables = pools.iter().map(|pool| (pool.name.as_str(), &pool.selector.busy));
    Json(list(tables)).into_response()
}

/// POST /busy_threshold {model, thresholds...}: an absent field is kept, an explicit null removes
/// it; a request without thresholds only reads them.
pub(super) async fn set_thresholds(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>, PlainReject> {
    let body = app.intake.control(body).await?;
    Change::check_type(&headers)?;
    let change = Change::parse(&body)?;
    let pool = app.fleet.route(&change.model).ok().flatten().map(|route| route.pool);
    // A model may have prefill workers only.
    let name = pool.as_ref().map_or(&*change.model, |pool| &pool.name);
    let prefills = app.fleet.prefill_pool(name);
    let pools = pool.iter().chain(&prefills);
    Ok(Json(change.apply(pools.map(|pool| &pool.selector.busy))?))
}

/// GET /why/{request id}: the decisions made for a request, and its outcome.
pub(super) async fn why(State(app): State<Arc<App>>, id: PathText) -> Result<Response, Reject> {
    let id = text_of("request id", id)?;
    app.aside.make(|| tell_why(&app, &id)).await
}

pub(super) fn tell_why(app: &App, id: &str) -> Result<Response, Reject> {
    let records = app.fleet.common.journal.find(id);
    if records.is_empty() {
        let message = if id.len() > MAX_REQUEST_ID_BYTES {
            format!(
                "a request id has at most {MAX_REQUEST_ID_BYTES} bytes, and kvflash replaced this longer one: use \
                 the x-request-id of the request's answer"
            )
        } else {
            format!(
                "no decision is stored for request {id:?}: it was not routed here, or newer decisions have replaced \
                 it (--decision-journal)"
            )
        };
        return Err(Reject::new(StatusCode::NOT_FOUND, message));
    }
    let now_ms = app.fleet.common.clock.now_ms();
    let mut trusts = HashMap::new();
    let decisions: Vec<Value> = records
        .iter()
        .map(|record| {
            let trust = trusts.entry(&*record.model).or_insert_with(|| trust(app, &record.model));
            let mut decision = record.whole(now_ms);
            for (candidate, now) in beliefs(app, &mut decision, trust) {
                candidate["now"] = now;
            }
            decision
        })
        .collect();
    Ok(Json(json!({ "request_id": id, "decisions": decisions })).into_response())
}

/// The trust in the events of each worker of a model.
fn trust(app: &App, model_name: &str) -> HashMap<String, Trust> {
    let reports = app.catalog.reports(|model| model.key.model_name == model_name);
    reports.into_iter().map(|report| (report.view.worker.to_string(), report.trust)).collect()
}

/// The reuse of all workers whose overlap has less than full weight.
fn reuse_views(app: &App) -> HashMap<String, ReuseView> {
    let pools = app.fleet.pools();
    let views = pools.iter().flat_map(|pool| pool.selector.reuse.views());
    let low = views.filter(|(_, view)| view.credit < 1.0);
    low.map(|(worker, view)| (worker.to_string(), view)).collect()
}

/// What is known now about the events of each of the decision's candidates.
fn beliefs<'a>(
    app: &App,
    decision: &'a mut Value,
    trust: &HashMap<String, Trust>,
) -> impl Iterator<Item = (&'a mut Value, Value)> {
    let (reuse, incomplete) = (reuse_views(app), incomplete(app));
    decision["candidates"].as_array_mut().into_iter().flatten().map(move |candidate| {
        let worker = candidate["worker"].as_str().unwrap_or_default();
        let mut known = json!({ "trust": trust.get(worker) });
        if let Some(view) = reuse.get(worker) {
            known["reuse"] = book::reuse_json(Some(*view));
        }
        if let Some(why) = incomplete.get(worker) {
            known["index_incomplete"] = why.clone();
        }
        (candidate, known)
    })
}

/// `decision`, which was made just now, with what is known about each candidate's events.
fn with_trust(app: &App, mut decision: Value, trust: &HashMap<String, Trust>) -> Value {
    for (candidate, known) in beliefs(app, &mut decision, trust) {
        if let (Value::Object(to), Value::Object(from)) = (candidate, known) {
            to.extend(from);
        }
    }
    decision
}

/// The path of the request that `/explain` is about.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Asked {
    pub path: Option<String>,
}

impl Asked {
    /// # Errors
    /// 400 for a path without requests.
    fn row(self) -> Result<Option<&'static Row>, Reject> {
        let Some(path) = self.path else { return Ok(None) };
        let unexplained = || Reject::bad_request(format!("path: {}", Row::unexplained(&path)));
        Row::of(&path).map(Some).ok_or_else(unexplained)
    }
}

/// POST /explain: explains the request in the body, for `?path=` if it is neither a chat nor a
/// completion; nothing is booked or forwarded.
pub(super) async fn explain(
    State(app): State<Arc<App>>,
    asked: Result<Query<Asked>, QueryRejection>,
    caller: Caller,
    headers: HeaderMap,
    mut body: Body,
) -> Result<Response, Reject> {
    let begin = || {
        let Query(asked) = asked.map_err(|error| Reject::bad_request(format!("query: {error}")))?;
        let row = asked.row()?;
        // It costs work on behalf of a client, so it counts against the client's key like a request.
        Ok((row, caller.client().map(|key| app.meters.begin(key)).transpose()?))
    };
    let (row, _running) = match begin() {
        Ok(begun) => begun,
        Err(reject) => {
            discard(&mut body).await;
            return Err(reject);
        }
    };
    let Received { bytes, counted, .. } = app.intake.whole(body).await?;
    let head = Head { uri: Uri::default(), headers, address: None, caller };
    let plan = Plan::make(&app, row, head, String::new(), bytes, counted, None).await?;
    let prefill = Prefill::of(&app, &plan).await?.explain(&app).await?;
    let part = Part { is_decode_only: prefill.is_some(), ..Part::default() };
    let decision = plan.explain(&app, part).await?;
    let made = app.aside.make(|| {
        let trust = trust(&app, &plan.route.pool.name);
        let mut value = with_trust(&app, decision, &trust);
        if let Some(prefill) = prefill {
            value["prefill"] = with_trust(&app, prefill, &trust);
        }
        Json(value).into_response()
    });
    Ok(made.await)
}
