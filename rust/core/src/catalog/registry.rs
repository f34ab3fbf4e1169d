//! The registry: publishers by id, model indexes by (model, tenant).

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hashbrown::{HashMap, HashSet};
use parking_lot::RwLock;

use super::command::{Command, CommandQueue};
use super::counters::EventCounts;
use super::legal::{check_endpoint, check_facts, check_identity, check_names, is_brokered};
use super::model::{ModelIndex, ModelKey, Named};
use super::past::{Left, Recovered};
use super::publisher::Publisher;
use super::registration::{ListenerStatus, Place, PublisherId, Registration};
use crate::cache::CacheStats;
use crate::clock::{Clock, SystemClock};
use crate::error::{Error, Result};
use crate::hash::engine::NameCache;
use crate::ids::{InstanceId, Worker};
use crate::index::groups::GroupIndex;
use crate::index::{self, CountMode, RadixIndex};

/// Default limit of one index: 32 Mi blocks, about 4 GiB if no workers share any.
pub const DEFAULT_MAX_BLOCKS: usize = 33_554_432;

/// Limits of a catalog.
#[derive(Debug, Clone)]
pub struct CatalogOptions {
    /// Maximum registered publishers.
    pub max_publishers: usize,
    /// Maximum model indexes.
    pub max_models: usize,
    /// Maximum blocks (memberships) of one index; 0: no limit. Further stores are refused and
    /// counted.
    pub max_blocks: usize,
    /// Maximum bytes of one index; 0: no limit. Near it the least recently stored blocks are
    /// evicted.
    pub index_memory_bytes: usize,
    /// Lifetime of a prediction in milliseconds; 0 means until it is evicted.
    pub predicted_ttl_ms: u64,
    /// Maximum predicted blocks of one index, counted per worker, and how many remain when it is
    /// exceeded; 0: no limit.
    pub max_predicted: (usize, usize),
    /// Predictions about a worker of known size last until they exceed its capacity, see
    /// [`ModelIndex::predict`], instead of for `predicted_ttl_ms`.
    pub has_histories: bool,
}

impl Default for CatalogOptions {
    fn default() -> Self {
        Self {
            max_publishers: 65_536,
            max_models: 4_096,
            max_blocks: DEFAULT_MAX_BLOCKS,
            index_memory_bytes: 0,
            predicted_ttl_ms: 0,
            max_predicted: (0, 0),
            has_histories: false,
        }
    }
}

/// Models without workers that stay known. Each keeps about 60 KiB, and its series in the metrics.
const MAX_EMPTIED: usize = 256;

/// A worker in one model and tenant.
pub(super) type Seat = (Worker, ModelKey);

#[derive(Default)]
pub(super) struct Tables {
    models: HashMap<ModelKey, Arc<ModelIndex>>,
    /// Models whose last worker has left, in that order, at most [`MAX_EMPTIED`].
    emptied: VecDeque<ModelKey>,
    publishers: BTreeMap<PublisherId, Arc<Publisher>>,
    /// An instance may serve several models and tenants, each with a publisher of its own.
    pub(super) workers: BTreeMap<Seat, PublisherId>,
    /// Workers without a publisher, together at most `max_publishers`.
    left: BTreeMap<Seat, Left>,
    pub(super) recovered: BTreeMap<Seat, Recovered>,
    /// Whether publishers must not read yet.
    pub(super) is_held: bool,
    /// Maximum publishers with a socket.
    max_sockets: Option<usize>,
    /// Counters of publishers that are no longer registered.
    departed: EventCounts,
}

/// All model indexes of a process and the publishers that feed them.
///
/// # Consistency
/// Registering and unregistering are serialized; queries and frames continue meanwhile.
pub struct Catalog {
    options: CatalogOptions,
    clock: Arc<dyn Clock>,
    pub(super) tables: RwLock<Tables>,
    next_id: AtomicU64,
    /// Cached names of recurring prompts, for all models.
    names: Arc<NameCache>,
    /// Orders for the transport.
    pub commands: CommandQueue,
}

impl Default for Catalog {
    fn default() -> Self {
        Self::new(CatalogOptions::default(), Arc::new(SystemClock::default()))
    }
}

impl Catalog {
    /// An empty catalog.
    pub fn new(options: CatalogOptions, clock: Arc<dyn Clock>) -> Self {
        Self {
            options,
            clock,
            tables: RwLock::default(),
            next_id: AtomicU64::new(1),
            names: Arc::default(),
            commands: CommandQueue::default(),
        }
    }

    /// Statistics of the name cache.
    pub fn name_cache_stats(&self) -> CacheStats {
        self.names.stats()
    }

    /// The limits of the catalog.
    pub fn options(&self) -> &CatalogOptions {
        &self.options
    }

    /// The index of `key`, created if missing; it is kept from now on, with or without publishers.
    /// A block size given with the first call lasts as long as the index; otherwise it is learned,
    /// and reset with the last publisher.
    ///
    /// # Errors
    /// `Conflict` if the index has another block size; `Overloaded` at the limit of models.
    pub fn model_or_create(
        &self,
        key: &ModelKey,
        block_size: Option<u32>,
    ) -> Result<Arc<ModelIndex>> {
        let model = self.model_in(&mut self.tables.write(), key, block_size, block_size)?;
        model.keep();
        Ok(model)
    }

    /// The index of `key`, created if missing; a given block size lasts until the last publisher
    /// leaves.
    pub(super) fn model_for(
        &self,
        key: &ModelKey,
        block_size: Option<u32>,
    ) -> Result<Arc<ModelIndex>> {
        self.model_in(&mut self.tables.write(), key, block_size, None)
    }

    fn model_in(
        &self,
        tables: &mut Tables,
        key: &ModelKey,
        block_size: Option<u32>,
        given: Option<u32>,
    ) -> Result<Arc<ModelIndex>> {
        tables.emptied.retain(|emptied| emptied != key);
        if let Some(model) = tables.models.get(key) {
            if let Some(size) = block_size
                && model.learn_block_size(size) != size
            {
                return Err(model.other_block_size(size, given.is_some()));
            }
            return Ok(Arc::clone(model));
        }
        if tables.models.len() >= self.options.max_models && !tables.drop_unused() {
            return Err(Error::Overloaded(format!(
                "the limit of {} models is reached",
                self.options.max_models
            )));
        }
        let index = RadixIndex::new(index::Options {
            count_mode: CountMode::Copies,
            limits: index::Limits {
                max_blocks: self.options.max_blocks,
                max_bytes: self.options.index_memory_bytes,
                predicted_ttl_ms: self.options.predicted_ttl_ms,
                max_predicted: self.options.max_predicted.0,
                predicted_target: self.options.max_predicted.1.min(self.options.max_predicted.0),
                ..index::Limits::default()
            },
            hash_seed: rand::random(),
        });
        let groups = GroupIndex::new(self.options.max_blocks, rand::random());
        let names = Arc::clone(&self.names);
        let mut model = ModelIndex::new(key.clone(), given.unwrap_or(0), index, groups, names);
        model.has_histories = self.options.has_histories;
        let model = Arc::new(model);
        if let Some(size) = block_size {
            model.learn_block_size(size);
        }
        tables.models.insert(key.clone(), Arc::clone(&model));
        Ok(model)
    }

    /// Registers a publisher and orders the transport to subscribe to it. A publisher in a broker's
    /// stream may already be registered; then that one is returned.
    ///
    /// # Errors
    /// `Conflict`: the worker is already registered for this model and tenant, or block size,
    /// adapter or salt differ from the index's. `InvalidArgument`: an invalid endpoint, model name
    /// or block size. `Overloaded`: a limit is reached.
    pub fn register(&self, registration: Registration) -> Result<Arc<Publisher>> {
        let Registration { worker, ref key, ref endpoint, ref identity, .. } = registration;
        check_endpoint("endpoint", endpoint)?;
        if let Some(replay) = &registration.replay_endpoint {
            check_endpoint("replay_endpoint", replay)?;
        }
        check_names(key)?;
        check_identity(&registration.identity)?;
        let block_size = registration.block_size;
        if block_size == Some(0) {
            return Err(Error::invalid("block_size must be at least 1, got 0"));
        }
        check_facts(&registration.facts, block_size)?;
        if registration.capacity_blocks == Some(0) {
            return Err(Error::invalid("capacity_blocks must be at least 1, got 0"));
        }
        let seat = (worker, key.clone());
        let mut tables = self.tables.write();
        if let Some(publisher) = tables.workers.get(&seat).and_then(|id| tables.publishers.get(id))
        {
            if publisher.endpoint == *endpoint && is_brokered(endpoint) {
                publisher.model.agreement.check(identity, key)?;
                return Ok(Arc::clone(publisher));
            }
            return Err(Error::Conflict(format!(
                "instance_id {} dp_rank {} is already registered for model={} tenant={}",
                worker.instance_id, worker.dp_rank, key.model_name, key.tenant_id
            )));
        }
        if tables.publishers.len() >= self.options.max_publishers {
            return Err(Error::Overloaded(format!(
                "the limit of {} publishers is reached",
                self.options.max_publishers
            )));
        }
        if !is_brokered(endpoint) {
            tables.check_sockets(endpoint, worker.instance_id)?;
        }
        if let Some(model) = tables.models.get(key) {
            model.agreement.check(identity, key)?;
        }
        let model = self.model_in(&mut tables, key, block_size, None)?;
        let recovered = tables.recovered.remove(&seat);
        let left = tables.left.remove(&seat).filter(|left| left.endpoint == *endpoint);
        model.agreement.settle(identity.clone());
        // Relaxed: the table's lock orders everything else.
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let publisher = Publisher::new(id, registration, model, Arc::clone(&self.clock));
        let publisher = Arc::new(publisher);
        if let Some(recovered) = recovered {
            publisher.go_on_from(&recovered.place);
        } else if let Some(left) = left {
            publisher.return_to(left.cursor);
        }
        tables.publishers.insert(id, Arc::clone(&publisher));
        tables.workers.insert(seat, id);
        self.commands.push(Command::Subscribe {
            publisher: id,
            endpoint: publisher.endpoint.clone(),
            replay_endpoint: publisher.replay_endpoint.clone(),
            is_held: tables.is_held,
        });
        Ok(publisher)
    }

    /// Unregisters an instance, or one rank of it; its blocks are dropped when this returns. If a
    /// rank is known only from events, the listener stays and restores it when it is named again. A
    /// model without workers stays known until its slot is needed, or many others have lost theirs.
    ///
    /// # Errors
    /// `NotFound` if nothing matches.
    pub fn unregister(
        &self,
        instance_id: InstanceId,
        model_name: &str,
        tenant_id: Option<&str>,
        dp_rank: Option<u32>,
    ) -> Result<usize> {
        let is_meant = |key: &ModelKey| {
            key.model_name == model_name && tenant_id.is_none_or(|tenant| key.tenant_id == tenant)
        };
        let fitting: Vec<Arc<Publisher>> = self
            .tables
            .read()
            .of_instance(instance_id)
            .filter(|publisher| is_meant(&publisher.model.key))
            .cloned()
            .collect();
        let (gone, others): (Vec<_>, Vec<_>) =
            fitting.into_iter().partition(|p| dp_rank.is_none_or(|rank| p.worker.dp_rank == rank));
        // Readers of a publisher's blocks delay this for a while, so it happens outside of the
        // lock.
        let dropped =
            others.iter().filter(|p| dp_rank.is_some_and(|rank| p.drop_rank(rank))).count();
        let gone: Vec<(Arc<Publisher>, Place)> =
            gone.into_iter().filter_map(|p| p.close().map(|place| (p, place))).collect();
        let mut tables = self.tables.write();
        let recovered: Vec<Seat> = seats_of(&tables.recovered, instance_id)
            .filter(|((_, key), _)| is_meant(key))
            .filter(|((worker, _), _)| dp_rank.is_none_or(|rank| worker.dp_rank == rank))
            .map(|(seat, _)| seat.clone())
            .collect();
        if gone.is_empty() && recovered.is_empty() && dropped == 0 {
            let rank = dp_rank.map(|rank| format!(" dp_rank={rank}")).unwrap_or_default();
            let tenant = tenant_id.map(|tenant| format!(" tenant={tenant}")).unwrap_or_default();
            return Err(Error::NotFound(format!(
                "instance_id {instance_id} is not registered for model={model_name}{tenant}{rank}"
            )));
        }
        let count = gone.len() + recovered.len() + dropped;
        let mut unused = Vec::new();
        for seat in recovered {
            if let Some(recovered) = tables.recovered.remove(&seat) {
                recovered.drop_blocks(instance_id);
                unused.push(recovered.model);
            }
        }
        for (publisher, place) in gone {
            tables.publishers.remove(&publisher.id);
            let seat = (publisher.worker, publisher.model.key.clone());
            tables.workers.remove(&seat);
            let endpoint = publisher.endpoint.clone();
            if let Some(cursor) = place.cursor
                && tables.makes_room(self.options.max_publishers)
            {
                tables.left.insert(seat, Left { endpoint, cursor });
            }
            tables.departed.add(&publisher.counts());
            self.commands.push(Command::Unsubscribe(publisher.id));
            unused.push(Arc::clone(&publisher.model));
        }
        for model in unused {
            tables.forget_unused(&model);
        }
        Ok(count)
    }

    /// Limits the sockets of this process: further publishers that need one are refused.
    pub fn limit_sockets(&self, most: usize) {
        self.tables.write().max_sockets = Some(most);
    }

    /// From now on new publishers connect but do not read, until [`Catalog::release`].
    pub fn hold(&self) {
        self.tables.write().is_held = true;
    }

    /// Lets all publishers read.
    pub fn release(&self) {
        let mut tables = self.tables.write();
        if std::mem::take(&mut tables.is_held) {
            for publisher in tables.publishers.keys() {
                self.commands.push(Command::Resume(*publisher));
            }
        }
    }

    /// Pauses or resumes reading for the registered rank of an instance, in every model and tenant,
    /// for tests of lost events.
    ///
    /// # Errors
    /// `NotFound` for an unregistered worker; `Conflict` if it is already in that state.
    pub fn pause(&self, worker: Worker, is_paused: bool) -> Result<()> {
        let mut publishers = self.publishers_of(worker);
        if publishers.is_empty() {
            return Err(Error::NotFound(format!(
                "instance_id {} dp_rank {} is not registered",
                worker.instance_id, worker.dp_rank
            )));
        }
        publishers.retain(|other| (other.view().status == ListenerStatus::Paused) != is_paused);
        if publishers.is_empty() {
            let state = if is_paused { "paused already" } else { "not paused" };
            return Err(Error::Conflict(format!(
                "the listener of instance_id {} dp_rank {} is {state}",
                worker.instance_id, worker.dp_rank
            )));
        }
        let command = if is_paused { Command::Pause } else { Command::Resume };
        publishers.iter().for_each(|publisher| self.commands.push(command(publisher.id)));
        Ok(())
    }

    /// Number of instances with a registered publisher, whatever their ranks.
    ///
    /// # Cost
    /// O(publishers).
    pub fn instance_count(&self) -> usize {
        let tables = self.tables.read();
        let mut last = None;
        let is_new =
            |(worker, _): &&Seat| last.replace(worker.instance_id) != Some(worker.instance_id);
        tables.workers.keys().filter(is_new).count()
    }

    /// Unregistered workers with blocks from a peer: model, worker, position.
    pub fn recovered(&self) -> Vec<(Arc<ModelIndex>, Worker, Place)> {
        let tables = self.tables.read();
        let place = |((worker, _), past): (&Seat, &Recovered)| {
            (Arc::clone(&past.model), *worker, past.place.clone())
        };
        tables.recovered.iter().map(place).collect()
    }

    /// Drops the unregistered workers with blocks from a peer; returns their number.
    pub fn drop_recovered(&self) -> usize {
        let mut tables = self.tables.write();
        let recovered = std::mem::take(&mut tables.recovered);
        for ((worker, _), past) in &recovered {
            past.drop_blocks(worker.instance_id);
            tables.forget_unused(&past.model);
        }
        recovered.len()
    }

    /// Releases a model's index, which is removed unless it has publishers.
    pub fn let_go(&self, model: &ModelIndex) {
        let mut tables = self.tables.write();
        let is_it =
            tables.models.get(&model.key).is_some_and(|known| std::ptr::eq(&**known, model));
        if is_it && !tables.is_used(&model.key) {
            tables.models.remove(&model.key);
        }
    }

    /// The publisher registered as `worker` for this model and tenant.
    pub(super) fn publisher_of(&self, worker: Worker, key: &ModelKey) -> Option<Arc<Publisher>> {
        let tables = self.tables.read();
        let id = tables.workers.get(&(worker, key.clone()))?;
        tables.publishers.get(id).cloned()
    }

    /// The publishers registered as `worker`, one for each model and tenant.
    pub(super) fn publishers_of(&self, worker: Worker) -> Vec<Arc<Publisher>> {
        let tables = self.tables.read();
        tables.of_instance(worker.instance_id).filter(|p| p.worker == worker).cloned().collect()
    }

    /// Whether a peer's dump has restored `worker`, which is not registered yet.
    pub(super) fn has_recovered(&self, worker: Worker, key: &ModelKey) -> bool {
        self.tables.read().recovered.contains_key(&(worker, key.clone()))
    }

    /// Keeps `recovered` until its worker registers; at the limit its blocks are dropped. False if
    /// it has registered meanwhile.
    pub(super) fn remember_recovered(&self, worker: Worker, recovered: Recovered) -> bool {
        let seat = (worker, recovered.model.key.clone());
        let mut tables = self.tables.write();
        if tables.workers.contains_key(&seat) {
            return false;
        }
        tables.left.remove(&seat);
        if tables.makes_room(self.options.max_publishers) {
            tables.recovered.insert(seat, recovered);
        } else {
            recovered.drop_blocks(worker.instance_id);
        }
        true
    }

    /// The publisher with this number.
    pub fn publisher(&self, id: PublisherId) -> Option<Arc<Publisher>> {
        self.tables.read().publishers.get(&id).cloned()
    }

    /// All publishers, in the order of registration.
    pub fn publishers(&self) -> Vec<Arc<Publisher>> {
        self.tables.read().publishers.values().cloned().collect()
    }

    /// Whether the first replay of every publisher is over; see [`Unheard`](super::Unheard) for one
    /// of them that is behind.
    pub fn is_caught_up(&self) -> bool {
        self.publishers().iter().all(|publisher| publisher.is_caught_up())
    }

    /// Counters of all events since the start, including those of departed publishers.
    pub fn event_counts(&self) -> EventCounts {
        let tables = self.tables.read();
        let mut counts = tables.departed;
        for publisher in tables.publishers.values() {
            counts.add(&publisher.counts());
        }
        counts
    }

    /// The index of a model and tenant.
    ///
    /// # Errors
    /// `NotFound`, with the text of the published API.
    pub fn model(&self, model_name: &str, tenant_id: &str) -> Result<Arc<ModelIndex>> {
        let key = Named { model_name, tenant_id };
        self.tables.read().models.get(&key).cloned().ok_or_else(|| {
            Error::NotFound(format!("no indexer for model={model_name} tenant={tenant_id}"))
        })
    }

    /// All model indexes, by name.
    pub fn models(&self) -> Vec<Arc<ModelIndex>> {
        let mut models: Vec<_> = self.tables.read().models.values().cloned().collect();
        models.sort_by(|a, b| a.key.cmp(&b.key));
        models
    }
}

impl Tables {
    /// Resets block size and identity of `model` if it has neither publishers nor their blocks,
    /// because the next ones may differ. Removes the model that has been without them longest if
    /// there are too many.
    fn forget_unused(&mut self, model: &ModelIndex) {
        if self.is_used(&model.key) {
            return;
        }
        model.forget_block_size();
        model.agreement.forget();
        self.emptied.retain(|key| *key != model.key);
        if !model.is_kept() {
            self.emptied.push_back(model.key.clone());
        }
        if self.emptied.len() > MAX_EMPTIED
            && let Some(key) = self.emptied.pop_front()
            && !self.is_used(&key)
            && self.models.get(&key).is_some_and(|model| !model.is_kept())
        {
            self.models.remove(&key);
        }
    }

    fn is_used(&self, key: &ModelKey) -> bool {
        self.used().any(|used| used == key)
    }

    /// The models of publishers and of their blocks; some several times.
    fn used(&self) -> impl Iterator<Item = &ModelKey> {
        let of_publishers = self.publishers.values().map(|publisher| &publisher.model.key);
        of_publishers.chain(self.recovered.values().map(|past| &past.model.key))
    }

    /// Checks that another publisher of the instance may have a socket. Other instances of its host
    /// that never connected may take at most an eighth of the slots once half of them are taken.
    fn check_sockets(&self, endpoint: &str, instance_id: InstanceId) -> Result<()> {
        let Some(most) = self.max_sockets.filter(|most| self.publishers.len() >= most / 2) else {
            return Ok(());
        };
        let with_socket = || self.publishers.values().filter(|other| !is_brokered(&other.endpoint));
        if with_socket().count() >= most {
            return Err(Error::Overloaded(format!(
                "the limit of {most} publishers is reached, which follows from the limit of open files; raise \
                 that limit (ulimit -n, LimitNOFILE of systemd)"
            )));
        }
        let host = host_of(endpoint);
        // The ranks of an engine are registered at once, before the first has connected.
        let is_idle = |other: &&Arc<Publisher>| {
            other.worker.instance_id != instance_id
                && host_of(&other.endpoint) == host
                && !other.has_connected()
        };
        if with_socket().filter(is_idle).count() >= (most / 8).max(1) {
            return Err(Error::Overloaded(format!(
                "{} publishers at {host} are registered but never connected; unregister those that are gone, or \
                 start them",
                most / 8
            )));
        }
        Ok(())
    }

    /// Makes room for another model by removing an unused one. False if there is none.
    ///
    /// # Cost
    /// O(models + publishers).
    fn drop_unused(&mut self) -> bool {
        let used: HashSet<&ModelKey> = self.used().collect();
        let is_unused = |model: &&Arc<ModelIndex>| !model.is_kept() && !used.contains(&model.key);
        let Some(key) = self.models.values().find(is_unused).map(|model| model.key.clone()) else {
            return false;
        };
        drop(used);
        self.models.remove(&key).is_some()
    }

    /// Whether another worker without a publisher may be kept. At the limit the position of a
    /// departed one is dropped for it: that costs at most a replay.
    fn makes_room(&mut self, limit: usize) -> bool {
        self.left.len() + self.recovered.len() < limit || self.left.pop_first().is_some()
    }

    pub(super) fn of_instance(
        &self,
        instance_id: InstanceId,
    ) -> impl Iterator<Item = &Arc<Publisher>> {
        seats_of(&self.workers, instance_id).filter_map(|(_, id)| self.publishers.get(id))
    }
}

/// The entries of an instance's ranks, in every model and tenant.
pub(super) fn seats_of<T>(
    table: &BTreeMap<Seat, T>,
    instance_id: InstanceId,
) -> impl Iterator<Item = (&Seat, &T)> {
    table
        .range((Worker::new(instance_id, 0), ModelKey::default())..)
        .take_while(move |((worker, _), _)| worker.instance_id == instance_id)
}

/// An endpoint without its port.
fn host_of(endpoint: &str) -> &str {
    endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host)
}

impl std::fmt::Debug for Catalog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Catalog").field("options", &self.options).finish_non_exhaustive()
    }
}
