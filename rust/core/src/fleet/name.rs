//! Served names: models, their aliases, adapters.

use std::collections::{BTreeMap, HashMap};

use crate::catalog::ModelKey;

/// Relation of a name to the model that serves it; the strongest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Claim {
    /// The model's own name.
    Model,
    /// Another name of the model.
    Alias,
    /// One of its adapters.
    Adapter,
}

/// Served names, each for as long as a worker serves it.
///
/// If models share a name, a model's own name takes precedence over an alias, and that over an
/// adapter; among equals the first model in order wins.
///
/// # Cost
/// Of every change: O(names of that worker), independent of other names.
#[derive(Debug, Default)]
pub struct Names {
    /// Number of workers, by claim and model.
    by_name: HashMap<String, BTreeMap<(Claim, ModelKey), usize>>,
}

impl Names {
    /// Adds the `names` of a worker of `key`; names with a base model are adapters.
    pub(super) fn add(&mut self, key: &ModelKey, names: &[(String, Option<String>)]) {
        for (name, parent) in names {
            let claims = self.by_name.entry(name.clone()).or_default();
            *claims.entry(claim(key, name, parent.as_deref())).or_default() += 1;
        }
    }

    /// Removes a worker's names.
    pub(super) fn remove(&mut self, key: &ModelKey, names: &[(String, Option<String>)]) {
        for (name, parent) in names {
            let Some(claims) = self.by_name.get_mut(name) else { continue };
            let claim = claim(key, name, parent.as_deref());
            match claims.get_mut(&claim) {
                Some(count) if *count > 1 => *count -= 1,
                _ => drop(claims.remove(&claim)),
            }
            if claims.is_empty() {
                self.by_name.remove(name);
            }
        }
    }

    /// The model that serves `name`, and how.
    pub fn find(&self, name: &str) -> Option<(&ModelKey, Claim)> {
        let (claim, key) = self.by_name.get(name)?.keys().next()?;
        Some((key, *claim))
    }

    /// All names, in no particular order.
    pub fn all(&self) -> impl Iterator<Item = (&str, &ModelKey, Claim)> {
        self.by_name.iter().filter_map(|(name, claims)| {
            claims.keys().next().map(|(claim, key)| (name.as_str(), key, *claim))
        })
    }
}

fn claim(key: &ModelKey, name: &str, parent: Option<&str>) -> (Claim, ModelKey) {
    let claim = match parent {
        Some(_) => Claim::Adapter,
        None if name == key.model_name => Claim::Model,
        None => Claim::Alias,
    };
    (claim, key.clone())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The served names are those of the workers' last lists, whatever the order of changes; a
        /// list may repeat a name.
        #[test]
        fn names_go_with_the_last_worker_that_serves_them(
            steps in prop::collection::vec((0..5_u64, prop::option::of(prop::collection::vec("[a-e]", 0..5))), 1..60)
        ) {
            let mut names = Names::default();
            let mut twin: BTreeMap<u64, Vec<(String, Option<String>)>> = BTreeMap::new();
            let key = |id: u64| ModelKey { model_name: format!("m{}", id % 2), tenant_id: "t".into() };
            for (id, served) in steps {
                let before = twin.remove(&id).unwrap_or_default();
                if let Some(served) = served {
                    let served: Vec<_> = served.into_iter().map(|name| (name, None)).collect();
                    names.add(&key(id), &served);
                    twin.insert(id, served);
                }
                names.remove(&key(id), &before);
                let wanted: BTreeSet<_> = twin.values().flatten().map(|(name, _)| &**name).collect();
                let found: BTreeSet<_> = names.all().map(|(name, ..)| name).collect();
                prop_assert_eq!(found, wanted);
            }
        }
    }
}
