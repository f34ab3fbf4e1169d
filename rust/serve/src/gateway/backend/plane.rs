//! Requests to workers of the runtime: they take tokens or text, and return items.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::http::StatusCode;
use bytes::Bytes;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::openai;
use super::worker::{BootstrapInfo, Handoff};
use crate::Reject;
use crate::frontend::app::App;
use crate::frontend::engine::{Engine, Member};
use crate::frontend::runtime::item::{Item, failure, parse_chunk};
use crate::frontend::runtime::plane::{Cause, Items, PlaneError};
use crate::frontend::runtime::spec::ModelInput;
use crate::gateway::attempts::Failed;
use crate::gateway::body::Body;
use crate::gateway::book::Choice;
use crate::gateway::generation::Generation;
use crate::gateway::plan::Plan;

/// The payload of a token worker's request.
#[derive(Serialize)]
struct TokenRequest<'a> {
    model: &'a str,
    token_ids: &'a [u32],
    stop_conditions: Value,
    sampling_options: &'a Map<String, Value>,
    output_options: Value,
    eos_token_ids: &'a [u32],
    annotations: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    lora_name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_salt: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dp_rank: Option<u32>,
    estimated_prefix_hit_num_blocks: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill_result: Option<PrefillResult<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bootstrap_info: Option<&'a BootstrapInfo>,
}

#[derive(Serialize)]
struct PrefillResult<'a> {
    disaggregated_params: &'a rmpv::Value,
}

/// An answer whose first item has arrived.
#[derive(Debug)]
pub(crate) struct Opened {
    pub engine: Arc<Engine>,
    pub member: Arc<Member>,
    pub items: Items,
    pub first: Bytes,
}

/// Sends `plan`'s request, with the prompt prefilled as `handoff` says, and waits for the
/// answer to begin.
pub(super) async fn open(
    app: &App,
    plan: &Plan,
    choice: &Choice,
    member: &Arc<Member>,
    handoff: &Handoff,
) -> Result<Opened, Failed> {
    let (result, bootstrap) = match handoff {
        Handoff::Alone => (None, None),
        Handoff::Done { params, .. } => (Some(params), None),
        Handoff::Beside { info, .. } => (None, Some(info)),
    };
    send(app, plan, choice, member, false, result, bootstrap).await
}

/// Prefills the prompt; returns what the decode worker needs.
pub(super) async fn prefill(
    app: &App,
    plan: &Plan,
    choice: &Choice,
    member: &Arc<Member>,
) -> Result<rmpv::Value, Failed> {
    begin_prefill(app, plan, choice, member, None).await?.into_transfer(app).await
}

/// Starts the prefill of a request whose decode runs beside it.
pub(super) async fn begin_prefill(
    app: &App,
    plan: &Plan,
    choice: &Choice,
    member: &Arc<Member>,
    bootstrap: Option<&BootstrapInfo>,
) -> Result<Opened, Failed> {
    let opened = send(app, plan, choice, member, true, None, bootstrap).await?;
    choice.booking.first_token();
    Ok(opened)
}

async fn send(
    app: &App,
    plan: &Plan,
    choice: &Choice,
    member: &Arc<Member>,
    is_prefill: bool,
    prefill_result: Option<&rmpv::Value>,
    bootstrap_info: Option<&BootstrapInfo>,
) -> Result<Opened, Failed> {
    let engine = &choice.engine;
    let unready = |why: &str| {
        let message = format!("worker {}: {why}", engine.id);
        Failed::new("not_ready", message, StatusCode::SERVICE_UNAVAILABLE)
    };
    if !plan.call.api().is_for_runtime() {
        // It joined after the request was planned for engines.
        let message = format!("worker {} does not serve {}", engine.id, plan.call.row.path);
        return Err(Failed::new("no_such_api", message, StatusCode::NOT_IMPLEMENTED).unsent());
    }
    engine.requests.fetch_add(1, Ordering::Relaxed);
    let id = &plan.call.request_id;
    let to_first_item = async {
        let sent = if member.spec.card.model_input == ModelInput::Text {
            let body = text_body(plan, is_prefill, prefill_result, bootstrap_info)?;
            member.plane.call(id, &member.spec, &body).await
        } else {
            let (Some(tokens), Some(generation)) = (&plan.tokens, &plan.generation) else {
                // It joined after the request was read for engines that take text.
                return Err(unready("accepts only tokens, and the prompt was not tokenized"));
            };
            let text = member.text.as_deref();
            let request = TokenRequest {
                model: &plan.model,
                token_ids: tokens,
                stop_conditions: stop_conditions(generation, is_prefill),
                sampling_options: &generation.sampling,
                output_options: json!({}),
                eos_token_ids: text.map(|text| &*text.eos_token_ids).unwrap_or_default(),
                annotations: plan.call.nvext.annotations(),
                lora_name: plan.route.lora_name(),
                cache_salt: plan.cache_salt.as_deref(),
                dp_rank: (engine.spec.dp_size > 1).then(|| choice.booking.worker().dp_rank),
                estimated_prefix_hit_num_blocks: choice.selection.overlap_blocks,
                prefill_result: prefill_result
                    .map(|disaggregated_params| PrefillResult { disaggregated_params }),
                bootstrap_info,
            };
            member.plane.call(id, &member.spec, &request).await
        };
        let mut items = sent.map_err(|error| failed(engine, error))?;
        let Some(first) = items.next().await.map_err(|error| failed(engine, error))? else {
            let message = format!("worker {} ended its answer without an item", engine.id);
            return Err(Failed::new("no_first_byte", message, StatusCode::BAD_GATEWAY).lost());
        };
        // An error of the worker within its first item also counts as a failed attempt.
        let parsed = match member.spec.card.model_input {
            ModelInput::Tokens => Item::parse(&first).map(drop),
            ModelInput::Text => {
                parse_chunk(&first).and_then(|chunk| failure(&chunk).map_or(Ok(()), Err))
            }
        };
        parsed.map_err(|error| failed(engine, error))?;
        Ok(Opened { engine: Arc::clone(engine), member: Arc::clone(member), items, first })
    };
    let timeout = app.options.first_byte_timeout;
    tokio::time::timeout(timeout, to_first_item).await.unwrap_or_else(|_| {
        let seconds = timeout.as_secs_f64();
        let what = format!("sent no item within {seconds} s (--first-byte-timeout)");
        let message = format!("worker {} {what}", engine.id);
        // Suspect only until it answers a ping: it may just be slow.
        Err(Failed::new("timeout", message, StatusCode::GATEWAY_TIMEOUT).fault().lost())
    })
}

fn stop_conditions(generation: &Generation, is_prefill: bool) -> Value {
    let limits = &generation.limits;
    let mut fields = Map::new();
    let mut put = |name: &str, value: Value| fields.insert(name.to_owned(), value);
    match limits.max_tokens {
        _ if is_prefill => put("max_tokens", json!(1)),
        Some(tokens) => put("max_tokens", json!(tokens)),
        None => None,
    };
    if !limits.stop.is_empty() {
        put("stop", json!(limits.stop));
    }
    if !limits.stop_token_ids.is_empty() {
        put("stop_token_ids", json!(limits.stop_token_ids));
    }
    if limits.min_tokens > 0 && !is_prefill {
        put("min_tokens", json!(limits.min_tokens));
    }
    if limits.ignore_eos {
        put("ignore_eos", json!(true));
    }
    Value::Object(fields)
}

/// The client's body, with what an engine gets of a handover.
fn text_body(
    plan: &Plan,
    is_prefill: bool,
    prefill_result: Option<&rmpv::Value>,
    bootstrap_info: Option<&BootstrapInfo>,
) -> Result<Value, Failed> {
    let (body, api) = (&plan.call.body, plan.call.api());
    let bytes = if is_prefill { openai::prefill_body(body, api) } else { body.bytes().clone() };
    let mut fields: Map<String, Value> = serde_json::from_slice(&bytes)
        .map_err(|error| Failed::invalid(unreadable(body, &error)))?;
    if let Some(params) = prefill_result {
        fields.insert(openai::PARAMS.to_owned(), openai::transfer_params(params)?);
    }
    if let Some(info) = bootstrap_info {
        fields.insert("bootstrap_info".to_owned(), json!(info));
    }
    Ok(Value::Object(fields))
}

/// The refusal of a body with a value that has no form on the way to a worker: half of a surrogate
/// pair, a number beyond all floats.
fn unreadable(body: &Body, error: &serde_json::Error) -> Reject {
    let wrong = body.fields().find_map(|(name, _)| body.value::<Value>(name).err());
    wrong.unwrap_or_else(|| Reject::bad_request(error.to_string()))
}

/// The meaning of a plane's failure for the attempt.
pub(in crate::gateway) fn failed(engine: &Engine, error: PlaneError) -> Failed {
    let cause = error.label();
    let message = format!("worker {}: {}", engine.id, error.message);
    let code = match &error.cause {
        Cause::Worker(code) => code,
        Cause::Prefill => return Failed::new(cause, message, StatusCode::BAD_GATEWAY),
        Cause::TooLarge => {
            let refused = Failed::new(cause, error.message, StatusCode::PAYLOAD_TOO_LARGE);
            return Failed { is_final: true, ..refused };
        }
        Cause::Refused(status) => {
            let status = StatusCode::from_u16(*status).unwrap_or(StatusCode::BAD_REQUEST);
            // Other workers may be less busy; an invalid request is invalid everywhere.
            let is_final = status != StatusCode::TOO_MANY_REQUESTS;
            return Failed { is_final, ..Failed::new(cause, message, status) };
        }
        Cause::Connect | Cause::Silent => {
            return Failed::new(cause, message, StatusCode::BAD_GATEWAY).fault().unsent();
        }
        Cause::Broken | Cause::Protocol => {
            return Failed::new(cause, message, StatusCode::BAD_GATEWAY).fault().died();
        }
    };
    match code.as_str() {
        "invalid" => {
            Failed { is_final: true, ..Failed::new(cause, message, StatusCode::BAD_REQUEST) }
        }
        "overloaded" => Failed::new(cause, message, StatusCode::SERVICE_UNAVAILABLE),
        // This worker is leaving; others are not.
        "draining" | "no_worker" => {
            Failed::new(cause, message, StatusCode::SERVICE_UNAVAILABLE).unsent()
        }
        // Another process has its port; discovery will report that soon.
        "not_found" => {
            Failed::new(cause, message, StatusCode::SERVICE_UNAVAILABLE).fault().unsent()
        }
        "deadline" => Failed::new(cause, message, StatusCode::GATEWAY_TIMEOUT).lost(),
        _ => Failed::new(cause, message, StatusCode::BAD_GATEWAY).lost(),
    }
}

impl Opened {
    /// The transfer parameters in a prefill's first item, once the prefill has ended.
    pub async fn into_transfer(mut self, app: &App) -> Result<rmpv::Value, Failed> {
        let first = std::mem::take(&mut self.first);
        let item = Item::parse(&first).map_err(|error| failed(&self.engine, error))?;
        let id = self.engine.id;
        self.drain(app).await?;
        item.into_transfer().ok_or_else(|| {
            let message = format!("worker {id} returned no disaggregated_params");
            Failed::new("no_transfer", message, StatusCode::BAD_GATEWAY)
        })
    }

    /// Reads to the end.
    pub async fn drain(mut self, app: &App) -> Result<(), Failed> {
        let timeout = app.options.stream_idle_timeout;
        loop {
            match tokio::time::timeout(timeout, self.items.next()).await {
                Ok(Ok(Some(payload))) => {
                    Item::parse(&payload).map_err(|error| failed(&self.engine, error))?;
                }
                Ok(Ok(None)) => return Ok(()),
                Ok(Err(error)) => return Err(failed(&self.engine, error)),
                Err(_) => {
                    let message = format!(
                        "worker {} sent nothing for {} s (--stream-idle-timeout)",
                        self.engine.id,
                        timeout.as_secs_f64()
                    );
                    return Err(
                        Failed::new("timeout", message, StatusCode::GATEWAY_TIMEOUT).fault()
                    );
                }
            }
        }
    }
}
