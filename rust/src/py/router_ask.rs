//! What a question about a prompt may carry, as a dict of Python's.

use std::collections::HashSet;

use kvflash_core::error::Error;
use kvflash_core::fair::Wish;
use kvflash_core::hash::engine::NameKeys;
use kvflash_core::ids::Worker;
use kvflash_core::policy::Session;
use kvflash_core::router::{Facts, RouteOverride};
use kvflash_core::select::{Ask, Pin, Prompt};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::error::{OrRaise, raise};
use super::prompt_keys::{PromptKeys, digests, media};

const KNOWN: &str = "overlap_score_weight, overlap_score_credit, prefill_load_scale, router_temperature, assume_kv_reuse, worker_id, dp_rank, \
                     allowed_worker_ids, lora_name, lora_path, cache_salt, mm, embeds, user, prompt, session_key, session_worker, priority, \
                     strict_priority, expected_output_tokens, seed";

/// Overrides, pins and identity of one request.
#[derive(Debug, Default)]
pub(super) struct Options {
    overrides: RouteOverride,
    pin: Option<Pin>,
    allowed: Option<HashSet<u64>>,
    user: Option<String>,
    prompt: Option<String>,
    session_key: Option<String>,
    session_worker: Option<(u64, u32)>,
    priority: Option<f64>,
    strict_priority: Option<u32>,
    expected_output_tokens: Option<u64>,
    keys: PromptKeys,
}

impl Options {
    /// What tells the prompt from others of the same tokens.
    pub fn keys(&self) -> NameKeys<'_> {
        self.keys.keys()
    }

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
                "overlap_score_credit" => {
                    let credit = value.extract().map_err(|_| wrong("a number"))?;
                    options.overrides.overlap_score_credit = Some(credit);
                }
                "prefill_load_scale" => {
                    let scale = value.extract().map_err(|_| wrong("a number"))?;
                    options.overrides.prefill_load_scale = Some(scale);
                }
                "router_temperature" => {
                    let temperature = value.extract().map_err(|_| wrong("a number"))?;
                    options.overrides.temperature = Some(temperature);
                }
                "assume_kv_reuse" => {
                    let reuse = value.extract().map_err(|_| wrong("True or False"))?;
                    options.overrides.assume_kv_reuse = Some(reuse);
                }
                "seed" => {
                    let seed = value.extract();
                    let wanted = "a whole number in 0..=18446744073709551615";
                    options.overrides.seed = Some(seed.map_err(|_| wrong(wanted))?);
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
                "user" => options.user = Some(value.extract().map_err(|_| wrong("a text"))?),
                "prompt" => options.prompt = Some(value.extract().map_err(|_| wrong("a text"))?),
                "session_key" => {
                    options.session_key = Some(value.extract().map_err(|_| wrong("a text"))?);
                }
                "session_worker" => {
                    let worker = value.extract().map_err(|_| wrong("(worker_id, dp_rank)"))?;
                    options.session_worker = Some(worker);
                }
                "priority" => {
                    options.priority = Some(value.extract().map_err(|_| wrong("a number"))?);
                }
                "strict_priority" => {
                    let strict = value.extract();
                    let wanted = "a whole number in 0..=4294967295";
                    options.strict_priority = Some(strict.map_err(|_| wrong(wanted))?);
                }
                "expected_output_tokens" => {
                    let tokens = value.extract();
                    let wanted = "a whole number of at least 0";
                    options.expected_output_tokens = Some(tokens.map_err(|_| wrong(wanted))?);
                }
                "lora_name" => {
                    options.keys.lora_name = Some(value.extract().map_err(|_| wrong("a text"))?);
                }
                "lora_path" => {
                    options.keys.lora_path = Some(value.extract().map_err(|_| wrong("a text"))?);
                }
                "cache_salt" => {
                    options.keys.cache_salt = Some(value.extract().map_err(|_| wrong("a text"))?);
                }
                "mm" => options.keys.media = media(Some(&value))?,
                "embeds" => options.keys.embeds = digests(Some(&value))?,
                other => {
                    let message = format!("unknown option {other:?}; known are {KNOWN}");
                    return Err(raise(py, &Error::invalid(message)));
                }
            }
        }
        Wish::of(options.priority, options.strict_priority).or_raise(py)?;
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

    /// What policies hash: the prompt's text, else four bytes of each token id.
    pub fn text(&self, ids: &[u32]) -> Vec<u8> {
        match &self.prompt {
            Some(prompt) => prompt.clone().into_bytes(),
            None => ids.iter().flat_map(|id| id.to_be_bytes()).collect(),
        }
    }

    /// What policies are told beside the prompt.
    pub fn facts(&self) -> Facts<'_> {
        let worker = self.session_worker.map(|(id, rank)| Worker::new(id, rank));
        Facts {
            user: self.user.as_deref(),
            session: Session { worker, key: self.session_key.as_deref() },
            ..Facts::default()
        }
    }

    /// How urgent it is among those that wait.
    pub fn wish(&self) -> Wish {
        // It was looked at when it came.
        Wish::of(self.priority, self.strict_priority).unwrap_or_default()
    }

    /// Whether every worker may take it.
    pub fn is_open(&self) -> bool {
        self.pin.is_none() && self.allowed.is_none()
    }

    /// Whether a list of workers allows `worker`.
    pub fn allows(&self, worker: Worker) -> bool {
        self.allowed.as_ref().is_none_or(|ids| ids.contains(&worker.instance_id))
    }

    /// The question about `prompt`; `allows` is [`allows`](Self::allows) of these options.
    pub fn ask<'a>(&'a self, prompt: &'a Prompt, allows: &'a dyn Fn(Worker) -> bool) -> Ask<'a> {
        Ask {
            overrides: self.overrides,
            allowed: self.allowed.is_some().then_some(allows),
            pin: self.pin,
            expected_output_tokens: self.expected_output_tokens,
            ..Ask::new(prompt)
        }
    }
}
