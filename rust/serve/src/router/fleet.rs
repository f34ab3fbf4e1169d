//! Who may be chosen: registered workers, by model and tenant.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvflash_core::catalog::{Catalog, EngineFacts, Identity, ModelKey, Registration};
use kvflash_core::clock::Clock;
use kvflash_core::error::{Error, Result};
use kvflash_core::ids::{InstanceId, Worker};
use kvflash_core::select::{Journal, Outbox, Queue, Selector, SelectorConfig, Thresholds};
use parking_lot::RwLock;

use super::super::frontend::engine::{address_of, port_of, shifted};
use super::super::frontend::fleet::PREFILL_TENANT;
use super::options::RouterOptions;
use super::request::{Events, NewWorker};

/// A registered worker.
#[derive(Debug)]
pub(super) struct Member {
    pub id: InstanceId,
    pub url: Option<String>,
    pub dp_size: u32,
    /// Where its ranks publish.
    pub events: BTreeMap<u32, Events>,
    /// How many were registered before it: another number when it comes again.
    pub joined: u64,
}

impl Member {
    pub fn ranks(&self) -> impl Iterator<Item = Worker> {
        let id = self.id;
        (0..self.dp_size).map(move |rank| Worker::new(id, rank))
    }
}

/// All workers of one model and tenant.
pub(super) struct Pool {
    pub key: ModelKey,
    pub selector: Arc<Selector>,
    /// Where reservations wait for a worker with room to prefill.
    pub queue: Option<Arc<Queue>>,
    members: RwLock<BTreeMap<InstanceId, Arc<Member>>>,
}

impl Pool {
    pub fn member(&self, id: InstanceId) -> Option<Arc<Member>> {
        self.members.read().get(&id).cloned()
    }

    /// The rank that a session's id names, if it is one of these workers.
    pub fn named(&self, address: &str, dp_rank: u32) -> Option<Worker> {
        let members = self.members.read();
        let is_it = |member: &&Arc<Member>| {
            dp_rank < member.dp_size
                && member.url.as_deref().is_some_and(|url| address_of(url) == address)
        };
        members.values().find(is_it).map(|member| Worker::new(member.id, dp_rank))
    }

    pub fn members(&self) -> Vec<Arc<Member>> {
        self.members.read().values().cloned().collect()
    }

    fn change(&self, edit: impl FnOnce(&mut BTreeMap<InstanceId, Arc<Member>>)) -> Result<()> {
        let mut members = self.members.write();
        let mut wanted = members.clone();
        edit(&mut wanted);
        let workers: Vec<Worker> = wanted.values().flat_map(|member| member.ranks()).collect();
        self.selector.set_workers(&workers)?;
        *members = wanted;
        Ok(())
    }
}

#[derive(Default)]
struct Tables {
    pools: BTreeMap<ModelKey, Arc<Pool>>,
    joined: BTreeMap<InstanceId, ModelKey>,
    /// Thresholds that were set for models all of whose workers have left: they hold when one returns.
    /// As many as the catalog has models.
    thresholds: BTreeMap<ModelKey, Thresholds>,
    registered_total: u64,
}

/// All workers of a router.
///
/// # Consistency
/// Changes are serialised; a selection works on the pool that it read first.
pub(super) struct Fleet {
    options: RouterOptions,
    catalog: Arc<Catalog>,
    pub clock: Arc<dyn Clock>,
    /// Past decisions of all models: it outlives workers that come and go.
    pub journal: Arc<Journal>,
    /// What replicas are to hear of bookings, of all models.
    pub outbox: Arc<Outbox>,
    tables: RwLock<Tables>,
}

impl Fleet {
    pub fn new(options: RouterOptions, catalog: Arc<Catalog>, clock: Arc<dyn Clock>) -> Self {
        let journal = Arc::new(Journal::new(options.selector.journal_bytes));
        let (outbox, tables) = (Arc::default(), RwLock::default());
        Self { options, catalog, clock, journal, outbox, tables }
    }

    /// Add a worker with all its ranks.
    ///
    /// # Errors
    /// `InvalidArgument` for a field that cannot be, `Conflict` for an id that is there already or a block
    /// size that is not the model's, `Overloaded` at a limit. Nothing changes then.
    pub fn add(&self, new: NewWorker) -> Result<(Arc<Pool>, Arc<Member>)> {
        new.check()?;
        let mut tables = self.tables.write();
        let id = new.worker_id;
        if let Some(key) = tables.joined.get(&id) {
            return Err(Error::Conflict(format!(
                "worker_id {id} is registered already, for model={} tenant={}",
                key.model_name, key.tenant_id
            )));
        }
        if tables.joined.len() >= self.options.max_workers {
            return Err(Error::Overloaded(format!(
                "the limit of {} workers is reached (--max-workers)",
                self.options.max_workers
            )));
        }
        let key = ModelKey { model_name: new.model_name.clone(), tenant_id: new.tenant_id.clone() };
        let pool = self.pool(&mut tables, &key)?;
        let joined = self.join(&pool, new, tables.registered_total);
        match &joined {
            Ok(_) => {
                tables.joined.insert(id, key);
                tables.registered_total += 1;
            }
            Err(_) => self.drop_empty(&mut tables, &pool),
        }
        joined.map(|member| (pool, member))
    }

    fn pool(&self, tables: &mut Tables, key: &ModelKey) -> Result<Arc<Pool>> {
        if let Some(pool) = tables.pools.get(key) {
            return Ok(Arc::clone(pool));
        }
        let forced = Some(self.options.selector.router.block_size).filter(|size| *size > 0);
        let index = self.catalog.model_or_create(key, forced)?;
        let config = SelectorConfig { journal_bytes: 0, ..self.options.selector.clone() };
        let policies = self.options.policies.clone();
        let selector = Selector::with_policies(config, policies, index, Arc::clone(&self.clock))?
            .with_journal(Arc::clone(&self.journal))
            .with_outbox(Arc::clone(&self.outbox));
        if let Some(thresholds) = tables.thresholds.get(key) {
            selector.busy.set_thresholds(*thresholds)?;
        }
        let queue = self.options.queue.as_ref();
        let queue = queue.map(|options| Queue::serving(options, &selector, &self.clock));
        let (key, members) = (key.clone(), RwLock::default());
        let selector = Arc::new(selector);
        let pool = Arc::new(Pool { key: key.clone(), selector, queue, members });
        tables.pools.insert(key, Arc::clone(&pool));
        Ok(pool)
    }

    fn join(&self, pool: &Pool, new: NewWorker, joined: u64) -> Result<Arc<Member>> {
        let (id, report) = (new.worker_id, new.report());
        for (field, address) in
            [("endpoint", &new.endpoint), ("replay_endpoint", &new.replay_endpoint)]
        {
            check_ports(field, address.as_deref(), new.dp_size)?;
        }
        let events = match &new.endpoint {
            Some(endpoint) => (0..new.dp_size)
                .map(|rank| {
                    let replay = new.replay_endpoint.as_deref();
                    let events = Events {
                        endpoint: shifted(endpoint, rank),
                        replay_endpoint: replay.map(|address| shifted(address, rank)),
                    };
                    (rank, events)
                })
                .collect(),
            None => new.events()?,
        };
        let model = pool.selector.model();
        let was_known = model.block_size().is_some();
        if let Some(size) = new.block_size {
            let known = model.learn_block_size(size);
            if known != size {
                return Err(Error::Conflict(format!(
                    "block_size {size} is not the {known} of model={} tenant={}",
                    pool.key.model_name, pool.key.tenant_id
                )));
            }
        }
        let member = Arc::new(Member { id, url: new.url, dp_size: new.dp_size, events, joined });
        let joined = self.take_in(pool, &member, new.kv_total_blocks);
        joined.inspect_err(|_| {
            if !was_known {
                // Nothing of what was refused stays.
                model.forget_block_size();
            }
        })?;
        for rank in member.ranks() {
            pool.selector.busy.report(rank, &report);
        }
        tracing::info!(worker = id, model = %pool.key, url = member.url, "worker joined");
        Ok(member)
    }

    fn take_in(
        &self,
        pool: &Pool,
        member: &Arc<Member>,
        capacity_blocks: Option<u64>,
    ) -> Result<()> {
        if self.options.follows_events() {
            self.follow(pool, member, capacity_blocks)?;
        }
        let added = pool.change(|members| {
            members.insert(member.id, Arc::clone(member));
        });
        added.inspect_err(|_| self.unfollow(pool, member.id))
    }

    /// Subscribe to all its ranks, or none.
    fn follow(&self, pool: &Pool, member: &Member, capacity_blocks: Option<u64>) -> Result<()> {
        for (dp_rank, events) in &member.events {
            let registered = self.catalog.register(Registration {
                worker: Worker::new(member.id, *dp_rank),
                key: pool.key.clone(),
                block_size: None,
                endpoint: events.endpoint.clone(),
                replay_endpoint: events.replay_endpoint.clone(),
                capacity_blocks,
                identity: Identity::default(),
                facts: EngineFacts::default(),
            });
            if let Err(error) = registered {
                self.unfollow(pool, member.id);
                return Err(error);
            }
        }
        Ok(())
    }

    fn unfollow(&self, pool: &Pool, id: InstanceId) {
        let ModelKey { model_name, tenant_id } = &pool.key;
        // NotFound only says that there is nothing to do.
        let _ = self.catalog.unregister(id, model_name, Some(tenant_id), None);
    }

    /// Remove a worker: its requests, its load and its blocks are forgotten.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn remove(&self, id: InstanceId) -> Result<()> {
        let mut tables = self.tables.write();
        let key = tables
            .joined
            .remove(&id)
            .ok_or_else(|| Error::NotFound(format!("no worker {id} is registered")))?;
        let Some(pool) = tables.pools.get(&key).cloned() else { return Ok(()) };
        self.unfollow(&pool, id);
        pool.change(|members| {
            members.remove(&id);
        })?;
        self.drop_empty(&mut tables, &pool);
        tracing::info!(worker = id, model = %key, "worker left");
        Ok(())
    }

    /// A model without workers is not known; workers that come back may have another block size.
    fn drop_empty(&self, tables: &mut Tables, pool: &Arc<Pool>) {
        if !pool.members.read().is_empty() {
            return;
        }
        let thresholds = pool.selector.busy.thresholds();
        if thresholds != self.options.selector.thresholds {
            tables.thresholds.insert(pool.key.clone(), thresholds);
        }
        tables.pools.remove(&pool.key);
        pool.selector.model().forget_block_size();
    }

    /// The pool of a model; of the only one where none is named.
    ///
    /// # Errors
    /// `NotFound` for one that nobody serves; `InvalidArgument` where several are and none is named;
    /// `NoWorker` while nobody is registered.
    pub fn find(&self, model_name: Option<&str>, tenant_id: Option<&str>) -> Result<Arc<Pool>> {
        let tables = self.tables.read();
        let fits = |key: &ModelKey| {
            model_name.is_none_or(|name| key.model_name == name)
                && tenant_id.map_or(model_name.is_none() || key.tenant_id == "default", |tenant| {
                    key.tenant_id == tenant
                })
        };
        let mut found = tables.pools.values().filter(|pool| fits(&pool.key));
        match (found.next(), found.next(), model_name) {
            (Some(pool), None, _) => Ok(Arc::clone(pool)),
            (Some(_), Some(_), _) => Err(Error::invalid(
                "model_name: several models have workers here; name one, and its tenant_id",
            )),
            (None, _, Some(name)) => {
                // Who names no tenant means the workers that only prefill where there are no others.
                let (model_name, tenant) = (name.to_owned(), tenant_id.unwrap_or(PREFILL_TENANT));
                let key = ModelKey { model_name, tenant_id: tenant.to_owned() };
                tables.pools.get(&key).cloned().ok_or_else(|| {
                    let tenant = tenant_id.unwrap_or("default");
                    Error::NotFound(format!("no workers for model={name} tenant={tenant}"))
                })
            }
            (None, _, None) => Err(Error::NoWorker("no worker is registered".to_owned())),
        }
    }

    /// The pool that a request means: a worker that it is pinned to says so where no model is named.
    ///
    /// # Errors
    /// As [`find`](Self::find).
    pub fn meant(
        &self,
        model_name: Option<&str>,
        tenant_id: Option<&str>,
        pinned: Option<InstanceId>,
    ) -> Result<Arc<Pool>> {
        match (model_name, pinned.map(|id| self.pool_of(id))) {
            (None, Some(Ok(pool))) => Ok(pool),
            _ => self.find(model_name, tenant_id),
        }
    }

    /// All pools, by model and tenant.
    pub fn pools(&self) -> Vec<Arc<Pool>> {
        self.tables.read().pools.values().cloned().collect()
    }

    /// The pools that a request's name is looked for in.
    pub fn fitting(&self, model_name: Option<&str>, tenant_id: Option<&str>) -> Vec<Arc<Pool>> {
        let mut pools = self.pools();
        pools.retain(|pool| {
            model_name.is_none_or(|name| pool.key.model_name == name)
                && tenant_id.is_none_or(|tenant| pool.key.tenant_id == tenant)
        });
        pools
    }

    /// The pool that a worker has joined.
    pub fn pool_of(&self, id: InstanceId) -> Result<Arc<Pool>> {
        let tables = self.tables.read();
        let pool = tables.joined.get(&id).and_then(|key| tables.pools.get(key));
        pool.cloned().ok_or_else(|| Error::NotFound(format!("no worker {id} is registered")))
    }

    /// How often a worker came or went.
    pub fn changes(&self) -> u64 {
        let (now, ever) = self.counts();
        2 * ever - now as u64
    }

    /// Registered workers, and how many ever were.
    pub fn counts(&self) -> (usize, u64) {
        let tables = self.tables.read();
        (tables.joined.len(), tables.registered_total)
    }
}

/// Rank r publishes at the port + r: there must be one, for all of them.
fn check_ports(field: &str, address: Option<&str>, dp_size: u32) -> Result<()> {
    let Some(address) = address.filter(|_| dp_size > 1) else { return Ok(()) };
    let has_ports = port_of(address).is_some_and(|port| u32::from(port) + dp_size - 1 <= 65_535);
    if !has_ports {
        return Err(Error::invalid(format!(
            "{field} must be tcp://host:port with room for {dp_size} ports (rank r is at port + r), or \
             give every rank's in events; got {address:?}"
        )));
    }
    Ok(())
}
