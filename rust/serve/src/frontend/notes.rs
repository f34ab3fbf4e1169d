//! What is known of an engine.

use std::collections::BTreeMap;

use kvflash_core::fleet::EventSpec;
use kvflash_core::select::WorkerReason;

/// How an engine fares.
#[derive(Debug, Clone, Default)]
pub(crate) struct EngineNotes {
    /// Model and adapters it serves: (name, base model of an adapter).
    pub models: Vec<(String, Option<String>)>,
    /// Longest prompt plus answer, tokens.
    pub max_model_len: Option<u64>,
    /// Blocks of its cache.
    pub capacity_blocks: Option<u64>,
    /// Tokens in a block, as its metrics say.
    pub block_size: Option<u32>,
    /// What it calls its version.
    pub version: Option<String>,
    /// When its process started, seconds since 1970, as its metrics say.
    pub started_s: Option<f64>,
    /// What its server says of itself, where it is SGLang's and was asked.
    pub server: Option<ServerNotes>,
    /// Last trouble, in words.
    pub last_error: Option<String>,
}

/// What was found when a worker was looked at last.
#[derive(Debug, Default)]
pub(crate) struct Inspection {
    pub faults: Vec<WorkerReason>,
    /// Everything was seen and is right: it is not looked at again.
    pub is_settled: bool,
    /// That there is no `/tokenize` was said.
    pub has_told_untold: bool,
}

/// What an SGLang engine's server said of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ServerNotes {
    /// Where its ranks publish; empty where they do not.
    pub events: BTreeMap<u32, EventSpec>,
    pub dp_size: u32,
    /// Tokens in a block of its events.
    pub block_size: Option<u32>,
    /// What was found, or why nothing was, for people.
    pub note: String,
}
