//! Options of the frontend, model aliases among them.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::str::FromStr;

use kvflash_core::error::{Error, Result};
use kvflash_core::named;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::gateway::turn::FairnessOptions;
use crate::metrics::check_prefix;
use crate::{FrontendSettings, Http, RoutingOptions};

named! {
    /// Whether a request may be answered without a prefill worker.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub enum EnforceDisagg {
        /// Yes: if no prefill worker is available, the decode worker does everything.
        #[default]
        Off = "off",
        /// Yes, until its model has had a prefill worker; then no.
        UntilFirstPrefill = "until-first-prefill",
        /// No.
        Always = "always",
    }
}

impl FromStr for EnforceDisagg {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::from_name(text).ok_or_else(|| {
            Error::Config(format!(
                "--enforce-disagg must be off, until-first-prefill or always, got {text:?}"
            ))
        })
    }
}

/// Options of a frontend; those in `own` are accessible as if they were here.
#[derive(Debug, Clone, Default)]
pub struct FrontendOptions {
    /// Settings that only a frontend has: limits and timeouts, its tokenizer.
    pub own: FrontendSettings,
    /// How requests are routed.
    pub routing: RoutingOptions,
    /// How clients take turns; `None`: first come, first served.
    pub fairness: Option<FairnessOptions>,
    /// Whether events over a broker are received.
    pub has_broker_events: bool,
    /// Whether requests may be answered without a prefill worker.
    pub enforce_disagg: EnforceDisagg,
    /// Where workers are expected from, for responses before any have joined.
    pub waits_for: String,
    /// Limits of its connections and bodies.
    pub http: Http,
}

impl Deref for FrontendOptions {
    type Target = FrontendSettings;

    fn deref(&self) -> &FrontendSettings {
        &self.own
    }
}

impl FrontendOptions {
    /// The key for the frontend's own calls to workers.
    ///
    /// # Errors
    /// `Config` if it is given twice, or its file is unreadable or empty.
    pub(super) fn api_key(&self) -> Result<Option<String>> {
        let Some(path) = &self.worker_api_key_file else {
            // In a variable, a secret often ends in a newline, or is one.
            let key = self.worker_api_key.as_deref().map(str::trim);
            return Ok(key.filter(|key| !key.is_empty()).map(str::to_owned));
        };
        let wrong =
            |why: String| Error::Config(format!("--worker-api-key-file {}: {why}", path.display()));
        if self.worker_api_key.is_some() {
            return Err(wrong("--worker-api-key is given as well; use one of them".to_owned()));
        }
        let text = std::fs::read_to_string(path)
            .map_err(|error| wrong(format!("can't be read: {error}")))?;
        match text.trim() {
            "" => Err(wrong("the file is empty".to_owned())),
            key => Ok(Some(key.to_owned())),
        }
    }

    /// Checks what the types can't express.
    ///
    /// # Errors
    /// `Config`, naming the flag.
    pub fn check(&self) -> Result<()> {
        check_prefix(&self.metrics_prefix)?;
        self.routing.check()?;
        self.fairness.as_ref().map_or(Ok(()), FairnessOptions::check)?;
        for (flag, value) in [
            ("--max-body-bytes", self.max_body_bytes),
            ("--max-upload-bytes", self.max_upload_bytes),
            ("--max-concurrent-requests", self.max_concurrent_requests),
            ("--max-workers", self.max_workers),
            ("--max-attempts", self.max_attempts),
        ] {
            if value == 0 {
                return Err(Error::Config(format!("{flag} must be at least 1, got 0")));
            }
        }
        for (flag, value) in [
            ("--connect-timeout", self.connect_timeout),
            ("--first-byte-timeout", self.first_byte_timeout),
            ("--stream-idle-timeout", self.stream_idle_timeout),
            ("--tokenize-timeout", self.tokenize_timeout),
            ("--health-interval", self.health_interval),
        ] {
            if value.is_zero() {
                return Err(Error::Config(format!("{flag} must be longer than 0")));
            }
        }
        Ok(())
    }
}

/// Maximum aliases, and maximum models per alias.
const MAX_ALIASES: usize = 1_024;
const MAX_TARGETS: usize = 64;

/// A model behind an alias, with its share.
#[derive(Debug, Clone, PartialEq)]
struct Target {
    model: String,
    weight: f64,
}

/// The aliases of `--model-alias`.
#[derive(Debug, Clone, Default)]
pub(crate) struct Aliases(BTreeMap<String, Vec<Target>>);

impl Aliases {
    /// Parses a list of `NAME=MODEL` and `NAME=MODEL:WEIGHT,MODEL:WEIGHT`.
    ///
    /// # Errors
    /// `Config` naming the flag, what is legal and what came.
    pub fn parse(texts: &[String]) -> Result<Self> {
        let mut aliases = BTreeMap::new();
        for text in texts {
            let wrong = |what: &str| {
                let form = "must be NAME=MODEL or NAME=MODEL:WEIGHT,MODEL:WEIGHT";
                Error::Config(format!("--model-alias {form}; {what}, got {text:?}"))
            };
            let (name, targets) = text.split_once('=').ok_or_else(|| wrong("= is missing"))?;
            if name.is_empty() {
                return Err(wrong("the name is empty"));
            }
            let targets: Vec<Target> = targets.split(',').map(target).collect();
            if targets.len() > MAX_TARGETS {
                return Err(wrong(&format!("an alias has at most {MAX_TARGETS} models")));
            }
            if targets.iter().any(|target| target.model.is_empty()) {
                return Err(wrong("the name of a model is empty"));
            }
            let is_weight = |weight: f64| (0.0..=1e9).contains(&weight);
            let total: f64 = targets.iter().map(|target| target.weight).sum();
            if !targets.iter().all(|target| is_weight(target.weight)) || total <= 0.0 {
                return Err(wrong(
                    "weights must be numbers in 0..=1e9, and at least one must be above 0",
                ));
            }
            if aliases.insert(name.to_owned(), targets).is_some() {
                return Err(wrong("the alias is defined twice"));
            }
        }
        if aliases.len() > MAX_ALIASES {
            let count = aliases.len();
            let message = format!("--model-alias: at most {MAX_ALIASES} aliases, got {count}");
            return Err(Error::Config(message));
        }
        Ok(Self(aliases))
    }

    /// The model for a request for `name`, if that is an alias. Equal keys get the same model, at
    /// every replica; without a key chance decides.
    pub fn model(&self, name: &str, key: Option<&str>) -> Option<&str> {
        let targets = self.0.get(name)?;
        let drawn = match key {
            // The name is part of the hash, so that the shares of different aliases are
            // independent.
            Some(key) => xxh3_64_with_seed(key.as_bytes(), xxh3_64_with_seed(name.as_bytes(), 0)),
            None => rand::random(),
        };
        let total: f64 = targets.iter().map(|target| target.weight).sum();
        let mut left = drawn as f64 / u64::MAX as f64 * total;
        for target in targets.iter().filter(|target| target.weight > 0.0) {
            left -= target.weight;
            if left < 0.0 {
                return Some(&target.model);
            }
        }
        // The largest number, or a rounding remainder.
        targets.iter().rfind(|target| target.weight > 0.0).map(|target| target.model.as_str())
    }

    /// All models of an alias, including those without a share.
    pub fn models(&self, name: &str) -> impl Iterator<Item = &str> + Clone {
        self.0.get(name).into_iter().flatten().map(|target| target.model.as_str())
    }

    /// The models of an alias that have a share.
    pub fn shares(&self, name: &str) -> impl Iterator<Item = &str> {
        let targets = self.0.get(name).into_iter().flatten();
        targets.filter(|target| target.weight > 0.0).map(|target| target.model.as_str())
    }

    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Every alias with its models that have a share, by name.
    pub fn all(&self) -> impl Iterator<Item = (&str, impl Iterator<Item = &str>)> {
        self.0.keys().map(|name| (name.as_str(), self.shares(name)))
    }
}

/// A model's name may contain colons; the part after the last one is a weight if it is a number.
fn target(text: &str) -> Target {
    let weighed = text.rsplit_once(':').and_then(|(model, weight)| {
        Some(Target { model: model.to_owned(), weight: weight.parse().ok()? })
    });
    weighed.unwrap_or_else(|| Target { model: text.to_owned(), weight: 1.0 })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
