//! The router's interface for other parts of the process: decisions without HTTP, and replica sync.

use std::sync::Arc;

use kvflash_core::error::{Error, Result};
use kvflash_core::ids::InstanceId;
use kvflash_core::select::{Outbox, Queue, Request, Selection, Selector};

use super::fleet::{Member, Pool};
use super::routes::RouterApp;
use crate::frontend::runtime::spec::WorkerSpec;

impl RouterApp {
    /// The selector of a request, with its queue, if there is one.
    ///
    /// # Errors
    /// `NotFound` for an unknown model of several; `InvalidArgument` if there are several and none is named;
    /// `NoWorker` while the start gate waits for workers.
    pub fn find(
        &self,
        model_name: Option<&str>,
        pinned: Option<InstanceId>,
    ) -> Result<(Arc<Selector>, Option<Arc<Queue>>)> {
        // With a single model, requests may use any name for it.
        let model_name = model_name.filter(|_| self.app.fleet.read().pools.len() > 1);
        let pool = self.app.fleet.meant(model_name, None, pinned)?;
        self.app.started()?;
        Ok((Arc::clone(&pool.selector), pool.queue.clone()))
    }

    /// Adds or changes a worker of discovery, from its JSON; returns its id.
    ///
    /// # Errors
    /// `Config`, naming the field; `Conflict` for the id of a registered worker or a block size that
    /// differs from the model's; `Overloaded` at a limit.
    pub fn put_worker(&self, json: &str) -> Result<InstanceId> {
        let spec = WorkerSpec::parse(json)?;
        let id = spec.id;
        self.app.fleet.put(spec).map(|()| id)
    }

    /// Removes a worker of discovery with its requests, load and blocks.
    ///
    /// # Errors
    /// `NotFound`, also for a registered worker.
    pub fn remove_worker(&self, id: InstanceId) -> Result<()> {
        self.app.fleet.remove_found(id)
    }

    /// Sets whether a worker takes new requests.
    ///
    /// # Errors
    /// `NotFound`; `Config` for an unknown state.
    pub fn set_worker_state(&self, id: InstanceId, state: &str) -> Result<()> {
        self.app.fleet.set_state(id, state.parse()?).map(drop)
    }

    /// Queries the remote indexer for the overlaps of the prompt, if there is one.
    pub async fn look_up(&self, selector: &Selector, request: &mut Request) {
        if let Some(remote) = &self.app.remote {
            remote.look_up(selector, request).await;
        }
    }

    /// Counts the outcome of a request that was decided without HTTP.
    pub fn note(&self, request: &Request, is_booked: bool, outcome: Result<&Selection, &Error>) {
        match is_booked {
            true => self.app.note_booking(request, outcome),
            false => self.app.note("previewed", outcome),
        }
    }

    /// Whether a remote indexer is used.
    pub fn is_remote(&self) -> bool {
        self.app.remote.is_some()
    }

    /// Whether decisions depend on a remote indexer or a policy outside the core.
    pub fn is_slow(&self) -> bool {
        self.is_remote() || self.app.options.routing.policies.desk().is_some()
    }

    /// Receives the bookings of all models.
    pub fn outbox(&self) -> Arc<Outbox> {
        Arc::clone(&self.app.fleet.common.outbox)
    }

    /// The selectors of all models.
    pub fn selectors(&self) -> Vec<Arc<Selector>> {
        self.app.fleet.pools().iter().map(|pool| Arc::clone(&pool.selector)).collect()
    }

    /// Uses this indexer from now on, in place of a discovered one; none if `None`.
    ///
    /// # Errors
    /// `Config` for an invalid address.
    pub fn set_remote_indexer(&self, url: Option<&str>) -> Result<()> {
        self.app.remote.as_ref().map_or(Ok(()), |remote| remote.set(url))
    }

    /// How many times a worker was registered or removed.
    pub fn worker_changes(&self) -> u64 {
        self.app.fleet.changes()
    }

    /// The workers that are registered now, by model: id, model, tenant, URL for gateways, and the
    /// number of the registration at this router, which differs when a worker joins again. By these
    /// two routers identify it.
    pub fn registered(&self) -> Vec<(u64, String, String, Option<String>, u64)> {
        let of_pool = |pool: &Arc<Pool>| {
            let key = &pool.key;
            let row = |one: &Arc<Member>| {
                let (model, tenant) = (key.model_name.clone(), key.tenant_id.clone());
                (one.id, model, tenant, one.url.clone(), one.joined)
            };
            pool.members().all().map(row).collect::<Vec<_>>()
        };
        self.app.fleet.pools().iter().flat_map(of_pool).collect()
    }

    /// Sets additional lines for `/metrics`, in the text format.
    pub fn set_more_metrics(&self, text: String) {
        *self.app.common.more.write() = text;
    }

    /// Sets the caller's warnings, for `/health`; replaces earlier ones.
    pub fn set_warnings(&self, warnings: Vec<String>) {
        *self.app.outside_warnings.write() = warnings;
    }
}
