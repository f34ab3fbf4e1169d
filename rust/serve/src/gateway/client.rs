//! The client of a request, and its link to earlier requests.

use std::sync::Arc;

use axum::http::{HeaderMap, HeaderName};
use kvflash_core::ids::Worker;
use kvflash_core::policy::session::{read_session_id, session_id};
use kvflash_core::select::Request;
use serde::Deserialize;

use super::api::Api;
use super::body::Raw;
use super::call::{Call, Envelope, Prompt};
use crate::frontend::engine::Engine;
use crate::frontend::engine_spec::address_of;
use crate::frontend::pool::Members;
use crate::tenant::pass;

/// Header that names the worker of a session; responses contain it with `session-affinity`.
pub(crate) static SESSION_HEADER: HeaderName = HeaderName::from_static("x-session-id");
/// Headers with a session's key; the first one counts.
static KEY_HEADERS: [HeaderName; 2] =
    [HeaderName::from_static("x-aibrix-session-key"), HeaderName::from_static("x-session-key")];
static USER_HEADER: HeaderName = HeaderName::from_static("user");

/// The key of a request's session, from its headers.
pub(super) fn session_key(headers: &HeaderMap) -> Option<&str> {
    let header = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let named = KEY_HEADERS.iter().chain([&SESSION_HEADER]).find_map(header);
    named.filter(|text| !text.is_empty())
}

/// The client's details in `call`; the prompt's text only if a policy `needs_text`.
pub(super) fn read(
    call: &Call,
    envelope: &Envelope<'_>,
    members: &Members,
    needs_text: bool,
) -> Request {
    let headers = &call.head.headers;
    let header = |name: &HeaderName| {
        headers.get(name).and_then(|value| value.to_str().ok()).filter(|text| !text.is_empty())
    };
    // A key identifies its owner, and the header `user` takes precedence over OpenAI's field.
    let owner = call.head.caller.key().map(|key| key.id.clone());
    let field = envelope.user.and_then(|raw| serde_json::from_str::<String>(raw.get()).ok());
    let user = owner
        .or_else(|| header(&USER_HEADER).map(str::to_owned))
        .or(field)
        .filter(|user| !user.is_empty());
    let id = header(&SESSION_HEADER);
    let named = id.and_then(read_session_id);
    let session_worker = named.as_ref().and_then(|(address, rank)| {
        let engine = members.all().find(|engine| address_of(&engine.base) == address)?;
        (*rank < engine.spec.dp_size).then(|| Worker::new(engine.id, *rank))
    });
    // An id that is not an address is the client's own: a key like the others.
    let is_address = named.as_ref().is_some_and(|(address, _)| {
        address.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok())
    });
    let own_id = id.filter(|_| !is_address);
    let key = KEY_HEADERS.iter().find_map(header).or(own_id);
    // Equal names of different tenants are different sessions.
    let key = key.map(|key| match pass::client(&call.head.caller) {
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
        #[serde(default)]
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
        #[serde(default)]
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use axum::http::Uri;

    use super::super::body::Body;
    use super::super::call::Head;
    use super::*;
    use crate::Caller;

    fn read(headers: &[(&'static str, &str)], body: &str) -> Request {
        let headers =
            headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
        let (headers, uri, caller) = (headers.collect(), Uri::default(), Caller::default());
        let head = Head { headers, uri, address: None, caller };
        let body = Arc::new(Body::parse(body.to_owned().into()).unwrap());
        let envelope = body.read().unwrap();
        let call = Call::new(None, head, String::new(), &body, &envelope).unwrap();
        super::read(&call, &envelope, &Members::default(), true)
    }

    #[test]
    fn text_of_prompts_in_all_forms() {
        for (body, wanted) in [
            (r#"{"prompt": "a\nb"}"#, b"a\nb".as_slice()),
            (r#"{"prompt": [1, 258]}"#, &[0, 0, 0, 1, 0, 0, 1, 2]),
            (r#"{"prompt": ["a", "b"]}"#, b""),
            (
                r#"{"messages": [{"role": "system", "content": "be "},
                    {"role": "user", "content": [{"type": "text", "text": "kind"},
                        {"type": "image_url", "image_url": {"url": "u"}}]},
                    {"role": "assistant", "content": null, "tool_calls": []},
                    {"role": "tool", "content": 5}]}"#,
                b"be kind",
            ),
            (r#"{"messages": 5}"#, b""),
        ] {
            assert_eq!(&*read(&[], body).text, wanted, "{body}");
        }
    }

    #[test]
    fn users_and_sessions_by_header_and_field() {
        let body = r#"{"prompt": "p", "user": "by-field"}"#;
        assert_eq!(read(&[], body).user.as_deref(), Some("by-field"));
        assert_eq!(read(&[("user", "by-header")], body).user.as_deref(), Some("by-header"));
        assert_eq!(read(&[], r#"{"prompt": "p", "user": 5}"#).user, None);
        assert_eq!(read(&[], r#"{"prompt": "p", "user": ""}"#).user, None);
        let key = |headers: &[(&'static str, &str)]| {
            read(headers, body).session_key.as_deref().map(str::to_owned)
        };
        assert_eq!(key(&[("x-session-key", "k")]).as_deref(), Some("k"));
        assert_eq!(key(&[("x-session-id", "mine")]).as_deref(), Some("mine"));
        // The worker it names is gone, so the session starts over.
        assert_eq!(key(&[("x-session-id", &session_id("10.0.0.1:8000", 0))]), None);
        let both = [("x-session-key", "b"), ("x-aibrix-session-key", "a")];
        assert_eq!(key(&both).as_deref(), Some("a"));
    }
}
