//! The fleet of a service: performs the roster's effects on the catalog and on the models' pools.

use std::collections::{BTreeMap, HashMap};
use std::ops::Deref;
use std::sync::Arc;

use kvflash_core::catalog::{Catalog, ModelIndex, ModelKey};
use kvflash_core::clock::Clock;
use kvflash_core::error::{Error, Result};
use kvflash_core::fleet::{Change, Effect, Roster, WorkerState};
use kvflash_core::ids::{InstanceId, Worker};
use kvflash_core::select::{Journal, Outbox, Queue, Selector, SelectorConfig, Thresholds};
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::RoutingOptions;

/// Tenant of the indexes of prefill workers, which hold other blocks than decode workers.
pub(crate) const PREFILL_TENANT: &str = "prefill";
/// Tenant of all other indexes of workers that are not registered; the cache salt separates clients.
const TENANT: &str = "default";

/// The index of a model's workers, or of those that only prefill.
pub(crate) fn key_of(name: &str, is_prefill: bool) -> ModelKey {
    let tenant = if is_prefill { PREFILL_TENANT } else { TENANT };
    ModelKey { model_name: name.to_owned(), tenant_id: tenant.to_owned() }
}

/// All workers of one model and tenant, with one index and one load table.
pub(crate) struct Pool<M, R> {
    pub key: ModelKey,
    /// The model's name.
    pub name: String,
    pub selector: Arc<Selector>,
    /// Requests that wait for a worker with room to prefill.
    pub queue: Option<Arc<Queue>>,
    /// Requests that wait for their turn.
    pub waiting: R,
    members: RwLock<Arc<Members<M>>>,
}

/// The workers of a pool at one moment.
pub(crate) struct Members<M> {
    by_id: BTreeMap<InstanceId, Arc<M>>,
}

impl<M> Default for Members<M> {
    fn default() -> Self {
        Self { by_id: BTreeMap::new() }
    }
}

impl<M> Members<M> {
    pub fn get(&self, id: InstanceId) -> Option<&Arc<M>> {
        self.by_id.get(&id)
    }

    pub fn all(&self) -> impl Iterator<Item = &Arc<M>> {
        self.by_id.values()
    }
}

impl<M, R> Pool<M, R> {
    pub fn index(&self) -> &Arc<ModelIndex> {
        self.selector.model()
    }

    pub fn members(&self) -> Arc<Members<M>> {
        Arc::clone(&self.members.read())
    }

    /// Booked and unfinished requests of each worker.
    pub fn in_flight(&self) -> HashMap<InstanceId, u64> {
        let mut counts = HashMap::new();
        for load in self.selector.loads() {
            *counts.entry(load.worker.instance_id).or_default() += u64::from(load.active.requests);
        }
        counts
    }

    /// Changes its workers, for requests and for the selector.
    ///
    /// # Errors
    /// `Overloaded` for more ranks than the selector supports; nothing changes then.
    fn set(&self, workers: &[Worker], known: &BTreeMap<InstanceId, Arc<M>>) -> Result<()> {
        let mut members = self.members.write();
        // Readers wait meanwhile, so a worker returned by the selector is always among the members.
        self.selector.set_workers(workers)?;
        let member = |worker: &Worker| {
            let id = worker.instance_id;
            known.get(&id).map(|member| (id, Arc::clone(member)))
        };
        *members = Arc::new(Members { by_id: workers.iter().filter_map(member).collect() });
        Ok(())
    }
}

/// State shared by the models of a service.
#[derive(Clone)]
pub(crate) struct Common {
    pub catalog: Arc<Catalog>,
    pub clock: Arc<dyn Clock>,
    /// Past decisions of all models; kept when workers leave.
    pub journal: Arc<Journal>,
    /// Bookings of all models, for replicas.
    pub outbox: Arc<Outbox>,
}

impl Common {
    pub fn new(catalog: Arc<Catalog>, clock: Arc<dyn Clock>, routing: &RoutingOptions) -> Self {
        let journal = Arc::new(Journal::new(routing.selector.journal_bytes));
        Self { catalog, clock, journal, outbox: Arc::default() }
    }

    /// A model's selector and its queue.
    pub fn selector(
        &self,
        key: &ModelKey,
        routing: &RoutingOptions,
    ) -> Result<(Selector, Option<Arc<Queue>>)> {
        let mut router = routing.selector.router.clone();
        if key.tenant_id == PREFILL_TENANT {
            router = router.of_prefill();
        }
        let forced = Some(router.load.block_size).filter(|size| *size > 0);
        let index = self.catalog.model_or_create(key, forced)?;
        let queue = routing.queue.as_ref();
        let threshold = queue.map(|options| options.threshold);
        let config = SelectorConfig {
            router,
            queue: threshold,
            journal_bytes: 0,
            ..routing.selector.clone()
        };
        let clock = &self.clock;
        let selector =
            Selector::with_policies(config, routing.policies.clone(), index, Arc::clone(clock))?
                .with_journal(Arc::clone(&self.journal))
                .with_outbox(Arc::clone(&self.outbox));
        let queue = queue.map(|options| Queue::serving(options, &selector, clock));
        Ok((selector, queue))
    }
}

/// The components of a pool: its selector, and its queues.
pub(crate) type Parts<R> = (Selector, Option<Arc<Queue>>, R);
type MakeParts<R> = Box<dyn Fn(&Common, &ModelKey) -> Result<Parts<R>> + Send + Sync>;

/// The current workers.
pub(crate) struct Tables<M, R> {
    pub roster: Roster,
    pub served: Served<M, R>,
}

/// The service's view of them.
pub(crate) struct Served<M, R> {
    pub members: BTreeMap<InstanceId, Arc<M>>,
    pub pools: BTreeMap<ModelKey, Arc<Pool<M, R>>>,
    /// Thresholds of models whose workers have left, if they differ from the flags. As many as the
    /// catalog has models.
    thresholds: BTreeMap<ModelKey, Thresholds>,
}

impl<M, R> Deref for Tables<M, R> {
    type Target = Served<M, R>;

    fn deref(&self) -> &Self::Target {
        &self.served
    }
}

/// All workers of a service.
///
/// # Consistency
/// Changes are serialized; a request uses the members that it read first.
pub(crate) struct Fleet<M, R> {
    pub common: Common,
    make: MakeParts<R>,
    thresholds: Thresholds,
    /// Whether predictions about a worker are dropped when its process restarts.
    has_predictions: bool,
    tables: RwLock<Tables<M, R>>,
}

impl<M, R> Fleet<M, R> {
    pub fn new(
        common: Common,
        roster: Roster,
        routing: &RoutingOptions,
        make: impl Fn(&Common, &ModelKey) -> Result<Parts<R>> + Send + Sync + 'static,
    ) -> Self {
        let (members, pools, thresholds_kept) = Default::default();
        let served = Served { members, pools, thresholds: thresholds_kept };
        let tables = RwLock::new(Tables { roster, served });
        let (thresholds, has_predictions) = (routing.selector.thresholds, routing.predicts());
        Self { common, make: Box::new(make), thresholds, has_predictions, tables }
    }

    pub fn read(&self) -> RwLockReadGuard<'_, Tables<M, R>> {
        self.tables.read()
    }

    pub fn write(&self) -> RwLockWriteGuard<'_, Tables<M, R>> {
        self.tables.write()
    }

    /// Adds a new worker. It serves once its card is known.
    ///
    /// # Errors
    /// Those of [`Roster::apply`].
    pub fn join(&self, tables: &mut Tables<M, R>, change: Change, member: Arc<M>) -> Result<()> {
        let id = change.id();
        self.change(tables, change)?;
        tables.served.members.insert(id, member);
        Ok(())
    }

    /// Applies a change with [`follow`].
    ///
    /// # Errors
    /// Those of [`Roster::apply`]; refusals of the catalog; the limits of models and of ranks.
    pub fn change(&self, tables: &mut Tables<M, R>, change: Change) -> Result<()> {
        let id = change.id();
        let before = tables.roster.key_of(id).cloned();
        let Tables { roster, served } = tables;
        let mut learned = None;
        let outcome = follow(roster, change, |effect| {
            if let Effect::BlockSize(key, _) = &effect {
                let pool = served.pools.get(key);
                learned = pool.filter(|pool| pool.index().block_size().is_none()).cloned();
            }
            self.perform(served, effect)
        });
        if let (Err(_), Some(pool)) = (&outcome, learned) {
            // Leaves nothing of a refused worker behind.
            pool.index().forget_block_size();
        }
        if let Some(key) = &before
            && let Some(pool) = tables.pools.get(key)
            && pool.index().block_size().is_none()
            && let Some(size) = tables.roster.block_size_of(key)
        {
            // The catalog forgot it with the last publisher, but other workers know it.
            pool.index().learn_block_size(size);
        }
        let now = tables.roster.key_of(id).cloned();
        if before != now {
            before.inspect(|model| tracing::info!(worker = id, %model, "worker left"));
            now.inspect(|model| tracing::info!(worker = id, %model, "worker joined"));
        }
        outcome
    }

    /// Sets whether a worker takes new requests.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn set_state(&self, id: InstanceId, state: WorkerState) -> Result<Arc<M>> {
        let mut tables = self.write();
        let before = tables.roster.state_of(id);
        self.change(&mut tables, Change::State { id, state })?;
        if before != Some(state) {
            tracing::info!(worker = id, %state, "worker state");
        }
        tables.members.get(&id).cloned().ok_or_else(|| unknown(id))
    }

    /// Removes a worker.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn leave(&self, tables: &mut Tables<M, R>, id: InstanceId) -> Result<Arc<M>> {
        self.change(tables, Change::Left { id })?;
        tables.served.members.remove(&id).ok_or_else(|| unknown(id))
    }

    fn perform(&self, tables: &mut Served<M, R>, effect: Effect) -> Result<()> {
        match effect {
            Effect::Open(key) => self.open(tables, key)?,
            Effect::BlockSize(key, size) => {
                let index = tables.pools[&key].index();
                if index.learn_block_size(size) != size {
                    return Err(index.other_block_size(size, false));
                }
            }
            Effect::SetWorkers(key, workers) => {
                // A model that could not be opened has nothing to change.
                let pool = tables.pools.get(&key);
                pool.map_or(Ok(()), |pool| pool.set(&workers, &tables.members))?;
            }
            Effect::SetDraining(key, ids) => {
                let pool = tables.pools.get(&key);
                pool.inspect(|pool| pool.selector.set_draining(ids));
            }
            Effect::Report(key, worker, report) => {
                tables.pools[&key].selector.busy.report(worker, &report);
            }
            Effect::Close(key) => {
                let Some(pool) = tables.pools.remove(&key) else { return Ok(()) };
                // Returning workers may have another block size, and an engine may keep changing
                // its model's name: no index and no metric series must stay behind.
                pool.index().forget_block_size();
                self.common.catalog.let_go(pool.index());
                pool.selector.close();
                let thresholds = pool.selector.busy.thresholds();
                if thresholds != self.thresholds {
                    if tables.thresholds.len() >= self.common.catalog.options().max_models {
                        tables.thresholds.pop_first();
                    }
                    tables.thresholds.insert(key, thresholds);
                }
            }
            Effect::Forget(key, id, ranks) => {
                if self.has_predictions {
                    let index = tables.pools[&key].index();
                    (0..ranks).for_each(|rank| index.clear_worker(Worker::new(id, rank)));
                }
                listen(&self.common.catalog, Effect::Forget(key, id, ranks))?;
            }
            Effect::Subscribe(_) | Effect::Unsubscribe(..) => listen(&self.common.catalog, effect)?,
        }
        Ok(())
    }

    fn open(&self, tables: &mut Served<M, R>, key: ModelKey) -> Result<()> {
        let (selector, queue, waiting) = (self.make)(&self.common, &key)?;
        let selector = Arc::new(selector);
        if let Some(thresholds) = tables.thresholds.get(&key) {
            selector.busy.set_thresholds(*thresholds)?;
        }
        let name = key.model_name.clone();
        let members = RwLock::default();
        let pool = Pool { key: key.clone(), name, selector, queue, waiting, members };
        tables.pools.insert(key, Arc::new(pool));
        Ok(())
    }

    /// A worker's pool.
    pub fn pool_of(&self, id: InstanceId) -> Option<Arc<Pool<M, R>>> {
        let tables = self.read();
        tables.pools.get(tables.roster.key_of(id)?).cloned()
    }

    /// Number of draining workers.
    pub fn draining(&self) -> usize {
        self.read().roster.draining().count()
    }

    /// Frees inactive bookings, and calls those who wait for room; returns how many were freed.
    pub fn expire(&self) -> usize {
        let pools = self.pools();
        let expired = pools.iter().map(|pool| pool.selector.tick()).sum();
        // Workers may have recovered, and others' bookings may have ended.
        pools.iter().filter_map(|pool| pool.queue.as_ref()).for_each(|queue| queue.call());
        expired
    }

    /// All pools, by model and tenant.
    pub fn pools(&self) -> Vec<Arc<Pool<M, R>>> {
        self.tables.read().pools.values().cloned().collect()
    }
}

/// The error for a worker that must exist.
pub(crate) fn unknown(id: InstanceId) -> Error {
    Error::NotFound(format!("no worker {id} is registered"))
}

/// Applies a change and performs its effects, in order. If one fails the whole change is reverted.
/// A change of events stays: of those that can't be subscribed to, the next report tries again.
///
/// # Errors
/// Those of [`Roster::apply`], and the first error of `perform`.
pub(crate) fn follow(
    roster: &mut Roster,
    change: Change,
    mut perform: impl FnMut(Effect) -> Result<()>,
) -> Result<()> {
    let (id, is_whole) = (change.id(), !matches!(change, Change::Events { .. }));
    let mut outcome = Ok(());
    for effect in roster.apply(change)? {
        let subscribed = match &effect {
            Effect::Subscribe(registration) => Some(registration.worker),
            _ => None,
        };
        let performed = perform(effect);
        let failed = subscribed.filter(|_| performed.is_err());
        outcome = outcome.and(performed);
        if outcome.is_err() && is_whole {
            roster.apply(Change::Withdrawn { id })?.into_iter().try_for_each(perform)?;
            break;
        }
        failed.into_iter().for_each(|worker| roster.forget_events(worker));
    }
    outcome
}

/// Performs the effects that concern the catalog; ignores all others.
///
/// # Errors
/// Those of [`Catalog::register`].
pub(crate) fn listen(catalog: &Catalog, effect: Effect) -> Result<()> {
    match effect {
        Effect::Subscribe(registration) => drop(catalog.register(registration)?),
        Effect::Unsubscribe(key, id, rank) => {
            // NotFound only means that nothing is left to do.
            let _ = catalog.unregister(id, &key.model_name, Some(&key.tenant_id), rank);
        }
        // Publishers notice restarts by themselves if they can; this is for those without a replay
        // socket.
        Effect::Forget(_, id, _) => {
            let publishers = catalog.publishers().into_iter();
            publishers
                .filter(|publisher| {
                    publisher.worker.instance_id == id && publisher.replay_endpoint.is_none()
                })
                .for_each(|publisher| publisher.restarted());
        }
        _ => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use kvflash_core::fleet::{Card, EventSpec, Hearing};

    use super::*;

    #[test]
    fn a_refused_subscription_is_tried_again_with_the_next_report() {
        let (catalog, mut roster) = (Catalog::default(), Roster::new(Hearing::Sockets, 9));
        let mut change = |change| follow(&mut roster, change, |effect| listen(&catalog, effect));
        let key = ModelKey { model_name: "m".to_owned(), tenant_id: "default".to_owned() };
        let joined = Change::Joined { id: 1, ranks: 3, events: BTreeMap::new(), registrant: None };
        change(joined).unwrap();
        change(Change::Card { id: 1, card: Card::new(key) }).unwrap();
        let events = EventSpec::of_ranks(Some("tcp://a:5557"), None, 3);
        catalog.limit_sockets(2);
        let report = || Change::Events { id: 1, events: events.clone() };
        let refused = change(report()).unwrap_err();
        assert!(matches!(refused, Error::Overloaded(_)), "{refused}");
        assert_eq!(catalog.publishers().len(), 2);
        catalog.limit_sockets(3);
        change(report()).unwrap();
        assert_eq!(catalog.publishers().len(), 3);
        assert_eq!(roster.events_of(1), events);
    }
}
