//! Clients, their groups, and the order in which they are served.

use std::collections::{BTreeMap, BTreeSet};

use hashbrown::HashMap;

use super::order::Standing;
use super::price::Predictor;
use super::request::ClientName;

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
    pub(super) group: Option<u32>,
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

/// Clients that have the turns of one client together. It is remembered as long as one of them is.
#[derive(Debug)]
struct Group {
    name: Box<str>,
    counter: f64,
    /// Requests of its clients that wait.
    queued: usize,
    by_name: HashMap<Box<str>, u32>,
    waiting: BTreeSet<Key>,
    /// Which of them waited last, while none waits.
    last_waiting: Option<u32>,
}

/// Rank and arrival of the first request of a client, and the client.
type Key = (u64, u64, u32);

/// Takes turns with the others: a client without a group, or a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Taker {
    Client(u32),
    Group(u32),
}

/// All clients by slot and by name; those that wait, and those that are idle, by rank.
#[derive(Debug)]
pub(super) struct Clients<T> {
    is_ranked: bool,
    pub(super) slots: Vec<Option<Client<T>>>,
    free: Vec<u32>,
    len: usize,
    by_name: HashMap<Box<str>, u32>,
    groups: Vec<Option<Group>>,
    free_groups: Vec<u32>,
    by_group: HashMap<Box<str>, u32>,
    waiting: BTreeSet<(u64, u64, Taker)>,
    waiting_len: usize,
    /// The last taker that waited, while none waits.
    last_waiting: Option<Taker>,
    idle: BTreeSet<(u64, u32)>,
}

impl<T> Clients<T> {
    /// `is_ranked`: by counter; otherwise only in order of arrival.
    pub(super) fn new(is_ranked: bool) -> Self {
        Self {
            is_ranked,
            slots: Vec::new(),
            free: Vec::new(),
            len: 0,
            by_name: HashMap::new(),
            groups: Vec::new(),
            free_groups: Vec::new(),
            by_group: HashMap::new(),
            waiting: BTreeSet::new(),
            waiting_len: 0,
            last_waiting: None,
            idle: BTreeSet::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn waiting_len(&self) -> usize {
        self.waiting_len
    }

    pub(super) fn slot(&self, name: ClientName<'_>) -> Option<u32> {
        let by_name = match name.group {
            None => &self.by_name,
            Some(group) => &self.group(*self.by_group.get(group)?)?.by_name,
        };
        by_name.get(name.client).copied()
    }

    pub(super) fn at(&self, slot: u32) -> Option<&Client<T>> {
        self.slots.get(slot as usize).and_then(Option::as_ref)
    }

    fn group(&self, group: u32) -> Option<&Group> {
        self.groups.get(group as usize).and_then(Option::as_ref)
    }

    fn group_mut(&mut self, group: u32) -> Option<&mut Group> {
        self.groups.get_mut(group as usize).and_then(Option::as_mut)
    }

    /// Requests of a group that wait.
    pub(super) fn queued_of(&self, group: &str) -> usize {
        let group = self.by_group.get(group).and_then(|&group| self.group(group));
        group.map_or(0, |group| group.queued)
    }

    /// The counter by which a client takes turns with others than those of its group.
    pub(super) fn counter(&self, slot: u32) -> f64 {
        self.taker(slot).map_or(0.0, |taker| self.counter_of(taker))
    }

    fn taker(&self, slot: u32) -> Option<Taker> {
        Some(self.at(slot)?.group.map_or(Taker::Client(slot), Taker::Group))
    }

    fn counter_of(&self, taker: Taker) -> f64 {
        match taker {
            Taker::Client(slot) => self.at(slot).map_or(0.0, |client| client.counter),
            Taker::Group(group) => self.group(group).map_or(0.0, |group| group.counter),
        }
    }

    /// Clients that wait, whose turn comes first first; of a group all, one after the other.
    pub(super) fn in_turn(&self) -> impl Iterator<Item = u32> {
        self.waiting.iter().flat_map(|&(_, _, taker)| {
            let (client, group) = match taker {
                Taker::Client(slot) => (Some(slot), None),
                Taker::Group(group) => (None, self.group(group)),
            };
            let of_group = group.map(|group| group.waiting.iter().map(|&(_, _, slot)| slot));
            client.into_iter().chain(of_group.into_iter().flatten())
        })
    }

    /// A client that is new and idle. A counter is that of its group, where that is new, too.
    pub(super) fn add(&mut self, name: ClientName<'_>, counter: f64, weight: f64) -> u32 {
        let slot = self.free.pop().unwrap_or(self.slots.len() as u32);
        if slot as usize == self.slots.len() {
            self.slots.push(None);
        }
        let group = name.group.map(|group| self.group_named(group, counter));
        let own: Box<str> = name.client.into();
        match group.and_then(|group| self.group_mut(group)) {
            None => self.by_name.insert(own.clone(), slot),
            Some(group) => group.by_name.insert(own.clone(), slot),
        };
        self.len += 1;
        self.slots[slot as usize] = Some(Client {
            name: own,
            group,
            counter: if group.is_some() { 0.0 } else { counter },
            weight,
            served: 0.0,
            running: 0,
            queue: BTreeMap::new(),
            predictor: Predictor::default(),
        });
        self.enter(slot);
        slot
    }

    fn group_named(&mut self, name: &str, counter: f64) -> u32 {
        if let Some(&known) = self.by_group.get(name) {
            return known;
        }
        let at = self.free_groups.pop().unwrap_or(self.groups.len() as u32);
        if at as usize == self.groups.len() {
            self.groups.push(None);
        }
        self.groups[at as usize] = Some(Group {
            name: name.into(),
            counter,
            queued: 0,
            by_name: HashMap::new(),
            waiting: BTreeSet::new(),
            last_waiting: None,
        });
        self.by_group.insert(name.into(), at);
        at
    }

    /// Forget the idle client with the lowest counter, and its group with the last one of it. False where none is
    /// idle.
    pub(super) fn forget_idle(&mut self) -> bool {
        let Some(&(_, slot)) = self.idle.first() else { return false };
        self.leave(slot);
        let Some(client) = self.slots[slot as usize].take() else { return false };
        self.free.push(slot);
        self.len -= 1;
        let mut gone = Some(Taker::Client(slot));
        match client.group.and_then(|at| Some((at, self.group_mut(at)?))) {
            None => {
                self.by_name.remove(&client.name);
            }
            Some((at, group)) => {
                group.by_name.remove(&client.name);
                group.last_waiting = group.last_waiting.filter(|&last| last != slot);
                gone = group.by_name.is_empty().then_some(Taker::Group(at));
            }
        }
        if let Some(Taker::Group(at)) = gone
            && let Some(group) = self.groups[at as usize].take()
        {
            self.by_group.remove(&group.name);
            self.free_groups.push(at);
        }
        self.last_waiting = self.last_waiting.filter(|&last| Some(last) != gone);
        true
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

    /// Change the counter by which a client takes turns with others than those of its group.
    pub(super) fn change_counter(&mut self, slot: u32, change: impl FnOnce(&mut f64)) {
        let Some(at) = self.at(slot).and_then(|client| client.group) else {
            self.change(slot, |client| change(&mut client.counter));
            return;
        };
        // Others of the group may wait while this one does not.
        if let Some(key) = self.group_key(at) {
            self.waiting.remove(&key);
        }
        if let Some(group) = self.group_mut(at) {
            change(&mut group.counter);
        }
        if let Some(key) = self.group_key(at) {
            self.waiting.insert(key);
        }
    }

    /// Give every client of this name a weight.
    pub(super) fn set_weight(&mut self, name: &str, weight: f64) {
        let named = self.slots.iter_mut().flatten().filter(|client| &*client.name == name);
        named.for_each(|client| client.weight = weight);
    }

    /// Charge a client that was served so much, and its group. Returns the counter by which it takes turns now.
    pub(super) fn charge(&mut self, slot: u32, service: f64) -> f64 {
        let change = self.change(slot, |client| {
            client.served = (client.served + service).max(0.0);
            let change = service / client.weight;
            if client.group.is_some() {
                client.counter = (client.counter + change).max(0.0);
            }
            change
        });
        let change = change.unwrap_or(0.0);
        self.change_counter(slot, |counter| *counter = (*counter + change).max(0.0));
        self.counter(slot)
    }

    /// Lift a client whose queue was empty to the lowest of its group that wait.
    pub(super) fn lift_within(&mut self, slot: u32) {
        let group = self.at(slot).and_then(|client| client.group);
        let Some(group) = group.and_then(|group| self.group(group)) else { return };
        let level = group.waiting.first().map(|&(_, _, slot)| slot).or(group.last_waiting);
        let level = level.and_then(|slot| self.at(slot)).map_or(0.0, |client| client.counter);
        self.change(slot, |client| client.counter = client.counter.max(level));
    }

    /// Lift a client, with its group, to the lowest of those that wait; whether that was higher.
    pub(super) fn lift(&mut self, slot: u32) -> bool {
        let level = self.waiting.first().map(|&(_, _, taker)| taker).or(self.last_waiting);
        let level = level.map_or(0.0, |taker| self.counter_of(taker));
        let is_lower = self.counter(slot) < level;
        self.change_counter(slot, |counter| *counter = counter.max(level));
        is_lower
    }

    /// Whether the client, or one of its group, has a request that waits.
    pub(super) fn is_waiting(&self, slot: u32) -> bool {
        match self.taker(slot) {
            None => false,
            Some(Taker::Client(slot)) => self.at(slot).is_some_and(|one| !one.queue.is_empty()),
            Some(Taker::Group(group)) => self.group(group).is_some_and(|group| group.queued > 0),
        }
    }

    /// One of its requests waits no more: remember it where it was the last one.
    pub(super) fn has_left(&mut self, slot: u32) {
        let Some(taker) = self.taker(slot) else { return };
        if let Taker::Group(group) = taker
            && let Some(group) = self.group_mut(group)
            && group.waiting.is_empty()
        {
            group.last_waiting = Some(slot);
        }
        if self.waiting.is_empty() {
            self.last_waiting = Some(taker);
        }
    }

    fn leave(&mut self, slot: u32) {
        let Some(client) = self.at(slot) else { return };
        let (group, queued) = (client.group, client.queue.len());
        let idle = (rank(client.counter), slot);
        let Some(key) = self.key(slot) else {
            self.idle.remove(&idle);
            return;
        };
        self.waiting_len -= 1;
        if let Some(top) = self.top_key(slot) {
            self.waiting.remove(&top);
        }
        let Some(at) = group else { return };
        if let Some(group) = self.group_mut(at) {
            group.waiting.remove(&key);
            group.queued -= queued;
        }
        // The others of the group stay.
        if let Some(top) = self.group_key(at) {
            self.waiting.insert(top);
        }
    }

    fn enter(&mut self, slot: u32) {
        let Some(client) = self.at(slot) else { return };
        let (group, queued) = (client.group, client.queue.len());
        let (is_idle, idle) = (client.is_idle(), (rank(client.counter), slot));
        let Some(key) = self.key(slot) else {
            if is_idle {
                self.idle.insert(idle);
            }
            return;
        };
        self.waiting_len += 1;
        if let Some(at) = group {
            if let Some(top) = self.group_key(at) {
                self.waiting.remove(&top);
            }
            if let Some(group) = self.group_mut(at) {
                group.waiting.insert(key);
                group.queued += queued;
            }
        }
        if let Some(top) = self.top_key(slot) {
            self.waiting.insert(top);
        }
    }

    /// Where a client stands that waits, among those of its group or among all.
    fn key(&self, slot: u32) -> Option<Key> {
        let client = self.at(slot)?;
        let (&(_, arrival), _) = client.queue.first_key_value()?;
        Some((self.rank(client.counter), arrival, slot))
    }

    /// Where a client that waits stands among all, with its group.
    fn top_key(&self, slot: u32) -> Option<(u64, u64, Taker)> {
        match self.taker(slot)? {
            Taker::Group(group) => self.group_key(group),
            Taker::Client(slot) => {
                let (rank, arrival, slot) = self.key(slot)?;
                Some((rank, arrival, Taker::Client(slot)))
            }
        }
    }

    fn group_key(&self, at: u32) -> Option<(u64, u64, Taker)> {
        let group = self.group(at)?;
        let &(_, arrival, _) = group.waiting.first()?;
        Some((self.rank(group.counter), arrival, Taker::Group(at)))
    }

    fn rank(&self, counter: f64) -> u64 {
        if self.is_ranked { rank(counter) } else { 0 }
    }
}

/// The bits of a non-negative number sort in its order.
fn rank(counter: f64) -> u64 {
    counter.max(0.0).to_bits()
}
