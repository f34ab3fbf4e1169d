//! Routing options of a request, in its `nvext` object and in headers: pins, and its urgency in queues.

use axum::http::{HeaderMap, HeaderName};
use kvflash_core::fair::{Options, Standing, Wish};
use kvflash_core::ids::InstanceId;
use serde::Deserialize;

use super::body::Raw;
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
            .map(|text| number(PRIORITY_HEADER.as_str(), text))
            .transpose()?;
        let strict = header(&STRICT_PRIORITY_HEADER)
            .map(|text| number(STRICT_PRIORITY_HEADER.as_str(), text))
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
            strict: strict.or(nvext.strict_priority()).unwrap_or(0),
            // JSON has no infinities, but a header may. The sum turns -0 into 0.
            earliness: if earliness.is_finite() { earliness + 0.0 } else { 0.0 },
        })
    }

    /// For the queue of workers with room: it never goes behind requests without an urgency.
    pub fn wish(self) -> Wish {
        Wish { strict_priority: self.strict, priority_jump: self.earliness.max(0.0) }
    }

    /// For its client's turn.
    pub fn turn(self) -> Options {
        let standing = Standing { strict_priority: self.strict, score: self.earliness };
        Options { standing, ..Options::default() }
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

fn number<T: std::str::FromStr>(name: &str, text: &str) -> Result<T, Reject> {
    text.parse().map_err(|_| {
        let text: String = text.chars().take(64).collect();
        Reject::bad_request(format!("header {name} must be a number, got {text:?}"))
    })
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

    /// The strict priority and the urgency from `headers` and a body's fields.
    fn read(headers: &[(&'static str, &str)], nvext: &str, field: &str) -> (u32, f64) {
        let urgency = read_where(true, headers, nvext, field).unwrap();
        assert_eq!(urgency.wish().strict_priority, urgency.turn().standing.strict_priority);
        assert_eq!(urgency.wish().priority_jump, urgency.turn().standing.score.max(0.0));
        (urgency.strict, urgency.earliness)
    }

    fn read_where(
        is_plain_heard: bool,
        headers: &[(&'static str, &str)],
        nvext: &str,
        field: &str,
    ) -> Result<Urgency, Reject> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, value.parse().unwrap());
        }
        let nvext = Nvext::parse(Some(Raw::of(nvext))).unwrap();
        Urgency::read(&map, &nvext, Some(Raw::of(field)), is_plain_heard)
    }

    #[test]
    fn one_answer_from_all_that_says_how_urgent_it_is() {
        let hints = r#"{"agent_hints": {"priority": 10, "strict_priority": 2}}"#;
        let (dynamo, own) = ((PRIORITY_HEADER.as_str(), "2.5"), (NICE_HEADER.as_str(), "-7"));
        assert_eq!(read(&[], "{}", "null"), (0, 0.0));
        assert_eq!(read(&[], "{}", "-3"), (0, 3.0));
        assert_eq!(read(&[], "{}", "4"), (0, -4.0));
        assert_eq!(read(&[], hints, "-3"), (2, 10.0));
        assert_eq!(read(&[dynamo], hints, "-3"), (2, 2.5));
        assert_eq!(read(&[dynamo, own], hints, "-3"), (2, 7.0));
        assert_eq!(read(&[(STRICT_PRIORITY_HEADER.as_str(), "5")], hints, "null"), (5, 10.0));
        let older = r#"{"agent_hints": {"latency_sensitivity": -1.5}}"#;
        assert_eq!(read(&[], older, "null"), (0, -1.5));
        assert_eq!(read(&[(PRIORITY_HEADER.as_str(), "inf")], hints, "null"), (2, 0.0));
        assert!(read(&[], "{}", "0").1.is_sign_positive());
        // Without a queue the field belongs to the engine; ignore it.
        let unheard = read_where(false, &[own], "{}", r#""soon""#).unwrap();
        assert_eq!(unheard, Urgency::default());
    }

    #[test]
    fn what_is_no_number_is_named() {
        for (headers, field, text) in [
            (
                vec![(STRICT_PRIORITY_HEADER.as_str(), "-1")],
                "null",
                STRICT_PRIORITY_HEADER.as_str(),
            ),
            (vec![(PRIORITY_HEADER.as_str(), "soon")], "null", "must be a number, got \"soon\""),
            (
                vec![(NICE_HEADER.as_str(), "1.5")],
                "null",
                "x-kvflash-priority: must be an integer in",
            ),
            (vec![], "[1]", "priority: must be an integer in -2147483648..=2147483647, got [1]"),
        ] {
            let error = read_where(true, &headers, "{}", field).unwrap_err();
            assert!(error.message.contains(text), "{}", error.message);
        }
    }
}
