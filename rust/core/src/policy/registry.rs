//! Every policy by name: the one place that a new one is entered.

use std::sync::Arc;

use rand::RngCore;

use super::contract::RoutePolicy;
use super::kind::Policy;
use super::settings::Settings;
use super::{
    least_busy_time, least_gpu_cache, least_kv_cache, least_latency, least_request,
    least_utilization, multi, prefix, price, session, throughput, today, vtc_basic,
};
use crate::error::{Error, Result};

type Build = fn(&Settings, &mut dyn RngCore) -> Result<Arc<dyn RoutePolicy>>;

/// One policy that can be asked for.
#[derive(Debug, Clone, Copy)]
pub struct Registration {
    /// The name in configuration, logs and metrics; `-` and `_` are the same.
    pub name: &'static str,
    /// What it does, in half a sentence.
    pub summary: &'static str,
    build: Build,
}

const fn entry(name: &'static str, summary: &'static str, build: Build) -> Registration {
    Registration { name, summary, build }
}

/// All policies, in the order in which they are listed to users.
pub const POLICIES: &[Registration] = &[
    entry(price::AUTO, "where the request costs everybody least", price::build),
    entry("kv", "lowest cost of prefill and active blocks", |_, _| Ok(today::policy(Policy::Kv))),
    entry("round_robin", "in turn", |_, _| Ok(today::policy(Policy::RoundRobin))),
    entry("random", "any", |_, _| Ok(today::policy(Policy::Random))),
    entry("least_loaded", "fewest blocks", |_, _| Ok(today::policy(Policy::LeastLoaded))),
    entry("power_of_two", "the better of two", |_, _| Ok(today::policy(Policy::PowerOfTwo))),
    entry("prefix-cache", "most of the prompt, if not too busy", prefix::build),
    entry("vtc-basic", "heavy clients apart from light ones", vtc_basic::build),
    entry("least-request", "fewest active requests", least_request::build),
    entry("least-kv-cache", "lowest KV usage, accelerator and host", least_kv_cache::build),
    entry("least-gpu-cache", "lowest KV usage of the accelerator", least_gpu_cache::build),
    entry("least-latency", "shortest expected time", least_latency::build),
    entry("least-busy-time", "accelerator least busy", least_busy_time::build),
    entry("least-utilization", "lowest utilization", least_utilization::build),
    entry("throughput", "fewest tokens so far", throughput::build),
    entry("session-affinity", "where the session was", session::build),
];

/// The policy that `strategy` names, or a weighted choice of several; see [`multi::parse`].
///
/// `rng` gives what a policy draws once for its lifetime, such as a hash seed.
///
/// # Errors
/// [`Error::InvalidArgument`] for a strategy that can't be read or a name that is unknown.
pub fn build(
    strategy: &str,
    settings: &Settings,
    rng: &mut dyn RngCore,
) -> Result<Arc<dyn RoutePolicy>> {
    multi::build(strategy, settings, rng)
}

pub(super) fn build_one(
    name: &str,
    settings: &Settings,
    rng: &mut dyn RngCore,
) -> Result<Arc<dyn RoutePolicy>> {
    let wanted = plain(name);
    // What AIBrix's document calls its default; no code of theirs knows it.
    let wanted = if wanted == "prefix_aware" { "prefix_cache".into() } else { wanted };
    let found = POLICIES.iter().find(|policy| plain(policy.name) == wanted);
    let found = found.ok_or_else(|| {
        let names: Vec<&str> = POLICIES.iter().map(|policy| policy.name).collect();
        Error::invalid(format!("policy must be one of {}; got {name:?}", names.join(", ")))
    })?;
    (found.build)(settings, rng)
}

fn plain(name: &str) -> String {
    name.replace('-', "_").to_ascii_lowercase()
}
