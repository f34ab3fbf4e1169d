//! Creates policies from names and the environment.

use std::iter::once;
use std::sync::Arc;

use kvflash_core::error::{Error, Result};
use kvflash_core::policy::settings::Origin;
use kvflash_core::policy::{Affinity, Counted, Outside, Profile, Settings, Shadow, registry};
use kvflash_core::select::{ModeSettings, Policies};
use pyo3::prelude::*;
use rand::SeedableRng;
use rand::rngs::SmallRng;

use super::error::Raised;
use super::policy_desk::PolicyDesk;

/// Check the name of a policy, or a weighted strategy such as ``prefix-cache:2,least-request``.
///
/// Raises:
///     InvalidArgumentError: Lists the known policies.
#[pyfunction]
pub(super) fn check_policy(strategy: &str) -> Raised<()> {
    let mut rng = SmallRng::seed_from_u64(0);
    Ok(registry::build(strategy.trim(), &Settings::default(), &mut rng)
        .map(drop)
        .map_err(with_flag_instead)?)
}

/// Check shadow policies: strategies, or one with settings: ``kv:temperature=0.5``.
///
/// Raises:
///     InvalidArgumentError: Names the policy, the parameter and what is legal; also for more than
///         four policies, and for a repeated policy with equal parameters.
#[pyfunction]
pub(super) fn check_shadow_policies(policies: Vec<String>) -> Raised<()> {
    let (settings, counted) = (Settings::default(), Counted::default());
    let mut rng = SmallRng::seed_from_u64(0);
    Ok(Shadow::of_texts(&policies, &settings, counted, &mut rng, 0)
        .map(drop)
        .map_err(with_flag_instead)?)
}

/// The policies that flags and variables select: at `desk`, else the mode's by name, else by
/// `ROUTING_ALGORITHM`, else `default`; defaults from the mode's profile, else from
/// `POLICY_PROFILE`. Sessions stay on their worker for the mode's time before any policy chooses;
/// without one the choice is the policy's. `counted` is what the router's load table counts;
/// `has_events`: engines' events are received.
///
/// # Errors
/// `Config` or `InvalidArgument`, naming the variable or the known values.
pub(super) fn chosen(
    mode: &ModeSettings,
    counted: Counted,
    desk: Option<&PolicyDesk>,
    default: &str,
    has_events: bool,
    seed: u64,
) -> Result<(Policies, Settings)> {
    let lookup = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let named = ["KVFLASH_POLICY_PROFILE", "AIBRIX_POLICY_PROFILE"];
    let by_flag = mode.policy_profile.clone().map(|value| ("--policy-profile", value));
    let by_variable = || named.into_iter().find_map(|name| Some((name, lookup(name)?)));
    let (source, profile) = by_flag.or_else(by_variable).unzip();
    let profile = profile.map_or(Ok(Profile::default()), |name| name.parse())?;
    let mut settings = Settings::read(profile, lookup)?;
    let is_profile = |origin: &&mut Origin| origin.name == "POLICY_PROFILE";
    if let Some(origin) = settings.origins.iter_mut().find(is_profile) {
        origin.read_from = source.map(str::to_owned);
    }
    let mut rng = SmallRng::seed_from_u64(seed);
    let affinity = mode.session_affinity_ttl_s.map(Affinity::new).transpose()?.map(Arc::new);
    let named = mode.policy.as_deref().or(settings.algorithm.as_deref()).unwrap_or(default).trim();
    let strategy = desk.map_or(named, |desk| desk.inner.name());
    let shadows = &mode.shadow_policies;
    let all: Vec<&str> = once(strategy).chain(shadows.iter().map(String::as_str)).collect();
    let unused = settings.without_effect(&all, has_events);
    for warning in settings.warnings.iter().chain(&unused) {
        tracing::warn!("{warning}");
    }
    let active = match desk {
        Some(desk) => Arc::new(Outside::new(Arc::clone(&desk.inner))),
        None => registry::build(strategy, &settings, &mut rng)
            .map_err(|error| of_flag(source_of(mode, &settings), error))?,
    };
    let shadows = Shadow::of_texts(shadows, &settings, counted, &mut rng, seed)
        .map_err(|error| of_flag("--shadow-policy", error))?;
    let set: Vec<String> = settings
        .origins
        .iter()
        .filter_map(|origin| Some(format!("{}={:?}", origin.read_from.as_ref()?, origin.value)))
        .collect();
    tracing::info!(policy = strategy, %profile, variables = set.join(" "), "routing policy");
    Ok((Policies { active, shadows, affinity }, settings))
}

/// Where the routing policy was named: the flag, or the variable that was read.
fn source_of<'a>(mode: &ModeSettings, settings: &'a Settings) -> &'a str {
    let mut origins = settings.origins.iter().filter(|origin| origin.name == "ROUTING_ALGORITHM");
    let variable = origins.find_map(|origin| origin.read_from.as_deref());
    variable.filter(|_| mode.policy.is_none()).unwrap_or("--router-mode")
}

fn of_flag(flag: &str, error: Error) -> Error {
    Error::Config(format!("{flag}: {}", with_flag_instead(error)))
}

/// Adds the flags to use instead of a name that other routers know as a policy.
fn with_flag_instead(error: Error) -> Error {
    let Error::InvalidArgument(text) = error else { return error };
    let name = text.rsplit_once("got ").map_or("", |(_, name)| name.trim_matches('"'));
    Error::InvalidArgument(match name.replace('_', "-").as_str() {
        "pd" => format!("{text}; for pd use --prefill-worker and --decode-worker"),
        "vtc-fair" => format!("{text}; for vtc-fair use --fairness vtc-fair"),
        _ => text,
    })
}
