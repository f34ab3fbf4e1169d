//! What a question about a prompt may carry, as a dict of Python's.

use std::collections::HashSet;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::error::raise;
use crate::error::Error;
use crate::ids::Worker;
use crate::router::RouteOverride;
use crate::select::{Ask, Pin, Prompt};

const KNOWN: &str = "overlap_score_weight, router_temperature, assume_kv_reuse, worker_id, dp_rank, \
                     allowed_worker_ids, lora_name, cache_salt";

/// Overrides, pins and identity of one request.
#[derive(Debug, Default)]
pub(super) struct Options {
    overrides: RouteOverride,
    pin: Option<Pin>,
    allowed: Option<HashSet<u64>>,
    pub lora_name: Option<String>,
    pub cache_salt: Option<String>,
}

impl Options {
    /// From keyword names to values; `None` is as good as absent. An unknown name is refused: it would
    /// else be a wish that nobody hears.
    pub fn of(py: Python<'_>, given: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let mut options = Self::default();
        let (mut worker_id, mut dp_rank) = (None, None);
        for (name, value) in given.into_iter().flatten() {
            if value.is_none() {
                continue;
            }
            let name: String = name.extract()?;
            let wrong = |wanted: &str| {
                raise(py, &Error::invalid(format!("{name} must be {wanted}, got {value}")))
            };
            match name.as_str() {
                "overlap_score_weight" => {
                    let weight = value.extract().map_err(|_| wrong("a number"))?;
                    options.overrides.overlap_score_weight = Some(weight);
                }
                "router_temperature" => {
                    let temperature = value.extract().map_err(|_| wrong("a number"))?;
                    options.overrides.temperature = Some(temperature);
                }
                "assume_kv_reuse" => {
                    let reuse = value.extract().map_err(|_| wrong("True or False"))?;
                    options.overrides.assume_kv_reuse = Some(reuse);
                }
                "worker_id" => {
                    worker_id = Some(value.extract().map_err(|_| wrong("a worker's id"))?);
                }
                "dp_rank" => {
                    dp_rank = Some(value.extract().map_err(|_| wrong("a rank's number"))?);
                }
                "allowed_worker_ids" => {
                    let ids =
                        value.try_iter().and_then(|ids| ids.map(|id| id?.extract()).collect());
                    options.allowed = Some(ids.map_err(|_: PyErr| wrong("a list of worker ids"))?);
                }
                "lora_name" => {
                    options.lora_name = Some(value.extract().map_err(|_| wrong("a text"))?);
                }
                "cache_salt" => {
                    options.cache_salt = Some(value.extract().map_err(|_| wrong("a text"))?);
                }
                other => {
                    let message = format!("unknown option {other:?}; known are {KNOWN}");
                    return Err(raise(py, &Error::invalid(message)));
                }
            }
        }
        options.pin = match (worker_id, dp_rank) {
            (Some(instance_id), dp_rank) => Some(Pin { instance_id, dp_rank }),
            (None, None) => None,
            (None, Some(rank)) => {
                let message =
                    format!("dp_rank {rank} without worker_id: a rank is one of a worker's");
                return Err(raise(py, &Error::invalid(message)));
            }
        };
        Ok(options)
    }

    /// Whether a list of workers allows `worker`.
    pub fn allows(&self, worker: Worker) -> bool {
        self.allowed.as_ref().is_none_or(|ids| ids.contains(&worker.instance_id))
    }

    /// The question about `prompt`; `allows` is [`allows`](Self::allows) of these options.
    pub fn ask<'a>(&self, prompt: &'a Prompt, allows: &'a dyn Fn(Worker) -> bool) -> Ask<'a> {
        Ask {
            overrides: self.overrides,
            allowed: self.allowed.is_some().then_some(allows),
            pin: self.pin,
            ..Ask::new(prompt)
        }
    }
}
