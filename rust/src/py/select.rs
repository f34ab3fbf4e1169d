//! Settings of routing that the frontend, the router and the router's core share.

use kvflash_core::catalog::CatalogOptions;
use kvflash_core::error::Error;
use kvflash_core::load::PrefillSpeed;
use kvflash_core::policy::{AUTO, Counted, KvScale, Settings};
use kvflash_core::router::{Policies, RouterConfig, TierWeights};
use kvflash_core::select::{
    DEFAULT_JOURNAL_BYTES, Overlap, QueueOptions, QueueThreshold, Thresholds,
};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::error::{OrRaise, raise};
use super::indexer::seconds;
use super::policies::Chosen;
use super::policy_desk::PolicyDesk;

/// How long a prediction stands without events, where nobody says.
const ROUTER_TTL_S: f64 = 120.0;

/// A struct of keyword arguments with their defaults, read of a call's `**settings`.
macro_rules! keywords {
    ($(#[$doc:meta])* $name:ident { $($field:ident: $kind:ty = $default:expr,)* }) => {
        $(#[$doc])*
        struct $name {
            $($field: $kind,)*
        }

        impl $name {
            fn of(settings: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
                let mut given = Self { $($field: $default,)* };
                for (name, value) in settings.iter().flat_map(|settings| settings.iter()) {
                    let name: String = name.extract()?;
                    match name.as_str() {
                        $(stringify!($field) => {
                            given.$field = value.extract().map_err(|error| {
                                PyTypeError::new_err(format!("argument '{name}': {error}"))
                            })?;
                        })*
                        _ => {
                            let text = format!("got an unexpected keyword argument '{name}'");
                            return Err(PyTypeError::new_err(text));
                        }
                    }
                }
                Ok(given)
            }
        }
    };
}

/// `None`, "auto" or tokens a second.
#[derive(Default)]
struct Speed(PrefillSpeed);

impl FromPyObject<'_, '_> for Speed {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        if value.is_none() {
            return Ok(Self(PrefillSpeed::Unknown));
        }
        if let Ok(word) = value.extract::<String>() {
            return match word.as_str() {
                "auto" => Ok(Self(PrefillSpeed::Learned)),
                _ => {
                    Err(PyTypeError::new_err(format!("must be a number or \"auto\", got {word:?}")))
                }
            };
        }
        Ok(Self(PrefillSpeed::Told(value.extract()?)))
    }
}

keywords! {
    /// By the names of the stub; the flags' defaults.
    Keywords {
        policy: Option<String> = None,
        is_kv_meant: bool = false,
        policy_desk: Option<Py<PolicyDesk>> = None,
        policy_profile: Option<String> = None,
        shadow_policies: Vec<String> = Vec::new(),
        overlap_score_weight: f64 = 1.0,
        temperature: f64 = 0.0,
        track_active_blocks: bool = true,
        assume_kv_reuse: bool = true,
        track_prefill_tokens: bool = true,
        active_request_expiry_s: f64 = 300.0,
        seed: Option<u64> = None,
        use_kv_events: bool = true,
        predicted_ttl_s: f64 = 5.0,
        router_ttl_s: f64 = ROUTER_TTL_S,
        is_router_ttl_meant: bool = false,
        router_max_tree_size: usize = 1_048_576,
        router_prune_target_ratio: f64 = 0.8,
        active_decode_blocks_threshold: Option<f64> = None,
        active_prefill_tokens_threshold: Option<u64> = None,
        active_prefill_tokens_threshold_frac: Option<f64> = None,
        decision_journal_bytes: usize = DEFAULT_JOURNAL_BYTES,
        max_blocks: usize = 33_554_432,
        index_memory_bytes: usize = 0,
        overlap_score_credit: f64 = 1.0,
        overlap_score_credit_decay: f64 = 0.0,
        prefill_load_scale: f64 = 1.0,
        active_request_weight: f64 = 0.0,
        host_cache_hit_weight: f64 = 0.75,
        disk_cache_hit_weight: f64 = 0.25,
        prefill_tokens_per_s: Speed = Speed::default(),
        session_affinity_ttl_s: Option<u64> = None,
        router_queue_threshold: Option<f64> = None,
        router_queue_policy: String = "fcfs".to_owned(),
        router_queue_limit: usize = 1_024,
        router_queue_timeout_s: f64 = 60.0,
        router_queue_batched_tokens: u64 = 10_000_000,
        log_decisions: bool = false,
    }
}

/// What the settings of routing come to.
pub(super) struct Routing {
    /// Its block size is not known yet, its limit of requests the default.
    pub router: RouterConfig,
    pub policies: Policies,
    pub settings: Settings,
    pub overlap: Overlap,
    pub uses_events: bool,
    pub thresholds: Thresholds,
    pub queue: Option<QueueOptions>,
    pub journal_bytes: usize,
    pub logs_decisions: bool,
    pub limits: CatalogOptions,
}

impl Routing {
    /// Read the keyword arguments that say how to route.
    ///
    /// # Errors
    /// `TypeError` for an argument that there is not, or of another type; `Config` by the setting's
    /// name.
    pub fn of(py: Python<'_>, settings: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let given = Keywords::of(settings)?;
        let queue = given.queue(py)?;
        let expiry = seconds(py, "--active-request-expiry", given.active_request_expiry_s)?;
        let foresight = given.foresight(py)?;
        let seed = given.seed.unwrap_or_else(rand::random);
        let chosen = Chosen::new(
            given.policy.as_deref(),
            given.policy_profile.as_deref(),
            &given.shadow_policies,
            Counted {
                active_blocks: given.track_active_blocks,
                prefill_tokens: given.track_prefill_tokens,
                kv_reuse: given.assume_kv_reuse,
            },
            given.policy_desk.as_ref().map(Py::get),
            given.session_affinity_ttl_s,
            given.default_policy(),
            given.use_kv_events
                && given.overlap_score_weight > 0.0
                && given.overlap_score_credit > 0.0,
            seed,
        );
        let Chosen { built_in, policies, settings } = chosen.or_raise(py)?;
        let is_auto = policies.active.as_ref().is_some_and(|active| active.name() == AUTO);
        let router = RouterConfig {
            policy: built_in,
            overlap_score_weight: given.overlap_score_weight,
            scale: KvScale {
                overlap_score_credit: given.overlap_score_credit,
                overlap_score_credit_decay: given.overlap_score_credit_decay,
                prefill_load_scale: given.prefill_load_scale,
                active_request_weight: given.active_request_weight,
            },
            prefill_speed: given.prefill_tokens_per_s.0,
            tiers: TierWeights {
                host: given.host_cache_hit_weight,
                disk: given.disk_cache_hit_weight,
            },
            temperature: given.temperature,
            track_active_blocks: given.track_active_blocks,
            assume_kv_reuse: given.assume_kv_reuse,
            track_prefill_tokens: given.track_prefill_tokens,
            expiry_ms: expiry.as_millis() as u64,
            seed,
            ..RouterConfig::default()
        };
        Ok(Self {
            router,
            policies,
            settings,
            overlap: foresight.overlap,
            uses_events: given.use_kv_events,
            thresholds: Thresholds {
                active_decode_blocks: given.active_decode_blocks_threshold,
                active_prefill_tokens: given.active_prefill_tokens_threshold,
                active_prefill_tokens_frac: given.active_prefill_tokens_threshold_frac,
            },
            queue,
            journal_bytes: given.decision_journal_bytes,
            logs_decisions: given.log_decisions,
            limits: CatalogOptions {
                // Who gives a time means it; `kv` has its documented one.
                has_histories: is_auto
                    && !given.use_kv_events
                    && !given.is_router_ttl_meant
                    && given.router_ttl_s == ROUTER_TTL_S,
                ..foresight.limit(given.max_blocks, given.index_memory_bytes)
            },
        })
    }
}

impl Keywords {
    /// The policy where nobody names one: `auto`, unless a setting of `kv`'s cost says that `kv` is meant.
    fn default_policy(&self) -> &'static str {
        let scale = KvScale {
            overlap_score_credit: self.overlap_score_credit,
            overlap_score_credit_decay: self.overlap_score_credit_decay,
            prefill_load_scale: self.prefill_load_scale,
            active_request_weight: self.active_request_weight,
        };
        let is_plain = !self.is_kv_meant
            && scale.is_plain()
            && self.overlap_score_weight == 1.0
            && self.track_active_blocks
            && self.track_prefill_tokens
            && self.assume_kv_reuse
            && self.prefill_tokens_per_s.0 == PrefillSpeed::Unknown;
        if is_plain { AUTO } else { "kv" }
    }

    /// How requests wait for a worker with room to prefill; `None` without a threshold.
    fn queue(&self, py: Python<'_>) -> PyResult<Option<QueueOptions>> {
        let order = self.router_queue_policy.parse().or_raise(py)?;
        let max_wait = seconds(py, "router_queue_timeout", self.router_queue_timeout_s)?;
        Ok(self.router_queue_threshold.map(|batches| QueueOptions {
            threshold: QueueThreshold { batches, batched_tokens: self.router_queue_batched_tokens },
            order,
            limit: self.router_queue_limit,
            max_wait,
        }))
    }

    fn foresight(&self, py: Python<'_>) -> PyResult<Foresight> {
        let fault = |text: String| Err(raise(py, &Error::Config(text)));
        let (max_tree_size, target_ratio) =
            (self.router_max_tree_size, self.router_prune_target_ratio);
        if !(0.0..=1.0).contains(&target_ratio) {
            return fault(format!(
                "router_prune_target_ratio must be in 0..=1, got {target_ratio}"
            ));
        }
        if max_tree_size == 0 {
            return fault("router_max_tree_size must be at least 1, got 0".to_owned());
        }
        let ms = |field, value| seconds(py, field, value).map(|time| time.as_millis() as u64);
        let predicted = match self.predicted_ttl_s {
            0.0 => 0,
            ttl_s => ms("predicted_ttl_secs", ttl_s)?,
        };
        // No time at all is as short as it goes, not for ever.
        let routed = match self.router_ttl_s {
            0.0 => 1,
            ttl_s => ms("router_ttl_secs", ttl_s)?.max(1),
        };
        let (overlap, ttl_ms) = match (self.use_kv_events, predicted) {
            (false, _) => (Overlap::Predictions, routed),
            (true, 0) => (Overlap::Events, 0),
            (true, ttl_ms) => (Overlap::EventsAndPredictions, ttl_ms),
        };
        // Both settings are in 0..=max, so that the product is, too.
        let target = (max_tree_size as f64 * target_ratio).floor() as usize;
        Ok(Foresight { overlap, ttl_ms, max_predicted: (max_tree_size, target) })
    }
}

/// What routing itself tells of caches, and how long that stands.
struct Foresight {
    overlap: Overlap,
    ttl_ms: u64,
    max_predicted: (usize, usize),
}

impl Foresight {
    fn limit(&self, max_blocks: usize, index_memory_bytes: usize) -> CatalogOptions {
        let is_on = self.overlap != Overlap::Events;
        CatalogOptions {
            max_blocks,
            index_memory_bytes,
            predicted_ttl_ms: self.ttl_ms,
            max_predicted: if is_on { self.max_predicted } else { (0, 0) },
            ..CatalogOptions::default()
        }
    }
}
