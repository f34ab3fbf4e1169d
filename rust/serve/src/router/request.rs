//! Requests of gateways. Unknown fields are refused by name, because ignoring a misspelt one would
//! silently change the routing.

use std::collections::BTreeMap;
use std::net::IpAddr;

use kvflash_core::error::{Error, Result};
use kvflash_core::fleet::{EventSpec, WorkerState};
use kvflash_core::hash::engine::MediaItem;
use kvflash_core::ids::InstanceId;
use kvflash_core::policy::EngineMetrics;
use kvflash_core::select::{Report, RouteOverride, Share, Usage};
use serde::{Deserialize, Serialize};

use super::super::indexer::request::{BlockHashes, TokenIds, default_tenant};
use super::super::prompt_keys;
use crate::Reject;
use crate::worker_allow::WorkerAllow;

/// Longest prompt in tokens: sums over all reservations must not overflow.
pub(super) const MAX_ISL_TOKENS: u64 = u32::MAX as u64;
/// Maximum worker ids that one request may allow.
const MAX_ALLOWED: usize = 65_535;
/// Longest address of a worker in characters; it is returned unchanged.
const MAX_URL_CHARS: usize = 4_096;

/// POST /workers
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NewWorker {
    /// The client that registers it.
    #[serde(skip)]
    pub registrant: Option<IpAddr>,
    pub worker_id: InstanceId,
    #[serde(alias = "model")]
    pub model_name: String,
    #[serde(default = "default_tenant")]
    pub tenant_id: String,
    /// The worker's address for the gateway; not used here.
    pub url: Option<String>,
    #[serde(default = "one")]
    pub dp_size: u32,
    pub block_size: Option<u32>,
    /// Of rank 0; rank r publishes at its port + r.
    pub endpoint: Option<String>,
    pub replay_endpoint: Option<String>,
    /// By rank, as an alternative to `endpoint`.
    #[serde(default)]
    pub events: BTreeMap<String, EventSpec>,
    pub kv_total_blocks: Option<u64>,
    pub max_num_batched_tokens: Option<u64>,
    /// Whether it takes new requests.
    #[serde(default)]
    pub state: WorkerState,
}

const fn one() -> u32 {
    1
}

impl NewWorker {
    /// Checks that the addresses of a worker added over HTTP are allowed.
    ///
    /// # Errors
    /// 403, naming the field, the address and the flag.
    pub async fn check_places(&self, allow: &WorkerAllow) -> std::result::Result<(), Reject> {
        if let Some(url) = &self.url
            && url.contains("://")
        {
            allow.check_url("url", url).await?;
        }
        let own = [&self.endpoint, &self.replay_endpoint].into_iter().flatten();
        let of_ranks = self.events.values().flat_map(|spec| {
            [Some(&spec.endpoint), spec.replay_endpoint.as_ref()].into_iter().flatten()
        });
        for address in own.chain(of_ranks) {
            allow.check_socket("endpoint", address).await?;
        }
        Ok(())
    }

    /// Checks what the types can't express.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the field, what is legal and what came.
    pub fn check(&self) -> Result<()> {
        if self.model_name.is_empty() {
            return Err(Error::invalid("model_name must not be empty"));
        }
        if !(1..=1_024).contains(&self.dp_size) {
            let got = self.dp_size;
            return Err(Error::invalid(format!("dp_size must be in 1..=1024, got {got}")));
        }
        if self.block_size == Some(0) {
            return Err(Error::invalid("block_size must be at least 1, got 0"));
        }
        if self.kv_total_blocks == Some(0) {
            return Err(Error::invalid("kv_total_blocks must be at least 1, got 0"));
        }
        let len = self.url.as_ref().map_or(0, |url| url.chars().count());
        if len > MAX_URL_CHARS {
            return Err(Error::invalid(format!(
                "url may have at most {MAX_URL_CHARS} characters, got {len}"
            )));
        }
        if self.endpoint.is_some() && !self.events.is_empty() {
            return Err(Error::invalid("endpoint and events exclude each other: give one of them"));
        }
        if self.replay_endpoint.is_some() && self.endpoint.is_none() {
            return Err(Error::invalid(
                "replay_endpoint needs endpoint: add it, or leave replay_endpoint out",
            ));
        }
        self.events().map(|_| ())
    }

    /// Sockets by rank; keys of maps are strings in every body format.
    ///
    /// # Errors
    /// `InvalidArgument` for an invalid rank.
    pub fn events(&self) -> Result<BTreeMap<u32, EventSpec>> {
        let rank = |(rank, events): (&String, &EventSpec)| match rank.parse() {
            Ok(number) if number < self.dp_size => Ok((number, events.clone())),
            _ => Err(Error::invalid(format!(
                "events.{rank}: a rank is a number below dp_size {}",
                self.dp_size
            ))),
        };
        self.events.iter().map(rank).collect()
    }

    /// The initial report of its ranks.
    pub fn report(&self) -> Report {
        Report {
            kv_total_blocks: self.kv_total_blocks,
            max_num_batched_tokens: self.max_num_batched_tokens,
            ..Report::default()
        }
    }
}

/// POST /select, /reserve, /potential_loads, /explain
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object")]
pub(super) struct Choose {
    /// The client's address.
    #[serde(skip)]
    pub caller: Option<IpAddr>,
    #[serde(alias = "model")]
    pub model_name: Option<String>,
    pub tenant_id: Option<String>,
    #[serde(alias = "tokens")]
    pub token_ids: Option<TokenIds>,
    #[serde(alias = "local_hashes")]
    pub block_hashes: Option<BlockHashes>,
    pub isl_tokens: Option<u64>,
    pub lora_name: Option<String>,
    /// The adapter's path in the engine, which is part of its hashes.
    pub lora_path: Option<String>,
    pub cache_salt: Option<String>,
    /// Multimodal items of `token_ids`.
    #[serde(default, deserialize_with = "prompt_keys::media")]
    pub mm: Vec<MediaItem>,
    /// Digests of the prompt's embeddings, one per hash block.
    #[serde(default, deserialize_with = "prompt_keys::embeds")]
    pub embeds: Vec<Vec<u8>>,
    #[serde(alias = "overrides")]
    pub router_config_override: Option<RouteOverride>,
    pub allowed_worker_ids: Option<Vec<InstanceId>>,
    pub worker_id: Option<InstanceId>,
    pub dp_rank: Option<u32>,
    pub request_id: Option<String>,
    /// The prompt's text, for policies that use it.
    pub prompt: Option<String>,
    /// The request's user.
    pub user: Option<String>,
    /// A key that all requests of a session share.
    pub session_key: Option<String>,
    /// The session id from an earlier response.
    pub session_id: Option<String>,
    pub priority: Option<f64>,
    pub strict_priority: Option<u32>,
    pub expected_output_tokens: Option<u64>,
    /// Seed of the random draw, instead of a new one.
    pub seed: Option<u64>,
}

impl Choose {
    /// Workers that may take it, ascending.
    ///
    /// # Errors
    /// `InvalidArgument` for more than 65,535.
    pub fn allowed(&self) -> Result<Option<Vec<InstanceId>>> {
        let Some(ids) = &self.allowed_worker_ids else { return Ok(None) };
        if ids.len() > MAX_ALLOWED {
            return Err(Error::invalid(format!(
                "allowed_worker_ids may have at most {MAX_ALLOWED} elements, got {}",
                ids.len()
            )));
        }
        let mut ids = ids.clone();
        ids.sort_unstable();
        Ok(Some(ids))
    }
}

/// POST /prefill_complete, /touch, /free
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Named {
    pub request_id: String,
    /// Limits the search to this model; default: all models.
    #[serde(alias = "model")]
    pub model_name: Option<String>,
    pub tenant_id: Option<String>,
    /// Tokens of the prompt, as the engine counted them; for policies.
    #[serde(alias = "prompt_tokens")]
    pub input_tokens: Option<u64>,
    /// Tokens of the prompt that the engine reports as reused; for GET /why and policies.
    pub cached_tokens: Option<u64>,
    /// Generated tokens; for policies.
    #[serde(alias = "completion_tokens")]
    pub output_tokens: Option<u64>,
    /// Tokens generated so far; their blocks count if that is enabled.
    pub generated_tokens: Option<u64>,
}

impl Named {
    /// The engine's usage counts.
    pub fn usage(&self) -> Usage {
        let (input_tokens, cached_tokens) = (self.input_tokens, self.cached_tokens);
        Usage { input_tokens, cached_tokens, output_tokens: self.output_tokens }.plausible()
    }
}

/// POST /report_load
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LoadReport {
    pub worker_id: InstanceId,
    #[serde(default)]
    pub dp_rank: u32,
    /// Another router's share of the load, instead of the worker's own report.
    pub router_id: Option<u64>,
    pub kv_used_blocks: Option<u64>,
    pub active_decode_blocks: Option<u64>,
    pub active_prefill_tokens: Option<u64>,
    pub kv_total_blocks: Option<u64>,
    pub max_num_batched_tokens: Option<u64>,
    pub running_requests: Option<f64>,
    pub gpu_kv_usage: Option<f64>,
    pub cpu_kv_usage: Option<f64>,
    pub queue_s: Option<f64>,
    pub mean_prefill_s: Option<f64>,
    pub mean_decode_s: Option<f64>,
    pub avg_prompt_tokens: Option<f64>,
    pub avg_generation_tokens: Option<f64>,
    pub busy_ratio: Option<f64>,
    pub utilization: Option<f64>,
}

impl LoadReport {
    /// The engine's metrics for policies.
    ///
    /// # Errors
    /// `InvalidArgument` for a field out of range, or one that only a worker may report.
    pub fn engine_metrics(&self) -> Result<EngineMetrics> {
        let metrics = EngineMetrics {
            running_requests: self.running_requests,
            gpu_kv_usage: self.gpu_kv_usage,
            cpu_kv_usage: self.cpu_kv_usage,
            queue_s: self.queue_s,
            mean_prefill_s: self.mean_prefill_s,
            mean_decode_s: self.mean_decode_s,
            avg_prompt_tokens: self.avg_prompt_tokens,
            avg_generation_tokens: self.avg_generation_tokens,
            busy_ratio: self.busy_ratio,
            utilization: self.utilization,
        };
        if self.router_id.is_some() && !metrics.is_empty() {
            return Err(Error::invalid(
                "workers report the engine's own figures, routers do not: leave them out with router_id",
            ));
        }
        metrics.validate()?;
        Ok(metrics)
    }

    pub fn report(&self) -> Report {
        Report {
            kv_used_blocks: self.kv_used_blocks,
            active_decode_blocks: self.active_decode_blocks,
            active_prefill_tokens: self.active_prefill_tokens,
            kv_total_blocks: self.kv_total_blocks,
            max_num_batched_tokens: self.max_num_batched_tokens,
        }
    }

    /// Another router's share.
    ///
    /// # Errors
    /// `InvalidArgument` for a field that only a worker may report.
    pub fn share(&self) -> Result<Share> {
        for (field, value) in [
            ("kv_used_blocks", self.kv_used_blocks),
            ("kv_total_blocks", self.kv_total_blocks),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
        ] {
            if value.is_some() {
                return Err(Error::invalid(format!(
                    "workers report {field}, routers do not: leave it out with router_id"
                )));
            }
        }
        Ok(Share {
            active_decode_blocks: self.active_decode_blocks,
            active_prefill_tokens: self.active_prefill_tokens,
        })
    }
}
