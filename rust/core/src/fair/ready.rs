//! Clients, and the order in which they are served.

use std::collections::{BTreeMap, BTreeSet};

use hashbrown::HashMap;

use super::order::Standing;
use super::price::Predictor;

/// A waiting request.
#[derive(Debug)]
pub(super) struct Waiting<T> {
    pub(super) item: T,
    pub(super) input: f64,
    pub(super) predicted: Option<f64>,
    pub(super) deadline_ms: u64,
    pub(super) queued_at_ms: u64,
}

/// Position in a client's queue: high priorities first, then order of arrival.
pub(super) type Place = (std::cmp::Reverse<Standing>, u64);

#[derive(Debug)]
pub(super) struct Client<T> {
    pub(super) name: Box<str>,
    pub(super) counter: f64,
    pub(super) weight: f64,
    pub(super) served: f64,
    pub(super) running: usize,
    pub(super) queue: BTreeMap<Place, Waiting<T>>,
    pub(super) predictor: Predictor,
}

impl<T> Client<T> {
    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.running == 0
    }
}

/// Rank and arrival of a client's first request, and the client.
type Key = (u64, u64, u32);

/// All clients by slot and by name; waiting and idle ones by rank.
#[derive(Debug)]
pub(super) struct Clients<T> {
    is_ranked: bool,
    slots: Vec<Option<Client<T>>>,
    free: Vec<u32>,
    by_name: HashMap<Box<str>, u32>,
    waiting: BTreeSet<Key>,
    idle: BTreeSet<(u64, u32)>,
}

impl<T> Clients<T> {
    /// `is_ranked`: by counter; otherwise only in order of arrival.
    pub(super) fn new(is_ranked: bool) -> Self {
        Self {
            is_ranked,
            slots: Vec::new(),
            free: Vec::new(),
            by_name: HashMap::new(),
            waiting: BTreeSet::new(),
            idle: BTreeSet::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.by_name.len()
    }

    pub(super) fn waiting_len(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn slot(&self, name: &str) -> Option<u32> {
        self.by_name.get(name).copied()
    }

    pub(super) fn at(&self, slot: u32) -> Option<&Client<T>> {
        self.slots.get(slot as usize).and_then(Option::as_ref)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Client<T>> {
        self.slots.iter().flatten()
    }

    /// Waiting clients, in the order of their turns.
    pub(super) fn in_turn(&self) -> impl Iterator<Item = u32> {
        self.waiting.iter().map(|&(_, _, slot)| slot)
    }

    /// Adds a new, idle client.
    pub(super) fn add(&mut self, name: &str, counter: f64, weight: f64) -> u32 {
        let slot = self.free.pop().unwrap_or(self.slots.len() as u32);
        if slot as usize == self.slots.len() {
            self.slots.push(None);
        }
        self.slots[slot as usize] = Some(Client {
            name: name.into(),
            counter,
            weight,
            served: 0.0,
            running: 0,
            queue: BTreeMap::new(),
            predictor: Predictor::default(),
        });
        self.by_name.insert(name.into(), slot);
        self.enter(slot);
        slot
    }

    /// Forgets the idle client with the lowest counter; returns its slot.
    pub(super) fn forget_idle(&mut self) -> Option<u32> {
        let &(_, slot) = self.idle.first()?;
        self.leave(slot);
        if let Some(client) = self.slots[slot as usize].take() {
            self.by_name.remove(&client.name);
        }
        self.free.push(slot);
        Some(slot)
    }

    /// Changes a client, and updates its position in the order.
    ///
    /// # Cost
    /// O(log clients).
    pub(super) fn change<R>(
        &mut self,
        slot: u32,
        change: impl FnOnce(&mut Client<T>) -> R,
    ) -> Option<R> {
        self.leave(slot);
        let result = self.slots.get_mut(slot as usize)?.as_mut().map(change);
        self.enter(slot);
        result
    }

    fn leave(&mut self, slot: u32) {
        let Some(client) = self.at(slot) else { return };
        let idle = (rank(client.counter), slot);
        match self.key(slot) {
            Some(key) => self.waiting.remove(&key),
            None => self.idle.remove(&idle),
        };
    }

    fn enter(&mut self, slot: u32) {
        let Some(client) = self.at(slot) else { return };
        let (is_idle, idle) = (client.is_idle(), (rank(client.counter), slot));
        if let Some(key) = self.key(slot) {
            self.waiting.insert(key);
        } else if is_idle {
            self.idle.insert(idle);
        }
    }

    /// The position of a waiting client.
    fn key(&self, slot: u32) -> Option<Key> {
        let client = self.at(slot)?;
        let (&(_, arrival), _) = client.queue.first_key_value()?;
        Some((if self.is_ranked { rank(client.counter) } else { 0 }, arrival, slot))
    }
}

/// The bits of a non-negative number sort in its order.
fn rank(counter: f64) -> u64 {
    counter.max(0.0).to_bits()
}
