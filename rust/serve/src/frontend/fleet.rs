//! Who can serve what: engines, and the models and adapters that they have told of.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvflash_core::catalog::{Catalog, EngineFacts, Identity, ModelKey, Registration};
use kvflash_core::clock::Clock;
use kvflash_core::error::{Error, Result};
use kvflash_core::ids::{InstanceId, Worker};
use kvflash_core::policy::Stage;
use kvflash_core::select::{Journal, Outbox, Overlap, Queue, Selector, SelectorConfig, Thresholds};
use parking_lot::RwLock;

use super::engine::{Engine, EngineSpec, base_of};
use super::notes::EngineNotes;
use super::options::FrontendOptions;
use super::pool::{Pool, Route};
use super::runtime::member::Member;
use super::runtime::spec::EventSpec;
use crate::gateway::turn::WaitingRoom;

/// Tenant of the frontend's own indexes; the cache salt keeps clients apart.
const TENANT: &str = "default";
/// Tenant of the indexes of prefill workers: what these hold is not what decode workers hold.
pub(crate) const PREFILL_TENANT: &str = "prefill";

/// Which of `engines` are unhealthy, and why, for people: the first ones.
pub(crate) fn unhealthy<'a>(engines: impl Iterator<Item = &'a Arc<Engine>>) -> String {
    let down: Vec<String> = engines
        .filter(|engine| !engine.is_healthy())
        .map(|engine| {
            let why = engine.notes.lock().last_error.clone();
            format!("{}: {}", engine.id, why.as_deref().unwrap_or("not checked yet"))
        })
        .take(5)
        .collect();
    if down.is_empty() { String::new() } else { format!("; unhealthy: {}", down.join("; ")) }
}

#[derive(Default)]
struct Tables {
    engines: BTreeMap<InstanceId, Arc<Engine>>,
    pools: BTreeMap<String, Arc<Pool>>,
    /// Of prefill workers, by model.
    prefill_pools: BTreeMap<String, Arc<Pool>>,
    /// Served models that had a prefill worker.
    had_prefill: BTreeSet<String>,
    /// Served names, adapters included.
    routes: HashMap<String, Route>,
    /// Which pool an engine has joined.
    joined: HashMap<InstanceId, String>,
    /// Of models whose engines have left, where they are not what the flags say.
    thresholds: HashMap<ModelKey, Thresholds>,
}

impl Tables {
    fn pools_of(&mut self, is_prefill: bool) -> &mut BTreeMap<String, Arc<Pool>> {
        if is_prefill { &mut self.prefill_pools } else { &mut self.pools }
    }

    fn nothing_served(&self, waits_for: &str) -> Error {
        let count = self.engines.len();
        let told = self.engines.values().filter(|engine| engine.is_healthy()).count();
        if told > 0 {
            return Error::NoWorker(format!(
                "{told} of {count} workers are healthy, and all of them only prefill: none is there to \
                 decode"
            ));
        }
        let mut message = format!("no worker has told its models yet ({count} registered)");
        if count == 0 && !waits_for.is_empty() {
            message.push_str("; waiting for ");
            message.push_str(waits_for);
        }
        message.push_str(&unhealthy(self.engines.values()));
        Error::NoWorker(message)
    }
}

/// All engines and models of a frontend.
///
/// # Consistency
/// Changes are serialised; a request works on the members it read first.
pub(crate) struct Fleet {
    options: FrontendOptions,
    catalog: Arc<Catalog>,
    pub clock: Arc<dyn Clock>,
    /// Decisions of all models.
    pub journal: Arc<Journal>,
    /// Bookings of all models, for replicas.
    pub outbox: Arc<Outbox>,
    tables: RwLock<Tables>,
    next_id: AtomicU64,
}

impl Fleet {
    pub fn new(options: FrontendOptions, catalog: Arc<Catalog>, clock: Arc<dyn Clock>) -> Self {
        let journal = Arc::new(Journal::new(options.decision_journal_bytes));
        let (tables, next_id) = (RwLock::default(), AtomicU64::new(1));
        Self { options, catalog, clock, journal, outbox: Arc::default(), tables, next_id }
    }

    /// Add an engine; it serves once a health check has told its models.
    ///
    /// # Errors
    /// `Config` for a bad spec, `Conflict` for an id or address that is there already, `Overloaded` at the limit.
    pub fn add(&self, spec: EngineSpec) -> Result<Arc<Engine>> {
        spec.check()?;
        let mut tables = self.tables.write();
        self.check_room(&tables)?;
        let same_url = |engine: &&Arc<Engine>| engine.base == base_of(&spec.url);
        if let Some(engine) = tables.engines.values().find(same_url) {
            return Err(Error::Conflict(format!(
                "{} is registered already, as worker {}",
                spec.url, engine.id
            )));
        }
        let id = match spec.instance_id {
            Some(id) => id,
            None => loop {
                let id = self.next_id.fetch_add(1, Ordering::Relaxed);
                if !tables.engines.contains_key(&id) {
                    break id;
                }
            },
        };
        if tables.engines.contains_key(&id) {
            return Err(Error::Conflict(format!("worker id {id} is registered already")));
        }
        let engine = Arc::new(Engine::new(id, spec));
        let given = engine.spec.url.trim_end_matches('/');
        if given != engine.base {
            tracing::warn!(
                worker = id,
                url = given,
                "the worker's URL ends with /v1, which requests bring themselves; {} is used instead: leave /v1 out",
                engine.base
            );
        }
        tables.engines.insert(id, Arc::clone(&engine));
        Ok(engine)
    }

    /// Add a worker of the runtime, whose card says what it serves.
    ///
    /// # Errors
    /// As [`Self::add`]; nothing is added then.
    pub fn add_member(&self, member: Arc<Member>) -> Result<Arc<Engine>> {
        let (spec, notes) = (&member.spec, member.notes());
        let engine = Arc::new(Engine::of_member(Arc::clone(&member)));
        {
            let mut tables = self.tables.write();
            self.check_room(&tables)?;
            if tables.engines.contains_key(&spec.id) {
                return Err(Error::Conflict(format!(
                    "worker id {} is registered already",
                    spec.id
                )));
            }
            tables.engines.insert(spec.id, Arc::clone(&engine));
        }
        let outcome = self.learned(&engine, notes);
        if let Err(error) = outcome {
            if !self.is_member(engine.id) {
                // NotFound only says that somebody else was first.
                let _ = self.remove(engine.id);
                return Err(error);
            }
            // It serves, but its blocks don't match: only that is lost.
            tracing::error!(worker = engine.id, url = engine.base, %error, "worker does not fit");
            engine.notes.lock().last_error = Some(error.to_string());
        }
        Ok(engine)
    }

    /// Are these events heard because this fleet asks the catalog for them? Those in a stream come with
    /// the stream, and what a broker has is not heard without its client.
    fn subscribes_to(&self, events: &EventSpec) -> bool {
        !events.is_brokered() || self.options.has_broker_events && !events.is_in_stream()
    }

    /// The events of a runtime worker are there now.
    ///
    /// # Errors
    /// `Conflict` or `Config` for the first one that can't be subscribed to; the others are.
    pub fn change_events(
        &self,
        engine: &Arc<Engine>,
        events: BTreeMap<u32, EventSpec>,
    ) -> Result<()> {
        let Some(member) = &engine.member else { return Ok(()) };
        // Changes of one worker come one after the other, as do all changes of the tables.
        let tables = self.tables.write();
        let Some(name) = tables.joined.get(&engine.id).cloned() else { return Ok(()) };
        let tenant = tenant_of(engine.spec.is_prefill);
        let before = std::mem::replace(&mut *member.events.lock(), events.clone());
        let is_gone = |(rank, was): &(&u32, &EventSpec)| {
            self.subscribes_to(was) && events.get(rank) != Some(was)
        };
        for (rank, _) in before.iter().filter(is_gone) {
            // NotFound only says that there is nothing left to do.
            let _ = self.catalog.unregister(engine.id, &name, Some(tenant), Some(*rank));
        }
        let fresh = events.keys().filter(|rank| before.get(rank) != events.get(rank));
        let mut outcome = Ok(());
        for rank in fresh {
            let registered = self.register(engine, *rank, &name);
            if outcome.is_ok() {
                outcome = registered;
            }
        }
        outcome
    }

    /// Subscribe to the events of a rank that publishes them, unless the options make no use of events. Every
    /// subscription of the frontend is made here.
    fn register(&self, engine: &Engine, dp_rank: u32, name: &str) -> Result<()> {
        if !self.options.uses_events() {
            return Ok(());
        }
        let events = engine.events_of(dp_rank).filter(|events| self.subscribes_to(events));
        let Some(events) = events else { return Ok(()) };
        let registered = self.catalog.register(Registration {
            worker: Worker::new(engine.id, dp_rank),
            key: key_of(name, engine.spec.is_prefill),
            block_size: None,
            endpoint: events.endpoint,
            replay_endpoint: events.replay_endpoint,
            capacity_blocks: None,
            identity: Identity::default(),
            facts: EngineFacts::default(),
        });
        registered.map(|_| ())
    }

    fn check_room(&self, tables: &Tables) -> Result<()> {
        if tables.engines.len() < self.options.max_workers {
            return Ok(());
        }
        Err(Error::Overloaded(format!(
            "the limit of {} workers is reached (--max-workers)",
            self.options.max_workers
        )))
    }

    /// Remove an engine: no new requests, its blocks are forgotten; requests in flight go on.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn remove(&self, id: InstanceId) -> Result<Arc<Engine>> {
        let mut tables = self.tables.write();
        let engine = tables
            .engines
            .remove(&id)
            .ok_or_else(|| Error::NotFound(format!("no worker {id} is registered")))?;
        engine.remove();
        self.leave(&mut tables, &engine);
        Ok(engine)
    }

    /// An engine has told what it serves. Joins it to its model's pool, or moves it there.
    ///
    /// # Errors
    /// `Config` when it serves nothing, `Conflict` when its block size is not the pool's.
    pub fn learned(&self, engine: &Arc<Engine>, notes: EngineNotes) -> Result<()> {
        let (Some((name, _)), block_size) =
            (notes.models.iter().find(|(_, parent)| parent.is_none()).cloned(), notes.block_size)
        else {
            return Err(Error::Config("its /v1/models lists no base model".to_owned()));
        };
        let mut tables = self.tables.write();
        if engine.is_removed() {
            return Ok(());
        }
        if tables.joined.get(&engine.id).is_some_and(|joined| *joined != name) {
            self.leave(&mut tables, engine);
        }
        let is_prefill = engine.spec.is_prefill;
        let pool = match tables.pools_of(is_prefill).get(&name) {
            Some(pool) => Arc::clone(pool),
            None => {
                let pool = Arc::new(self.new_pool(&name, is_prefill)?);
                if let Some(thresholds) = tables.thresholds.get(&key_of(&name, is_prefill)) {
                    pool.selector.busy.set_thresholds(*thresholds)?;
                }
                tables.pools_of(is_prefill).insert(name.clone(), Arc::clone(&pool));
                pool
            }
        };
        if !tables.joined.contains_key(&engine.id) {
            self.join(&mut tables, engine, &pool)?;
        }
        self.note_restart(engine, &notes, &pool);
        *engine.notes.lock() = notes.clone();
        if is_prefill {
            tables.had_prefill.insert(name.clone());
        } else {
            for (served, parent) in &notes.models {
                let lora_name = parent.as_ref().map(|_| served.clone());
                let route = Route { pool: Arc::clone(&pool), lora_name };
                tables.routes.insert(served.clone(), route);
            }
            let gone = pool.served.lock().put(engine.id, &notes);
            Self::drop_routes(&mut tables, &pool, &gone);
        }
        drop(tables);
        if let Some(size) = block_size {
            let known = pool.index().hint_block_size(size);
            if pool.index().fits_block_size(size) {
                return Ok(());
            }
            if self.options.router.block_size > 0 && known != size {
                return Err(Error::Conflict(format!(
                    "its block size {size} is not the {known} of --kv-cache-block-size: its blocks never \
                     match; leave the flag out, or set it to what the workers have"
                )));
            }
            if known != size {
                return Err(Error::Conflict(format!(
                    "its block size {size} is not the {known} of model {name}: its blocks never match; \
                     start it with --block-size {known}, or serve it under another name"
                )));
            }
        }
        Ok(())
    }

    /// An engine whose process is another one holds nothing of what its predecessor held. Publishers
    /// notice it by themselves where they can; this is for those without a replay socket.
    fn note_restart(&self, engine: &Engine, notes: &EngineNotes, pool: &Pool) {
        let before = engine.notes.lock().started_s;
        let (Some(before), Some(now)) = (before, notes.started_s) else { return };
        if before == now {
            return;
        }
        if self.options.overlap == Overlap::Predictions {
            for rank in 0..engine.spec.dp_size {
                pool.index().clear_worker(Worker::new(engine.id, rank));
            }
        }
        for publisher in self.catalog.publishers() {
            let is_its = publisher.worker.instance_id == engine.id;
            if is_its && publisher.replay_endpoint.is_none() {
                publisher.restarted();
            }
        }
    }

    fn new_pool(&self, name: &str, is_prefill: bool) -> Result<Pool> {
        let key = key_of(name, is_prefill);
        let forced = Some(self.options.router.block_size).filter(|size| *size > 0);
        let index = self.catalog.model_or_create(&key, forced)?;
        let mut router = self.options.router.clone();
        // Nothing stays with a prefill worker: only its prompt tokens count.
        router.track_active_blocks &= !is_prefill;
        router.track_output_blocks &= !is_prefill;
        if is_prefill {
            router.stage = Stage::Prefill;
        }
        let policies = self.options.policies.clone();
        // Who waits for the worker that decodes need not wait for the one that prefills.
        let fairness = self.options.fairness.as_ref().filter(|_| !is_prefill);
        let waiting = match fairness {
            Some(options) => Some(Arc::new(WaitingRoom::new(options, Arc::clone(&self.clock))?)),
            None => None,
        };
        let config = SelectorConfig {
            router,
            overlap: self.options.overlap,
            thresholds: self.options.thresholds,
            queue: self.options.queue.as_ref().map(|options| options.threshold),
            journal_bytes: 0,
            logs_decisions: self.options.logs_decisions,
        };
        let selector = Selector::with_policies(config, policies, index, Arc::clone(&self.clock))?
            .with_journal(Arc::clone(&self.journal))
            .with_outbox(Arc::clone(&self.outbox));
        let queue = self.options.queue.as_ref();
        let queue = queue.map(|options| Queue::serving(options, &selector, &self.clock));
        Ok(Pool::new(name, selector, waiting, queue))
    }

    fn join(&self, tables: &mut Tables, engine: &Arc<Engine>, pool: &Arc<Pool>) -> Result<()> {
        let mut ranks = 0..engine.spec.dp_size;
        let joined = ranks.try_for_each(|rank| self.register(engine, rank, &pool.name));
        let joined = joined.and_then(|()| {
            pool.change(|members| {
                members.insert(engine.id, Arc::clone(engine));
            })
        });
        if let Err(error) = joined {
            // All of it or nothing; NotFound only says that the first rank failed.
            let tenant = tenant_of(engine.spec.is_prefill);
            let _ = self.catalog.unregister(engine.id, &pool.name, Some(tenant), None);
            return Err(error);
        }
        tables.joined.insert(engine.id, pool.name.clone());
        tracing::info!(worker = engine.id, url = engine.base, model = pool.name, "worker joined");
        Ok(())
    }

    fn leave(&self, tables: &mut Tables, engine: &Arc<Engine>) {
        let Some(name) = tables.joined.remove(&engine.id) else { return };
        let is_prefill = engine.spec.is_prefill;
        if engine.events().any(|events| self.subscribes_to(&events)) {
            // NotFound only says that there is nothing left to do.
            let tenant = tenant_of(is_prefill);
            let _ = self.catalog.unregister(engine.id, &name, Some(tenant), None);
        }
        if let Some(pool) = tables.pools_of(is_prefill).get(&name).cloned() {
            pool.change(|members| {
                members.remove(&engine.id);
            })
            .expect("fewer ranks than before fit");
            let gone = pool.served.lock().remove(engine.id);
            Self::drop_routes(tables, &pool, &gone);
            if pool.members().all().next().is_none() {
                // Engines that come back may have another block size: they begin anew.
                tables.pools_of(is_prefill).remove(&name);
                pool.selector.model().forget_block_size();
                let thresholds = pool.selector.busy.thresholds();
                if thresholds != self.options.thresholds {
                    tables.thresholds.insert(key_of(&name, is_prefill), thresholds);
                }
                if !tables.pools.contains_key(&name) && !tables.prefill_pools.contains_key(&name) {
                    tables.had_prefill.remove(&name);
                }
            }
        }
        tracing::info!(worker = engine.id, url = engine.base, model = name, "worker left");
    }

    /// A name is served as long as one engine serves it; a pool stays, for its engines come back.
    fn drop_routes(tables: &mut Tables, pool: &Arc<Pool>, names: &[Arc<str>]) {
        for name in names {
            // Another pool may serve an adapter of that name.
            if tables.routes.get(&**name).is_some_and(|route| Arc::ptr_eq(&route.pool, pool)) {
                tables.routes.remove(&**name);
            }
        }
    }

    /// Where requests for `model` go.
    ///
    /// # Errors
    /// `NotFound`, naming what is served; `NoWorker` while nothing is served yet.
    pub fn route(&self, model: &str) -> Result<Route> {
        let tables = self.tables.read();
        if let Some(route) = tables.routes.get(model) {
            return Ok(route.clone());
        }
        if tables.routes.is_empty() {
            return Err(tables.nothing_served(&self.options.waits_for));
        }
        let mut names: Vec<&str> = tables.routes.keys().map(String::as_str).collect();
        names.sort_unstable();
        names.truncate(20);
        Err(Error::NotFound(format!(
            "the model {model:?} is not served; served are {}",
            names.join(", ")
        )))
    }

    /// The only served base model, for requests that name none.
    ///
    /// # Errors
    /// `InvalidArgument` where there are several; `NoWorker` while nothing is served yet.
    pub fn only_route(&self) -> Result<Route> {
        let tables = self.tables.read();
        let mut bases = tables.routes.values().filter(|route| route.lora_name.is_none());
        match (bases.next(), bases.next()) {
            (Some(route), None) => Ok(route.clone()),
            (None, _) => Err(tables.nothing_served(&self.options.waits_for)),
            _ => Err(Error::invalid("model: this frontend serves several models; name one")),
        }
    }

    pub fn engines(&self) -> Vec<Arc<Engine>> {
        self.tables.read().engines.values().cloned().collect()
    }

    pub fn engine(&self, id: InstanceId) -> Option<Arc<Engine>> {
        self.tables.read().engines.get(&id).cloned()
    }

    /// All pools, those of prefill workers last.
    pub fn pools(&self) -> Vec<Arc<Pool>> {
        let tables = self.tables.read();
        tables.pools.values().chain(tables.prefill_pools.values()).cloned().collect()
    }

    /// The prefill workers of a model.
    pub fn prefill_pool(&self, name: &str) -> Option<Arc<Pool>> {
        self.tables.read().prefill_pools.get(name).cloned()
    }

    /// Models with healthy prefill workers and no worker that decodes.
    pub fn without_decode(&self) -> Vec<String> {
        let tables = self.tables.read();
        let is_alone = |(name, pool): &(&String, &Arc<Pool>)| {
            pool.members().healthy() > 0
                && tables.pools.get(*name).is_none_or(|pool| pool.members().all().next().is_none())
        };
        tables.prefill_pools.iter().filter(is_alone).map(|(name, _)| name.clone()).collect()
    }

    pub fn had_prefill(&self, name: &str) -> bool {
        self.tables.read().had_prefill.contains(name)
    }

    fn is_member(&self, id: InstanceId) -> bool {
        self.tables.read().joined.contains_key(&id)
    }

    /// Served names and, for adapters, their base model; sorted.
    pub fn served(&self) -> Vec<(String, Option<String>)> {
        let tables = self.tables.read();
        let mut names: Vec<_> = tables
            .routes
            .iter()
            .map(|(name, route)| {
                (name.clone(), route.lora_name.as_ref().map(|_| route.pool.name.clone()))
            })
            .collect();
        names.sort();
        names
    }
}

fn tenant_of(is_prefill: bool) -> &'static str {
    if is_prefill { PREFILL_TENANT } else { TENANT }
}

fn key_of(name: &str, is_prefill: bool) -> ModelKey {
    ModelKey { model_name: name.to_owned(), tenant_id: tenant_of(is_prefill).to_owned() }
}
