//! Every policy by name; new policies are registered here.

use std::sync::Arc;

use rand::RngCore;

use super::by_metric::{self, each, lowest};
use super::contract::RoutePolicy;
use super::cost::Policy;
pub use super::multi::build;
use super::prefix::PrefixCache;
use super::price::{self, PricePolicy};
use super::session::SessionAffinity;
use super::settings::Settings;
use super::vtc_basic::VtcBasic;
use crate::error::{Error, Result};

/// Creates the policy of this name.
type Build = fn(&'static str, &Settings, &mut dyn RngCore) -> Arc<dyn RoutePolicy>;

/// All policies by their names in configuration, logs and metrics, in the order shown to users; `-`
/// and `_` are the same.
pub(super) const POLICIES: [(&str, Build); 16] = [
    (price::AUTO, |_, _, _| Arc::new(PricePolicy::default())),
    ("kv", |_, _, _| Arc::new(Policy::Kv)),
    ("round_robin", |_, _, _| Arc::new(Policy::RoundRobin)),
    ("random", |_, _, _| Arc::new(Policy::Random)),
    ("least_loaded", |_, _, _| Arc::new(Policy::LeastLoaded)),
    ("power_of_two", |_, _, _| Arc::new(Policy::PowerOfTwo)),
    ("prefix-cache", |_, settings, rng| {
        Arc::new(PrefixCache::new(&settings.prefix, settings.hash_seed(rng)))
    }),
    ("vtc-basic", |_, settings, _| Arc::new(VtcBasic::new(&settings.vtc))),
    ("least-request", |name, _, _| lowest(name, by_metric::requests)),
    ("least-kv-cache", |name, _, _| lowest(name, by_metric::kv_usage)),
    ("least-gpu-cache", |name, _, _| {
        lowest(name, |found, out| each(found, out, |metrics| metrics.gpu_kv_usage))
    }),
    ("least-latency", |name, _, _| lowest(name, by_metric::latency)),
    ("least-busy-time", |name, _, _| {
        lowest(name, |found, out| each(found, out, |metrics| metrics.busy_ratio))
    }),
    ("least-utilization", |name, _, _| {
        lowest(name, |found, out| each(found, out, |metrics| metrics.utilization))
    }),
    ("throughput", |name, _, _| lowest(name, by_metric::throughput)),
    ("session-affinity", |_, settings, _| Arc::new(SessionAffinity::new(settings.max_sessions))),
];

pub(super) fn build_one(
    name: &str,
    settings: &Settings,
    rng: &mut dyn RngCore,
) -> Result<Arc<dyn RoutePolicy>> {
    let wanted = plain(name);
    // AIBrix's documentation calls this its default; its code does not know the name.
    let wanted = if wanted == "prefix_aware" { "prefix_cache".into() } else { wanted };
    let found = POLICIES.into_iter().find(|(name, _)| plain(name) == wanted);
    let (name, build) = found.ok_or_else(|| {
        let names = POLICIES.map(|(name, _)| name).join(", ");
        Error::invalid(format!("policy must be one of {names}; got {name:?}"))
    })?;
    Ok(build(name, settings, rng))
}

fn plain(name: &str) -> String {
    name.replace('-', "_").to_ascii_lowercase()
}
