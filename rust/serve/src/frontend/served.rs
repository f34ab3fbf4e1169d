//! Which names a pool's engines serve, and how many of them serve each.

use std::collections::HashMap;
use std::sync::Arc;

use kvflash_core::ids::InstanceId;

use super::notes::EngineNotes;

/// The names that engines of one pool have told, counted.
///
/// # Cost
/// Of every change: O(names of that engine), however many others there are.
#[derive(Debug, Default)]
pub(crate) struct Served {
    /// Engines that serve a name.
    counts: HashMap<Arc<str>, usize>,
    by_engine: HashMap<InstanceId, Vec<Arc<str>>>,
}

impl Served {
    /// What an engine serves now: all that its notes name. Returns the names that nobody serves any more.
    pub fn put(&mut self, id: InstanceId, notes: &EngineNotes) -> Vec<Arc<str>> {
        let names = || notes.models.iter().map(|(name, _)| name.as_str());
        let known = self.by_engine.get(&id).map_or(&[][..], Vec::as_slice);
        if known.iter().map(|name| &**name).eq(names()) {
            return Vec::new();
        }
        // Counted before the old ones are taken off: what stays is never at zero.
        let fresh = names().map(|name| self.count(name)).collect();
        let before = self.by_engine.insert(id, fresh).unwrap_or_default();
        self.discount(before)
    }

    /// An engine has left. Returns the names that nobody serves any more.
    pub fn remove(&mut self, id: InstanceId) -> Vec<Arc<str>> {
        let before = self.by_engine.remove(&id).unwrap_or_default();
        self.discount(before)
    }

    fn count(&mut self, name: &str) -> Arc<str> {
        // Engines share the text of a name.
        let known = self.counts.get_key_value(name).map(|(name, _)| Arc::clone(name));
        let name = known.unwrap_or_else(|| Arc::from(name));
        *self.counts.entry(Arc::clone(&name)).or_default() += 1;
        name
    }

    fn discount(&mut self, names: Vec<Arc<str>>) -> Vec<Arc<str>> {
        let mut gone = Vec::new();
        for name in names {
            match self.counts.get_mut(&name) {
                Some(count) if *count > 1 => *count -= 1,
                _ => {
                    self.counts.remove(&name);
                    gone.push(name);
                }
            }
        }
        gone
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    fn notes(names: &[String]) -> EngineNotes {
        let models = names.iter().map(|name| (name.clone(), None)).collect();
        EngineNotes { models, ..EngineNotes::default() }
    }

    proptest! {
        /// The names that go are those that no engine's last list has, whoever comes, changes and leaves;
        /// lists may name one twice.
        #[test]
        fn names_go_with_the_last_engine_that_serves_them(
            steps in prop::collection::vec((0..5_u64, prop::option::of(prop::collection::vec("[a-e]", 0..5))), 1..60)
        ) {
            let mut served = Served::default();
            let mut twin: BTreeMap<u64, Vec<String>> = BTreeMap::new();
            let all = |twin: &BTreeMap<u64, Vec<String>>| -> BTreeSet<String> {
                twin.values().flatten().cloned().collect()
            };
            for (id, names) in steps {
                let before = all(&twin);
                let gone = match names {
                    Some(names) => {
                        let gone = served.put(id, &notes(&names));
                        twin.insert(id, names);
                        gone
                    }
                    None => {
                        twin.remove(&id);
                        served.remove(id)
                    }
                };
                let expected: Vec<_> = before.difference(&all(&twin)).cloned().collect();
                let mut gone: Vec<_> = gone.iter().map(|name| name.to_string()).collect();
                gone.sort();
                prop_assert_eq!(gone, expected);
                prop_assert_eq!(served.counts.len(), all(&twin).len());
                prop_assert!(served.by_engine.len() <= twin.len());
            }
        }
    }
}
