//! Responses kept by an engine for the next turn: their ids contain the worker's name, so that any
//! replica finds it, also after a restart, and the tenant of a client with a key, so that no other
//! tenant gets or continues them.

use std::sync::Arc;

use axum::http::StatusCode;
use kvflash_core::error::Error;
use kvflash_core::fleet::WorkerState;
use kvflash_core::ids::{InstanceId, Worker};
use kvflash_core::select::Pin;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::xxh3_64;

use super::api::Row;
use super::body::Body;
use super::call::Call;
use crate::frontend::app::App;
use crate::frontend::engine::{Engine, Route};
use crate::frontend::engine_spec::address_of;
use crate::{Caller, Reject};

/// Separates a response's own id from its worker's name.
const MARK: &str = "_kv";

/// Separates a response's own id from its tenant's mark, which [`MARK`] follows.
const TENANT_MARK: &str = "_kt";

/// The field that sets a response's id at engines.
///
/// # Source
/// `ResponsesRequest.request_id` of vLLM and SGLang.
const ID_FIELD: &str = "request_id";

/// The field in which a client names the previous response.
const BEFORE: &str = "previous_response_id";

/// The engines' name for the id in a path.
///
/// # Source
/// `_make_not_found_error` of vLLM.
const IN_PATH: &str = "response_id";

/// Limits, in error messages, of an id's length and of the number of a worker's models.
const SHOWN_CHARS: usize = 100;
const SHOWN_MODELS: usize = 20;

/// A response kept by a registered worker.
pub(crate) struct Kept {
    id: String,
    /// The request's field or path parameter with the id.
    param: &'static str,
    engine: Arc<Engine>,
    rank: u32,
}

impl Kept {
    /// The response that a request of `caller` refers to: named in its path, or continued by
    /// `body`, if its id contains a worker's name.
    ///
    /// # Errors
    /// 400 for an id that is not a string; 404 for a response of another tenant, a worker that is
    /// gone, or an id in a path without a worker; 503 for a worker that is unhealthy or draining.
    pub fn of(
        app: &App,
        row: &Row,
        path: &str,
        body: &Body,
        caller: &Caller,
    ) -> Result<Option<Self>, Reject> {
        if row.names_response() {
            let id = row.response_of(path).unwrap_or_default();
            check_tenant(id, IN_PATH, caller)?;
            return Self::named(app, id.to_owned(), IN_PATH)?.map(Some).ok_or_else(|| {
                gone(
                    id,
                    IN_PATH,
                    "it names no worker, so kvflash can't find the engine that keeps it",
                )
            });
        }
        // Without a worker's name, the engine decides whether the response exists.
        let Some(id) = body.value::<String>(BEFORE)? else { return Ok(None) };
        check_tenant(&id, BEFORE, caller)?;
        Self::named(app, id, BEFORE)
    }

    /// The response of this id, if it names a worker.
    fn named(app: &App, id: String, param: &'static str) -> Result<Option<Self>, Reject> {
        // The id from a path is forwarded to an engine, so it must not lead elsewhere.
        let is_plain =
            id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte));
        if param == IN_PATH && !is_plain {
            return Ok(None);
        }
        let Some((name, rank)) = id.rsplit_once(MARK).and_then(|(_, name)| read(name)) else {
            return Ok(None);
        };
        let is_keeper = |engine: &Arc<Engine>| {
            !engine.spec.is_prefill && rank < engine.spec.dp_size && name_of(engine) == name
        };
        let Some(engine) = app.fleet.engines().into_iter().find(is_keeper) else {
            return Err(gone(&id, param, "the worker that kept it is gone"));
        };
        if app.fleet.state_of(engine.id) == WorkerState::Draining {
            let (worker, id) = (engine.id, shown(&id));
            let message = format!("worker {worker}, which keeps response {id}, is draining");
            return Err(Reject::from(Error::NoWorker(message)).param(param));
        }
        let kept = Self { id, param, engine, rank };
        match kept.absence() {
            Some(error) => Err(Reject::from(error).param(param)),
            None => Ok(Some(kept)),
        }
    }

    /// The worker that must take the request.
    pub fn pin(&self) -> Pin {
        Pin { instance_id: self.engine.id, dp_rank: Some(self.rank) }
    }

    /// Why its worker takes no requests, if so.
    pub fn absence(&self) -> Option<Error> {
        let why = self.engine.why_unhealthy()?;
        let (worker, id) = (self.engine.id, shown(&self.id));
        let message = format!("worker {worker}, which keeps response {id}, is unhealthy: {why}");
        Some(Error::NoWorker(message))
    }

    /// The first model of its worker.
    pub fn model(&self) -> Option<String> {
        self.engine.notes.lock().models.first().map(|(name, _)| name.clone())
    }

    /// Whether its worker serves `model`.
    pub fn serves(&self, model: &str) -> bool {
        self.engine.serves(model)
    }

    /// Checks that its worker receives requests for `model`.
    ///
    /// # Errors
    /// 404 with the models that it serves.
    pub fn check(&self, route: &Route, model: &str) -> Result<(), Reject> {
        let is_member = route.pool.members().get(self.engine.id).is_some();
        if is_member && route.is_served_by(&self.engine) {
            return Ok(());
        }
        Err(self.elsewhere(&format!("not {model}")))
    }

    /// 404: its worker serves none of the models of the alias `name`.
    pub fn outside(&self, name: &str, models: &[&str]) -> Reject {
        let models = models.join(", ");
        self.elsewhere(&format!("and none of the models of alias {name:?} ({models})"))
    }

    fn elsewhere(&self, wanted: &str) -> Reject {
        let (worker, id) = (self.engine.id, shown(&self.id));
        let notes = self.engine.notes.lock();
        let names: Vec<&str> =
            notes.models.iter().take(SHOWN_MODELS).map(|(name, _)| name.as_str()).collect();
        let served = names.join(", ");
        let message =
            format!("response {id} is kept by worker {worker}, which serves {served}, {wanted}");
        Reject::new(StatusCode::NOT_FOUND, message).param(self.param)
    }
}

/// Checks that a client with a key asks for a response of its tenant. An engine finds a response
/// by its whole id, so a changed mark finds none.
///
/// # Errors
/// 404, which does not tell whether the response exists.
fn check_tenant(id: &str, param: &'static str, caller: &Caller) -> Result<(), Reject> {
    let Some(key) = caller.client() else { return Ok(()) };
    let own = id.rsplit_once(MARK).and_then(|(own, _)| own.rsplit_once(TENANT_MARK));
    if own.is_some_and(|(_, mark)| mark == mark_of(&key.tenant)) {
        return Ok(());
    }
    Err(gone(id, param, &format!("tenant {:?} has no such response", key.tenant)))
}

/// A tenant's mark in the ids of its responses: 64 bits of a cryptographic hash, since an issuer of
/// tokens may let callers choose their tenant's name, also one with another tenant's mark.
fn mark_of(tenant: &str) -> String {
    Sha256::digest(tenant)[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether a request continues a response; null names none.
pub(super) fn is_continued(body: &Body) -> bool {
    body.text_of(BEFORE).is_some_and(|id| id != "null")
}

fn shown(id: &str) -> &str {
    id.char_indices().nth(SHOWN_CHARS).map_or(id, |(end, _)| &id[..end])
}

/// Changes to a request's body at this worker: the id of the response, if the client names none.
pub(super) fn changes(
    call: &Call,
    engine: &Engine,
    worker: Worker,
) -> Option<(&'static str, Option<Value>)> {
    if call.body.has(ID_FIELD) {
        return None;
    }
    let (id, name) = (rand::random::<u128>(), name_of(engine));
    let tenant = call
        .head
        .caller
        .client()
        .map(|key| format!("{TENANT_MARK}{}", mark_of(&key.tenant)))
        .unwrap_or_default();
    let id = format!("resp_{id:032x}{tenant}{MARK}{name:016x}{}", worker.dp_rank);
    Some((ID_FIELD, Some(json!(id))))
}

/// The meaning of an engine's 404, if the request continues a response.
pub(super) fn gone_at(call: &Call, worker: InstanceId) -> Option<Reject> {
    let id: String = call.body.value(BEFORE).ok()??;
    let why = format!(
        "worker {worker} does not keep it; vLLM keeps responses only with \
         VLLM_ENABLE_RESPONSES_API_STORE=1"
    );
    Some(gone(&id, BEFORE, &why))
}

/// 404 in OpenAI's format.
fn gone(id: &str, param: &'static str, why: &str) -> Reject {
    let what = if param == BEFORE { "Previous response" } else { "Response" };
    let message = format!("{what} with id '{}' not found: {why}.", shown(id));
    Reject::new(StatusCode::NOT_FOUND, message).param(param)
}

/// A worker's name that is equal at every replica; instance ids differ between processes.
fn name_of(engine: &Engine) -> u64 {
    xxh3_64(address_of(&engine.base).as_bytes())
}

/// Parses a name and a rank.
fn read(text: &str) -> Option<(u64, u32)> {
    let (name, rank) = text.split_at_checked(16)?;
    Some((u64::from_str_radix(name, 16).ok()?, rank.parse().ok()?))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        assert_eq!(read("00000000000000ff12"), Some((255, 12)));
        for other in
            ["", "0", "00000000000000ff", "00000000000000gg0", "00000000000000ff-1", "ééééééééé"]
        {
            assert_eq!(read(other), None, "{other}");
        }
    }
}
