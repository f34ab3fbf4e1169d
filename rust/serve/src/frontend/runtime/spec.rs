//! A worker as discovery tells of it.

use std::collections::BTreeMap;

use kvflash_core::error::{Error, Result};
use kvflash_core::fleet::{self, EventSpec, WorkerState};
use kvflash_core::ids::InstanceId;
use kvflash_core::select::Report;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::super::engine_spec::MAX_RANKS;
use crate::fleet::key_of;

/// Longest name, address or path.
const MAX_NAME_BYTES: usize = 4_096;
/// Most adapters of a worker.
const MAX_ADAPTERS: usize = 4_096;

/// How to reach a worker.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub(crate) enum PlaneSpec {
    /// `host:port`.
    Tcp { address: String },
    /// `http://host:port[/path]`.
    Http { url: String },
}

/// What a worker takes and gives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ModelInput {
    #[default]
    Tokens,
    Text,
}

/// Where a prefill worker of the bootstrap kind is met by its decode worker.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct Bootstrap {
    pub host: String,
    pub port: u16,
}

/// What a worker serves. Fields that are not named here are for others.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Card {
    pub model_name: String,
    #[serde(default)]
    pub model_input: ModelInput,
    #[serde(default)]
    pub model_type: Vec<String>,
    pub kv_cache_block_size: Option<u32>,
    /// Longest prompt plus answer, tokens.
    pub context_length: Option<u64>,
    /// Folder with the tokenizer and the chat template, or the model's id at the Hub.
    pub tokenizer: Option<String>,
    pub total_kv_blocks: Option<u64>,
    pub max_num_batched_tokens: Option<u64>,
    pub dp_size: Option<u32>,
    #[serde(default)]
    pub lora_names: Vec<String>,
    pub bootstrap: Option<Bootstrap>,
    /// How its model marks its reasoning, and its tool calls.
    pub reasoning_parser: Option<String>,
    pub tool_call_parser: Option<String>,
    /// Not read here; two cards that differ in it are two cards.
    #[serde(default)]
    pub user_data: Value,
}

/// One worker of the runtime.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct WorkerSpec {
    pub id: InstanceId,
    pub plane: PlaneSpec,
    /// `namespace/component/endpoint`.
    pub endpoint: String,
    pub card: Card,
    /// By data-parallel rank.
    #[serde(default)]
    pub events: BTreeMap<u32, EventSpec>,
    /// Its address for gateways, where they send it requests.
    pub url: Option<String>,
    /// Whether it takes new requests when it joins a router.
    #[serde(default)]
    pub state: WorkerState,
}

impl WorkerSpec {
    /// Read and check a worker's JSON.
    ///
    /// # Errors
    /// `Config`, naming the field, what is legal and what came.
    pub fn parse(json: &str) -> Result<Self> {
        let mut reader = serde_json::Deserializer::from_str(json);
        let spec: Self = serde_path_to_error::deserialize(&mut reader)
            .map_err(|error| Error::Config(format!("worker: {error}")))?;
        spec.check().map_err(|what| Error::Config(format!("worker {}: {what}", spec.id)))?;
        Ok(spec)
    }

    fn check(&self) -> std::result::Result<(), String> {
        if self.id == 0 {
            return Err("id must be at least 1, got 0".to_owned());
        }
        let address = match &self.plane {
            PlaneSpec::Tcp { address } => {
                let (host, port) = address.rsplit_once(':').unwrap_or_default();
                if host.is_empty() || !port.parse::<u16>().is_ok_and(|port| port > 0) {
                    return Err(format!("plane.address must be host:port, got {address:?}"));
                }
                address
            }
            PlaneSpec::Http { url } => {
                let uri: Option<axum::http::Uri> = url.parse().ok();
                let is_whole = uri.is_some_and(|uri| {
                    uri.scheme_str() == Some("http") && uri.host().is_some_and(|h| !h.is_empty())
                });
                if !is_whole {
                    return Err(format!("plane.url must be http://host:port, got {url:?}"));
                }
                url
            }
        };
        for (field, text) in [
            ("plane", address),
            ("endpoint", &self.endpoint),
            ("card.model_name", &self.card.model_name),
        ] {
            if !(1..=MAX_NAME_BYTES).contains(&text.len()) {
                return Err(format!(
                    "{field} must have 1..={MAX_NAME_BYTES} bytes, got {}",
                    text.len()
                ));
            }
        }
        if self.endpoint.split('/').filter(|part| !part.is_empty()).count() != 3 {
            let came = &self.endpoint;
            return Err(format!("endpoint must be namespace/component/endpoint, got {came:?}"));
        }
        let ranks = self.dp_size();
        if !(1..=MAX_RANKS).contains(&ranks) {
            return Err(format!("card.dp_size must be in 1..={MAX_RANKS}, got {ranks}"));
        }
        if self.card.kv_cache_block_size == Some(0) {
            return Err("card.kv_cache_block_size must be at least 1, got 0".to_owned());
        }
        if self.card.lora_names.len() > MAX_ADAPTERS {
            let came = self.card.lora_names.len();
            return Err(format!("card.lora_names: at most {MAX_ADAPTERS}, got {came}"));
        }
        if let Some(rank) = self.events.keys().find(|rank| **rank >= ranks) {
            return Err(format!("events: rank {rank} of a worker with {ranks} ranks"));
        }
        Ok(())
    }

    pub fn dp_size(&self) -> u32 {
        self.card.dp_size.unwrap_or(1)
    }

    /// Does it only prefill?
    pub fn is_prefill(&self) -> bool {
        self.card.model_type.iter().any(|kind| kind.eq_ignore_ascii_case("prefill"))
    }

    /// The initial report of its ranks; an engine that does not know a figure says 0.
    pub fn report(&self) -> Report {
        let known = |figure: Option<u64>| figure.filter(|figure| *figure > 0);
        Report {
            kv_total_blocks: known(self.card.total_kv_blocks),
            max_num_batched_tokens: known(self.card.max_num_batched_tokens),
            ..Report::default()
        }
    }

    /// Its model, in an index of its own if it only prefills.
    pub fn model(&self) -> fleet::Card {
        let key = key_of(&self.card.model_name, self.is_prefill());
        let report = self.report();
        fleet::Card {
            block_size: self.card.kv_cache_block_size,
            capacity_blocks: report.kv_total_blocks,
            report,
            ..fleet::Card::new(key)
        }
    }

    /// The same but for its events.
    pub fn is_same_but_events(&self, other: &Self) -> bool {
        let state = self.state;
        let plain = |spec: &Self| Self { events: BTreeMap::new(), state, ..spec.clone() };
        plain(self) == plain(other)
    }

    /// Where it is, for people.
    pub fn address(&self) -> String {
        match &self.plane {
            PlaneSpec::Tcp { address } => format!("tcp://{address}/{}", self.endpoint),
            PlaneSpec::Http { url } => format!("{}/{}", url.trim_end_matches('/'), self.endpoint),
        }
    }
}

/// A worker's own report of its load.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
pub(crate) struct LoadReport {
    #[serde(skip_serializing)]
    pub id: InstanceId,
    #[serde(default, skip_serializing)]
    pub dp_rank: u32,
    pub kv_used_blocks: Option<u64>,
    pub kv_total_blocks: Option<u64>,
    pub active_decode_blocks: Option<u64>,
    pub active_prefill_tokens: Option<u64>,
}

impl LoadReport {
    /// Read a report's JSON.
    ///
    /// # Errors
    /// `Config`, naming the field, what is legal and what came.
    pub fn parse(json: &str) -> Result<Self> {
        let mut reader = serde_json::Deserializer::from_str(json);
        serde_path_to_error::deserialize(&mut reader)
            .map_err(|error| Error::Config(format!("load report: {error}")))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    fn worker() -> Value {
        json!({
            "id": 7, "plane": {"kind": "tcp", "address": "h:5"}, "endpoint": "n/c/e",
            "card": {"model_name": "m", "model_input": "tokens", "dp_size": 2, "later": 1},
            "events": {"1": {"endpoint": "tcp://h:6"}},
        })
    }

    #[test]
    fn a_worker_is_read_with_its_defaults() {
        let spec = WorkerSpec::parse(&worker().to_string()).unwrap();
        assert_eq!((spec.id, spec.dp_size(), spec.is_prefill()), (7, 2, false));
        assert_eq!(spec.card.model_input, ModelInput::Tokens);
        assert_eq!(spec.address(), "tcp://h:5/n/c/e");
        let mut later = worker();
        later["events"] = json!({});
        let later = WorkerSpec::parse(&later.to_string()).unwrap();
        assert!(later != spec && later.is_same_but_events(&spec));
    }

    #[test]
    fn refusals_name_the_field_and_what_came() {
        for (pointer, value, wanted) in [
            ("/id", json!(0), "id must be at least 1"),
            ("/id", json!("x"), "id: invalid type"),
            ("/plane", json!({"kind": "udp"}), "plane.kind: unknown variant `udp`"),
            ("/plane/address", json!("h"), "plane.address must be host:port, got \"h\""),
            ("/plane", json!({"kind": "http", "url": "h:1"}), "plane.url must be http://"),
            ("/endpoint", json!("n/c"), "endpoint must be namespace/component/endpoint"),
            ("/card/model_name", json!(""), "card.model_name must have 1..=4096 bytes"),
            ("/card/dp_size", json!(0), "card.dp_size must be in 1..=1024, got 0"),
            ("/card/dp_size", json!(1), "events: rank 1 of a worker with 1 ranks"),
            ("/card/model_input", json!("images"), "card.model_input: unknown variant"),
        ] {
            let mut spec = worker();
            *spec.pointer_mut(pointer).unwrap() = value;
            let error = WorkerSpec::parse(&spec.to_string()).unwrap_err().to_string();
            assert!(error.contains(wanted), "{pointer}: {error}");
        }
    }
}
