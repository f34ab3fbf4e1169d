//! What other doors of the process need of a router: decisions in process, and what replicas tell each other.

use std::sync::Arc;

use kvflash_core::error::{Error, Result};
use kvflash_core::ids::InstanceId;
use kvflash_core::select::{Outbox, Queue, Request, Selection, Selector};

use super::fleet::{Member, Pool};
use super::routes::RouterApp;

impl RouterApp {
    /// What decides about a request, and the line before it where there is one.
    ///
    /// # Errors
    /// `NotFound` for a model that nobody serves; `InvalidArgument` where several are served and none is
    /// named; `NoWorker` while the start waits for workers.
    pub fn find(
        &self,
        model_name: Option<&str>,
        pinned: Option<InstanceId>,
    ) -> Result<(Arc<Selector>, Option<Arc<Queue>>)> {
        let pool = self.app.fleet.meant(model_name, None, pinned)?;
        self.app.started()?;
        Ok((Arc::clone(&pool.selector), pool.queue.clone()))
    }

    /// Have the remote indexer tell what workers hold of the prompt, where there is one.
    pub async fn look_up(&self, selector: &Selector, request: &mut Request) {
        if let Some(remote) = &self.app.remote {
            remote.look_up(selector, request).await;
        }
    }

    /// Count what became of a request that was decided outside the HTTP service.
    pub fn note(&self, request: &Request, is_booked: bool, outcome: Result<&Selection, &Error>) {
        match is_booked {
            true => self.app.note_booking(request, outcome),
            false => self.app.note("previewed", outcome),
        }
    }

    /// Whether a remote indexer is asked.
    pub fn is_remote(&self) -> bool {
        self.app.remote.is_some()
    }

    /// Whether decisions wait for somebody else: a remote indexer, or a policy outside the core.
    pub fn is_slow(&self) -> bool {
        self.is_remote() || self.app.options.policies.desk().is_some()
    }

    /// Where bookings of all models are told.
    pub fn outbox(&self) -> Arc<Outbox> {
        Arc::clone(&self.app.fleet.outbox)
    }

    /// Call with one model's selector after the other until the answer is true; whether it was.
    pub fn any_selector(&self, call: &mut dyn FnMut(&Selector) -> bool) -> bool {
        self.app.fleet.pools().iter().any(|pool| call(&pool.selector))
    }

    /// Ask this indexer from now on, in place of one that was to be found; none while there is `None`.
    ///
    /// # Errors
    /// `Config` for what is no address.
    pub fn set_remote_indexer(&self, url: Option<&str>) -> Result<()> {
        self.app.remote.as_ref().map_or(Ok(()), |remote| remote.set(url))
    }

    /// How often a worker was registered or forgotten.
    pub fn worker_changes(&self) -> u64 {
        self.app.fleet.changes()
    }

    /// The workers that are registered now, by model.
    pub fn registered(&self) -> Vec<Registered> {
        let of_pool = |pool: &Arc<Pool>| {
            let members = pool.members();
            members.all().map(|member| Registered::new(pool, member)).collect::<Vec<_>>()
        };
        self.app.fleet.pools().iter().flat_map(of_pool).collect()
    }

    /// What `/metrics` tells besides its own: lines of the text format.
    pub fn set_more_metrics(&self, text: String) {
        *self.app.more_metrics.write() = text;
    }

    /// What only the caller knows, for `/health`; replaces what it said before.
    pub fn set_warnings(&self, warnings: Vec<String>) {
        *self.app.outside_warnings.write() = warnings;
    }
}

/// A registered worker: what says that two routers mean the same one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registered {
    /// Its number.
    pub worker_id: u64,
    /// What it serves.
    pub model_name: String,
    /// For whom.
    pub tenant_id: String,
    /// Where gateways reach it.
    pub url: Option<String>,
    /// Which registration it is; another one when it comes again. Of this router.
    pub joined: u64,
}

impl Registered {
    fn new(pool: &Pool, member: &Member) -> Self {
        Self {
            worker_id: member.id,
            model_name: pool.key.model_name.clone(),
            tenant_id: pool.key.tenant_id.clone(),
            url: member.url.clone(),
            joined: member.joined,
        }
    }
}
