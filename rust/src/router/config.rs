//! What a router is told at its start, and what a request may override.

use crate::error::{Error, Result};
use crate::load::LoadConfig;
use crate::policy::Policy;

/// Settings of a [`Router`](super::Router).
#[derive(Debug, Clone, PartialEq)]
pub struct RouterConfig {
    /// Tokens in a block; 0 while unknown. Costs are then in tokens and requests.
    pub block_size: u32,
    /// What a block to prefill costs in blocks held; finite and at least 0.
    pub overlap_score_weight: f64,
    /// 0 takes the lowest cost, larger values spread the choice; finite and at least 0.
    pub temperature: f64,
    /// How a worker is chosen.
    pub policy: Policy,
    /// Count the blocks of active requests; off: only their prompt tokens count.
    pub track_active_blocks: bool,
    /// Workers keep one copy of a block for all requests that share it; off: every request
    /// occupies all of its blocks, as where blocks are transferred and not looked up.
    pub assume_kv_reuse: bool,
    /// Count prompt tokens of active requests until their first token; off on routers whose
    /// workers do not prefill.
    pub track_prefill_tokens: bool,
    /// A request idle for longer is taken for leaked; at least 1.
    pub expiry_ms: u64,
    /// Where the generator of chance starts.
    pub seed: u64,
    /// Most active requests; at least 1.
    pub max_requests: usize,
}

impl Default for RouterConfig {
    fn default() -> Self {
        let load = LoadConfig::default();
        Self {
            block_size: load.block_size,
            overlap_score_weight: 1.0,
            temperature: 0.0,
            policy: Policy::default(),
            track_active_blocks: true,
            assume_kv_reuse: true,
            track_prefill_tokens: load.track_prefill_tokens,
            expiry_ms: load.expiry_ms,
            seed: 0,
            max_requests: load.max_requests,
        }
    }
}

impl RouterConfig {
    /// Check every field.
    ///
    /// # Errors
    /// [`Error::Config`] with the name of the first field that is out of range, what is legal and
    /// what came.
    pub fn validate(&self) -> Result<()> {
        // Places in the table are 32-bit numbers.
        let limit = u32::MAX as usize - 1;
        let fault = fault_of("overlap_score_weight", self.overlap_score_weight)
            .or_else(|| fault_of("temperature", self.temperature))
            .or_else(|| (self.expiry_ms == 0).then(|| "expiry_ms must be at least 1, got 0".into()))
            .or_else(|| {
                let is_legal = (1..=limit).contains(&self.max_requests);
                let got = self.max_requests;
                (!is_legal).then(|| format!("max_requests must be in 1..={limit}, got {got}"))
            });
        fault.map_or(Ok(()), |fault| Err(Error::Config(fault)))
    }

    pub(super) fn load(&self) -> LoadConfig {
        LoadConfig {
            block_size: self.block_size,
            expiry_ms: self.expiry_ms,
            max_requests: self.max_requests,
            track_prefill_tokens: self.track_prefill_tokens,
        }
    }
}

/// What one request wants otherwise than the router's configuration.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RouteOverride {
    /// Instead of [`RouterConfig::overlap_score_weight`].
    pub overlap_score_weight: Option<f64>,
    /// Instead of [`RouterConfig::temperature`].
    pub temperature: Option<f64>,
    /// Instead of [`RouterConfig::assume_kv_reuse`].
    pub assume_kv_reuse: Option<bool>,
}

impl RouteOverride {
    pub(super) fn validate(&self) -> Result<()> {
        let weight = self.overlap_score_weight;
        let fault = weight
            .and_then(|weight| fault_of("overlap_score_weight", weight))
            .or_else(|| self.temperature.and_then(|t| fault_of("temperature", t)));
        fault.map_or(Ok(()), |fault| Err(Error::InvalidArgument(fault)))
    }
}

fn fault_of(field: &str, value: f64) -> Option<String> {
    let is_legal = value.is_finite() && value >= 0.0;
    (!is_legal).then(|| format!("{field} must be finite and at least 0, got {value}"))
}
