//! Properties reported by an SGLang engine: its event endpoint, ranks and block size, so that an
//! operator need only give its URL.

use std::collections::BTreeMap;
use std::time::Duration;

use kvflash_core::fleet::{EventSpec, port_of};
use serde::Deserialize;
use serde_json::Value;

use super::engine::{Engine, ServerNotes, release_of};
use super::engine_spec::{MAX_RANKS, dialled};
use super::proxy::Upstream;

/// Newer engines answer at the first path.
const PATHS: [&str; 2] = ["/server_info", "/get_server_info"];
/// SGLang's default event endpoint.
const DEFAULT_ENDPOINT: &str = "tcp://*:5557";

#[derive(Deserialize)]
struct ServerInfo {
    page_size: u32,
    dp_size: Option<u32>,
    version: Option<String>,
    enable_lora: Option<bool>,
    /// A JSON object as a string, as on its command line.
    #[serde(default)]
    kv_events_config: Value,
}

#[derive(Deserialize)]
struct KvEvents {
    publisher: Option<String>,
    endpoint: Option<String>,
    replay_endpoint: Option<String>,
    format: Option<String>,
}

/// Queries `engine`; `None` if it is not SGLang, or does not answer.
pub(crate) async fn ask(
    upstream: &Upstream,
    engine: &Engine,
    timeout: Duration,
) -> Option<ServerNotes> {
    let host = engine.base.parse::<axum::http::Uri>().ok()?.host()?.to_owned();
    for path in PATHS {
        if let Ok((200, body)) = upstream.get(&engine.spec, path, timeout).await
            && let Some(mut notes) = read(&host, path, &body)
        {
            if engine.spec.is_added() {
                notes.keep_events_at(&host);
            }
            return Some(notes);
        }
    }
    None
}

impl ServerNotes {
    /// For an engine added over HTTP: its events must be on its own host.
    fn keep_events_at(&mut self, host: &str) {
        let own = format!("tcp://{host}:");
        let is_own = |spec: &EventSpec| {
            let replay = spec.replay_endpoint.as_ref();
            spec.endpoint.starts_with(&own) && replay.is_none_or(|replay| replay.starts_with(&own))
        };
        if !self.events.values().all(is_own) {
            self.events.clear();
            self.note.push_str(
                ", which is on another host; a worker added over HTTP must have its sockets on its own host",
            );
        }
    }
}

/// Parses the response of an engine at `host`.
fn read(host: &str, path: &str, body: &[u8]) -> Option<ServerNotes> {
    let info: ServerInfo = serde_json::from_slice(body).ok()?;
    let dp_size = info.dp_size.unwrap_or(1).clamp(1, MAX_RANKS);
    let block_size = Some(info.page_size).filter(|size| *size > 0);
    let (events, note) = match sockets(host, dp_size, &info.kv_events_config) {
        Ok((endpoint, replay, format)) => {
            let mut note = format!(
                "GET {path} says that it publishes at {endpoint}, replays {}, and has {dp_size} ranks",
                replay.as_ref().map_or("nothing".to_owned(), |replay| format!("at {replay}"))
            );
            let version = info.version.as_deref().unwrap_or_default();
            if info.enable_lora == Some(true) && !names_adapters(version, format.as_deref()) {
                note.push_str(&format!(
                    ", but SGLang {version} names no adapters in its events: their blocks count as the base \
                     model's, so give adapters workers of their own, or upgrade to 0.5.23"
                ));
            }
            (EventSpec::of_ranks(Some(&endpoint), replay.as_deref(), dp_size), note)
        }
        Err(why) => (BTreeMap::new(), format!("GET {path} says that {why}")),
    };
    Some(ServerNotes { events, dp_size, block_size, note })
}

/// Whether events of this version and format tell adapters from the base model; assumed of versions
/// that are not understood.
///
/// # Source
/// `KVCacheEventRecorder` of SGLang 0.5.21 to 0.5.23.
fn names_adapters(version: &str, format: Option<&str>) -> bool {
    let since = if format == Some("dynamo") { 22 } else { 23 };
    release_of(version).is_none_or(|release| release >= (0, 5, since))
}

/// Event socket, replay socket and format of rank 0.
type Sockets = (String, Option<String>, Option<String>);

/// # Errors
/// Why there are none, as text.
fn sockets(host: &str, dp_size: u32, config: &Value) -> Result<Sockets, String> {
    const FIX: &str = "start it with --kv-events-config '{\"publisher\": \"zmq\", \"endpoint\": \
                       \"tcp://*:5557\", \"replay_endpoint\": \"tcp://*:5657\"}'";
    let read: Result<KvEvents, _> = match config {
        Value::Null => return Err(format!("it publishes no KV events: {FIX}")),
        Value::String(text) => serde_json::from_str(text),
        other => KvEvents::deserialize(other),
    };
    let config = read.map_err(|error| format!("its kv_events_config is not JSON: {error}"))?;
    if config.publisher.as_deref() != Some("zmq") {
        return Err(format!("the publisher of its kv_events_config is not zmq: {FIX}"));
    }
    let place = |field: &str, address: &str| {
        let address = dialled(host, address);
        let has_ports =
            port_of(&address).is_some_and(|port| u32::from(port) + dp_size - 1 <= 65_535);
        let is_local = address.starts_with("ipc://") && dp_size == 1;
        if has_ports || is_local {
            return Ok(address);
        }
        Err(format!("the {field} of its kv_events_config is {address:?}, not tcp://host:port"))
    };
    let endpoint = place("endpoint", config.endpoint.as_deref().unwrap_or(DEFAULT_ENDPOINT))?;
    let replay = config.replay_endpoint.as_deref();
    let replay = replay.map(|replay| place("replay_endpoint", replay)).transpose()?;
    Ok((endpoint, replay, config.format))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    fn told(config: Value, dp_size: u32) -> ServerNotes {
        let info = json!({
            "model_path": "m", "page_size": 64, "dp_size": dp_size, "kv_events_config": config,
            "internal_states": [{}], "version": "0.5",
        });
        read("10.0.0.7", "/server_info", info.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn one_that_was_added_over_http_names_sockets_of_its_own_host() {
        for (endpoint, is_kept) in [
            ("tcp://*:5557", true),
            ("tcp://10.0.0.7:5557", true),
            ("tcp://10.0.0.70:5557", false),
            ("ipc:///tmp/other", false),
        ] {
            let mut notes = told(json!({ "publisher": "zmq", "endpoint": endpoint }), 1);
            assert_eq!(notes.events.len(), 1, "{endpoint}");
            notes.keep_events_at("10.0.0.7");
            assert_eq!(!notes.events.is_empty(), is_kept, "{endpoint}: {}", notes.note);
        }
    }

    #[test]
    fn sockets_of_all_interfaces_are_at_the_engines_host() {
        let config = json!({
            "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://0.0.0.0:5657",
            "topic": "kv-events", "buffer_steps": 10_000,
        });
        for given in [json!(config.to_string()), config] {
            let notes = told(given, 2);
            let places: Vec<_> = notes
                .events
                .values()
                .map(|events| (&*events.endpoint, events.replay_endpoint.as_deref().unwrap()))
                .collect();
            let wanted = [
                ("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5657"),
                ("tcp://10.0.0.7:5558", "tcp://10.0.0.7:5658"),
            ];
            assert_eq!(places, wanted);
            assert_eq!((notes.dp_size, notes.block_size), (2, Some(64)));
            assert!(notes.note.contains("tcp://10.0.0.7:5557") && notes.note.contains("2 ranks"));
        }
        let bare = told(json!(r#"{"publisher": "zmq"}"#), 1);
        assert_eq!(bare.events[&0].endpoint, "tcp://10.0.0.7:5557");
        let named = told(json!(r#"{"publisher": "zmq", "endpoint": "tcp://10.0.0.8:1"}"#), 1);
        assert_eq!(named.events[&0].endpoint, "tcp://10.0.0.8:1");
    }

    #[test]
    fn events_without_adapters_are_told() {
        for (version, format, is_told) in [
            ("0.5.21.post1", "default", true),
            ("0.5.22", "default", true),
            ("0.5.22", "dynamo", false),
            ("0.5.23", "default", false),
            ("0.6.0rc1", "default", false),
            ("main", "default", false),
        ] {
            let config = json!({ "publisher": "zmq", "format": format });
            for enable_lora in [true, false] {
                let info = json!({
                    "page_size": 64, "kv_events_config": config, "version": version,
                    "enable_lora": enable_lora,
                });
                let notes = read("h", "/server_info", info.to_string().as_bytes()).unwrap();
                let told = notes.note.contains("names no adapters in its events");
                assert_eq!(told, is_told && enable_lora, "{version} {format}: {}", notes.note);
            }
        }
    }

    #[test]
    fn who_publishes_nothing_is_told_why() {
        for (config, why) in [
            (Value::Null, "it publishes no KV events: start it with --kv-events-config"),
            (json!("{"), "not JSON"),
            (json!(r#"{"publisher": "null"}"#), "not zmq"),
            (json!(r#"{"publisher": "zmq", "endpoint": "udp://x"}"#), "not tcp://host:port"),
            (json!(r#"{"publisher": "zmq", "endpoint": "tcp://*:65535"}"#), "not tcp://host:port"),
        ] {
            let notes = told(config, 2);
            assert!(notes.events.is_empty() && notes.note.contains(why), "{}", notes.note);
            assert_eq!(notes.block_size, Some(64));
        }
        // vLLM's response, in versions that have one.
        assert_eq!(read("h", "/server_info", br#"{"vllm_config": "..."}"#), None);
        assert_eq!(read("h", "/server_info", b"no"), None);
    }
}
