//! Options of the router.

use std::ops::Deref;

use kvflash_core::error::Result;

use super::super::metrics::check_prefix;
use super::super::{Http, RouterSettings, RoutingOptions};

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
    /// As [`SelectorConfig::validate`](kvflash_core::select::SelectorConfig::validate); `Config` for options that
    /// contradict each other.
    pub fn check(&self) -> Result<()> {
        check_prefix(&self.metrics_prefix)?;
        self.routing.check()
    }
}
