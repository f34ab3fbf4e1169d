//! Engines that are discovered rather than registered: by flags, in DNS, in discovery. The index
//! follows their events under the ids that routers use.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvflash_core::catalog::{Catalog, ModelKey, Source};
use kvflash_core::error::Result;
use kvflash_core::fleet::{Card, Change, Hearing, Roster, broker_path};
use kvflash_core::ids::InstanceId;
use parking_lot::Mutex;

use crate::fleet::{PREFILL_TENANT, follow};
use crate::frontend::engine_spec::EngineSpec;
use crate::frontend::runtime::spec::WorkerSpec;

/// An indexer's workers without registration.
pub struct FoundWorkers {
    catalog: Arc<Catalog>,
    /// Model card of engines that are known only by address.
    card: Card,
    tables: Mutex<Tables>,
}

struct Tables {
    roster: Roster,
    /// The spec of each from discovery.
    specs: BTreeMap<InstanceId, WorkerSpec>,
}

impl FoundWorkers {
    /// Without workers yet. Engines known only by address serve `key`, in blocks of `block_size`
    /// tokens.
    pub fn new(
        catalog: Arc<Catalog>,
        key: ModelKey,
        block_size: Option<u32>,
        max_workers: usize,
    ) -> Self {
        let card = Card { block_size, ..Card::new(key) };
        let roster = Roster::new(Hearing::Sockets, max_workers);
        let tables = Mutex::new(Tables { roster, specs: BTreeMap::new() });
        Self { catalog, card, tables }
    }

    /// Follows an engine given as `URL[,events=...][,replay=...][,id=N][,dp=N][,role=...]`; returns
    /// its id.
    ///
    /// # Errors
    /// `Config` for an invalid spec; `Conflict` for an existing id; those of the catalog.
    pub fn add(&self, spec: &str) -> Result<InstanceId> {
        let spec: EngineSpec = spec.parse()?;
        let mut tables = self.tables.lock();
        let free = || (1..).find(|id| !tables.roster.has(*id));
        let id = spec.instance_id.or_else(free).expect("fewer workers than numbers");
        let mut card = self.card.clone();
        if spec.is_prefill {
            PREFILL_TENANT.clone_into(&mut card.key.tenant_id);
        }
        let (ranks, events) = (spec.dp_size, spec.event_specs());
        let url = &spec.url;
        match &spec.events {
            None => tracing::warn!(
                worker = id,
                url,
                "this worker is not followed, because an indexer reads only event sockets: add \
                 events=tcp://HOST:PORT to its --worker (also for an SGLang engine, which only a frontend asks for \
                 its socket)"
            ),
            Some(events) if broker_path(events).is_some() => tracing::warn!(
                worker = id,
                url,
                events,
                "this worker is not followed, because an indexer does not read events over a broker: start it with \
                 --event-plane zmq and set events=tcp://HOST:PORT"
            ),
            Some(_) => {}
        }
        self.join(&mut tables, Change::Joined { id, ranks, events, registrant: None }, card)?;
        Ok(id)
    }

    /// Follows a worker of discovery, or applies its changes; returns its id.
    ///
    /// # Errors
    /// `Config` naming the field; `Overloaded` at the limit; those of the catalog.
    pub fn put(&self, json: &str) -> Result<InstanceId> {
        let spec = WorkerSpec::parse(json)?;
        let id = spec.id;
        let mut tables = self.tables.lock();
        let before = tables.specs.get(&id);
        let (ranks, events) = (spec.dp_size(), spec.events.clone());
        if before.is_some_and(|before| before.is_same_but_events(&spec)) {
            let followed = self.change(&mut tables, Change::Events { id, events });
            tables.specs.insert(id, spec);
            return followed.map(|()| id);
        }
        if before.is_some() {
            self.leave(&mut tables, id)?;
        }
        let tenant = if spec.is_prefill() { PREFILL_TENANT } else { "default" };
        let model_name = spec.card.model_name.clone();
        let card = Card {
            block_size: spec.card.kv_cache_block_size,
            capacity_blocks: spec.card.total_kv_blocks.filter(|blocks| *blocks > 0),
            source: Source::Discovery,
            ..Card::new(ModelKey { model_name, tenant_id: tenant.to_owned() })
        };
        self.join(&mut tables, Change::Joined { id, ranks, events, registrant: None }, card)?;
        tables.specs.insert(id, spec);
        Ok(id)
    }

    /// Stops following it, and forgets its blocks.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn remove(&self, id: InstanceId) -> Result<()> {
        self.leave(&mut self.tables.lock(), id)
    }

    /// Sets whether a worker takes new requests; the index is not affected.
    ///
    /// # Errors
    /// `NotFound`; `Config` for an unknown state.
    pub fn set_state(&self, id: InstanceId, state: &str) -> Result<()> {
        self.change(&mut self.tables.lock(), Change::State { id, state: state.parse()? })
    }

    fn join(&self, tables: &mut Tables, change: Change, card: Card) -> Result<()> {
        let id = change.id();
        self.change(tables, change)?;
        let served = self.change(tables, Change::Card { id, card });
        if served.is_err() {
            self.leave(tables, id)?;
        }
        served
    }

    fn leave(&self, tables: &mut Tables, id: InstanceId) -> Result<()> {
        tables.specs.remove(&id);
        self.change(tables, Change::Left { id })
    }

    fn change(&self, tables: &mut Tables, change: Change) -> Result<()> {
        follow(&mut tables.roster, change, |effect| crate::fleet::listen(&self.catalog, effect))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kvflash_core::catalog::Publisher;
    use kvflash_core::error::Error;
    use serde_json::{Value, json};

    use super::*;

    fn found(block_size: Option<u32>) -> FoundWorkers {
        let key = ModelKey { model_name: "m".into(), tenant_id: "default".into() };
        FoundWorkers::new(Arc::default(), key, block_size, 2)
    }

    fn listened(found: &FoundWorkers) -> Vec<String> {
        let line = |publisher: Arc<Publisher>| {
            let view = publisher.view();
            let of = match view.source {
                Source::Zmq => "",
                Source::Discovery => " found",
            };
            format!("{} {} {}{of}", view.worker, publisher.model.key, view.endpoint)
        };
        found.catalog.publishers().into_iter().map(line).collect()
    }

    fn worker(id: u64, card: Value, endpoint: &str) -> String {
        let plane = json!({"kind": "tcp", "address": "h:1"});
        let events = json!({"0": {"endpoint": endpoint}});
        json!({"id": id, "plane": plane, "endpoint": "n/c/e", "card": card, "events": events})
            .to_string()
    }

    #[test]
    fn engines_by_address_serve_the_model_of_the_flags() {
        let found = found(Some(16));
        assert_eq!(found.add("http://h:8000,events=tcp://h:1,dp=2").unwrap(), 1);
        assert_eq!(found.add("http://i:8000,events=tcp://i:1,id=7,role=prefill").unwrap(), 7);
        let wanted =
            ["1:0 m:default tcp://h:1", "1:1 m:default tcp://h:2", "7:0 m:prefill tcp://i:1"];
        assert_eq!(listened(&found), wanted);
        assert_eq!(found.catalog.model("m", "default").unwrap().block_size(), Some(16));
        let error = found.add("http://j:8000,events=tcp://j:1").unwrap_err();
        assert!(matches!(error, Error::Overloaded(_)), "{error}");
        found.remove(1).unwrap();
        assert_eq!(listened(&found), wanted[2..]);
        assert!(matches!(found.remove(1), Err(Error::NotFound(_))));
    }

    #[test]
    fn workers_of_discovery_serve_what_their_card_says() {
        let found = found(None);
        let card = json!({"model_name": "n", "kv_cache_block_size": 32});
        found.put(&worker(5, card.clone(), "tcp://h:1")).unwrap();
        found.put(&worker(5, card.clone(), "tcp://h:9")).unwrap();
        assert_eq!(listened(&found), ["5:0 n:default tcp://h:9 found"]);
        let other = json!({"model_name": "n", "model_type": ["prefill"]});
        found.put(&worker(5, other, "tcp://h:9")).unwrap();
        assert_eq!(listened(&found), ["5:0 n:prefill tcp://h:9 found"]);
        // Events available only over a broker are not received, and invalid workers are not
        // followed.
        found.put(&worker(6, card.clone(), "nats://s/6/0")).unwrap();
        assert_eq!(listened(&found).len(), 1);
        found.remove(6).unwrap();
        let sizes = [16, 32].map(|size| json!({"model_name": "n", "kv_cache_block_size": size}));
        found.put(&worker(5, sizes[0].clone(), "tcp://h:1")).unwrap();
        let error = found.put(&worker(6, sizes[1].clone(), "tcp://h:2")).unwrap_err();
        assert!(matches!(error, Error::Conflict(_)), "{error}");
        assert_eq!(listened(&found), ["5:0 n:default tcp://h:1 found"]);
    }
}
