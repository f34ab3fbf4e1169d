//! Clients, their groups, and the order in which they are served.

use std::collections::{BTreeMap, BTreeSet};

use hashbrown::HashMap;
use slab::Slab;

use super::order::Standing;
use super::request::ClientName;

/// A waiting request.
#[derive(Debug)]
pub(super) struct Waiting<T> {
    pub(super) item: T,
    pub(super) input: f64,
    pub(super) deadline_ms: u64,
}

/// Number of answers over which their length is averaged.
pub(super) const WINDOW: f64 = 5.0;

/// Length of a client's answers, as a moving average.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Predictor {
    length: f64,
}

impl Predictor {
    /// Expected tokens of the next answer; 0 before the first one.
    pub const fn length(&self) -> f64 {
        self.length
    }

    /// Records an answer of `length` tokens: the first one counts in full, later ones with a weight
    /// of `1 / WINDOW`.
    pub fn learn(&mut self, length: f64) {
        self.length = match self.length {
            0.0 => length,
            known => (known * (WINDOW - 1.0) + length) / WINDOW,
        };
    }
}

/// Position in a client's queue: high priorities first, then order of arrival.
pub(super) type Place = (std::cmp::Reverse<Standing>, u64);

/// Rank and arrival of the first request of a client or group, and its slot.
type Key = (u64, u64, u32);

/// A client, a group of clients that have the turns of one client together, or the root, whose
/// members take turns with each other. A group is remembered as long as one of its clients is.
#[derive(Debug)]
pub(super) struct Client<T> {
    pub(super) name: Box<str>,
    /// The slot of its group, or [`ROOT`].
    pub(super) parent: u32,
    /// By which it takes turns with the other members of its parent.
    pub(super) counter: f64,
    pub(super) weight: f64,
    pub(super) running: usize,
    pub(super) queue: BTreeMap<Place, Waiting<T>>,
    pub(super) predictor: Predictor,
    /// Clients of a group, or of the root.
    by_name: HashMap<Box<str>, u32>,
    /// Those that wait.
    waiting: BTreeSet<Key>,
    /// Which of them waited last, while none waits.
    last_waiting: Option<u32>,
    /// Its requests, or those of its members, that wait.
    queued: usize,
}

/// The slot of the root.
pub(super) const ROOT: u32 = 0;

impl<T> Client<T> {
    fn new(name: &str, parent: u32, counter: f64, weight: f64) -> Self {
        Self {
            name: name.into(),
            parent,
            counter,
            weight,
            running: 0,
            queue: BTreeMap::new(),
            predictor: Predictor::default(),
            by_name: HashMap::new(),
            waiting: BTreeSet::new(),
            last_waiting: None,
            queued: 0,
        }
    }

    fn arrival(&self) -> Option<u64> {
        let own = self.queue.first_key_value().map(|(&(_, arrival), _)| arrival);
        own.or_else(|| self.waiting.first().map(|&(_, arrival, _)| arrival))
    }
}

/// All clients and groups by slot and by name; those that wait, and those that are idle, by rank.
#[derive(Debug)]
pub(super) struct Clients<T> {
    is_ranked: bool,
    nodes: Slab<Client<T>>,
    by_group: HashMap<Box<str>, u32>,
    idle: BTreeSet<(u64, u32)>,
}

impl<T> Clients<T> {
    /// `is_ranked`: by counter; otherwise only in order of arrival.
    pub(super) fn new(is_ranked: bool) -> Self {
        let mut nodes = Slab::new();
        nodes.insert(Client::new("", ROOT, 0.0, 1.0));
        Self { is_ranked, nodes, by_group: HashMap::new(), idle: BTreeSet::new() }
    }

    /// Number of clients.
    pub(super) fn len(&self) -> usize {
        self.nodes.len() - 1 - self.by_group.len()
    }

    pub(super) fn slot(&self, name: ClientName<'_>) -> Option<u32> {
        let parent = name.group.map_or(Some(&ROOT), |group| self.by_group.get(group))?;
        self.at(*parent).by_name.get(name.client).copied()
    }

    /// The client at a slot in use.
    pub(super) fn at(&self, slot: u32) -> &Client<T> {
        &self.nodes[slot as usize]
    }

    /// Requests of a group that wait.
    pub(super) fn queued_of(&self, group: &str) -> usize {
        self.by_group.get(group).map_or(0, |&group| self.at(group).queued)
    }

    /// The group of a client, or itself without one: what takes turns with all others.
    fn taker(&self, slot: u32) -> u32 {
        Some(self.at(slot).parent).filter(|&group| group != ROOT).unwrap_or(slot)
    }

    /// The counter by which a client takes turns with others than those of its group.
    pub(super) fn counter(&self, slot: u32) -> f64 {
        self.at(self.taker(slot)).counter
    }

    /// The client whose turn it is, of all that wait.
    pub(super) fn first_in_turn(&self) -> Option<u32> {
        let &(_, _, taker) = self.at(ROOT).waiting.first()?;
        Some(self.at(taker).waiting.first().map_or(taker, |&(_, _, slot)| slot))
    }

    /// A client that is new and idle. A counter is that of its group, where that is new, too.
    pub(super) fn add(&mut self, name: ClientName<'_>, counter: f64, weight: f64) -> u32 {
        let (parent, counter) = match name.group {
            None => (ROOT, counter),
            Some(group) => {
                let new = || self.nodes.insert(Client::new(group, ROOT, counter, 1.0)) as u32;
                (*self.by_group.entry_ref(group).or_insert_with(new), 0.0)
            }
        };
        let slot = self.nodes.insert(Client::new(name.client, parent, counter, weight)) as u32;
        self.nodes[parent as usize].by_name.insert(name.client.into(), slot);
        self.enter(slot);
        slot
    }

    /// Forget the idle client with the lowest counter, and its group with the last one of it. False where none is
    /// idle.
    pub(super) fn forget_idle(&mut self) -> bool {
        let Some((_, slot)) = self.idle.pop_first() else { return false };
        let client = self.nodes.remove(slot as usize);
        let parent = &mut self.nodes[client.parent as usize];
        parent.by_name.remove(&client.name);
        parent.last_waiting = parent.last_waiting.filter(|&last| last != slot);
        if client.parent != ROOT && parent.by_name.is_empty() {
            let group = self.nodes.remove(client.parent as usize);
            self.by_group.remove(&group.name);
            let root = &mut self.nodes[ROOT as usize];
            root.last_waiting = root.last_waiting.filter(|&last| last != client.parent);
        }
        true
    }

    /// Changes a client or group, and updates its position in the order.
    ///
    /// # Cost
    /// O(log clients).
    pub(super) fn change<R>(&mut self, slot: u32, change: impl FnOnce(&mut Client<T>) -> R) -> R {
        self.leave(slot);
        let result = change(&mut self.nodes[slot as usize]);
        self.enter(slot);
        result
    }

    /// Adds a waiting request to a client, or removes it. Remembers the client where it was the
    /// last one that waits.
    pub(super) fn change_queue<R>(
        &mut self,
        slot: u32,
        change: impl FnOnce(&mut BTreeMap<Place, Waiting<T>>) -> R,
    ) -> R {
        let before = self.at(slot).queue.len();
        let result = self.change(slot, |client| change(&mut client.queue));
        let after = self.at(slot).queue.len();
        for at in self.path(slot) {
            let parent = self.at(at).parent;
            self.nodes[at as usize].queued += after;
            self.nodes[at as usize].queued -= before;
            let parent = &mut self.nodes[parent as usize];
            if after < before && parent.waiting.is_empty() {
                parent.last_waiting = Some(at);
            }
        }
        result
    }

    /// A client, and its group if it has one.
    fn path(&self, slot: u32) -> impl Iterator<Item = u32> + use<T> {
        let group = self.at(slot).parent;
        std::iter::once(slot).chain((group != ROOT).then_some(group))
    }

    /// Change the counter by which a client takes turns with others than those of its group.
    pub(super) fn change_counter(&mut self, slot: u32, change: impl FnOnce(&mut f64)) {
        self.change(self.taker(slot), |taker| change(&mut taker.counter));
    }

    /// Give every client of this name a weight.
    pub(super) fn set_weight(&mut self, name: &str, weight: f64) {
        let named = self.nodes.iter_mut().filter(|(_, client)| &*client.name == name);
        named.for_each(|(_, client)| client.weight = weight);
    }

    /// Charge a client that was served so much, and its group, each by its own weight: clients of a group choose their
    /// names. Returns the counter by which it takes turns now.
    pub(super) fn charge(&mut self, slot: u32, service: f64) -> f64 {
        for at in self.path(slot) {
            let change = service / self.at(at).weight;
            self.change(at, |client| client.counter = (client.counter + change).max(0.0));
        }
        self.counter(slot)
    }

    /// Lift a client whose queue was empty to the lowest of its group that wait.
    pub(super) fn lift_within(&mut self, slot: u32) {
        if self.at(slot).parent != ROOT {
            self.lift_one(slot);
        }
    }

    /// Lift a client, with its group, to the lowest of those that wait.
    pub(super) fn lift(&mut self, slot: u32) {
        self.lift_one(self.taker(slot));
    }

    fn lift_one(&mut self, slot: u32) {
        let parent = self.at(self.at(slot).parent);
        let level = parent.waiting.first().map(|&(_, _, slot)| slot).or(parent.last_waiting);
        let level = level.map_or(0.0, |slot| self.at(slot).counter);
        self.change(slot, |client| client.counter = client.counter.max(level));
    }

    /// Whether the client, or one of its group, has a request that waits.
    pub(super) fn is_waiting(&self, slot: u32) -> bool {
        self.at(self.taker(slot)).queued > 0
    }

    /// Takes a client or group out of the order; its group is taken out, too.
    fn leave(&mut self, slot: u32) {
        let parent = self.at(slot).parent;
        if parent != ROOT {
            self.leave(parent);
        }
        match self.key(slot) {
            Some(key) => self.nodes[parent as usize].waiting.remove(&key),
            None => self.idle.remove(&(rank(self.at(slot).counter), slot)),
        };
    }

    fn enter(&mut self, slot: u32) {
        let client = self.at(slot);
        let parent = client.parent;
        let is_idle = client.running == 0 && client.by_name.is_empty();
        match self.key(slot) {
            Some(key) => self.nodes[parent as usize].waiting.insert(key),
            None => is_idle && self.idle.insert((rank(client.counter), slot)),
        };
        if parent != ROOT {
            self.enter(parent);
        }
    }

    /// Where a client or group that waits stands among the members of its parent.
    fn key(&self, slot: u32) -> Option<Key> {
        let client = self.at(slot);
        let rank = if self.is_ranked { rank(client.counter) } else { 0 };
        Some((rank, client.arrival()?, slot))
    }
}

/// The bits of a non-negative number sort in its order.
fn rank(counter: f64) -> u64 {
    counter.max(0.0).to_bits()
}

#[cfg(test)]
impl<T> Clients<T> {
    /// Every client, in no particular order.
    pub(super) fn all(&self) -> impl Iterator<Item = &Client<T>> {
        let is_client = |slot: usize, node: &Client<T>| slot > 0 && node.by_name.is_empty();
        let found = self.nodes.iter().filter(move |(slot, node)| is_client(*slot, node));
        found.map(|(_, node)| node)
    }
}
