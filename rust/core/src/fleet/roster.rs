//! The roster: changes in, effects out.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::str::FromStr;

use super::events::{EventSpec, Hearing};
use super::name::Names;
use crate::catalog::{EngineFacts, Identity, ModelKey, Registration, Source};
use crate::error::{Error, Result};
use crate::ids::{InstanceId, Worker};
use crate::load::MAX_WORKERS as MAX_RANKS;
use crate::select::Report;

/// Ranks that one registrant may always have, even if few workers may join: a worker has up to
/// 1,024.
const LEAST_RANKS_OF_REGISTRANT: usize = 1_024;

named! {
    /// Whether a worker takes new requests.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
    #[serde(rename_all = "lowercase", try_from = "String")]
    pub enum WorkerState {
        /// It takes new requests.
        #[default]
        Active = "active",
        /// It finishes its requests and takes no new ones. Its blocks and events stay.
        Draining = "draining",
    }
}

// By name only: formats with numbered variants would also accept a number.
impl TryFrom<String> for WorkerState {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl FromStr for WorkerState {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::from_name(text)
            .ok_or_else(|| Error::Config(format!("must be active or draining, got {text:?}")))
    }
}

/// A change to a worker, reported by a source.
#[derive(Debug, Clone)]
pub enum Change {
    /// It has joined, with this number of data-parallel ranks and their event endpoints.
    Joined {
        /// Its number.
        id: InstanceId,
        /// Its data-parallel ranks.
        ranks: u32,
        /// Their event endpoints.
        events: BTreeMap<u32, EventSpec>,
        /// The client that registered it over HTTP; `None` for workers from operators and
        /// discovery.
        registrant: Option<IpAddr>,
    },
    /// Its model card, new or changed.
    Card {
        /// Its number.
        id: InstanceId,
        /// The card.
        card: Card,
    },
    /// Its event endpoints have changed.
    Events {
        /// Its number.
        id: InstanceId,
        /// The new endpoints.
        events: BTreeMap<u32, EventSpec>,
    },
    /// It has passed a health check, which also reports the start of its process. A failed check
    /// changes nothing here: its blocks will still be there when it recovers.
    Health {
        /// Its number.
        id: InstanceId,
        /// Start of its process, seconds since 1970.
        started_s: f64,
    },
    /// An operator takes it out of service, or back into it.
    State {
        /// Its number.
        id: InstanceId,
        /// Whether it takes new requests from now on.
        state: WorkerState,
    },
    /// It serves no model for now.
    Withdrawn {
        /// Its number.
        id: InstanceId,
    },
    /// It has left. Running requests are handled by their senders.
    Left {
        /// Its number.
        id: InstanceId,
    },
}

impl Change {
    /// The worker that it is about.
    pub fn id(&self) -> InstanceId {
        match self {
            Self::Joined { id, .. }
            | Self::Card { id, .. }
            | Self::Events { id, .. }
            | Self::Health { id, .. }
            | Self::State { id, .. }
            | Self::Withdrawn { id }
            | Self::Left { id } => *id,
        }
    }
}

/// The model that a worker serves.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Card {
    /// Its model, and the index of its blocks.
    pub key: ModelKey,
    /// All names that it serves; for adapters with the base model.
    pub names: Vec<(String, Option<String>)>,
    /// Tokens in a block, if known for certain.
    pub block_size: Option<u32>,
    /// Blocks of each rank's device.
    pub capacity_blocks: Option<u64>,
    /// The initial report of its ranks.
    pub report: Report,
    /// How it became known.
    pub source: Source,
}

impl Card {
    /// The card of a worker that only names its model.
    pub fn new(key: ModelKey) -> Self {
        Self { key, ..Self::default() }
    }
}

/// An action for the caller.
#[derive(Debug, Clone)]
pub enum Effect {
    /// A model has its first worker.
    Open(ModelKey),
    /// A worker of the model knows its block size; a conflict if it differs from the known one.
    BlockSize(ModelKey, u32),
    /// Subscribe to a rank's events.
    Subscribe(Registration),
    /// Unsubscribe, and forget what the events reported: of one rank, or of all.
    Unsubscribe(ModelKey, InstanceId, Option<u32>),
    /// Set the complete list of the model's workers.
    SetWorkers(ModelKey, Vec<Worker>),
    /// Set the model's draining workers, ascending; all others take new requests.
    SetDraining(ModelKey, Vec<InstanceId>),
    /// A rank's own report.
    Report(ModelKey, Worker, Report),
    /// A worker's process has restarted: forget its blocks; it has this number of ranks.
    Forget(ModelKey, InstanceId, u32),
    /// The model's last worker has left.
    Close(ModelKey),
}

#[derive(Debug)]
struct Member {
    ranks: u32,
    registrant: Option<IpAddr>,
    events: BTreeMap<u32, EventSpec>,
    started_s: Option<f64>,
    state: WorkerState,
    card: Option<Card>,
}

/// All workers of a service, and their models.
#[derive(Debug)]
pub struct Roster {
    hearing: Hearing,
    max_workers: usize,
    members: BTreeMap<InstanceId, Member>,
    models: BTreeMap<ModelKey, BTreeSet<InstanceId>>,
    names: Names,
}

impl Roster {
    /// An empty roster for up to `max_workers` workers.
    pub fn new(hearing: Hearing, max_workers: usize) -> Self {
        let (members, models, names) = (BTreeMap::new(), BTreeMap::new(), Names::default());
        Self { hearing, max_workers, members, models, names }
    }

    /// Applies a change. If an effect fails, [`Change::Withdrawn`] reverts the change.
    ///
    /// # Errors
    /// `NotFound` for a worker that has not joined, `Conflict` for one that joins twice,
    /// `Overloaded` at a limit. Nothing changes then.
    ///
    /// # Cost
    /// O(workers of the model) if its workers change, else O(size of the change).
    pub fn apply(&mut self, change: Change) -> Result<Vec<Effect>> {
        let mut effects = Vec::new();
        match change {
            Change::Joined { id, ranks, events, registrant } => {
                self.join(id, ranks, events, registrant)?;
            }
            Change::Card { id, card } => self.serve(id, card, &mut effects)?,
            Change::Events { id, events } => self.move_events(id, events, &mut effects)?,
            Change::Health { id, started_s } => {
                let member = self.member(id)?;
                let before = member.started_s.replace(started_s);
                if let (Some(card), Some(before)) = (&member.card, before)
                    && before != started_s
                {
                    effects.push(Effect::Forget(card.key.clone(), id, member.ranks));
                }
            }
            Change::State { id, state } => {
                let member = self.member(id)?;
                let before = std::mem::replace(&mut member.state, state);
                let key = member.card.as_ref().map(|card| card.key.clone());
                effects.extend(key.filter(|_| before != state).map(|key| self.draining_of(key)));
            }
            Change::Withdrawn { id } => self.withdraw(id, &mut effects)?,
            Change::Left { id } => {
                self.withdraw(id, &mut effects)?;
                self.members.remove(&id);
            }
        }
        Ok(effects)
    }

    fn member(&mut self, id: InstanceId) -> Result<&mut Member> {
        let unknown = || Error::NotFound(format!("no worker {id} is registered"));
        self.members.get_mut(&id).ok_or_else(unknown)
    }

    /// Checks that another worker with this number of ranks may join. Ranks count from joining on,
    /// whatever the model: an accepted worker will later find its place among the candidates.
    ///
    /// # Errors
    /// `Overloaded`: too many workers, too many ranks in total, or too many registered by
    /// `registrant`.
    ///
    /// # Cost
    /// O(workers).
    pub fn check_room(&self, ranks: u32, registrant: Option<IpAddr>) -> Result<()> {
        let limit = self.max_workers;
        if self.members.len() >= limit {
            let reached = format!("the limit of {limit} workers is reached (--max-workers)");
            return Err(Error::Overloaded(reached));
        }
        let sum = |members: &mut dyn Iterator<Item = &Member>| {
            members.map(|member| member.ranks as usize).sum::<usize>() + ranks as usize
        };
        let all = sum(&mut self.members.values());
        if all > MAX_RANKS {
            return Err(Error::Overloaded(format!(
                "a router supports at most {MAX_RANKS} data-parallel ranks over all workers, got {all} with the \
                 {ranks} of this one"
            )));
        }
        let Some(address) = registrant else { return Ok(()) };
        let is_theirs = |member: &&Member| member.registrant == registrant;
        let theirs = sum(&mut self.members.values().filter(is_theirs));
        let limit = limit.max(LEAST_RANKS_OF_REGISTRANT);
        if theirs > limit {
            return Err(Error::Overloaded(format!(
                "one address may register at most {limit} data-parallel ranks (--max-workers), got \
                 {theirs} of {address} with this one's {ranks}"
            )));
        }
        Ok(())
    }

    fn join(
        &mut self,
        id: InstanceId,
        ranks: u32,
        events: BTreeMap<u32, EventSpec>,
        registrant: Option<IpAddr>,
    ) -> Result<()> {
        if self.has(id) {
            return Err(Error::Conflict(format!("worker id {id} is already registered")));
        }
        self.check_room(ranks, registrant)?;
        let state = WorkerState::Active;
        let member = Member { ranks, registrant, events, started_s: None, state, card: None };
        self.members.insert(id, member);
        Ok(())
    }

    fn serve(&mut self, id: InstanceId, card: Card, effects: &mut Vec<Effect>) -> Result<()> {
        if self.member(id)?.card.as_ref().is_some_and(|before| before.key != card.key) {
            self.withdraw(id, effects)?;
        }
        let key = card.key.clone();
        let before = self.member(id)?.card.clone();
        let is_new = before.is_none();
        if before.as_ref().is_none_or(|before| before.names != card.names) {
            // Added before the old ones are removed, so that the count of a kept name is never
            // zero.
            self.names.add(&key, &card.names);
            self.names.remove(&key, before.as_ref().map_or(&[], |before| &before.names));
        }
        if is_new {
            if !self.models.contains_key(&key) {
                effects.push(Effect::Open(key.clone()));
            }
            self.models.entry(key.clone()).or_default().insert(id);
            effects.extend(card.block_size.map(|size| Effect::BlockSize(key.clone(), size)));
        }
        let report = card.report;
        let has_news = before.is_none_or(|before| before.report != report);
        let member = self.member(id)?;
        member.card = Some(card);
        let (ranks, state) = (member.ranks, member.state);
        if is_new {
            effects.extend(self.subscriptions(id, |_, _| true));
            // Before it becomes one of the workers, so that it gets no request in between.
            let is_draining = state == WorkerState::Draining;
            effects.extend(is_draining.then(|| self.draining_of(key.clone())));
            effects.push(self.workers(key.clone()));
        }
        if has_news && report != Report::default() {
            let of_rank = |rank| Effect::Report(key.clone(), Worker::new(id, rank), report);
            effects.extend((0..ranks).map(of_rank));
        }
        Ok(())
    }

    fn move_events(
        &mut self,
        id: InstanceId,
        events: BTreeMap<u32, EventSpec>,
        effects: &mut Vec<Effect>,
    ) -> Result<()> {
        let hearing = self.hearing;
        let member = self.member(id)?;
        let before = std::mem::replace(&mut member.events, events);
        let Some(card) = &member.card else { return Ok(()) };
        for (rank, was) in &before {
            if hearing.hears(was) && member.events.get(rank) != Some(was) {
                effects.push(Effect::Unsubscribe(card.key.clone(), id, Some(*rank)));
            }
        }
        effects.extend(self.subscriptions(id, |rank, now| before.get(&rank) != Some(now)));
        Ok(())
    }

    /// Forgets the events of a rank that can't be subscribed to: the next report of them tries
    /// again.
    pub fn forget_events(&mut self, worker: Worker) {
        if let Some(member) = self.members.get_mut(&worker.instance_id) {
            member.events.remove(&worker.dp_rank);
        }
    }

    /// Subscriptions of a serving worker to the `wanted` events.
    fn subscriptions(
        &self,
        id: InstanceId,
        wanted: impl Fn(u32, &EventSpec) -> bool,
    ) -> Vec<Effect> {
        let member = &self.members[&id];
        let Some(card) = &member.card else { return Vec::new() };
        let heard = member.events.iter().filter(|(rank, events)| {
            **rank < member.ranks && self.hearing.hears(events) && wanted(**rank, events)
        });
        let subscribe = |(rank, events): (&u32, &EventSpec)| {
            Effect::Subscribe(Registration {
                worker: Worker::new(id, *rank),
                key: card.key.clone(),
                block_size: card.block_size,
                endpoint: events.endpoint.clone(),
                replay_endpoint: events.replay_endpoint.clone(),
                capacity_blocks: card.capacity_blocks,
                identity: Identity::default(),
                facts: EngineFacts::default(),
                source: card.source,
            })
        };
        heard.map(subscribe).collect()
    }

    fn withdraw(&mut self, id: InstanceId, effects: &mut Vec<Effect>) -> Result<()> {
        let hearing = self.hearing;
        let member = self.member(id)?;
        let is_draining = member.state == WorkerState::Draining;
        let Some(card) = member.card.take() else { return Ok(()) };
        if member.events.values().any(|events| hearing.hears(events)) {
            effects.push(Effect::Unsubscribe(card.key.clone(), id, None));
        }
        self.names.remove(&card.key, &card.names);
        let is_empty = self.models.get_mut(&card.key).is_none_or(|ids| {
            ids.remove(&id);
            ids.is_empty()
        });
        effects.push(self.workers(card.key.clone()));
        // The number may be reused by another worker.
        effects.extend(is_draining.then(|| self.draining_of(card.key.clone())));
        if is_empty {
            self.models.remove(&card.key);
            effects.push(Effect::Close(card.key));
        }
        Ok(())
    }

    fn workers(&self, key: ModelKey) -> Effect {
        let ids = self.models.get(&key).into_iter().flatten();
        let ranks = |id: &InstanceId| {
            let id = *id;
            (0..self.members[&id].ranks).map(move |rank| Worker::new(id, rank))
        };
        let workers = ids.flat_map(ranks).collect();
        Effect::SetWorkers(key, workers)
    }

    fn draining_of(&self, key: ModelKey) -> Effect {
        let ids = self.models.get(&key).into_iter().flatten().copied();
        let ids = ids.filter(|id| self.members[id].state == WorkerState::Draining).collect();
        Effect::SetDraining(key, ids)
    }

    /// Whether a worker takes new requests; `None` if it has not joined.
    pub fn state_of(&self, id: InstanceId) -> Option<WorkerState> {
        self.members.get(&id).map(|member| member.state)
    }

    /// All draining workers.
    pub fn draining(&self) -> impl Iterator<Item = InstanceId> {
        let is_draining = |member: &Member| member.state == WorkerState::Draining;
        self.members.iter().filter(move |(_, member)| is_draining(member)).map(|(id, _)| *id)
    }

    /// Whether it has joined.
    pub fn has(&self, id: InstanceId) -> bool {
        self.members.contains_key(&id)
    }

    /// What it serves.
    pub fn card_of(&self, id: InstanceId) -> Option<&Card> {
        self.members.get(&id)?.card.as_ref()
    }

    /// Its model.
    pub fn key_of(&self, id: InstanceId) -> Option<&ModelKey> {
        self.card_of(id).map(|card| &card.key)
    }

    /// The block size of a model, if one of its workers knows it.
    pub fn block_size_of(&self, key: &ModelKey) -> Option<u32> {
        let mut cards = self.models.get(key)?.iter().map(|id| &self.members[id].card);
        cards.find_map(|card| card.as_ref()?.block_size)
    }

    /// Whether it has joined with these ranks, and `card` differs from its own in nothing that its
    /// blocks depend on.
    pub fn is_same(&self, id: InstanceId, ranks: u32, card: &Card) -> bool {
        let is_same = |own: &Card| {
            (&own.key, own.block_size, own.capacity_blocks)
                == (&card.key, card.block_size, card.capacity_blocks)
        };
        self.members.get(&id).is_some_and(|member| {
            member.ranks == ranks && member.card.as_ref().is_some_and(is_same)
        })
    }

    /// The known event endpoints of its ranks.
    pub fn events_of(&self, id: InstanceId) -> BTreeMap<u32, EventSpec> {
        self.members.get(&id).map(|member| member.events.clone()).unwrap_or_default()
    }

    /// Number of joined workers.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether no worker has joined.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// All served names.
    pub fn names(&self) -> &Names {
        &self.names
    }
}
