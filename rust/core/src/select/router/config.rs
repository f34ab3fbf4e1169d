//! A router's configuration, and the settings that a request may override.

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::load::{LoadConfig, PrefillSpeed};
use crate::policy::{KvScale, Stage};

/// Saving of a block that a worker holds outside of its device: a share of the prefill cost,
/// because the block must be fetched. Finite and at least 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TierWeights {
    /// In host memory.
    pub host: f64,
    /// On local disks and in shared storage.
    pub disk: f64,
}

impl Default for TierWeights {
    fn default() -> Self {
        Self { host: 0.75, disk: 0.25 }
    }
}

impl TierWeights {
    /// Whether tiers other than the device count at all.
    pub fn is_any(&self) -> bool {
        self.host > 0.0 || self.disk > 0.0
    }

    /// Saving of the blocks after the first `leading`, in thousandths of a block; `host` blocks are
    /// reached with host memory, `disk` with all tiers.
    ///
    /// # Source
    /// The cases of `tier-overlap` in `tests/vectors/radix_cases.json`.
    #[inline]
    pub fn milliblocks(&self, leading: u32, host: u32, disk: u32) -> u32 {
        // Nearly always: rounding is a call, which costs more than the rest of a candidate.
        if host.max(disk) <= leading {
            return 0;
        }
        let in_host = f64::from(host.saturating_sub(leading));
        let on_disk = f64::from(disk.saturating_sub(host.max(leading)));
        // Saturates, like every cast from float to integer.
        ((self.host * in_host + self.disk * on_disk) * 1_000.0).round() as u32
    }
}

/// Settings of a [`Router`](super::Router).
#[derive(Debug, Clone, PartialEq)]
pub struct RouterConfig {
    /// Limits and units of the load table. Without a block size costs are in tokens and requests; prompt
    /// tokens are not tracked by routers of decode-only workers. The policies say whether the queue is
    /// estimated.
    pub load: LoadConfig,
    /// Cost of a block to prefill, in held blocks; finite and at least 0.
    pub overlap_score_weight: f64,
    /// How `kv` weighs its other terms.
    pub scale: KvScale,
    /// Weights of blocks that workers hold outside of their devices.
    pub tiers: TierWeights,
    /// 0 takes the lowest cost, larger values spread the choice; finite and at least 0.
    pub temperature: f64,
    /// The part of a request that its workers do.
    pub stage: Stage,
    /// Count the blocks of active requests; otherwise only their prompt tokens count.
    pub track_active_blocks: bool,
    /// Also count the blocks that active requests generate; requires `track_active_blocks`.
    pub track_output_blocks: bool,
    /// Whether workers keep one copy of a block for all requests that share it; otherwise every
    /// request occupies all of its blocks, as when blocks are transferred and not looked up.
    pub assume_kv_reuse: bool,
    /// Seed of the random generator.
    pub seed: u64,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            load: LoadConfig::default(),
            overlap_score_weight: 1.0,
            scale: KvScale::default(),
            tiers: TierWeights::default(),
            temperature: 0.0,
            stage: Stage::default(),
            track_active_blocks: true,
            track_output_blocks: false,
            assume_kv_reuse: true,
            seed: 0,
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
        let numbers = [
            ("overlap_score_weight", self.overlap_score_weight),
            ("temperature", self.temperature),
            ("host_cache_hit_weight", self.tiers.host),
            ("disk_cache_hit_weight", self.tiers.disk),
        ];
        let mut numbers = numbers.into_iter().chain(self.scale.fields());
        if let Some(fault) = numbers.find_map(|(name, number)| fault_of(name, number)) {
            return Err(Error::Config(fault));
        }
        // Places in the table are 32-bit numbers.
        let LoadConfig { expiry_ms, max_requests: max, prefill_speed, .. } = self.load;
        let limit = u32::MAX as usize - 1;
        let speed = if let PrefillSpeed::Told(speed) = prefill_speed { speed } else { 1.0 };
        let faults = [
            (expiry_ms == 0, "expiry_ms must be at least 1, got 0".to_owned()),
            (
                !(1..=limit).contains(&max),
                format!("max_requests must be in 1..={limit}, got {max}"),
            ),
            (
                !(speed.is_finite() && speed > 0.0),
                format!("prefill_tokens_per_second must be finite and above 0, got {speed}"),
            ),
            (
                self.track_output_blocks && !self.track_active_blocks,
                "track_output_blocks requires track_active_blocks".to_owned(),
            ),
        ];
        let fault = faults.into_iter().find(|(is_fault, _)| *is_fault);
        fault.map_or(Ok(()), |(_, fault)| Err(Error::Config(fault)))
    }

    /// The same for workers that only prefill. Requests leave no state there: only their prompt
    /// tokens count, and always do.
    pub fn of_prefill(self) -> Self {
        Self {
            stage: Stage::Prefill,
            track_active_blocks: false,
            track_output_blocks: false,
            load: LoadConfig { track_prefill_tokens: true, ..self.load },
            ..self
        }
    }

    /// Whether caches count at all.
    pub fn weighs_overlap(&self) -> bool {
        self.scale.weighs_overlap(self.overlap_score_weight)
    }
}

/// Settings that one request overrides.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object")]
pub struct RouteOverride {
    /// Replaces [`RouterConfig::overlap_score_weight`].
    #[serde(alias = "kv_overlap_score_weight")]
    pub overlap_score_weight: Option<f64>,
    /// Replaces [`KvScale::overlap_score_credit`].
    pub overlap_score_credit: Option<f64>,
    /// Replaces [`KvScale::prefill_load_scale`].
    pub prefill_load_scale: Option<f64>,
    /// Replaces [`RouterConfig::temperature`].
    #[serde(rename = "router_temperature", alias = "temperature")]
    pub temperature: Option<f64>,
    /// Replaces [`RouterConfig::assume_kv_reuse`].
    pub assume_kv_reuse: Option<bool>,
    /// Seed of the random draw, instead of a new one: an equal seed gives an equal choice among
    /// equal candidates.
    #[serde(skip)]
    pub seed: Option<u64>,
}

impl RouteOverride {
    /// Whether it replaces a setting of the formula of [`Policy::Kv`](crate::policy::Policy::Kv).
    pub(super) fn is_of_formula(&self) -> bool {
        let is_weighed = self.overlap_score_weight.is_some() || self.assume_kv_reuse.is_some();
        self.overlap_score_credit.is_some()
            || self.prefill_load_scale.is_some()
            || (is_weighed && !self.is_prefilled_elsewhere())
    }

    /// Whether it says, as decode workers are asked for, that the prompt is prefilled elsewhere:
    /// every policy knows that.
    pub(in crate::select) fn is_prefilled_elsewhere(&self) -> bool {
        self.overlap_score_weight == Some(0.0) && self.assume_kv_reuse == Some(false)
    }

    pub(super) fn validate(&self) -> Result<()> {
        let fields = [
            ("overlap_score_weight", self.overlap_score_weight),
            ("overlap_score_credit", self.overlap_score_credit),
            ("prefill_load_scale", self.prefill_load_scale),
            ("router_temperature", self.temperature),
        ];
        let fault = fields.into_iter().find_map(|(name, value)| fault_of(name, value?));
        fault.map_or(Ok(()), |fault| Err(Error::InvalidArgument(fault)))
    }
}

fn fault_of(field: &str, value: f64) -> Option<String> {
    let is_legal = value.is_finite() && value >= 0.0;
    (!is_legal).then(|| format!("{field} must be finite and at least 0, got {value}"))
}
