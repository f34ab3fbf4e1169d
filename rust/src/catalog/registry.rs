//! Who is registered: publishers by id, model indexes by (model, tenant).

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

use super::command::{Command, CommandQueue};
use super::counters::EventCounts;
use super::model::{ModelIndex, ModelKey};
use super::publisher::{Publisher, PublisherId};
use crate::clock::{Clock, SystemClock};
use crate::codec;
use crate::error::{Error, Result};
use crate::ids::{InstanceId, Worker};
use crate::index::{self, CountMode, RadixIndex};

/// Default limit of one index: 32 Mi blocks, about 4 GiB when no two workers share any.
pub const DEFAULT_MAX_BLOCKS: usize = 33_554_432;

/// Limits of a catalog.
#[derive(Debug, Clone)]
pub struct CatalogOptions {
    /// Publishers that may be registered at once.
    pub max_publishers: usize,
    /// Model indexes that may exist at once.
    pub max_models: usize,
    /// Blocks (memberships) that one index may hold; 0 = no limit. Beyond it stores are refused and counted.
    pub max_blocks: usize,
    /// Bytes that one index may occupy; 0 = no limit. Near it the least recently stored blocks go.
    pub index_memory_bytes: usize,
    /// Limits of one event frame.
    pub frame: codec::Limits,
}

impl Default for CatalogOptions {
    fn default() -> Self {
        Self {
            max_publishers: 65_536,
            max_models: 4_096,
            max_blocks: DEFAULT_MAX_BLOCKS,
            index_memory_bytes: 0,
            frame: codec::Limits::default(),
        }
    }
}

/// What a publisher is registered as.
#[derive(Debug, Clone)]
pub struct Registration {
    /// The engine instance and rank whose blocks it reports.
    pub worker: Worker,
    /// The index that it feeds.
    pub key: ModelKey,
    /// Tokens in a block; `None` = learn it from the engine.
    pub block_size: Option<u32>,
    /// Address of the PUB socket.
    pub endpoint: String,
    /// Address of the replay socket.
    pub replay_endpoint: Option<String>,
    /// Blocks that the device of each of its ranks has, where somebody knows.
    pub capacity_blocks: Option<u64>,
}

#[derive(Default)]
struct Tables {
    models: HashMap<ModelKey, Arc<ModelIndex>>,
    publishers: BTreeMap<PublisherId, Arc<Publisher>>,
    workers: BTreeMap<Worker, PublisherId>,
    /// Counts of publishers that are registered no more.
    departed: EventCounts,
}

/// All model indexes of a process and the publishers that feed them.
///
/// # Consistency
/// Registering and unregistering are serialised; queries and frames go on meanwhile.
pub struct Catalog {
    options: CatalogOptions,
    clock: Arc<dyn Clock>,
    tables: RwLock<Tables>,
    next_id: AtomicU64,
    /// Orders for the transport door.
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
            commands: CommandQueue::default(),
        }
    }

    /// Its limits.
    pub fn options(&self) -> &CatalogOptions {
        &self.options
    }

    /// The index of `key`, made when it is not there yet. A block size given with the first call holds
    /// as long as the index; without one it is learned, and forgotten with the last publisher.
    ///
    /// # Errors
    /// `Conflict` when the index has another block size; `Overloaded` at the limit of models.
    pub fn model_or_create(
        &self,
        key: &ModelKey,
        block_size: Option<u32>,
    ) -> Result<Arc<ModelIndex>> {
        self.model_in(&mut self.tables.write(), key, block_size, block_size)
    }

    fn model_in(
        &self,
        tables: &mut Tables,
        key: &ModelKey,
        block_size: Option<u32>,
        given: Option<u32>,
    ) -> Result<Arc<ModelIndex>> {
        if let Some(model) = tables.models.get(key) {
            if let Some(size) = block_size {
                let known = model.learn_block_size(size);
                if known != size {
                    return Err(Error::Conflict(format!(
                        "block_size {size} is not the {known} of model={} tenant={}",
                        key.model_name, key.tenant_id
                    )));
                }
            }
            return Ok(Arc::clone(model));
        }
        if tables.models.len() >= self.options.max_models {
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
                ..index::Limits::default()
            },
            hash_seed: rand::random(),
        });
        let model = Arc::new(ModelIndex::new(key.clone(), given.unwrap_or(0), Box::new(index)));
        if let Some(size) = block_size {
            model.learn_block_size(size);
        }
        tables.models.insert(key.clone(), Arc::clone(&model));
        Ok(model)
    }

    /// Register a publisher and order the transport door to subscribe to it.
    ///
    /// # Errors
    /// `Conflict`: the worker is registered already, its instance belongs to another model or tenant,
    /// or the block size is not the index's. `InvalidArgument`: an endpoint, a model name or a block size that
    /// cannot be. `Overloaded`: a limit is reached.
    pub fn register(&self, registration: Registration) -> Result<Arc<Publisher>> {
        let Registration { worker, key, block_size, endpoint, replay_endpoint, capacity_blocks } =
            registration.clone();
        check_endpoint("endpoint", &endpoint)?;
        if let Some(replay) = &replay_endpoint {
            check_endpoint("replay_endpoint", replay)?;
        }
        if key.model_name.is_empty() {
            return Err(Error::invalid("model_name must not be empty"));
        }
        if block_size == Some(0) {
            return Err(Error::invalid("block_size must be at least 1, got 0"));
        }
        if capacity_blocks == Some(0) {
            return Err(Error::invalid("capacity_blocks must be at least 1, got 0"));
        }
        let mut tables = self.tables.write();
        if tables.workers.contains_key(&worker) {
            return Err(Error::Conflict(format!(
                "instance_id {} dp_rank {} is registered already",
                worker.instance_id, worker.dp_rank
            )));
        }
        if let Some(other) = tables.of_instance(worker.instance_id).find(|p| p.model.key != key) {
            return Err(Error::Conflict(format!(
                "instance_id {} is registered already under model={} tenant={}; instance ids are unique \
                 across models and tenants",
                worker.instance_id, other.model.key.model_name, other.model.key.tenant_id
            )));
        }
        if tables.publishers.len() >= self.options.max_publishers {
            return Err(Error::Overloaded(format!(
                "the limit of {} publishers is reached",
                self.options.max_publishers
            )));
        }
        let model = self.model_in(&mut tables, &key, block_size, None)?;
        // Relaxed: the table's lock orders everything else.
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let frame = self.options.frame;
        let publisher = Publisher::new(id, registration, model, frame, Arc::clone(&self.clock));
        let publisher = Arc::new(publisher);
        tables.publishers.insert(id, Arc::clone(&publisher));
        tables.workers.insert(worker, id);
        self.commands.push(Command::Subscribe { publisher: id, endpoint, replay_endpoint });
        Ok(publisher)
    }

    /// Unregister an instance, or one rank of it; its blocks are gone when this returns.
    ///
    /// # Errors
    /// `NotFound` when nothing fits.
    pub fn unregister(
        &self,
        instance_id: InstanceId,
        model_name: &str,
        tenant_id: Option<&str>,
        dp_rank: Option<u32>,
    ) -> Result<usize> {
        let mut tables = self.tables.write();
        let gone: Vec<Arc<Publisher>> = tables
            .of_instance(instance_id)
            .filter(|p| p.model.key.model_name == model_name)
            .filter(|p| tenant_id.is_none_or(|tenant| p.model.key.tenant_id == tenant))
            .filter(|p| dp_rank.is_none_or(|rank| p.worker.dp_rank == rank))
            .cloned()
            .collect();
        if gone.is_empty() {
            let rank = dp_rank.map(|rank| format!(" dp_rank={rank}")).unwrap_or_default();
            let tenant = tenant_id.map(|tenant| format!(" tenant={tenant}")).unwrap_or_default();
            return Err(Error::NotFound(format!(
                "instance_id {instance_id} is not registered for model={model_name}{tenant}{rank}"
            )));
        }
        for publisher in &gone {
            tables.publishers.remove(&publisher.id);
            tables.workers.remove(&publisher.worker);
            publisher.close();
            tables.departed.add(&publisher.counts());
            self.commands.push(Command::Unsubscribe { publisher: publisher.id });
            let key = &publisher.model.key;
            if !tables.publishers.values().any(|other| other.model.key == *key) {
                // The next one to register may have another block size.
                publisher.model.forget_block_size();
            }
        }
        Ok(gone.len())
    }

    /// The publisher with this number.
    pub fn publisher(&self, id: PublisherId) -> Option<Arc<Publisher>> {
        self.tables.read().publishers.get(&id).cloned()
    }

    /// All publishers, in the order of registration.
    pub fn publishers(&self) -> Vec<Arc<Publisher>> {
        self.tables.read().publishers.values().cloned().collect()
    }

    /// What became of events since the start, those of publishers that have left included.
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
    /// `NotFound`, in the words of the published API.
    pub fn model(&self, model_name: &str, tenant_id: &str) -> Result<Arc<ModelIndex>> {
        let key = ModelKey { model_name: model_name.to_owned(), tenant_id: tenant_id.to_owned() };
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

    /// Workers registered for a model and tenant, by instance and rank.
    pub fn workers_of(&self, key: &ModelKey) -> Vec<Worker> {
        let tables = self.tables.read();
        tables
            .workers
            .iter()
            .filter(|(_, id)| tables.publishers.get(id).is_some_and(|p| p.model.key == *key))
            .map(|(worker, _)| *worker)
            .collect()
    }
}

impl Tables {
    fn of_instance(&self, instance_id: InstanceId) -> impl Iterator<Item = &Arc<Publisher>> {
        self.workers
            .range(Worker::new(instance_id, 0)..=Worker::new(instance_id, u32::MAX))
            .filter_map(|(_, id)| self.publishers.get(id))
    }
}

impl std::fmt::Debug for Catalog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Catalog").field("options", &self.options).finish_non_exhaustive()
    }
}

/// Check an event endpoint: `tcp://host:port`, `ipc://path` or `inproc://name`.
///
/// # Errors
/// `InvalidArgument`: names the field and says what is legal.
fn check_endpoint(field: &str, endpoint: &str) -> Result<()> {
    let legal = match endpoint.split_once("://") {
        Some(("tcp", address)) => address.rsplit_once(':').is_some_and(|(host, port)| {
            !host.is_empty() && (port == "*" || port.parse::<u16>().is_ok())
        }),
        Some(("ipc" | "inproc", path)) => !path.is_empty(),
        _ => false,
    };
    if legal {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{field} must be tcp://host:port, ipc://path or inproc://name, got {endpoint:?}"
    )))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_follow_the_published_rules() {
        for good in [
            "tcp://*:5558",
            "tcp://127.0.0.1:0",
            "inproc://x",
            "ipc:///tmp/a.sock",
            "tcp://[::1]:5557",
        ] {
            assert_eq!(check_endpoint("endpoint", good), Ok(()));
        }
        for bad in [
            "tcp://host",
            "tcp://:5558",
            "udp://host:5558",
            "not-an-endpoint",
            "tcp://host:99999",
            "",
        ] {
            let error = check_endpoint("endpoint", bad).unwrap_err().to_string();
            assert!(error.starts_with("endpoint must be"), "{error}");
        }
    }
}
