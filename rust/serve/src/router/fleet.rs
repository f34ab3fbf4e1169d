//! The registered workers, by model and tenant.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvflash_core::catalog::{Catalog, ModelKey};
use kvflash_core::clock::Clock;
use kvflash_core::error::{Error, Result};
use kvflash_core::fleet::{Card, Change, EventSpec, Hearing, Roster, WorkerState, port_of};
use kvflash_core::ids::{InstanceId, Worker};

use super::super::frontend::engine_spec::address_of;
use super::request::NewWorker;
use crate::RoutingOptions;
use crate::fleet::{self, Common, PREFILL_TENANT};
use crate::frontend::runtime::spec::WorkerSpec;

/// A registered worker.
#[derive(Debug)]
pub(super) struct Member {
    pub id: InstanceId,
    pub url: Option<String>,
    pub dp_size: u32,
    /// Number of registrations before it; differs when it joins again.
    pub joined: u64,
    /// Whether it comes from discovery.
    is_found: bool,
}

impl Member {
    pub fn ranks(&self) -> impl Iterator<Item = Worker> {
        let id = self.id;
        (0..self.dp_size).map(move |rank| Worker::new(id, rank))
    }
}

/// All workers of one model and tenant.
pub(super) type Pool = fleet::Pool<Member, ()>;
type Tables = fleet::Tables<Member, ()>;

impl Pool {
    pub fn member(&self, id: InstanceId) -> Option<Arc<Member>> {
        self.members().get(id).cloned()
    }

    /// The rank named in a session id, if it belongs to these workers.
    pub fn named(&self, address: &str, dp_rank: u32) -> Option<Worker> {
        let members = self.members();
        let is_it = |member: &&Arc<Member>| {
            dp_rank < member.dp_size
                && member.url.as_deref().is_some_and(|url| address_of(url) == address)
        };
        members.all().find(is_it).map(|member| Worker::new(member.id, dp_rank))
    }
}

/// All workers of a router.
///
/// # Consistency
/// Changes are serialized; a selection uses the pool that it read first.
pub(super) struct Fleet {
    fleet: fleet::Fleet<Member, ()>,
    registered_total: AtomicU64,
}

impl Deref for Fleet {
    type Target = fleet::Fleet<Member, ()>;

    fn deref(&self) -> &Self::Target {
        &self.fleet
    }
}

impl Fleet {
    pub fn new(
        routing: RoutingOptions,
        max_workers: usize,
        catalog: Arc<Catalog>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let common = Common::new(catalog, clock, &routing);
        let hearing = if routing.uses_events() { Hearing::All } else { Hearing::Nothing };
        let roster = Roster::new(hearing, max_workers);
        let of_all = routing.clone();
        let make = move |common: &Common, key: &ModelKey| {
            let (selector, queue) = common.selector(key, &of_all)?;
            Ok((selector, queue, ()))
        };
        let fleet = fleet::Fleet::new(common, roster, &routing, make);
        Self { fleet, registered_total: AtomicU64::new(0) }
    }

    /// Adds a worker with all its ranks.
    ///
    /// # Errors
    /// `InvalidArgument` for an invalid field, `Conflict` for an existing id or a block size that
    /// differs from the model's, `Overloaded` at a limit. Nothing changes then.
    pub fn add(&self, new: NewWorker) -> Result<(Arc<Pool>, Arc<Member>)> {
        new.check()?;
        let mut tables = self.fleet.write();
        let (id, report) = (new.worker_id, new.report());
        check_free(&tables, id)?;
        tables.roster.check_room(new.dp_size, new.registrant)?;
        for (field, address) in
            [("endpoint", &new.endpoint), ("replay_endpoint", &new.replay_endpoint)]
        {
            check_ports(field, address.as_deref(), new.dp_size)?;
        }
        let events = events(&new)?;
        let key = ModelKey { model_name: new.model_name, tenant_id: new.tenant_id };
        let (capacity_blocks, block_size) = (new.kv_total_blocks, new.block_size);
        let card = Card { capacity_blocks, block_size, report, ..Card::new(key) };
        let (ranks, registrant, joined) = (new.dp_size, new.registrant, self.registrations());
        let member = Member { id, url: new.url, dp_size: ranks, joined, is_found: false };
        let change = Change::Joined { id, ranks, events, registrant };
        self.join(&mut tables, member, change, new.state, card)
    }

    /// Adds a worker of discovery, or applies its changes. With other ranks or blocks, another model
    /// or address it is a new worker.
    ///
    /// # Errors
    /// `Conflict` for the id of a registered worker or a block size that differs from the model's,
    /// `Overloaded` at a limit.
    pub fn put(&self, spec: WorkerSpec) -> Result<()> {
        let (id, ranks, card) = (spec.id, spec.dp_size(), spec.model());
        let (events, mut state) = (spec.events, spec.state);
        let mut tables = self.fleet.write();
        match tables.members.get(&id) {
            Some(member) if member.is_found => {
                if member.url == spec.url && tables.roster.is_same(id, ranks, &card) {
                    self.fleet.change(&mut tables, Change::Card { id, card })?;
                    return self.fleet.change(&mut tables, Change::Events { id, events });
                }
                state = tables.roster.state_of(id).unwrap_or(state);
                self.fleet.leave(&mut tables, id)?;
            }
            _ => check_free(&tables, id)?,
        }
        let (url, joined) = (spec.url, self.registrations());
        let member = Member { id, url, dp_size: ranks, joined, is_found: true };
        let change = Change::Joined { id, ranks, events, registrant: None };
        self.join(&mut tables, member, change, state, card).map(drop)
    }

    fn join(
        &self,
        tables: &mut Tables,
        member: Member,
        joined: Change,
        state: WorkerState,
        card: Card,
    ) -> Result<(Arc<Pool>, Arc<Member>)> {
        let (id, key, member) = (member.id, card.key.clone(), Arc::new(member));
        self.fleet.join(tables, joined, Arc::clone(&member))?;
        self.fleet.change(tables, Change::State { id, state })?;
        if let Err(error) = self.fleet.change(tables, Change::Card { id, card }) {
            self.fleet.leave(tables, id)?;
            return Err(error);
        }
        // Relaxed: the lock orders it.
        self.registered_total.fetch_add(1, Ordering::Relaxed);
        Ok((Arc::clone(&tables.pools[&key]), member))
    }

    fn registrations(&self) -> u64 {
        self.registered_total.load(Ordering::Relaxed)
    }

    /// Removes a worker with its requests, load and blocks.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn remove(&self, id: InstanceId) -> Result<()> {
        self.fleet.leave(&mut self.fleet.write(), id).map(drop)
    }

    /// Removes a worker of discovery; one that was registered under the same id stays.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn remove_found(&self, id: InstanceId) -> Result<()> {
        let mut tables = self.fleet.write();
        if !tables.members.get(&id).is_some_and(|member| member.is_found) {
            return Err(fleet::unknown(id));
        }
        self.fleet.leave(&mut tables, id).map(drop)
    }

    /// A registered worker and its pool.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn known(&self, id: InstanceId) -> Result<(Arc<Pool>, Arc<Member>)> {
        let pool = self.pool_of(id).ok_or_else(|| fleet::unknown(id))?;
        let member = pool.member(id).ok_or_else(|| fleet::unknown(id))?;
        Ok((pool, member))
    }

    /// The pool of a model; the only one if none is named.
    ///
    /// # Errors
    /// `NotFound` for an unknown model or tenant; `InvalidArgument` if there are several and none is
    /// named; `NoWorker` while none is registered.
    pub fn find(&self, model_name: Option<&str>, tenant_id: Option<&str>) -> Result<Arc<Pool>> {
        let tables = self.fleet.read();
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
                // Without a tenant the prefill workers are meant if there are no others.
                let (model_name, tenant) = (name.to_owned(), tenant_id.unwrap_or(PREFILL_TENANT));
                let key = ModelKey { model_name, tenant_id: tenant.to_owned() };
                tables.pools.get(&key).cloned().ok_or_else(|| {
                    let tenant = tenant_id.unwrap_or("default");
                    Error::NotFound(format!("no workers for model={name} tenant={tenant}"))
                })
            }
            (None, _, None) => Err(match tenant_id.filter(|_| !tables.pools.is_empty()) {
                Some(tenant) => Error::NotFound(format!("no workers for tenant={tenant}")),
                None => Error::NoWorker("no worker is registered".to_owned()),
            }),
        }
    }

    /// The pool of a request; a pinned worker determines it if no model is named.
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
            (None, Some(Some(pool))) => Ok(pool),
            _ => self.find(model_name, tenant_id),
        }
    }

    /// The pools in which a request's name is searched.
    pub fn fitting(&self, model_name: Option<&str>, tenant_id: Option<&str>) -> Vec<Arc<Pool>> {
        let mut pools = self.pools();
        pools.retain(|pool| {
            model_name.is_none_or(|name| pool.key.model_name == name)
                && tenant_id.is_none_or(|tenant| pool.key.tenant_id == tenant)
        });
        pools
    }

    /// How many times a worker joined or left.
    pub fn changes(&self) -> u64 {
        let (now, ever) = self.counts();
        2 * ever - now as u64
    }

    /// Registered workers, and registrations so far.
    pub fn counts(&self) -> (usize, u64) {
        let tables = self.fleet.read();
        (tables.roster.len(), self.registrations())
    }
}

/// Checks that no worker has this id.
fn check_free(tables: &Tables, id: InstanceId) -> Result<()> {
    let Some(ModelKey { model_name, tenant_id }) = tables.roster.key_of(id) else { return Ok(()) };
    Err(Error::Conflict(format!(
        "worker_id {id} is already registered for model={model_name} tenant={tenant_id}"
    )))
}

/// The event endpoints of a worker's ranks.
fn events(new: &NewWorker) -> Result<BTreeMap<u32, EventSpec>> {
    let Some(endpoint) = &new.endpoint else { return new.events() };
    Ok(EventSpec::of_ranks(Some(endpoint), new.replay_endpoint.as_deref(), new.dp_size))
}

/// Checks that port + r is valid for every rank r.
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
