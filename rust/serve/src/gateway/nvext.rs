//! Routing options of a request, in its `nvext` object.

use super::body::Raw;
use kvflash_core::ids::InstanceId;
use serde::Deserialize;

use crate::Reject;

/// Maximum annotations of a request.
const MAX_ANNOTATIONS: usize = 64;
/// The annotation that asks for the worker of a request without sending it.
const QUERY: &str = "query_instance_id";

/// The fields of `nvext` that routing reads.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, expecting = "an object")]
pub(crate) struct Nvext {
    annotations: Option<Vec<String>>,
    backend_instance_id: Option<InstanceId>,
    prefill_worker_id: Option<InstanceId>,
    decode_worker_id: Option<InstanceId>,
    agent_hints: Option<AgentHints>,
    seed: Option<u64>,
}

/// Hints of an agent framework about a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
#[serde(default)]
struct AgentHints {
    /// Higher values go first in the queue.
    priority: Option<f64>,
    /// An older name for it.
    latency_sensitivity: Option<f64>,
    /// Goes before all requests with a lower value.
    strict_priority: Option<u32>,
    /// Expected tokens of the answer.
    osl: Option<u64>,
}

impl Nvext {
    /// Parses the object; missing fields pin nothing.
    ///
    /// # Errors
    /// 400 naming the field, what was expected and what came.
    pub fn parse(raw: Option<Raw<'_>>) -> Result<Self, Reject> {
        let Some(raw) = raw.filter(|raw| raw.get() != "null") else { return Ok(Self::default()) };
        let mut reader = serde_json::Deserializer::from_str(raw.get());
        let nvext: Self = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
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

    /// The seed of routing's random draw; not the seed of the answer's tokens.
    pub fn seed(&self) -> Option<u64> {
        self.seed
    }

    /// Its priority in the queue; higher values go first.
    pub fn priority(&self) -> Option<f64> {
        let hints = self.agent_hints?;
        hints.priority.or(hints.latency_sensitivity)
    }

    /// It goes before all requests with a lower value.
    pub fn strict_priority(&self) -> Option<u32> {
        self.agent_hints?.strict_priority
    }

    /// Expected tokens of the answer.
    pub fn expected_output_tokens(&self) -> Option<u64> {
        self.agent_hints.and_then(|hints| hints.osl)
    }

    /// The worker that must prefill.
    pub fn prefill_pin(&self) -> Option<InstanceId> {
        self.prefill_worker_id
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<Nvext, Reject> {
        Nvext::parse(Some(Raw::of(json)))
    }

    #[test]
    fn pins_and_annotations() {
        assert_eq!(Nvext::parse(None).unwrap(), Nvext::default());
        assert_eq!(parse("null").unwrap(), Nvext::default());
        for annotation in ["query_instance_id:", "query_instance_id", "query_instance_id:7"] {
            let json = format!(r#"{{"annotations": ["x", "{annotation}"], "other": 1}}"#);
            assert!(parse(&json).unwrap().is_query(), "{annotation}");
        }
        assert!(!parse(r#"{"annotations": ["query_instance"]}"#).unwrap().is_query());
        let both = parse(r#"{"backend_instance_id": 1, "decode_worker_id": 2}"#).unwrap();
        assert_eq!((both.decode_pin(), both.prefill_pin()), (Some(2), None));
        let json = r#"{"agent_hints": {"priority": 10, "strict_priority": 2, "osl": 5}}"#;
        let hints = parse(json).unwrap();
        assert_eq!((hints.priority(), hints.strict_priority()), (Some(10.0), Some(2)));
        assert_eq!(hints.expected_output_tokens(), Some(5));
        let older = parse(r#"{"agent_hints": {"latency_sensitivity": -1.5}}"#).unwrap();
        assert_eq!((older.priority(), older.strict_priority()), (Some(-1.5), None));
        let error = parse(r#"{"agent_hints": {"priority": "high"}}"#).unwrap_err();
        assert!(error.message.contains("nvext.agent_hints.priority"), "{}", error.message);
        let error = parse(r#"{"prefill_worker_id": "x"}"#).unwrap_err();
        assert!(
            error.message.contains("nvext.prefill_worker_id: invalid type"),
            "{}",
            error.message
        );
    }
}
