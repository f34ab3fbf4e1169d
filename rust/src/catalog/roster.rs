//! Who may hold blocks of an index: registered workers and ranks that only events have named.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::RwLock;

use crate::ids::Worker;

/// The workers of one index, with a list that is ready for queries.
///
/// # Cost
/// A change is O(log workers). The first [`Roster::list`] after changes writes the list anew, every other
/// one copies a pointer.
#[derive(Debug, Default)]
pub(super) struct Roster {
    state: RwLock<State>,
}

#[derive(Debug, Default)]
struct State {
    /// How many publishers speak for the worker.
    claims: BTreeMap<Worker, u32>,
    /// `None` since the last change.
    list: Option<Arc<[Worker]>>,
}

impl Roster {
    /// One more publisher speaks for `worker`.
    pub fn add(&self, worker: Worker) {
        let mut state = self.state.write();
        let claims = state.claims.entry(worker).or_default();
        *claims += 1;
        if *claims == 1 {
            state.list = None;
        }
    }

    /// One publisher less speaks for `worker`.
    pub fn remove(&self, worker: Worker) {
        let mut state = self.state.write();
        let Some(claims) = state.claims.get_mut(&worker) else { return };
        *claims -= 1;
        if *claims == 0 {
            state.claims.remove(&worker);
            state.list = None;
        }
    }

    /// Everybody, by instance and rank.
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
        roster.remove(first);
        assert_eq!(*roster.list(), [second, first]);
        roster.remove(first);
        roster.remove(first);
        assert_eq!(*roster.list(), [second]);
    }
}
