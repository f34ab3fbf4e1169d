//! Reported properties of an engine.

use std::collections::BTreeMap;

use kvflash_core::fleet::EventSpec;
use kvflash_core::select::WorkerReason;

/// Properties and state of an engine.
#[derive(Debug, Clone, Default)]
pub(crate) struct EngineNotes {
    /// Model and adapters it serves: (name, base model of an adapter).
    pub models: Vec<(String, Option<String>)>,
    /// Longest prompt plus answer, tokens.
    pub max_model_len: Option<u64>,
    /// Blocks of its cache.
    pub capacity_blocks: Option<u64>,
    /// Tokens in a block, from its metrics.
    pub block_size: Option<u32>,
    /// Its version string.
    pub version: Option<String>,
    /// Start of its process, seconds since 1970, from its metrics.
    pub started_s: Option<f64>,
    /// Properties reported by its server, if it is SGLang's and was asked.
    pub server: Option<ServerNotes>,
    /// The last error, as text.
    pub last_error: Option<String>,
}

/// Results of the last inspection of a worker.
#[derive(Debug, Default)]
pub(crate) struct Inspection {
    pub faults: Vec<WorkerReason>,
    /// Everything was checked and is correct: no further inspection.
    pub is_settled: bool,
    /// The missing `/tokenize` was already logged.
    pub has_told_untold: bool,
}

/// Properties reported by an SGLang server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ServerNotes {
    /// Event endpoints of its ranks; empty without events.
    pub events: BTreeMap<u32, EventSpec>,
    pub dp_size: u32,
    /// Tokens in a block of its events.
    pub block_size: Option<u32>,
    /// The result, or why there is none, for people.
    pub note: String,
}
