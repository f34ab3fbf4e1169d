//! Routing options of a prompt, from a Python dict.

use kvflash_core::fair::Wish;
use kvflash_core::ids::Worker;
use kvflash_core::select::{Pin, Request, Selector};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::error::{Fault, Raised, invalid};
use super::prompt_keys::{PromptKeys, digests, media};

const KNOWN: &str = "overlap_score_weight, overlap_score_credit, prefill_load_scale, router_temperature, assume_kv_reuse, worker_id, dp_rank, \
                     allowed_worker_ids, lora_name, lora_path, cache_salt, mm, embeds, user, prompt, session_key, session_worker, priority, \
                     strict_priority, expected_output_tokens, seed, model_name";

/// A request without its prompt, which is hashed without the GIL.
#[derive(Debug, Default)]
pub(super) struct Options {
    request: Request,
    prompt: Option<String>,
    keys: PromptKeys,
    /// The requested model, if there are several.
    pub model_name: Option<String>,
}

impl Options {
    /// Parses keyword options; `None` is the same as absent.
    ///
    /// # Errors
    /// `InvalidArgumentError`, naming the option. Unknown options are refused, as they would have
    /// no effect.
    pub fn of(given: Option<&Bound<'_, PyDict>>) -> Raised<Self> {
        let mut options = Self::default();
        let (mut worker_id, mut dp_rank) = (None, None);
        let (mut priority, mut strict_priority) = (None, None);
        for (name, value) in given.into_iter().flatten() {
            if value.is_none() {
                continue;
            }
            let name: String = name.extract()?;
            let given = Given { name: &name, value: &value };
            let Self { request, prompt, keys, model_name } = &mut options;
            let overrides = &mut request.overrides;
            match name.as_str() {
                "overlap_score_weight" => overrides.overlap_score_weight = given.number()?,
                "overlap_score_credit" => overrides.overlap_score_credit = given.number()?,
                "prefill_load_scale" => overrides.prefill_load_scale = given.number()?,
                "router_temperature" => overrides.temperature = given.number()?,
                "assume_kv_reuse" => overrides.assume_kv_reuse = given.a("True or False")?,
                "seed" => overrides.seed = given.a("a whole number in 0..=18446744073709551615")?,
                "worker_id" => worker_id = given.a("a worker's id")?,
                "dp_rank" => dp_rank = given.a("a rank's number")?,
                "allowed_worker_ids" => {
                    let ids =
                        value.try_iter().and_then(|ids| ids.map(|id| id?.extract()).collect());
                    let mut ids: Vec<u64> =
                        ids.map_err(|_: PyErr| given.wrong("a list of worker ids"))?;
                    ids.sort_unstable();
                    request.allowed = Some(ids);
                }
                "user" => request.user = given.text()?.map(Into::into),
                "session_key" => request.session_key = given.text()?.map(Into::into),
                "session_worker" => {
                    let worker: Option<(u64, u32)> = given.a("(worker_id, dp_rank)")?;
                    request.session_worker = worker.map(|(id, rank)| Worker::new(id, rank));
                }
                "priority" => priority = given.number()?,
                "strict_priority" => {
                    strict_priority = given.a("a whole number in 0..=4294967295")?;
                }
                "expected_output_tokens" => {
                    request.expected_output_tokens = given.a("a whole number of at least 0")?;
                }
                "prompt" => *prompt = given.text()?,
                "model_name" => *model_name = given.text()?,
                "lora_name" => keys.lora_name = given.text()?,
                "lora_path" => keys.lora_path = given.text()?,
                "cache_salt" => keys.cache_salt = given.text()?,
                "mm" => keys.media = media(Some(&value))?,
                "embeds" => keys.embeds = digests(Some(&value))?,
                other => {
                    let message = format!("unknown option {other:?}; known options are {KNOWN}");
                    return Err(invalid(message));
                }
            }
        }
        options.request.wish = Wish::of(priority, strict_priority)?;
        options.request.pin = Pin::of(worker_id, dp_rank)?;
        Ok(options)
    }

    /// The worker that must take the request.
    pub fn pinned(&self) -> Option<u64> {
        self.request.pin.map(|pin| pin.instance_id)
    }

    /// The request for a prompt of `ids`; runs without Python.
    ///
    /// # Cost
    /// O(tokens).
    pub fn request(self, selector: &Selector, ids: &[u32], request_id: Option<String>) -> Request {
        let mut request = Request {
            request_id,
            prompt: selector.prompt(ids, &self.keys.keys()).into(),
            ..self.request
        };
        if selector.needs_text() {
            request.tell_prompt(ids.to_vec(), self.prompt);
        }
        request
    }
}

/// The value of one option.
struct Given<'a, 'py> {
    name: &'a str,
    value: &'a Bound<'py, PyAny>,
}

impl<'py> Given<'_, 'py> {
    fn wrong(&self, wanted: &str) -> Fault {
        let Self { name, value } = self;
        invalid(format!("{name} must be {wanted}, got {value}"))
    }

    fn a<T>(&self, wanted: &str) -> Raised<Option<T>>
    where
        for<'a> T: FromPyObject<'a, 'py>,
    {
        self.value.extract().map(Some).map_err(|_| self.wrong(wanted))
    }

    fn number(&self) -> Raised<Option<f64>> {
        self.a("a number")
    }

    fn text(&self) -> Raised<Option<String>> {
        self.a("a string")
    }
}
