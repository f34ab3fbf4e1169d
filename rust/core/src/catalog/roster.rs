//! The workers that may hold blocks of an index: registered ones, and ranks known only from events.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::RwLock;

use crate::ids::Worker;

/// The workers of one index, with a cached list for queries.
///
/// # Cost
/// A change is O(log workers). The first [`Roster::list`] after changes rebuilds the list, every
/// other one copies a pointer.
#[derive(Debug, Default)]
pub(super) struct Roster {
    state: RwLock<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Number of publishers per worker.
    claims: BTreeMap<Worker, u32>,
    /// `None` since the last change.
    list: Option<Arc<[Worker]>>,
}

impl Roster {
    /// Adds a publisher for `worker`.
    pub fn add(&self, worker: Worker) {
        let mut state = self.state.write();
        let claims = state.claims.entry(worker).or_default();
        *claims += 1;
        if *claims == 1 {
            state.list = None;
        }
    }

    /// Removes a publisher for `worker`. Returns whether it was the last one.
    pub fn remove(&self, worker: Worker) -> bool {
        let mut state = self.state.write();
        let Some(claims) = state.claims.get_mut(&worker) else { return true };
        *claims -= 1;
        let is_gone = *claims == 0;
        if is_gone {
            state.claims.remove(&worker);
            state.list = None;
        }
        is_gone
    }

    /// Whether `worker` has a publisher.
    pub fn has(&self, worker: Worker) -> bool {
        self.state.read().claims.contains_key(&worker)
    }

    /// Whether `worker` has more than one publisher.
    pub fn is_shared(&self, worker: Worker) -> bool {
        self.state.read().claims.get(&worker).is_some_and(|claims| *claims > 1)
    }

    /// All workers, by instance and rank.
    pub fn list(&self) -> Arc<[Worker]> {
        if let Some(list) = &self.state.read().list {
            return Arc::clone(list);
        }
        let mut state = self.state.write();
        let State { claims, list } = &mut *state;
        Arc::clone(list.get_or_insert_with(|| claims.keys().copied().collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_stays_until_its_last_publisher_goes() {
        let roster = Roster::default();
        let (first, second) = (Worker::new(2, 0), Worker::new(1, 7));
        assert!(roster.list().is_empty());
        roster.add(first);
        roster.add(second);
        roster.add(first);
        assert_eq!(*roster.list(), [second, first]);
        assert!(Arc::ptr_eq(&roster.list(), &roster.list()), "an unchanged list is not made anew");
        assert!(roster.is_shared(first) && !roster.is_shared(second));
        assert!(!roster.remove(first));
        assert_eq!(*roster.list(), [second, first]);
        assert!(roster.remove(first) && roster.remove(first));
        assert_eq!(*roster.list(), [second]);
    }
}
