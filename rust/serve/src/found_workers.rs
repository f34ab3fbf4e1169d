//! Workers that are discovered rather than registered: by flags, in DNS, in discovery. An index
//! follows their events under the ids that routers use, and one model's selector decides between
//! them.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvflash_core::catalog::{Catalog, ModelKey, Source};
use kvflash_core::error::Result;
use kvflash_core::fleet::{Card, Change, Effect, Hearing, Roster, WorkerState, broker_path};
use kvflash_core::ids::InstanceId;
use kvflash_core::select::Selector;
use parking_lot::Mutex;

use crate::fleet::{PREFILL_TENANT, follow, listen};
use crate::frontend::engine_spec::EngineSpec;
use crate::frontend::runtime::spec::WorkerSpec;

/// The workers of an index, or of one selector.
pub struct FoundWorkers {
    catalog: Arc<Catalog>,
    /// Model card of engines that are known only by address, and of all workers of a selector.
    card: Card,
    selector: Option<Arc<Selector>>,
    roster: Mutex<Roster>,
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
        let roster = Mutex::new(Roster::new(Hearing::Sockets, max_workers));
        Self { catalog, card, selector: None, roster }
    }

    /// The workers of `selector`, without any yet. They all serve its model in its blocks, whatever
    /// their cards say.
    pub fn of_selector(catalog: Arc<Catalog>, selector: Arc<Selector>, hearing: Hearing) -> Self {
        let block_size = Some(selector.block_size());
        let card = Card { block_size, ..Card::new(selector.model().key.clone()) };
        let roster = Mutex::new(Roster::new(hearing, usize::MAX));
        Self { catalog, card, selector: Some(selector), roster }
    }

    /// Follows an engine given as `URL[,events=...][,replay=...][,id=N][,dp=N][,role=...]`; returns
    /// its id.
    ///
    /// # Errors
    /// `Config` for an invalid spec; `Conflict` for an existing id; those of the catalog.
    pub fn add(&self, spec: &str) -> Result<InstanceId> {
        let spec: EngineSpec = spec.parse()?;
        let mut roster = self.roster.lock();
        let free = || (1..).find(|id| !roster.has(*id));
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
        let joined = Change::Joined { id, ranks, events, registrant: None };
        self.join(&mut roster, joined, WorkerState::Active, card)?;
        Ok(id)
    }

    /// Follows a worker of discovery, or applies its changes; returns its id.
    ///
    /// # Errors
    /// `Config` naming the field; `Conflict` for the id of another engine; `Overloaded` at the limit;
    /// those of the catalog.
    pub fn put(&self, json: &str) -> Result<InstanceId> {
        let spec = WorkerSpec::parse(json)?;
        let (id, ranks) = (spec.id, spec.dp_size());
        let card = match &self.selector {
            Some(_) => Card { report: spec.report(), ..self.card.clone() },
            None => spec.model(),
        };
        let card = Card { source: Source::Discovery, ..card };
        let mut roster = self.roster.lock();
        let is_found = roster.card_of(id).is_some_and(|own| own.source == Source::Discovery);
        let is_same = is_found && roster.is_same(id, ranks, &card);
        if is_same {
            self.change(&mut roster, Change::Card { id, card })?;
        } else {
            let state = roster.state_of(id).filter(|_| is_found);
            if is_found {
                self.change(&mut roster, Change::Left { id })?;
            }
            let events = BTreeMap::new();
            let joined = Change::Joined { id, ranks, events, registrant: None };
            self.join(&mut roster, joined, state.unwrap_or(spec.state), card)?;
        }
        let events = Change::Events { id, events: spec.events };
        if let Err(error) = self.change(&mut roster, events) {
            if self.selector.is_none() {
                if !is_same {
                    self.change(&mut roster, Change::Left { id })?;
                }
                return Err(error);
            }
            // It serves without them: its cache is not known and earns no credit.
            tracing::error!(worker = id, %error, "cannot subscribe to its events");
        }
        Ok(id)
    }

    /// Stops following it, and forgets its blocks.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn remove(&self, id: InstanceId) -> Result<()> {
        self.change(&mut self.roster.lock(), Change::Left { id })
    }

    /// Sets whether a worker takes new requests; an index is not affected.
    ///
    /// # Errors
    /// `NotFound`; `Config` for an unknown state.
    pub fn set_state(&self, id: InstanceId, state: &str) -> Result<()> {
        self.change(&mut self.roster.lock(), Change::State { id, state: state.parse()? })
    }

    fn join(
        &self,
        roster: &mut Roster,
        joined: Change,
        state: WorkerState,
        card: Card,
    ) -> Result<()> {
        let id = joined.id();
        self.change(roster, joined)?;
        self.change(roster, Change::State { id, state })?;
        let served = self.change(roster, Change::Card { id, card });
        if served.is_err() {
            self.change(roster, Change::Left { id })?;
        }
        served
    }

    fn change(&self, roster: &mut Roster, change: Change) -> Result<()> {
        follow(roster, change, |effect| match (&self.selector, effect) {
            (Some(selector), Effect::SetWorkers(_, workers)) => selector.set_workers(&workers),
            (Some(selector), Effect::SetDraining(_, ids)) => {
                selector.set_draining(ids);
                Ok(())
            }
            (Some(selector), Effect::Report(_, worker, report)) => {
                selector.busy.report(worker, &report);
                Ok(())
            }
            (_, effect) => listen(&self.catalog, effect),
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kvflash_core::catalog::Publisher;
    use kvflash_core::clock::SystemClock;
    use kvflash_core::error::Error;
    use kvflash_core::ids::Worker;
    use kvflash_core::select::{Policies, Report, SelectorConfig};
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

    #[test]
    fn a_worker_of_discovery_replaces_no_engine_given_by_address() {
        let found = found(Some(16));
        found.add("http://h:8000,events=tcp://h:1,id=7").unwrap();
        for card in
            [json!({"model_name": "m", "kv_cache_block_size": 16}), json!({"model_name": "n"})]
        {
            let error = found.put(&worker(7, card, "tcp://h:2")).unwrap_err();
            assert!(matches!(error, Error::Conflict(_)), "{error}");
        }
        assert_eq!(listened(&found), ["7:0 m:default tcp://h:1"]);
    }

    #[test]
    fn the_workers_of_a_selector_serve_its_model() {
        let catalog = Arc::new(Catalog::default());
        let key = ModelKey { model_name: "m".into(), tenant_id: "default".into() };
        let model = catalog.model_or_create(&key, Some(16)).unwrap();
        let clock = Arc::new(SystemClock::default());
        let config = SelectorConfig::default();
        let policies = Policies::default();
        let selector = Arc::new(Selector::with_policies(config, policies, model, clock).unwrap());
        let found = FoundWorkers::of_selector(catalog, Arc::clone(&selector), Hearing::All);
        let ranks =
            || selector.loads().iter().map(|load| load.worker.to_string()).collect::<Vec<_>>();
        // Neither another model nor another block size keeps it away.
        let card = json!({"model_name": "n", "kv_cache_block_size": 32, "total_kv_blocks": 0,
            "max_num_batched_tokens": 0});
        found.put(&worker(5, card, "tcp://h:1")).unwrap();
        assert_eq!(listened(&found), ["5:0 m:default tcp://h:1 found"]);
        let rank = Worker::new(5, 0);
        assert_eq!(selector.busy.reported(rank), Some(Report::default()));
        // What changes but its ranks leaves it in its place.
        found.set_state(5, "draining").unwrap();
        found
            .put(&worker(5, json!({"model_name": "n", "total_kv_blocks": 9}), "tcp://h:2"))
            .unwrap();
        assert_eq!(listened(&found), ["5:0 m:default tcp://h:2 found"]);
        assert_eq!(selector.busy.reported(rank).unwrap().kv_total_blocks, Some(9));
        found.put(&worker(5, json!({"model_name": "n", "dp_size": 2}), "tcp://h:2")).unwrap();
        assert_eq!(ranks(), ["5:0", "5:1"]);
        assert!(selector.draining.has(5));
        // It takes requests, even if its events can't be received.
        found.put(&worker(6, json!({"model_name": "n"}), "nowhere")).unwrap();
        assert_eq!(ranks(), ["5:0", "5:1", "6:0"]);
        found.remove(5).unwrap();
        assert_eq!((ranks(), listened(&found).len()), (vec!["6:0".to_owned()], 0));
    }
}
