//! What engines tell of conversations' prompts with their answers, so that the next turn of a conversation is matched
//! where neither a tokenizer here nor an engine tells its tokens beforehand.
//!
//! A conversation is its list of messages, byte for byte. What is known of one is the ids of its last prompt, and how
//! many of these each shorter list of its messages stands for.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;

/// The end of a prompt that the next turn's may not have: what the template writes for the answer to begin, which some
/// write otherwise once the answer is there. It counts until a next turn has shown what stays.
///
/// # Source
/// The longest of the common templates (Qwen 3 without thinking) has 8 tokens there.
const UNSURE_TOKENS: usize = 32;

/// Most lists of messages that one record tells of: the shortest are forgotten.
const MAX_KEYS: usize = 1_024;

/// A record may take this share of the memory.
const RECORDS_MIN: usize = 4;

/// What a record and a key of it take beside the ids, bytes: places in tables.
const RECORD_BYTES: usize = 192;
const KEY_BYTES: usize = 128;

/// What is known of a list of messages.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    key: u128,
    /// Leading ids of the record that it stands for.
    len: usize,
    /// A longer list of messages was seen to begin with these ids.
    is_confirmed: bool,
}

/// A conversation.
#[derive(Debug)]
struct Record {
    /// Of the longest list.
    ids: Arc<[u32]>,
    /// Shortest list first; each goes on where the one before ends.
    stretches: Vec<Stretch>,
    used: u64,
}

impl Record {
    fn bytes(&self) -> usize {
        RECORD_BYTES + size_of_val(&*self.ids) + self.stretches.len() * KEY_BYTES
    }

    fn stretch(&self, key: u128) -> Option<Stretch> {
        self.stretches.iter().rev().find(|stretch| stretch.key == key).copied()
    }
}

#[derive(Debug, Default)]
struct State {
    /// The record of a list of messages.
    places: HashMap<u128, u64>,
    records: HashMap<u64, Record>,
    /// By when they were used last.
    order: BTreeMap<u64, u64>,
    /// Of the next record, and of the next use.
    next: u64,
    bytes: usize,
    evictions_total: u64,
}

/// The ids that a prompt is expected to begin with.
#[derive(Debug, Clone)]
pub(crate) struct Beginning {
    ids: Arc<[u32]>,
    len: usize,
    /// How many of its messages they are known of.
    pub messages: usize,
}

impl Beginning {
    pub fn ids(&self) -> &[u32] {
        &self.ids[..self.len]
    }
}

/// All conversations.
///
/// # Consistency
/// Every look-up that begins after a prompt was learned finds it.
#[derive(Debug)]
pub(crate) struct Taught {
    state: Mutex<State>,
    capacity_bytes: usize,
}

impl Taught {
    /// Of at most `capacity_bytes`; 0 keeps nothing.
    pub fn new(capacity_bytes: usize) -> Self {
        Self { state: Mutex::default(), capacity_bytes }
    }

    pub fn is_off(&self) -> bool {
        self.capacity_bytes == 0
    }

    /// Ids of a longer prompt are not kept.
    pub fn most_ids(&self) -> usize {
        self.capacity_bytes / RECORDS_MIN / size_of::<u32>()
    }

    /// What the prompt of a conversation begins with, which `keys` name: one for its first message, one for the first
    /// two, and so on.
    ///
    /// # Cost
    /// A look-up for each message that is new.
    pub fn find(&self, keys: &[u128]) -> Option<Beginning> {
        let state = &mut *self.state.lock();
        let (messages, id) = state.longest(keys)?;
        state.touch(id);
        let record = &state.records[&id];
        let stretch = record.stretch(keys[messages - 1])?;
        let is_whole = messages == keys.len();
        let len = match stretch.is_confirmed || is_whole {
            true => stretch.len,
            false => stretch.len.saturating_sub(UNSURE_TOKENS),
        };
        (len > 0).then(|| Beginning { ids: Arc::clone(&record.ids), len, messages })
    }

    /// An engine told the `ids` of the prompt of this conversation.
    pub fn learn(&self, keys: &[u128], ids: &[u32]) {
        let Some(&key) = keys.last() else { return };
        if self.is_off() || ids.is_empty() || ids.len() > self.most_ids() {
            return;
        }
        let state = &mut *self.state.lock();
        match state.longest(keys) {
            None => state.begin(key, ids),
            Some((messages, id)) => state.go_on(id, keys[messages - 1], key, ids),
        }
        while state.bytes > self.capacity_bytes {
            state.evict();
        }
    }

    /// Bytes held, and records dropped to make room.
    pub fn held(&self) -> (usize, u64) {
        let state = self.state.lock();
        (state.bytes, state.evictions_total)
    }
}

impl State {
    /// How many of these messages are known, and the record that knows most.
    fn longest(&self, keys: &[u128]) -> Option<(usize, u64)> {
        let known = |(at, key)| self.places.get(key).map(|id| (at + 1, *id));
        keys.iter().enumerate().rev().find_map(known)
    }

    fn touch(&mut self, id: u64) {
        let now = self.next;
        self.next += 1;
        let record = self.records.get_mut(&id).expect("places name records that are there");
        self.order.remove(&record.used);
        record.used = now;
        self.order.insert(now, id);
    }

    /// A conversation of which nothing is known.
    fn begin(&mut self, key: u128, ids: &[u32]) {
        let id = self.next;
        self.next += 1;
        let stretches = vec![Stretch { key, len: ids.len(), is_confirmed: false }];
        let record = Record { ids: ids.into(), stretches, used: id };
        self.bytes += record.bytes();
        self.places.insert(key, id);
        self.order.insert(id, id);
        self.records.insert(id, record);
    }

    /// The conversation `key`, whose prompt has these `ids`, goes on from the messages `known` of a record.
    fn go_on(&mut self, id: u64, known: u128, key: u128, ids: &[u32]) {
        self.touch(id);
        let record = self.records.get_mut(&id).expect("it was found just now");
        let before = record.bytes();
        let common = common(&record.ids, ids);
        let at = record.stretches.iter().rposition(|one| one.key == known).expect("as above");
        for stretch in &mut record.stretches[..=at] {
            stretch.is_confirmed |= stretch.len > common || (key != known && stretch.key == known);
            stretch.len = stretch.len.min(common);
        }
        let is_end = at + 1 == record.stretches.len();
        if is_end {
            record.ids = ids.into();
            if key != known {
                record.stretches.push(Stretch { key, len: ids.len(), is_confirmed: false });
                self.places.insert(key, id);
            }
            if record.stretches.len() > MAX_KEYS {
                let gone = record.stretches.remove(0);
                self.places.remove(&gone.key);
            }
        }
        self.bytes = self.bytes - before + record.bytes();
        if !is_end && key != known {
            // The record goes on otherwise: here the conversation branches.
            self.begin(key, ids);
        }
    }

    /// Drop what was not used for longest.
    fn evict(&mut self) {
        let Some((_, id)) = self.order.pop_first() else { return };
        let gone = self.records.remove(&id).expect("the order names records that are there");
        self.bytes -= gone.bytes();
        for stretch in &gone.stretches {
            self.places.remove(&stretch.key);
        }
        self.evictions_total += 1;
    }
}

/// Leading ids that both have.
fn common(one: &[u32], other: &[u32]) -> usize {
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn ids(from: u32, count: u32) -> Vec<u32> {
        (from..from + count).collect()
    }

    fn found(taught: &Taught, keys: &[u128]) -> Option<(usize, usize)> {
        taught.find(keys).map(|found| (found.messages, found.ids().len()))
    }

    #[test]
    fn the_next_turn_begins_with_what_was_told_but_for_its_end() {
        let taught = Taught::new(1 << 20);
        taught.learn(&[1], &ids(0, 100));
        assert_eq!(found(&taught, &[2]), None);
        assert_eq!(found(&taught, &[1]), Some((1, 100)), "the same prompt again");
        assert_eq!(found(&taught, &[1, 2, 3]), Some((1, 100 - UNSURE_TOKENS)));
        // The template wrote the last four otherwise once there was an answer.
        let second = [ids(0, 96), ids(1_000, 60)].concat();
        taught.learn(&[1, 2, 3], &second);
        assert_eq!(found(&taught, &[1, 7]), Some((1, 96)), "seen to stay");
        assert_eq!(found(&taught, &[1, 2, 3, 4, 5]), Some((3, 156 - UNSURE_TOKENS)));
        assert_eq!(taught.find(&[1, 2, 3]).unwrap().ids(), second);
    }

    #[test]
    fn what_a_turn_contradicts_is_shortened_for_good() {
        let taught = Taught::new(1 << 20);
        taught.learn(&[1], &ids(0, 100));
        taught.learn(&[1, 2], &ids(0, 200));
        // Reasoning that is dropped: all lists before are shorter now.
        let third = [ids(0, 50), ids(1_000, 100)].concat();
        taught.learn(&[1, 2, 3], &third);
        assert_eq!(found(&taught, &[1, 9]), Some((1, 50)));
        assert_eq!(found(&taught, &[1, 2, 9]), Some((2, 50)));
        // It was cut, and the whole prompt once more does not bring the rest back.
        taught.learn(&[1, 2], &ids(0, 200));
        assert_eq!(found(&taught, &[1, 2, 9]), Some((2, 50)));
        assert_eq!(taught.find(&[1, 2, 3]).unwrap().ids(), third);
    }

    #[test]
    fn a_branch_has_a_record_of_its_own() {
        let taught = Taught::new(1 << 20);
        taught.learn(&[1], &ids(0, 100));
        taught.learn(&[1, 2], &ids(0, 200));
        let other = [ids(0, 100), ids(1_000, 100)].concat();
        taught.learn(&[1, 7], &other);
        assert_eq!(taught.find(&[1, 2]).unwrap().ids(), ids(0, 200));
        assert_eq!(taught.find(&[1, 7]).unwrap().ids(), other);
        assert_eq!(found(&taught, &[1, 8]), Some((1, 100)));
    }

    #[test]
    fn it_stays_under_its_limit_and_keeps_what_is_used() {
        let taught = Taught::new(64 * 1024);
        taught.learn(&[1], &ids(0, 100));
        for n in 0..1_000_u32 {
            taught.learn(&[u128::from(n) + 10], &ids(n, 100));
            assert_eq!(found(&taught, &[1]), Some((1, 100)), "after {n}");
            assert!(taught.held().0 <= 64 * 1024);
        }
        assert!(taught.held().1 > 800);
        taught.learn(&[5], &ids(0, taught.most_ids() as u32 + 1));
        assert_eq!(found(&taught, &[5]), None, "too long");
        let none = Taught::new(0);
        none.learn(&[1], &[1]);
        assert!(none.is_off() && none.find(&[1]).is_none());
    }

    #[test]
    fn a_long_conversation_is_kept_once() {
        let taught = Taught::new(1 << 22);
        let mut keys = Vec::new();
        for n in 1..=2 * MAX_KEYS {
            keys.push(n as u128);
            taught.learn(&keys, &ids(0, 40 * n as u32));
        }
        let state = taught.state.lock();
        assert_eq!((state.records.len(), state.places.len()), (1, MAX_KEYS));
        let counted: usize = state.records.values().map(Record::bytes).sum();
        assert_eq!((state.bytes, state.order.len()), (counted, 1));
    }
}
