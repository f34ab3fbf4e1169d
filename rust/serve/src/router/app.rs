//! Options of the router, and the shared state of its routes.

use std::ops::Deref;
use std::sync::Arc;

use axum::body::Body;
use axum::http::HeaderMap;
use bytes::Bytes;
use kvflash_core::catalog::Catalog;
use kvflash_core::error::Result as KvResult;
use kvflash_core::select::StartGate;
use parking_lot::RwLock;
use serde::de::DeserializeOwned;

use super::fleet::{Fleet, Pool};
use super::metrics::RouterMetrics;
use super::request::Named;
use crate::aside::Aside;
use crate::body::Intake;
use crate::indexer::form::Form;
use crate::metrics::{CommonMetrics, check_prefix};
use crate::remote::RemoteIndexer;
use crate::state_file::Registrations;
use crate::{Http, Reject, RouterSettings, RoutingOptions};

/// Options of a router; those in `own` are accessible as if they were here.
#[derive(Debug, Clone, Default)]
pub struct RouterOptions {
    /// Settings that only a router has: limits and timeouts.
    pub own: RouterSettings,
    /// How workers are chosen.
    pub routing: RoutingOptions,
    /// Limits of its connections and bodies.
    pub http: Http,
}

impl Deref for RouterOptions {
    type Target = RouterSettings;

    fn deref(&self) -> &RouterSettings {
        &self.own
    }
}

impl RouterOptions {
    /// Checks every field.
    ///
    /// # Errors
    /// As [`SelectorConfig::validate`](kvflash_core::select::SelectorConfig::validate); `Config`
    /// for options that contradict each other.
    pub fn check(&self) -> KvResult<()> {
        check_prefix(&self.metrics_prefix)?;
        self.routing.check()
    }
}

pub(super) struct App {
    pub options: RouterOptions,
    pub catalog: Arc<Catalog>,
    pub fleet: Fleet,
    pub common: CommonMetrics,
    pub metrics: RouterMetrics,
    pub remote: Option<RemoteIndexer>,
    /// Whether enough workers have registered.
    pub start: StartGate,
    /// The caller's warnings, for `/health`.
    pub outside_warnings: RwLock<Vec<String>>,
    /// Builds responses that list every worker.
    pub aside: Aside,
    pub intake: Intake,
    /// Workers that were registered over HTTP.
    pub registrations: Registrations,
}

impl App {
    /// Whether requests are accepted: once enough workers have registered.
    ///
    /// # Errors
    /// `NoWorker`, with the number of missing workers.
    pub fn started(&self) -> KvResult<()> {
        self.start.check(|| self.fleet.counts().1 as usize)
    }

    pub async fn read(&self, body: Body) -> Result<Bytes, Reject> {
        Ok(self.intake.whole(body).await?.bytes)
    }

    pub async fn parse<T: DeserializeOwned>(
        &self,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<T, Reject> {
        Form::of_body(headers).parse(&self.read(body).await?)
    }

    /// The pools that may have a named request.
    pub fn pools_of(&self, named: &Named) -> Vec<Arc<Pool>> {
        self.fleet.fitting(named.model_name.as_deref(), named.tenant_id.as_deref())
    }
}
