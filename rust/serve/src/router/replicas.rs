//! What replicas of a router tell each other, and what is told of it.

use std::sync::Arc;

use kvflash_core::select::{Outbox, Selector};

use super::app::RouterApp;
use super::fleet::{Member, Pool};

impl RouterApp {
    /// Where bookings of all models are told.
    pub fn outbox(&self) -> Arc<Outbox> {
        Arc::clone(&self.app.fleet.outbox)
    }

    /// Call with one model's selector after the other until the answer is true; whether it was.
    pub fn any_selector(&self, call: &mut dyn FnMut(&Selector) -> bool) -> bool {
        self.app.fleet.pools().iter().any(|pool| call(&pool.selector))
    }

    /// How often a worker was registered or forgotten.
    pub fn worker_changes(&self) -> u64 {
        self.app.fleet.changes()
    }

    /// The workers that are registered now, by model.
    pub fn registered(&self) -> Vec<Registered> {
        let of_pool = |pool: &Arc<Pool>| {
            let members = pool.members();
            members.iter().map(|member| Registered::new(pool, member)).collect::<Vec<_>>()
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
