//! Events that wait for publication, oldest first.

use std::collections::VecDeque;

/// A batch is closed at this many events; receivers accept 65,536.
const BATCH_EVENTS_MAX: usize = 1_024;

/// The waiting events.
#[derive(Debug)]
pub struct Pending {
    events: VecDeque<Vec<u8>>,
    bytes: usize,
    bytes_max: usize,
    batch_bytes_max: usize,
}

impl Pending {
    /// For batches of `batch_bytes_max`; callers wait above `bytes_max`.
    pub fn new(batch_bytes_max: usize, bytes_max: usize) -> Self {
        Self { events: VecDeque::new(), bytes: 0, bytes_max, batch_bytes_max }
    }

    /// Adds events at the end.
    pub fn put(&mut self, events: Vec<Vec<u8>>) {
        self.bytes += events.iter().map(Vec::len).sum::<usize>();
        self.events.extend(events);
    }

    /// Takes the events of the next batch; empty if none wait. An event that is larger than a batch
    /// forms its own batch.
    pub fn take_batch(&mut self) -> Vec<Vec<u8>> {
        let mut events = Vec::new();
        let mut size = 0;
        while events.len() < BATCH_EVENTS_MAX {
            let Some(next) = self.events.front().map(Vec::len) else { break };
            if !events.is_empty() && size + next > self.batch_bytes_max {
                break;
            }
            size += next;
            events.extend(self.events.pop_front());
        }
        self.bytes -= size;
        events
    }

    /// Drops all events.
    pub fn clear(&mut self) {
        self.events.clear();
        self.bytes = 0;
    }

    /// Bytes of the waiting events.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether no event waits.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Whether a batch is full and need not wait for more events.
    pub fn has_batch(&self) -> bool {
        self.bytes >= self.batch_bytes_max || self.events.len() >= BATCH_EVENTS_MAX
    }

    /// Whether callers must wait before they add more.
    pub fn is_full(&self) -> bool {
        self.bytes > self.bytes_max
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_keep_the_order_and_their_limits() {
        let mut pending = Pending::new(1 << 20, 16 << 20);
        pending.put((0..3_000_u32).map(|n| n.to_be_bytes().to_vec()).collect());
        assert!(pending.has_batch() && !pending.is_full());
        let mut sizes = Vec::new();
        let mut seen = Vec::new();
        while !pending.is_empty() {
            let batch = pending.take_batch();
            sizes.push(batch.len());
            seen.extend(batch);
        }
        assert_eq!(sizes, [1_024, 1_024, 952]);
        assert!(seen.is_sorted() && seen.len() == 3_000);
        assert!(pending.take_batch().is_empty());
    }

    #[test]
    fn a_large_event_is_a_batch_of_its_own() {
        let mut pending = Pending::new(1 << 20, 16 << 20);
        pending.put(vec![vec![0; 17 << 20], vec![1]]);
        assert!(pending.is_full());
        assert_eq!(pending.take_batch().len(), 1);
        assert!(!pending.is_full() && !pending.has_batch());
        assert_eq!(pending.take_batch(), [vec![1]]);
    }
}
