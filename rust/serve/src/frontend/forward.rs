//! A client's request: read, given to one worker after the other until one answers.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri};
use axum::response::Response;
use bytes::Bytes;
use kvflash_core::error::Error;
use kvflash_core::ids::InstanceId;
use kvflash_core::select::MAX_REQUEST_ID_BYTES;

use super::super::metrics::RequestLabel;
use super::super::{Reject, body};
use super::app::{App, InFlight, REQUEST_ID_HEADER};
use super::attempt::{Failed, Waiting, attempt, watched};
use super::disagg::{Handoff, Prefill};
use super::fairness::client_name;
use super::nvext::Nvext;
use super::openai_prefill;
use super::plan::{Api, Plan};
use super::query;
use super::reply::{PREFILL_HEADER, answer, relay};
use super::request::Envelope;
use super::runtime::body::Generation;
use super::runtime::call::{self, Ask};
use super::runtime::spec::ModelInput;
use super::urgency::Urgency;

/// A request from its head to its answer's head; the relay goes on from there.
pub(super) async fn forward(
    app: Arc<App>,
    api: Api,
    uri: Uri,
    headers: HeaderMap,
    address: Option<String>,
    body: Body,
) -> Response {
    let started = Instant::now();
    let request_id = request_id(&headers);
    let address = address.as_deref();
    let mut waiting = Waiting::new(&app);
    let answered =
        attempt_all(&app, api, &uri, &headers, body, &request_id, address, &mut waiting).await;
    waiting.over();
    let mut response = match answered {
        Ok(response) => response,
        Err(reject) => reject.openai(),
    };
    if let Ok(value) = HeaderValue::try_from(request_id) {
        response.headers_mut().insert(REQUEST_ID_HEADER.clone(), value);
    }
    let label = RequestLabel { endpoint: api.path(), status: response.status().as_u16() };
    app.common.requests.get_or_create(&label).inc();
    app.common.request_seconds.observe(started.elapsed().as_secs_f64());
    response
}

/// The name under which a request's decisions are kept: the client's where it gave a usable one.
fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get(&REQUEST_ID_HEADER).and_then(|value| value.to_str().ok());
    let is_usable = |id: &&str| (1..=MAX_REQUEST_ID_BYTES).contains(&id.len());
    given
        .filter(is_usable)
        .map_or_else(|| format!("{:032x}", rand::random::<u128>()), str::to_owned)
}

/// A place among the requests in flight. Without one the body is read away: else a client that is still
/// sending may see its connection reset instead of the answer.
async fn admit(app: &Arc<App>, body: &mut Body) -> Result<InFlight, Reject> {
    let admitted = match app.started() {
        Ok(()) => app.admit(),
        Err(error) => {
            app.refused("no_worker");
            Err(error.into())
        }
    };
    if admitted.is_err() {
        body::discard(body).await;
    }
    admitted
}

#[allow(clippy::too_many_arguments)]
async fn attempt_all(
    app: &Arc<App>,
    api: Api,
    uri: &Uri,
    headers: &HeaderMap,
    mut body: Body,
    request_id: &str,
    address: Option<&str>,
    waiting: &mut Waiting<'_>,
) -> Result<Response, Reject> {
    let mut in_flight = admit(app, &mut body).await?;
    let body = app.read_body(body).await?;
    let started = Instant::now();
    let envelope = Envelope::parse(&body)?;
    let nvext = Nvext::parse(envelope.nvext)?;
    let plan = Plan::make(app, api, &envelope, headers, body.len(), nvext.is_query()).await;
    let mut plan = plan.inspect_err(|reject| {
        if reject.status == StatusCode::SERVICE_UNAVAILABLE {
            app.refused("no_worker");
        }
    })?;
    plan.request_id = Some(request_id.to_owned());
    let is_plain_heard = plan.route.pool.is_queued();
    let urgency = Urgency::read(headers, &nvext, envelope.priority, is_plain_heard)?;
    plan.wish = urgency.wish();
    plan.expected_output_tokens = nvext.expected_output_tokens();
    plan.seed = nvext.seed();
    plan.pin(nvext.decode_pin())?;
    app.metrics.route_seconds.observe(started.elapsed().as_secs_f64());
    let mut prefill = Prefill::of(app, &plan, &nvext).await?;
    let reuses_prefix = envelope.reuses_prefix();
    let ask = ask(&plan, api, headers, &body, &envelope, &nvext, request_id)?;
    drop(envelope);
    if nvext.is_query() {
        plan.decode_only(prefill.query(None).await.is_some());
        return query::answer(&ask, &plan, &prefill).await;
    }

    if let Some(room) = &plan.route.pool.waiting {
        let client = client_name(plan.client.user.as_deref(), headers, address);
        let workers = plan.route.pool.members().healthy();
        let waited = Instant::now();
        let turn = room.turn(&client, plan.cost(room.cached_share), urgency.turn(), workers).await;
        app.metrics.turn_seconds.observe(waited.elapsed().as_secs_f64());
        in_flight.turn = Some(turn.inspect_err(|_| app.refused("no_turn"))?);
    }

    let mut handoff = Handoff::Alone;
    let mut tried: Vec<InstanceId> = Vec::new();
    let mut last: Option<Failed> = None;
    while tried.len() < app.options.max_attempts {
        // What a prefill beside has begun is of no use to another worker.
        if !prefill.is_idle() && !matches!(handoff, Handoff::Done { .. }) {
            handoff = prefill.hand_off(app, &ask).await?;
            plan.decode_only(!handoff.is_alone());
        }
        let choice = match plan.book(&app.metrics, &tried).await {
            Ok(choice) => choice,
            // Everybody eligible was tried: say how that went, not that nobody is left.
            Err(_) if last.is_some() => break,
            Err(error) => return Err(unbooked(app, error)),
        };
        let engine = Arc::clone(&choice.engine);
        tried.push(engine.id);
        // One that was at other workers before, or is prefilled elsewhere, says nothing of this one's events.
        let is_evidence = reuses_prefix && tried.len() == 1 && handoff.is_alone();
        let expected = plan.expectation(app, &choice).filter(|_| is_evidence);
        if engine.member.is_some() {
            let opening = call::open(app, &choice, &ask, &mut handoff);
            match watched(&choice.booking, opening).await {
                Ok(opened) => {
                    // The answer counts a client that leaves it.
                    waiting.over();
                    app.metrics.first_byte_seconds.observe(started.elapsed().as_secs_f64());
                    choice.booking.first_token();
                    in_flight.answered();
                    plan.count(&app.metrics, &choice);
                    let overlap = plan.reusable_blocks(choice.overlap_blocks);
                    return answer(app, choice, ask, handoff, opened, overlap, in_flight, expected)
                        .await;
                }
                Err(failed) if failed.is_final => return Err(failed.into()),
                Err(failed) => {
                    failed.note(app, &engine, tried.len());
                    if failed.cause == "prefill_failed" {
                        // The worker was well; it may have the request again.
                        tried.pop();
                    } else if let Handoff::Beside { worker, .. } = &handoff {
                        prefill.spare(*worker);
                    }
                    last = Some(failed);
                    continue;
                }
            }
        }
        let changed = match &handoff {
            Handoff::Done { params, .. } => openai_prefill::decode_body(&body, params)?,
            _ => body.clone(),
        };
        let attempt = attempt(app, &choice, uri, headers, &changed);
        match watched(&choice.booking, attempt).await {
            Ok((head, first, upstream)) => {
                app.metrics.first_byte_seconds.observe(started.elapsed().as_secs_f64());
                if head.status.is_success() {
                    choice.booking.first_token();
                    in_flight.answered();
                    plan.count(&app.metrics, &choice);
                }
                let overlap = plan.reusable_blocks(choice.overlap_blocks);
                let mut response = relay(
                    app,
                    engine,
                    choice.booking,
                    overlap,
                    head,
                    first,
                    upstream,
                    plan.prompt_tokens(),
                    in_flight,
                    expected,
                );
                let prefiller = handoff.worker().map(|worker| worker.to_string());
                if let Some(Ok(value)) = prefiller.map(HeaderValue::try_from) {
                    response.headers_mut().insert(PREFILL_HEADER.clone(), value);
                }
                return Ok(response);
            }
            Err(failed) => {
                failed.note(app, &engine, tried.len());
                last = Some(failed);
            }
        }
    }
    Err(all_failed(app, &tried, last))
}

/// Nobody may take the request now.
fn unbooked(app: &App, error: Error) -> Reject {
    app.refused(match error {
        Error::AllBusy(_) => "all_busy",
        Error::InvalidArgument(_) => "invalid",
        Error::Overloaded(_) => "overloaded",
        _ => "no_worker",
    });
    error.into()
}

/// Everybody who could be tried was.
fn all_failed(app: &App, tried: &[InstanceId], last: Option<Failed>) -> Reject {
    app.refused("all_failed");
    let failed =
        last.unwrap_or_else(|| Failed::new("none", String::new(), StatusCode::BAD_GATEWAY));
    let message = format!(
        "no worker answered; tried {tried:?}, the last one failed with: {}",
        failed.message
    );
    Reject::last_failure(failed.status, message)
}

/// What every attempt at a request needs.
fn ask(
    plan: &Plan,
    api: Api,
    headers: &HeaderMap,
    body: &Bytes,
    envelope: &Envelope<'_>,
    nvext: &Nvext,
    request_id: &str,
) -> Result<Ask, Reject> {
    let members = plan.route.pool.members();
    let mut generation = None;
    let mut runtime = members.all().filter_map(|engine| engine.member.as_ref()).peekable();
    let has_runtime = runtime.peek().is_some();
    if has_runtime && runtime.all(|member| member.spec.card.model_input == ModelInput::Text) {
        generation = Some(Generation::of_text(body)?);
    } else if has_runtime {
        let mut read = Generation::parse(api, body)?;
        let context = members.all().filter_map(|engine| engine.notes.lock().max_model_len).min();
        read.fit(plan.prompt_tokens().unwrap_or(1), context)?;
        generation = Some(read);
    }
    Ok(Ask {
        api,
        request_id: request_id.to_owned(),
        headers: headers.clone(),
        body: body.clone(),
        model: envelope.model.as_deref().unwrap_or(&plan.route.pool.name).to_owned(),
        lora_name: plan.route.lora_name.clone(),
        cache_salt: envelope.cache_salt.as_deref().map(str::to_owned),
        annotations: nvext.annotations().to_vec(),
        tokens: plan.tokens.clone(),
        generation,
    })
}
