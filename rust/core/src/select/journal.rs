//! Past decisions: a ring of the latest ones, by request id, limited in bytes.

use std::collections::VecDeque;
use std::sync::Arc;

use hashbrown::HashMap;
use parking_lot::Mutex;

use super::record::Record;

/// Maximum decisions returned for one name, because clients choose the names.
const MAX_FOUND: usize = 16;

#[derive(Debug, Default)]
struct State {
    /// Oldest first; the first one has the number `first`.
    ring: VecDeque<Kept>,
    first: u64,
    /// The latest decision of a name.
    by_id: HashMap<Arc<str>, u64>,
    bytes: usize,
    dropped_total: u64,
}

#[derive(Debug)]
struct Kept {
    record: Record,
    /// The previous decision for the same name.
    previous: Option<u64>,
}

/// Sizes and counters of a [`Journal`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct JournalStats {
    /// Decisions kept.
    pub records: usize,
    /// Bytes they occupy.
    pub bytes: usize,
    /// Decisions dropped for later ones, or larger than the limit.
    pub dropped_total: u64,
}

/// The latest decisions, as many as its limit allows; the oldest are dropped.
///
/// # Cost
/// A lock and O(1) besides the record itself.
#[derive(Debug)]
pub struct Journal {
    limit_bytes: usize,
    state: Mutex<State>,
}

impl Journal {
    /// An empty journal of at most `limit_bytes`; 0 keeps nothing.
    pub fn new(limit_bytes: usize) -> Self {
        Self { limit_bytes, state: Mutex::default() }
    }

    /// Whether it keeps records.
    pub fn is_on(&self) -> bool {
        self.limit_bytes > 0
    }

    /// Keeps `record`; returns its number for [`update`](Self::update).
    pub fn push(&self, record: Record) -> u64 {
        let bytes = record.bytes();
        let mut state = self.state.lock();
        let state = &mut *state;
        if bytes > self.limit_bytes {
            state.dropped_total += 1;
            // A number that no record has.
            return u64::MAX;
        }
        while state.bytes + bytes > self.limit_bytes {
            state.drop_oldest();
        }
        let number = state.first + state.ring.len() as u64;
        let previous = state.by_id.insert(Arc::clone(&record.request_id), number);
        state.ring.push_back(Kept { record, previous });
        state.bytes += bytes;
        number
    }

    /// Changes a record, if it still exists.
    pub fn update(&self, number: u64, change: impl FnOnce(&mut Record)) {
        let mut state = self.state.lock();
        if let Some(kept) = state.at(number) {
            change(&mut kept.record);
        }
    }

    /// The latest decisions for `request_id`, 16 at most, oldest first: several if several workers
    /// were tried.
    pub fn find(&self, request_id: &str) -> Vec<Record> {
        let mut state = self.state.lock();
        let mut next = state.by_id.get(request_id).copied();
        let mut found = Vec::new();
        while found.len() < MAX_FOUND
            && let Some(kept) = next.and_then(|number| state.at(number))
        {
            found.push(kept.record.clone());
            next = kept.previous;
        }
        found.reverse();
        found
    }

    /// Sizes and counters.
    pub fn stats(&self) -> JournalStats {
        let state = self.state.lock();
        JournalStats {
            records: state.ring.len(),
            bytes: state.bytes,
            dropped_total: state.dropped_total,
        }
    }
}

impl State {
    fn at(&mut self, number: u64) -> Option<&mut Kept> {
        let place = number.checked_sub(self.first)?;
        self.ring.get_mut(usize::try_from(place).ok()?)
    }

    fn drop_oldest(&mut self) {
        let Some(Kept { record, .. }) = self.ring.pop_front() else { return };
        if self.by_id.get(&record.request_id) == Some(&self.first) {
            self.by_id.remove(&record.request_id);
        }
        self.first += 1;
        self.bytes -= record.bytes();
        self.dropped_total += 1;
    }
}
