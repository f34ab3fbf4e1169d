//! What the router's routes share.

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
use super::options::RouterOptions;
use super::request::Named;
use crate::Reject;
use crate::aside::Aside;
use crate::body::Intake;
use crate::indexer::form::Form;
use crate::metrics::CommonMetrics;
use crate::remote::RemoteIndexer;
use crate::state_file::Registrations;

pub(super) struct App {
    pub options: RouterOptions,
    pub catalog: Arc<Catalog>,
    pub fleet: Fleet,
    pub common: CommonMetrics,
    pub metrics: RouterMetrics,
    pub remote: Option<RemoteIndexer>,
    /// Whether as many workers as the start waits for have registered.
    pub start: StartGate,
    /// What is told of it besides, in `/metrics`.
    pub more_metrics: RwLock<String>,
    /// What only the caller knows, for `/health`.
    pub outside_warnings: RwLock<Vec<String>>,
    /// Where answers that tell of every worker are made.
    pub aside: Aside,
    pub intake: Intake,
    /// Workers that were registered over HTTP.
    pub registrations: Registrations,
}

impl App {
    /// Whether requests are taken: from the moment on at which enough workers had registered.
    ///
    /// # Errors
    /// `NoWorker`, saying how many are missing.
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

    /// The pools in which a named request may be.
    pub fn pools_of(&self, named: &Named) -> Vec<Arc<Pool>> {
        self.fleet.fitting(named.model_name.as_deref(), named.tenant_id.as_deref())
    }
}
