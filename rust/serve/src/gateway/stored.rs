//! Responses that an engine keeps for the next turn: their ids carry its name, so that any replica finds it, also after
//! a restart.

use axum::http::StatusCode;
use kvflash_core::ids::Worker;
use kvflash_core::select::Pin;
use serde::Deserialize;
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

use super::api::Api;
use super::body::Body;
use super::call::Call;
use crate::Reject;
use crate::frontend::engine::{Engine, address_of};
use crate::frontend::pool::Members;

/// Stands between a response's own id and its worker's name.
const MARK: &str = "_kv";

/// The field by which engines are told a response's id.
///
/// # Source
/// `ResponsesRequest.request_id` of vLLM and SGLang.
const ID_FIELD: &str = "request_id";

#[derive(Deserialize)]
struct Fields {
    #[serde(default)]
    previous_response_id: Option<String>,
}

/// The worker that must take `call`, because it keeps the response before it.
///
/// # Errors
/// 400 for an id that is no text; 404 for a worker that is gone.
pub(super) fn pin(call: &Call, members: &Members) -> Result<Option<Pin>, Reject> {
    if call.api() != Api::Responses || !call.body.has("previous_response_id") {
        return Ok(None);
    }
    let fields: Fields = call.body.read()?;
    let Some(id) = fields.previous_response_id else { return Ok(None) };
    // One without a worker's name was made elsewhere: whether anybody keeps it is the engine's to say.
    let Some((name, rank)) = id.rsplit_once(MARK).and_then(|(_, name)| read(name)) else {
        return Ok(None);
    };
    let mut keepers = members.all().filter(|engine| name_of(engine) == name);
    match keepers.find(|engine| rank < engine.spec.dp_size) {
        Some(engine) => Ok(Some(Pin { instance_id: engine.id, dp_rank: Some(rank) })),
        None => Err(gone(&id, "the worker that kept it is gone")),
    }
}

/// What is changed of a request's body at this worker: the id of the response, where the client names none.
pub(super) fn changes(
    call: &Call,
    engine: &Engine,
    worker: Worker,
) -> Option<(&'static str, Option<Value>)> {
    if call.api() != Api::Responses || call.body.has(ID_FIELD) {
        return None;
    }
    let (id, name) = (rand::random::<u128>(), name_of(engine));
    Some((ID_FIELD, Some(json!(format!("resp_{id:032x}{MARK}{name:016x}{}", worker.dp_rank)))))
}

/// What an engine's 404 to a request with a response before it means.
pub(super) fn is_gone(call: &Call, status: StatusCode) -> bool {
    let has = |body: &Body| body.has("previous_response_id");
    status == StatusCode::NOT_FOUND && call.api() == Api::Responses && has(&call.body)
}

/// 404, in OpenAI's words.
fn gone(id: &str, why: &str) -> Reject {
    let message = format!("Previous response with id '{id}' not found: {why}.");
    Reject::new(StatusCode::NOT_FOUND, message).param("previous_response_id")
}

/// A worker's name at every replica: instance ids are each process's own.
fn name_of(engine: &Engine) -> u64 {
    xxh3_64(address_of(&engine.base).as_bytes())
}

/// A name and a rank.
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
