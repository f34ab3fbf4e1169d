//! What a client says of its request beside the prompt: who it is, its link to earlier requests,
//! the routing options in the object `nvext`, and how urgent it is.

use std::sync::Arc;

use axum::http::{HeaderMap, HeaderName};
use kvflash_core::fair::{Standing, Wish};
use kvflash_core::ids::{InstanceId, Worker};
use kvflash_core::policy::session::{read_session_id, session_id};
use kvflash_core::select::Request;
use serde::Deserialize;

use super::api::Api;
use super::body::{Envelope, Object, Raw, object_or_default};
use super::call::{Call, Prompt};
use crate::Reject;
use crate::frontend::engine::{Engine, Members};
use crate::frontend::engine_spec::address_of;

/// Header that names the worker of a session; responses contain it with `session-affinity`.
pub(crate) static SESSION_HEADER: HeaderName = HeaderName::from_static("x-session-id");
/// Headers with a session's key; the first one counts.
static KEY_HEADERS: [HeaderName; 2] =
    [HeaderName::from_static("x-aibrix-session-key"), HeaderName::from_static("x-session-key")];
static USER_HEADER: HeaderName = HeaderName::from_static("user");

/// The text of a header, unless it is empty.
fn text_in<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok()).filter(|text| !text.is_empty())
}

/// A request's session, as its headers name it.
pub(super) struct Session<'a> {
    /// The client's own key.
    pub key: Option<&'a str>,
    /// Address and rank of a worker in [`SESSION_HEADER`].
    worker: Option<(String, u32)>,
}

impl<'a> Session<'a> {
    pub fn read(headers: &'a HeaderMap) -> Self {
        let id = text_in(headers, &SESSION_HEADER);
        let worker = id.and_then(read_session_id);
        // An id that is not an address is the client's own: a key like the others.
        let is_address = worker.as_ref().is_some_and(|(address, _)| {
            address.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok())
        });
        let own_id = id.filter(|_| !is_address);
        let key = KEY_HEADERS.iter().find_map(|name| text_in(headers, name)).or(own_id);
        Self { key, worker }
    }

    /// The one of `engines` that it names, with the rank.
    pub fn engine_among<'e>(
        &self,
        mut engines: impl Iterator<Item = &'e Arc<Engine>>,
    ) -> Option<(&'e Arc<Engine>, u32)> {
        let (address, rank) = self.worker.as_ref()?;
        let engine = engines.find(|engine| address_of(&engine.base) == address)?;
        (*rank < engine.spec.dp_size).then_some((engine, *rank))
    }
}

/// The client's details in `call`; the prompt's text only if a policy `needs_text`.
pub(super) fn read(
    call: &Call,
    envelope: &Envelope<'_>,
    members: &Members,
    needs_text: bool,
) -> Request {
    let headers = &call.head.headers;
    // A key identifies its owner, and the header `user` takes precedence over OpenAI's field.
    let owner = call.head.caller.key().map(|key| key.id.clone());
    let field = envelope.user.and_then(|raw| serde_json::from_str::<String>(raw.get()).ok());
    let user = owner
        .or_else(|| text_in(headers, &USER_HEADER).map(str::to_owned))
        .or(field)
        .filter(|user| !user.is_empty());
    let session = Session::read(headers);
    let named = session.engine_among(members.all());
    let session_worker = named.map(|(engine, rank)| Worker::new(engine.id, rank));
    // Equal names of different tenants are different sessions.
    let key = session.key.map(|key| match call.head.caller.client() {
        Some(client) => format!("{}/{key}", client.tenant).into(),
        None => Arc::from(key),
    });
    Request {
        user: user.map(Arc::from),
        session_worker,
        session_key: key,
        is_whole: envelope.stream.is_none_or(|stream| stream.get() != "true"),
        text: if needs_text { text(call.api(), envelope) } else { Arc::default() },
        ..Request::default()
    }
}

/// The value of [`SESSION_HEADER`] that returns a client to the same worker.
pub(crate) fn session_id_of(engine: &Engine, dp_rank: u32) -> String {
    session_id(address_of(&engine.base), dp_rank)
}

/// The prompt's text, message by message and without roles; four bytes per token id. Empty for
/// non-text or unreadable prompts: the request is still routed.
fn text(api: Api, envelope: &Envelope<'_>) -> Arc<[u8]> {
    match api {
        Api::Chat | Api::Messages => envelope.messages.map(chat_text).unwrap_or_default().into(),
        _ => match envelope.prompt.map(|raw| Prompt::parse(raw.get())) {
            Some(Ok(Prompt::Text(text))) => text.into_bytes().into(),
            Some(Ok(Prompt::Tokens(ids))) => Request::text_of(&ids),
            _ => Arc::default(),
        },
    }
}

fn chat_text(messages: Raw<'_>) -> Vec<u8> {
    #[derive(Deserialize)]
    struct Message {
        content: Option<Content>,
    }
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Content {
        Text(String),
        Parts(Vec<Part>),
        Other(serde::de::IgnoredAny),
    }
    #[derive(Deserialize)]
    struct Part {
        text: Option<String>,
    }
    let messages: Vec<Message> = serde_json::from_str(messages.get()).unwrap_or_default();
    let mut text = Vec::new();
    for message in messages {
        match message.content {
            Some(Content::Text(piece)) => text.extend(piece.into_bytes()),
            Some(Content::Parts(parts)) => {
                parts
                    .into_iter()
                    .filter_map(|part| part.text)
                    .for_each(|one| text.extend(one.into_bytes()));
            }
            Some(Content::Other(_)) | None => {}
        }
    }
    text
}

/// Maximum annotations of a request.
const MAX_ANNOTATIONS: usize = 64;
/// The annotation that asks for the worker of a request without sending it.
const QUERY: &str = "query_instance_id";

/// The fields of `nvext` that routing reads.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct Nvext {
    annotations: Option<Vec<String>>,
    backend_instance_id: Option<InstanceId>,
    /// The worker that must prefill.
    pub prefill_worker_id: Option<InstanceId>,
    decode_worker_id: Option<InstanceId>,
    #[serde(deserialize_with = "object_or_default")]
    pub agent_hints: AgentHints,
    /// The seed of routing's random draw; not the seed of the answer's tokens.
    pub seed: Option<u64>,
}

/// Hints of an agent framework about a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct AgentHints {
    /// Higher values go first in the queue.
    priority: Option<f64>,
    /// An older name for it.
    latency_sensitivity: Option<f64>,
    /// Goes before all requests with a lower value.
    strict_priority: Option<u32>,
    /// Expected tokens of the answer.
    pub osl: Option<u64>,
}

impl Nvext {
    /// Parses the object; missing fields pin nothing.
    ///
    /// # Errors
    /// 400 naming the field, what was expected and what came.
    pub fn parse(raw: Option<Raw<'_>>) -> Result<Self, Reject> {
        let Some(raw) = raw.filter(|raw| raw.get() != "null") else { return Ok(Self::default()) };
        let mut reader = serde_json::Deserializer::from_str(raw.get());
        let read = serde_path_to_error::deserialize(&mut reader);
        let Object(nvext): Object<Self> = read.map_err(|error| {
            let path = error.path().to_string();
            let dot = if path == "." { "" } else { "." };
            let path = if path == "." { "" } else { &path };
            Reject::bad_request(format!("nvext{dot}{path}: {}", error.into_inner()))
        })?;
        let count = nvext.annotations().len();
        if count > MAX_ANNOTATIONS {
            let why = format!("nvext.annotations: at most {MAX_ANNOTATIONS}, got {count}");
            return Err(Reject::bad_request(why));
        }
        Ok(nvext)
    }

    pub fn annotations(&self) -> &[String] {
        self.annotations.as_deref().unwrap_or_default()
    }

    /// Whether it only asks for the worker.
    pub fn is_query(&self) -> bool {
        self.annotations().iter().any(|one| one.split(':').next() == Some(QUERY))
    }

    /// The worker that must answer.
    pub fn decode_pin(&self) -> Option<InstanceId> {
        self.decode_worker_id.or(self.backend_instance_id)
    }

    /// The field that names that worker.
    pub fn decode_pin_field(&self) -> &'static str {
        match self.decode_worker_id {
            Some(_) => "nvext.decode_worker_id",
            None => "nvext.backend_instance_id",
        }
    }

    /// Its priority in the queue; higher values go first.
    pub fn priority(&self) -> Option<f64> {
        self.agent_hints.priority.or(self.agent_hints.latency_sensitivity)
    }
}

/// Lower is earlier, as in the field `priority` of vLLM's bodies.
static NICE_HEADER: HeaderName = HeaderName::from_static("x-kvflash-priority");
/// Higher is earlier, as in `nvext.agent_hints.priority`.
static PRIORITY_HEADER: HeaderName = HeaderName::from_static("x-dynamo-request-priority");
static STRICT_PRIORITY_HEADER: HeaderName =
    HeaderName::from_static("x-dynamo-request-strict-priority");

/// The urgency of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Urgency {
    /// Requests with a higher number go before all those with lower ones.
    strict: u32,
    /// Within these, higher values go first; finite.
    earliness: f64,
}

impl Urgency {
    /// Headers take precedence over the body, and `nvext` over its `field`, which the engine may
    /// interpret differently: if `is_plain_heard` is false, neither that field nor the
    /// corresponding header is read.
    ///
    /// # Errors
    /// 400, naming header or field, what is legal and what came.
    pub fn read(
        headers: &HeaderMap,
        nvext: &Nvext,
        field: Option<Raw<'_>>,
        is_plain_heard: bool,
    ) -> Result<Self, Reject> {
        let header = |name: &HeaderName| {
            headers.get(name).map(|value| value.to_str().unwrap_or("no text").trim())
        };
        let nice = header(&NICE_HEADER).filter(|_| is_plain_heard);
        let nice = nice.map(|text| earliness_of(NICE_HEADER.as_str(), text)).transpose()?;
        let jump = header(&PRIORITY_HEADER)
            .map(|text| number(PRIORITY_HEADER.as_str(), text, "a number"))
            .transpose()?;
        let strict = header(&STRICT_PRIORITY_HEADER)
            .map(|text| {
                number(STRICT_PRIORITY_HEADER.as_str(), text, "an integer in 0..=4294967295")
            })
            .transpose()?;
        let of_body = || {
            let text = field.map(Raw::get).filter(|text| is_plain_heard && *text != "null");
            text.map(|text| earliness_of("priority", text)).transpose()
        };
        let earliness = match nice.or(jump).or(nvext.priority()) {
            Some(earliness) => earliness,
            None => of_body()?.unwrap_or(0.0),
        };
        Ok(Self {
            strict: strict.or(nvext.agent_hints.strict_priority).unwrap_or(0),
            // JSON has no infinities, but a header may. The sum turns -0 into 0.
            earliness: if earliness.is_finite() { earliness + 0.0 } else { 0.0 },
        })
    }

    /// For the queue of workers with room: it never goes behind requests without an urgency.
    pub fn wish(self) -> Wish {
        Wish { strict_priority: self.strict, priority_jump: self.earliness.max(0.0) }
    }

    /// For its client's turn.
    pub fn turn(self) -> Standing {
        Standing { strict_priority: self.strict, score: self.earliness }
    }
}

/// From a whole number with lower ones earlier.
fn earliness_of(name: &str, text: &str) -> Result<f64, Reject> {
    let lower_is_earlier = text.parse::<i32>().map_err(|_| {
        let (low, high) = (i32::MIN, i32::MAX);
        let text: String = text.chars().take(64).collect();
        Reject::bad_request(format!("{name}: must be an integer in {low}..={high}, got {text}"))
    })?;
    Ok(-f64::from(lower_is_earlier))
}

fn number<T: std::str::FromStr>(name: &str, text: &str, wanted: &str) -> Result<T, Reject> {
    text.parse().map_err(|_| {
        let text: String = text.chars().take(64).collect();
        Reject::bad_request(format!("header {name} must be {wanted}, got {text:?}"))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
