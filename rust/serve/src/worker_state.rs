//! An operator's requests about one worker: its id, and whether it takes new requests.

use axum::extract::Path;
use axum::extract::rejection::PathRejection;
use kvflash_core::fleet::WorkerState;
use kvflash_core::ids::InstanceId;
use serde::Deserialize;

use crate::Reject;
use crate::indexer::form::parse_json;

/// A part of a path.
pub(crate) type PathText = Result<Path<String>, PathRejection>;

/// The text of a part of a path, `what`.
///
/// # Errors
/// 400 for text that is not UTF-8.
pub(crate) fn text_of(what: &str, path: PathText) -> Result<String, Reject> {
    path.map(|Path(text)| text).map_err(|error| Reject::bad_request(format!("{what}: {error}")))
}

/// A worker's key in the file of registrations.
pub(crate) fn worker_key(id: InstanceId) -> String {
    format!("worker/{id}")
}

/// The worker id in a path.
///
/// # Errors
/// 400 with the value instead of a number.
pub(crate) fn worker_id(path: PathText) -> Result<InstanceId, Reject> {
    let id = text_of("worker id", path)?;
    id.parse().map_err(|_| Reject::bad_request(format!("a worker id must be a number, got {id:?}")))
}

/// PATCH /workers/{id}
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with the field state")]
pub(crate) struct Patch {
    pub state: WorkerState,
}

impl Patch {
    /// Parses a body.
    ///
    /// # Errors
    /// 400 naming the field, what is legal and what came.
    pub fn parse(body: &[u8]) -> Result<Self, Reject> {
        parse_json(body).map_err(|error| Reject::bad_request(format!("invalid change: {error}")))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_a_state_and_nothing_else() {
        let patch = Patch::parse(br#" {"state": "draining"} "#).unwrap();
        assert_eq!(patch.state, WorkerState::Draining);
        for (body, wanted) in [
            (&br#"{"state": "gone"}"#[..], "state: must be active or draining, got \"gone\""),
            (br#"{"state": 0}"#, "state must be a string, got 0"),
            (br#"{"state": "active", "url": "x"}"#, "unknown field `url`"),
            (b"{}", "missing field `state`"),
            (b"[\"active\"]", "the body must be a JSON object, got a list"),
            (b"\"active\"", "an object with the field state"),
            (br#"{"state": "active"} {}"#, "trailing characters"),
        ] {
            let reject = Patch::parse(body).unwrap_err();
            assert_eq!(reject.status.as_u16(), 400);
            assert!(reject.message.contains(wanted), "{}", reject.message);
        }
    }
}
