//! Metrics that engines report of themselves.

use serde::Serialize;

use crate::error::{Error, Result};

/// Metrics that an engine reports of itself; `None` if unreported.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct EngineMetrics {
    /// Requests in its batch.
    pub running_requests: Option<f64>,
    /// Share of its accelerator's blocks in use, 0 to 1.
    pub gpu_kv_usage: Option<f64>,
    /// Share of its host blocks in use, 0 to 1.
    pub cpu_kv_usage: Option<f64>,
    /// How long requests wait before they are scheduled, in seconds.
    pub queue_s: Option<f64>,
    /// Mean time of a prefill, in seconds.
    pub mean_prefill_s: Option<f64>,
    /// Mean time of a decode, in seconds.
    pub mean_decode_s: Option<f64>,
    /// Mean length of prompts, in tokens.
    pub avg_prompt_tokens: Option<f64>,
    /// Mean length of answers, in tokens.
    pub avg_generation_tokens: Option<f64>,
    /// Share of time in which the accelerator was busy, 0 to 1.
    pub busy_ratio: Option<f64>,
    /// A score of utilization, as the engine defines it.
    pub utilization: Option<f64>,
}

impl EngineMetrics {
    /// Whether nothing is reported.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// These metrics, with gaps filled from `earlier`.
    pub fn or(mut self, mut earlier: Self) -> Self {
        for ((_, field, _), (_, before, _)) in
            self.fields_mut().into_iter().zip(earlier.fields_mut())
        {
            *field = field.or(*before);
        }
        self
    }

    /// From fields by name.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown name, and as [`validate`](Self::validate).
    pub fn from_fields(fields: impl IntoIterator<Item = (String, f64)>) -> Result<Self> {
        let mut metrics = Self::default();
        for (name, value) in fields {
            let known = metrics.fields_mut();
            let names = known.each_ref().map(|(name, ..)| *name).join(", ");
            let place = known.into_iter().find(|(known, ..)| *known == name);
            let Some((_, field, _)) = place else {
                return Err(Error::invalid(format!("unknown figure {name:?}; known are {names}")));
            };
            *field = Some(value);
        }
        metrics.validate()?;
        Ok(metrics)
    }

    /// Validates received values.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], naming the first field that is not a number of at least 0, or
    /// not a share in 0..=1.
    pub fn validate(mut self) -> Result<()> {
        for (name, value, highest) in self.fields_mut() {
            if let Some(value) = value.filter(|value| !(0.0..=highest).contains(value)) {
                let wanted = if highest == 1.0 { "in 0..=1" } else { "finite and at least 0" };
                return Err(Error::invalid(format!("{name} must be {wanted}, got {value}")));
            }
        }
        Ok(())
    }

    /// The reported values, by name.
    pub fn reported(mut self) -> Vec<(&'static str, f64)> {
        let fields = self.fields_mut().map(|(name, value, _)| Some((name, (*value)?)));
        fields.into_iter().flatten().collect()
    }

    /// Every field by name, with its highest legal value.
    fn fields_mut(&mut self) -> [(&'static str, &mut Option<f64>, f64); 10] {
        [
            ("running_requests", &mut self.running_requests, f64::MAX),
            ("gpu_kv_usage", &mut self.gpu_kv_usage, 1.0),
            ("cpu_kv_usage", &mut self.cpu_kv_usage, 1.0),
            ("queue_s", &mut self.queue_s, f64::MAX),
            ("mean_prefill_s", &mut self.mean_prefill_s, f64::MAX),
            ("mean_decode_s", &mut self.mean_decode_s, f64::MAX),
            ("avg_prompt_tokens", &mut self.avg_prompt_tokens, f64::MAX),
            ("avg_generation_tokens", &mut self.avg_generation_tokens, f64::MAX),
            ("busy_ratio", &mut self.busy_ratio, 1.0),
            ("utilization", &mut self.utilization, f64::MAX),
        ]
    }
}
