//! The JSON form of a dump, parsed while it arrives: used for dumps of other systems' indexers.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io::{self, Read};
use std::sync::Arc;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::dump::apply_router_event;
use super::model::{ModelIndex, ModelKey};
use super::registration::Place;
use super::registry::Catalog;
use super::transfer::{Progress, RESTORED, TransferError, Watermark, adopt, model_of};
use crate::codec::router::RouterEvent;
use crate::ids::Worker;
use crate::index::StoreOutcome;

/// Restores a dump in the JSON form, `{"model:tenant": {"block_size": N, "events": [...]}, ...}`.
///
/// A name is split at its last `:`, unless the entry has `model_name` and `tenant_id` before its
/// events. Workers without a watermark continue from their first received batch.
///
/// # Errors
/// See [`TransferError`]; complete models are kept, an incomplete one is discarded.
///
/// # Cost
/// O(blocks); holds one event in memory at a time.
pub fn restore_json(
    catalog: &Catalog,
    from: &mut dyn Read,
    tell: &mut dyn FnMut(&Progress),
) -> Result<Progress, TransferError> {
    let mut progress = Progress::default();
    let since_event = Cell::new(0);
    let mut json =
        serde_json::Deserializer::from_reader(Measured { from, since_event: &since_event });
    let dump = Dump { catalog, progress: &mut progress, tell, since_event: &since_event };
    json.deserialize_map(dump).map_err(|error| match error.classify() {
        serde_json::error::Category::Io => TransferError::Io(error.into()),
        serde_json::error::Category::Eof => TransferError::Cut,
        _ => TransferError::NotADump(error.to_string()),
    })?;
    Ok(progress)
}

/// Maximum bytes of an event: an endless one would be held in memory.
const EVENT_BYTES_MAX: usize = 256 << 20;

/// Counts the bytes read for one event.
struct Measured<'a> {
    from: &'a mut dyn Read,
    since_event: &'a Cell<usize>,
}

impl Read for Measured<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let len = self.from.read(into)?;
        let since = self.since_event.get() + len;
        self.since_event.set(since);
        if since > EVENT_BYTES_MAX {
            let why = format!("an event of more than {EVENT_BYTES_MAX} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        Ok(len)
    }
}

struct Dump<'a> {
    catalog: &'a Catalog,
    progress: &'a mut Progress,
    tell: &'a mut dyn FnMut(&Progress),
    since_event: &'a Cell<usize>,
}

impl<'de> Visitor<'de> for Dump<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of models")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<String>()? {
            let mut entry = Entry::new(&mut self, &name);
            if let Err(error) = map.next_value_seed(&mut entry) {
                entry.undo();
                return Err(error);
            }
            entry.finish();
        }
        Ok(())
    }
}

/// One model of the dump.
struct Entry<'a, 'b> {
    dump: &'a mut Dump<'b>,
    key: ModelKey,
    block_size: Option<u32>,
    model: Option<Arc<ModelIndex>>,
    workers: HashMap<Worker, Taken>,
    watermarks: Vec<Watermark>,
}

/// What is taken of a worker's events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Taken {
    All,
    /// The index refused some.
    Part,
    /// It already holds blocks, or an earlier dump has restored it.
    None,
}

impl<'a, 'b> Entry<'a, 'b> {
    fn new(dump: &'a mut Dump<'b>, name: &str) -> Self {
        let (model_name, tenant_id) = name.rsplit_once(':').unwrap_or((name, "default"));
        let key = ModelKey { model_name: model_name.to_owned(), tenant_id: tenant_id.to_owned() };
        let (workers, watermarks) = (HashMap::new(), Vec::new());
        Self { dump, key, block_size: None, model: None, workers, watermarks }
    }

    /// The index, created with the first event.
    fn model(&mut self) -> Option<Arc<ModelIndex>> {
        if self.model.is_none() && self.workers.is_empty() {
            match model_of(self.dump.catalog, &self.key, self.block_size) {
                Ok(model) => self.model = Some(model),
                Err(error) => self.dump.progress.skip(format!("model {}: {error}", self.key)),
            }
        }
        self.model.clone()
    }

    fn apply(&mut self, event: &RouterEvent) {
        let worker = event.worker();
        let model = self.model();
        let progress = &mut *self.dump.progress;
        let catalog = self.dump.catalog;
        let taken = self.workers.entry(worker).or_insert_with(|| {
            let Some(model) = &model else { return Taken::None };
            if catalog.has_recovered(worker, &model.key) {
                progress.skip(format!("worker {worker}: {RESTORED}"));
                return Taken::None;
            }
            let held = model.index.blocks(worker);
            if held == 0 {
                return Taken::All;
            }
            progress.skip(format!("worker {worker}: the worker already holds {held} blocks"));
            Taken::None
        });
        let Some(model) = model.filter(|_| *taken != Taken::None) else { return };
        let reason = match apply_router_event(&model.index, event) {
            Ok(StoreOutcome { refused: 0, .. }) => return,
            Ok(StoreOutcome { refused, .. }) => format!("the index refused {refused} blocks"),
            Err(error) => error.to_string(),
        };
        *taken = Taken::Part;
        progress.skip(format!("worker {worker}: {reason}"));
    }

    fn taken(&self, worker: Worker) -> Taken {
        self.workers.get(&worker).copied().unwrap_or(Taken::All)
    }

    /// The workers with events from the dump.
    fn loaded(&self) -> impl Iterator<Item = Worker> {
        let loaded = self.workers.iter().filter(|(_, taken)| **taken != Taken::None);
        loaded.map(|(worker, _)| *worker)
    }

    /// Undoes the first part, because the rest will not arrive.
    fn undo(self) {
        let Some(model) = &self.model else { return };
        for worker in self.loaded() {
            if self.dump.catalog.publisher_of(worker, &model.key).is_some() {
                model.clear_worker(worker);
            } else {
                model.remove_worker(worker);
            }
        }
        if !model.is_kept() {
            self.dump.catalog.let_go(model);
        }
    }

    /// Sets every worker's position, or keeps it without one.
    fn finish(mut self) {
        let Some(model) = self.model.take() else { return };
        let place = |worker: Worker| Place { ranks: vec![worker.dp_rank], ..Place::default() };
        let mut loose: BTreeMap<Worker, Place> =
            self.loaded().map(|worker| (worker, place(worker))).collect();
        self.dump.progress.workers += loose.len();
        self.dump.progress.blocks +=
            loose.keys().map(|worker| model.index.blocks(*worker)).sum::<usize>();
        let mut placed = Vec::new();
        for mark in &self.watermarks {
            let worker = Worker::new(mark.instance_id, mark.dp_rank);
            let ranks: Vec<Worker> =
                mark.dp_ranks.iter().map(|rank| Worker::new(mark.instance_id, *rank)).collect();
            // Without all of its ranks, its position would promise too much.
            if ranks.iter().all(|rank| self.taken(*rank) != Taken::None) {
                ranks.iter().for_each(|rank| drop(loose.remove(rank)));
                placed.push((worker, mark.place()));
            }
        }
        for (worker, mut place) in placed.into_iter().chain(loose) {
            let rank = |rank: &u32| Worker::new(worker.instance_id, *rank);
            place.is_inexact |= place.ranks.iter().map(rank).any(|w| self.taken(w) == Taken::Part);
            match adopt(self.dump.catalog, &model, worker, || place) {
                Ok(()) => self.dump.progress.publishers += 1,
                Err(reason) => self.dump.progress.skip(format!("worker {worker}: {reason}")),
            }
        }
        (self.dump.tell)(self.dump.progress);
    }
}

impl<'de> DeserializeSeed<'de> for &mut Entry<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut Entry<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with block_size and events")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(field) = map.next_key::<String>()? {
            match field.as_str() {
                "model_name" => self.key.model_name = map.next_value()?,
                "tenant_id" => self.key.tenant_id = map.next_value()?,
                "block_size" => {
                    self.block_size = map.next_value::<Option<u32>>()?.filter(|size| *size > 0);
                }
                "events" => map.next_value_seed(Events(&mut *self))?,
                "watermarks" => self.watermarks = map.next_value()?,
                "error" => {
                    let error: String = map.next_value()?;
                    self.dump.progress.skip(format!("model {}: the peer says: {error}", self.key));
                }
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

struct Events<'a, 'b, 'c>(&'a mut Entry<'b, 'c>);

impl<'de> DeserializeSeed<'de> for Events<'_, '_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Events<'_, '_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of events")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while let Some(event) = seq.next_element::<RouterEvent>()? {
            self.0.dump.since_event.set(0);
            self.0.apply(&event);
        }
        Ok(())
    }
}
