//! Engines, and the models and adapters that they serve.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvflash_core::catalog::{Catalog, ModelKey};
use kvflash_core::clock::Clock;
use kvflash_core::error::{Error, Result};
use kvflash_core::fleet::{Card, Change, Claim, EventSpec, Hearing, Roster, WorkerState};
use kvflash_core::ids::InstanceId;
use parking_lot::Mutex;

use super::engine::{Engine, EngineNotes, Member, Pool, Route};
use super::engine_spec::{EngineSpec, base_of};
use super::options::FrontendOptions;
use crate::cause::{Topic, Warning};
use crate::fleet::{self, Common, PREFILL_TENANT, Parts, key_of};
use crate::gateway::turn::{FairnessOptions, WaitingRoom};

type Rooms = Option<Arc<WaitingRoom>>;
type Tables = fleet::Tables<Engine, Rooms>;

/// The first of the unhealthy ones among `engines`, with reasons, for people.
pub(crate) fn unhealthy<'a>(engines: impl Iterator<Item = &'a Arc<Engine>>) -> String {
    let down: Vec<String> = engines
        .filter_map(|engine| Some(format!("{}: {}", engine.id, engine.why_unhealthy()?)))
        .take(5)
        .collect();
    if down.is_empty() { String::new() } else { format!("; unhealthy: {}", down.join("; ")) }
}

fn refusal(id: InstanceId, why: &str) -> String {
    format!("worker {id} in discovery is not accepted: {why}")
}

/// All engines and models of a frontend.
///
/// # Consistency
/// Changes are serialized; a request uses the members that it read first.
pub(crate) struct Fleet {
    fleet: fleet::Fleet<Engine, Rooms>,
    waits_for: String,
    /// The block size set by a flag.
    block_size: u32,
    /// Served models that ever had a prefill worker.
    had_prefill: Mutex<BTreeSet<String>>,
    /// Why workers of discovery are not accepted, by id.
    refused: Mutex<BTreeMap<InstanceId, String>>,
    max_workers: usize,
    next_id: AtomicU64,
}

impl Deref for Fleet {
    type Target = fleet::Fleet<Engine, Rooms>;

    fn deref(&self) -> &Self::Target {
        &self.fleet
    }
}

impl Fleet {
    pub fn new(options: FrontendOptions, catalog: Arc<Catalog>, clock: Arc<dyn Clock>) -> Self {
        let routing = options.routing.clone();
        let common = Common::new(catalog, clock, &routing);
        let hearing = match routing.uses_events() {
            true if options.has_broker_events => Hearing::Broker,
            true => Hearing::Sockets,
            false => Hearing::Nothing,
        };
        let max_workers = options.max_workers;
        let roster = Roster::new(hearing, max_workers);
        let waits_for = options.waits_for.clone();
        let make = move |common: &Common, key: &ModelKey| parts(&options, common, key);
        let fleet = fleet::Fleet::new(common, roster, &routing, make);
        Self {
            fleet,
            waits_for,
            block_size: routing.selector.router.load.block_size,
            had_prefill: Mutex::default(),
            refused: Mutex::default(),
            max_workers,
            next_id: AtomicU64::new(1),
        }
    }

    /// Adds an engine; it serves once a health check has reported its models.
    ///
    /// # Errors
    /// `Config` for an invalid spec, `Conflict` for an existing id, address or event socket,
    /// `Overloaded` at the limit.
    pub fn add(&self, spec: EngineSpec) -> Result<Arc<Engine>> {
        spec.check()?;
        let mut tables = self.fleet.write();
        tables.roster.check_room(spec.dp_size, spec.registrant)?;
        let same_url = |engine: &&Arc<Engine>| engine.base == base_of(&spec.url);
        if let Some(engine) = tables.members.values().find(same_url) {
            return Err(Error::Conflict(format!(
                "{} is already registered as worker {}",
                spec.url, engine.id
            )));
        }
        // A worker may have one URL to prefill and another one to decode.
        let rivals = tables.members.values().filter(|one| one.spec.is_prefill == spec.is_prefill);
        let shared = |one: &Arc<Engine>| Some((spec.shared_socket(&one.spec)?, one.id));
        if let Some((socket, other)) = rivals.filter_map(shared).next() {
            return Err(Error::Conflict(format!(
                "events: {socket} is already the event socket of worker {other}; give each engine an endpoint of its \
                 own in --kv-events-config"
            )));
        }
        let id = match spec.instance_id {
            Some(id) => match tables.members.get(&id) {
                Some(other) => {
                    return Err(Error::Conflict(format!(
                        "worker id {id} is already registered: {} has it; workers without an id are numbered 1, 2, \
                         ... in order",
                        other.base
                    )));
                }
                None => id,
            },
            None => loop {
                let id = self.next_id.fetch_add(1, Ordering::Relaxed);
                if !tables.roster.has(id) {
                    break id;
                }
            },
        };
        let engine = Arc::new(Engine::new(id, spec));
        let events = engine.spec.event_specs();
        let (ranks, registrant) = (engine.spec.dp_size, engine.spec.registrant);
        let change = Change::Joined { id, ranks, events, registrant };
        self.fleet.join(&mut tables, change, Arc::clone(&engine))?;
        let given = engine.spec.url.trim_end_matches('/');
        if given != engine.base {
            tracing::warn!(
                worker = id,
                url = given,
                "the worker's URL ends with /v1, which the paths of requests already contain; using {} instead. \
                 Remove /v1 from it",
                engine.base
            );
        }
        Ok(engine)
    }

    /// Adds a worker of the runtime, with its card.
    ///
    /// # Errors
    /// As [`Self::add`]; nothing is added then.
    pub fn add_member(&self, member: Arc<Member>) -> Result<Arc<Engine>> {
        let notes = member.notes();
        let engine = Arc::new(Engine::of_member(member));
        let (id, ranks) = (engine.id, engine.spec.dp_size);
        let change = Change::Joined { id, ranks, events: BTreeMap::new(), registrant: None };
        self.fleet.join(&mut self.fleet.write(), change, Arc::clone(&engine))?;
        if let Err(error) = self.learned(&engine, notes) {
            if self.fleet.read().roster.key_of(id).is_none() {
                // NotFound only means that it was already removed.
                let _ = self.remove(id);
                return Err(error);
            }
            // It serves requests, but its blocks can't be matched.
            tracing::error!(worker = id, url = engine.base, %error, "the worker does not match its model");
            engine.notes.lock().faults.insert("block_size", error.to_string());
        }
        Ok(engine)
    }

    /// Sets a worker's event endpoints.
    ///
    /// # Errors
    /// `NotFound` for an unknown worker; `Conflict` or `Config` for the first rank with an invalid
    /// subscription; the other ranks are subscribed.
    pub fn change_events(&self, id: InstanceId, events: BTreeMap<u32, EventSpec>) -> Result<()> {
        self.fleet.change(&mut self.fleet.write(), Change::Events { id, events })
    }

    /// The known event endpoints of a worker's ranks.
    pub fn events_of(&self, id: InstanceId) -> BTreeMap<u32, EventSpec> {
        self.fleet.read().roster.events_of(id)
    }

    /// Checks that a worker may have this many more ranks.
    ///
    /// # Errors
    /// `Overloaded`.
    pub fn check_room(&self, more: u32, registrant: Option<IpAddr>) -> Result<()> {
        self.fleet.read().roster.check_room(more, registrant)
    }

    /// Removes an engine: it gets no new requests, its blocks are forgotten; requests in flight go
    /// on.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn remove(&self, id: InstanceId) -> Result<Arc<Engine>> {
        let mut tables = self.fleet.write();
        let engine = self.fleet.leave(&mut tables, id)?;
        engine.remove();
        self.forget_prefill(&tables);
        Ok(engine)
    }

    /// Whether a worker takes new requests; true for a removed one.
    pub fn state_of(&self, id: InstanceId) -> WorkerState {
        self.fleet.read().roster.state_of(id).unwrap_or_default()
    }

    /// Records what an engine serves. Adds it to its model's pool, or moves it there.
    ///
    /// # Errors
    /// `Config` if it serves nothing, `Conflict` if its block size differs from the pool's.
    pub fn learned(&self, engine: &Arc<Engine>, notes: EngineNotes) -> Result<()> {
        let (Some((name, _)), block_size) =
            (notes.models.iter().find(|(_, parent)| parent.is_none()).cloned(), notes.block_size)
        else {
            return Err(Error::Config("its /v1/models lists no base model".to_owned()));
        };
        let mut tables = self.fleet.write();
        if engine.is_removed() {
            return Ok(());
        }
        let (id, is_prefill) = (engine.id, engine.spec.is_prefill);
        let key = key_of(&name, is_prefill);
        // Prefill workers can't serve by themselves.
        let names = if is_prefill { Vec::new() } else { notes.models.clone() };
        let report = engine.member.as_ref().map(|member| member.spec.report()).unwrap_or_default();
        let card = Card { names, report, ..Card::new(key.clone()) };
        let joined = self.fleet.change(&mut tables, Change::Card { id, card });
        self.forget_prefill(&tables);
        joined?;
        if let Some(started_s) = notes.started_s {
            self.fleet.change(&mut tables, Change::Health { id, started_s })?;
        }
        *engine.notes.lock() = notes;
        if is_prefill {
            self.had_prefill.lock().insert(name.clone());
        }
        let index = Arc::clone(tables.pools[&key].index());
        drop(tables);
        let Some(size) = block_size else { return Ok(()) };
        let known = index.hint_block_size(size);
        if known == size || index.fits_block_size(size) {
            return Ok(());
        }
        if self.block_size > 0 {
            return Err(Error::Conflict(format!(
                "its block size is {size}, but --kv-cache-block-size is {known}: its blocks never match; remove the \
                 flag, or set it to the workers' block size"
            )));
        }
        Err(Error::Conflict(format!(
            "its block size is {size}, but that of model {name} is {known}: its blocks never match; start it with \
             --block-size {known}, or serve it under another name"
        )))
    }

    /// Forgets prefill history of models without any worker.
    fn forget_prefill(&self, tables: &Tables) {
        let is_there = |name: &String| {
            [false, true]
                .iter()
                .any(|is_prefill| tables.pools.contains_key(&key_of(name, *is_prefill)))
        };
        self.had_prefill.lock().retain(is_there);
    }

    /// The route of requests for `model`; `None` if only other models are served.
    ///
    /// # Errors
    /// `NoWorker` while nothing is served yet.
    pub fn route(&self, model: &str) -> Result<Option<Route>> {
        let tables = self.fleet.read();
        if let Some((key, claim)) = tables.roster.names().find(model) {
            return Ok(Some(route(&tables, model, key, claim)));
        }
        match tables.roster.names().all().next() {
            Some(_) => Ok(None),
            None => Err(self.nothing_served(&tables)),
        }
    }

    /// The only served base model, for requests without a model.
    ///
    /// # Errors
    /// `InvalidArgument` if there are several; `NoWorker` while nothing is served yet.
    pub fn only_route(&self) -> Result<Route> {
        let tables = self.fleet.read();
        let mut bases = tables.roster.names().all().filter(|(.., claim)| *claim == Claim::Model);
        match (bases.next(), bases.next()) {
            (Some((name, key, claim)), None) => Ok(route(&tables, name, key, claim)),
            (None, _) => Err(self.nothing_served(&tables)),
            _ => Err(Error::invalid("model: this frontend serves several models; name one")),
        }
    }

    fn nothing_served(&self, tables: &Tables) -> Error {
        let count = tables.members.len();
        let told = tables.members.values().filter(|engine| engine.is_healthy()).count();
        if told > 0 {
            let mut message = format!(
                "{told} of {count} workers are healthy, but all of them only prefill: add a decode worker"
            );
            message.push_str(&self.refused_briefly());
            return Error::NoWorker(message);
        }
        let mut message = match count {
            0 => "no worker is registered".to_owned(),
            _ => format!("no worker has reported its models yet ({count} registered)"),
        };
        if count == 0 && !self.waits_for.is_empty() {
            message.push_str("; waiting for ");
            message.push_str(&self.waits_for);
        }
        message.push_str(&unhealthy(tables.members.values()));
        message.push_str(&self.refused_briefly());
        Error::NoWorker(message)
    }

    /// Why workers of discovery are not accepted.
    pub fn refused(&self) -> Vec<Warning> {
        let warning = |(id, why): (&InstanceId, &String)| {
            let warning = Warning::new(Topic::WorkerRefused, refusal(*id, why));
            Warning { worker: Some(id.to_string()), ..warning }
        };
        self.refused.lock().iter().map(warning).collect()
    }

    /// The first of these, as the end of a message.
    fn refused_briefly(&self) -> String {
        let refused = self.refused.lock();
        refused.iter().take(5).map(|(id, why)| format!("; {}", refusal(*id, why))).collect()
    }

    /// Records that a worker of discovery is not accepted; `None` if it is, or has left. Whether a
    /// refusal was recorded before.
    pub fn note_refused(&self, id: InstanceId, why: Option<&Error>) -> bool {
        let mut refused = self.refused.lock();
        match why {
            None => refused.remove(&id).is_some(),
            // Bounded, as discovery's words are.
            Some(why) if refused.len() < self.max_workers || refused.contains_key(&id) => {
                refused.insert(id, why.to_string()).is_some()
            }
            Some(_) => false,
        }
    }

    pub fn engines(&self) -> Vec<Arc<Engine>> {
        self.fleet.read().members.values().cloned().collect()
    }

    /// A worker that must exist.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn known(&self, id: InstanceId) -> Result<Arc<Engine>> {
        self.engine(id).ok_or_else(|| fleet::unknown(id))
    }

    /// Number of healthy decode workers, and how many of these take new requests.
    pub fn decoding(&self) -> (usize, usize) {
        let tables = self.fleet.read();
        let is_active =
            |engine: &Arc<Engine>| tables.roster.state_of(engine.id) == Some(WorkerState::Active);
        let decodes = |engine: &&Arc<Engine>| engine.is_healthy() && !engine.spec.is_prefill;
        tables.members.values().filter(decodes).fold((0, 0), |(healthy, active), engine| {
            (healthy + 1, active + usize::from(is_active(engine)))
        })
    }

    pub fn engine(&self, id: InstanceId) -> Option<Arc<Engine>> {
        self.fleet.read().members.get(&id).cloned()
    }

    /// All pools, those of prefill workers last.
    pub fn pools(&self) -> Vec<Arc<Pool>> {
        let mut pools = self.fleet.pools();
        pools.sort_by_key(|pool| pool.prefills());
        pools
    }

    /// The prefill workers of a model.
    pub fn prefill_pool(&self, name: &str) -> Option<Arc<Pool>> {
        self.fleet.read().pools.get(&key_of(name, true)).cloned()
    }

    /// Models with healthy prefill workers but no decode worker.
    pub fn without_decode(&self) -> Vec<String> {
        let tables = self.fleet.read();
        let is_alone = |pool: &&Arc<Pool>| {
            pool.prefills()
                && pool.members().healthy() > 0
                && !tables.pools.contains_key(&key_of(&pool.name, false))
        };
        tables.pools.values().filter(is_alone).map(|pool| pool.name.clone()).collect()
    }

    pub fn had_prefill(&self, name: &str) -> bool {
        self.had_prefill.lock().contains(name)
    }

    /// Served names and, for adapters, their base model; sorted.
    pub fn served(&self) -> Vec<(String, Option<String>)> {
        let tables = self.fleet.read();
        let served = tables.roster.names().all().map(|(name, key, claim)| {
            (name.to_owned(), (claim == Claim::Adapter).then(|| key.model_name.clone()))
        });
        let mut names: Vec<_> = served.collect();
        names.sort();
        names
    }
}

fn route(tables: &Tables, name: &str, key: &ModelKey, claim: Claim) -> Route {
    let extra_name = (claim != Claim::Model).then(|| name.to_owned());
    Route { pool: Arc::clone(&tables.pools[key]), extra_name, is_adapter: claim == Claim::Adapter }
}

/// Creates the components of a model for its first engine.
fn parts(options: &FrontendOptions, common: &Common, key: &ModelKey) -> Result<Parts<Rooms>> {
    let is_prefill = key.tenant_id == PREFILL_TENANT;
    let (selector, queue) = common.selector(key, &options.routing)?;
    // A request that waits for the decode worker need not wait for the prefill worker.
    let fairness = options.fairness.as_ref().filter(|_| !is_prefill);
    let room = |options: &FairnessOptions| {
        WaitingRoom::new(options.clone(), Arc::clone(&common.clock)).map(Arc::new)
    };
    Ok((selector, queue, fairness.map(room).transpose()?))
}
