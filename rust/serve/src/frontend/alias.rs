//! Model aliases for clients: each stands for one model, or several that share its requests.

use std::collections::BTreeMap;

use kvflash_core::error::{Error, Result};
use xxhash_rust::xxh3::xxh3_64_with_seed;

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
mod tests {
    use super::*;

    fn aliases(texts: &[&str]) -> Result<Aliases> {
        Aliases::parse(&texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn shares_are_kept_and_keys_stay() {
        let aliases = aliases(&["g=a:90,b:10,c:0", "h=org/model:8b"]).unwrap();
        assert_eq!(aliases.model("h", None), Some("org/model:8b"));
        assert_eq!(aliases.model("a", None), None);
        let to_b = |keys: &mut dyn Iterator<Item = Option<String>>| {
            keys.filter(|key| aliases.model("g", key.as_deref()) == Some("b")).count()
        };
        let keyed = to_b(&mut (0..10_000).map(|n| Some(format!("session-{n}"))));
        assert!((850..1_150).contains(&keyed), "{keyed} of 10000");
        let drawn = to_b(&mut (0..10_000).map(|_| None));
        assert!((850..1_150).contains(&drawn), "{drawn} of 10000");
        for n in 0..100 {
            let key = format!("session-{n}");
            assert_eq!(aliases.model("g", Some(&key)), aliases.model("g", Some(&key)));
        }
        let all: Vec<_> =
            aliases.all().map(|(name, models)| (name, models.collect::<Vec<_>>())).collect();
        assert_eq!(all, [("g", vec!["a", "b"]), ("h", vec!["org/model:8b"])]);
        assert_eq!(aliases.models("g").collect::<Vec<_>>(), ["a", "b", "c"]);
        assert_eq!(aliases.shares("g").collect::<Vec<_>>(), ["a", "b"]);
    }

    #[test]
    fn refusals_name_the_flag_and_what_came() {
        for (texts, wanted) in [
            (&["g"][..], "= is missing, got \"g\""),
            (&["=a"], "the name is empty"),
            (&["g="], "the name of a model is empty"),
            (&["g=a:1,:2"], "the name of a model is empty"),
            (&["g=a:-1"], "weights must be numbers in 0..=1e9"),
            (&["g=a:0"], "at least one must be above 0"),
            (&["g=a:inf,b:1"], "weights must be numbers"),
            (&["g=a", "g=b"], "defined twice"),
        ] {
            let error = aliases(texts).unwrap_err().to_string();
            assert!(
                error.contains("--model-alias") && error.contains(wanted),
                "{texts:?}: {error}"
            );
        }
    }
}
