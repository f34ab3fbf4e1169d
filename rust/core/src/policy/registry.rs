//! Every policy by name; new policies are registered here.

use std::sync::Arc;

use rand::RngCore;

use super::by_metric::{ByMetric, Values};
use super::contract::RoutePolicy;
use super::kind::Policy;
pub use super::multi::build;
use super::settings::Settings;
use super::{metrics, prefix, price, session, vtc_basic};
use crate::error::{Error, Result};

/// How a policy is created.
#[derive(Debug, Clone, Copy)]
enum Build {
    /// By its own function.
    Own(fn(&Settings, &mut dyn RngCore) -> Result<Arc<dyn RoutePolicy>>),
    /// It is built in.
    BuiltIn(Policy),
    /// It minimizes these values.
    Lowest(Values),
}
use Build::{BuiltIn, Lowest, Own};

/// A policy that can be selected.
#[derive(Debug, Clone, Copy)]
pub struct Registration {
    /// The name in configuration, logs and metrics; `-` and `_` are the same.
    pub name: &'static str,
    /// A short description.
    pub summary: &'static str,
    build: Build,
}

const fn entry(name: &'static str, summary: &'static str, build: Build) -> Registration {
    Registration { name, summary, build }
}

/// All policies, in the order shown to users.
pub const POLICIES: &[Registration] = &[
    entry(price::AUTO, "lowest total cost for all requests", Own(price::build)),
    entry("kv", "lowest cost of prefill and active blocks", BuiltIn(Policy::Kv)),
    entry("round_robin", "in turn", BuiltIn(Policy::RoundRobin)),
    entry("random", "any", BuiltIn(Policy::Random)),
    entry("least_loaded", "fewest blocks", BuiltIn(Policy::LeastLoaded)),
    entry("power_of_two", "less loaded of two random workers", BuiltIn(Policy::PowerOfTwo)),
    entry("prefix-cache", "most of the prompt cached, unless busy", Own(prefix::build)),
    entry("vtc-basic", "separates heavy from light clients", Own(vtc_basic::build)),
    entry("least-request", "fewest active requests", Lowest(metrics::requests)),
    entry("least-kv-cache", "lowest KV usage, accelerator and host", Lowest(metrics::kv_usage)),
    entry("least-gpu-cache", "lowest KV usage of the accelerator", Lowest(metrics::gpu_kv_usage)),
    entry("least-latency", "shortest expected time", Lowest(metrics::latency)),
    entry("least-busy-time", "accelerator least busy", Lowest(metrics::busy_ratio)),
    entry("least-utilization", "lowest utilization", Lowest(metrics::utilization)),
    entry("throughput", "fewest tokens so far", Lowest(metrics::throughput)),
    entry("session-affinity", "the worker of the session", Own(session::build)),
];

pub(super) fn build_one(
    name: &str,
    settings: &Settings,
    rng: &mut dyn RngCore,
) -> Result<Arc<dyn RoutePolicy>> {
    let wanted = plain(name);
    // AIBrix's documentation calls this its default; its code does not know the name.
    let wanted = if wanted == "prefix_aware" { "prefix_cache".into() } else { wanted };
    let found = POLICIES.iter().find(|policy| plain(policy.name) == wanted);
    let found = found.ok_or_else(|| {
        let names: Vec<&str> = POLICIES.iter().map(|policy| policy.name).collect();
        Error::invalid(format!("policy must be one of {}; got {name:?}", names.join(", ")))
    })?;
    match found.build {
        Own(build) => build(settings, rng),
        BuiltIn(policy) => Ok(Arc::new(policy)),
        Lowest(values) => Ok(ByMetric::policy(found.name, values)),
    }
}

fn plain(name: &str) -> String {
    name.replace('-', "_").to_ascii_lowercase()
}
