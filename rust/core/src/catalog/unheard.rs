//! Workers with blocks that may be unknown to the index: it is incomplete about them.
//!
//! Known blocks of such a worker earn credit as usual; unknown ones can't.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;

use super::code::{Code, Codes};
use crate::ids::Worker;

named! {
    /// Why the index is incomplete about a worker. The names are those of the codes of its trust.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum Unheard {
        /// No events have arrived from its socket yet.
        Silent = "no_events_yet",
        /// Its earlier events are being replayed.
        Replaying = "catching_up",
        /// It published more before the first received batch than it can replay.
        Missed = "missed_first_batches",
    }
}

impl Unheard {
    /// The meaning of the codes of a publisher's trust for its workers.
    pub(super) fn of(codes: Codes) -> Option<Self> {
        let meanings = [
            (Code::CatchingUp, Self::Replaying),
            (Code::MissedFirstBatches, Self::Missed),
            (Code::NeverConnected, Self::Silent),
            (Code::NoEventsYet, Self::Silent),
        ];
        meanings.into_iter().find(|(code, _)| codes.has(*code)).map(|(_, meaning)| meaning)
    }

    /// As text.
    pub const fn message(self) -> &'static str {
        match self {
            Self::Silent => {
                "index incomplete: no event has arrived from the worker's event socket yet, so its cache earns \
                 no credit"
            }
            Self::Replaying => {
                "index incomplete: the worker's earlier events are being replayed, and the rest of its cache earns no \
                 credit until they are applied"
            }
            Self::Missed => {
                "index incomplete: the worker stored blocks before the first event received and cannot replay \
                 those events; such blocks earn no credit until known blocks fill its cache, or it is cleared or \
                 restarted"
            }
        }
    }

    /// Whether events arrived, so that unknown blocks may be older than they are.
    pub const fn is_partly_heard(self) -> bool {
        matches!(self, Self::Replaying | Self::Missed)
    }
}

/// The workers of one index with incomplete data; at most as many as it has workers.
///
/// # Cost
/// One atomic read while there are none.
#[derive(Debug, Default)]
pub(super) struct UnheardTable {
    by_worker: RwLock<BTreeMap<Worker, Unheard>>,
    is_any: AtomicBool,
}

impl UnheardTable {
    /// Sets the state of `worker`.
    pub fn set(&self, worker: Worker, why: Option<Unheard>) {
        let mut by_worker = self.by_worker.write();
        match why {
            Some(why) => by_worker.insert(worker, why),
            None => by_worker.remove(&worker),
        };
        // Relaxed: a slightly outdated report does no harm.
        self.is_any.store(!by_worker.is_empty(), Ordering::Relaxed);
    }

    /// Why the index is incomplete about `worker`, if it is.
    pub fn of(&self, worker: Worker) -> Option<Unheard> {
        let is_any = self.is_any.load(Ordering::Relaxed);
        is_any.then(|| self.by_worker.read().get(&worker).copied()).flatten()
    }

    /// All entries, in worker order.
    pub fn all(&self) -> Vec<(Worker, Unheard)> {
        match self.is_any.load(Ordering::Relaxed) {
            true => self.by_worker.read().iter().map(|(worker, why)| (*worker, *why)).collect(),
            false => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_being_repaired_comes_before_what_is_lost() {
        let none = Codes::EMPTY;
        let both = none.with(Code::CatchingUp).with(Code::MissedFirstBatches);
        for (codes, why) in [
            (none, None),
            (none.with(Code::LostBatches), None),
            (none.with(Code::NeverConnected), Some(Unheard::Silent)),
            (none.with(Code::NoEventsYet), Some(Unheard::Silent)),
            (none.with(Code::MissedFirstBatches), Some(Unheard::Missed)),
            (both, Some(Unheard::Replaying)),
        ] {
            assert_eq!(Unheard::of(codes), why);
        }
        assert!(Unheard::ALL.iter().all(|why| why.message().starts_with("index incomplete: ")));
    }

    #[test]
    fn workers_come_and_go() {
        let (table, one, two) = (UnheardTable::default(), Worker::new(1, 0), Worker::new(2, 1));
        assert_eq!((table.of(one), table.all()), (None, vec![]));
        table.set(two, Some(Unheard::Silent));
        table.set(one, Some(Unheard::Missed));
        assert_eq!(table.all(), [(one, Unheard::Missed), (two, Unheard::Silent)]);
        table.set(one, None);
        assert_eq!((table.of(one), table.of(two)), (None, Some(Unheard::Silent)));
        table.set(two, None);
        assert!(table.all().is_empty());
    }
}
