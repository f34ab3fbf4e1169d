//! Shadow policies, which run beside the deciding one and are only counted.

use std::sync::Arc;

use parking_lot::Mutex;
use rand::rngs::SmallRng;
use rand::{RngCore, SeedableRng};

use super::contract::{Candidates, Context, RoutePolicy, Sample};
use super::cost::CandidateCost;
use super::decision::Choice;
use super::settings::Settings;
use super::tuned::{self, Counted};
use crate::error::{Error, Result};
use crate::ids::Worker;

/// Maximum shadow policies: each costs as much as a decision.
pub const MAX_SHADOWS: usize = 4;

/// The hypothetical choices of a policy for requests that another one decides.
///
/// It sees the real state: it remembers where earlier requests really went, not where it would have
/// sent them. It has its own generator, so the deciding policy draws the same numbers with and
/// without it.
#[derive(Debug)]
pub struct Shadow {
    policy: Arc<dyn RoutePolicy>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    rng: SmallRng,
    costs: Vec<CandidateCost>,
    stats: ShadowStats,
}

/// Counters of a shadow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ShadowStats {
    /// Requests that it saw.
    pub decisions: u64,
    /// Of these, requests for which it chose the same worker.
    pub agreed: u64,
    /// Requests that it could not route.
    pub refused: u64,
    /// Blocks of these prompts that the chosen workers held.
    pub active_reused_blocks: u64,
    /// Blocks of these prompts that the shadow's choices held.
    pub shadow_reused_blocks: u64,
    /// Sum of active requests on the chosen workers.
    pub active_requests: u64,
    /// Sum of active requests on the shadow's choices.
    pub shadow_requests: u64,
}

impl Shadow {
    /// `policy` as a shadow, with a generator seeded by `seed`.
    pub fn new(policy: Arc<dyn RoutePolicy>, seed: u64) -> Self {
        let state = State {
            rng: SmallRng::seed_from_u64(seed),
            costs: Vec::new(),
            stats: ShadowStats::default(),
        };
        Self { policy, state: Mutex::new(state) }
    }

    /// Creates a shadow for each of `texts`: a strategy as for
    /// [`registry::build`](super::registry::build), or one policy with its own settings,
    /// `NAME:PARAMETER=VALUE,...`. `counted` is what the router's load table counts, `rng` provides
    /// values that a policy draws once, and the shadows' generators are seeded from `seed` on.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for more than [`MAX_SHADOWS`], an unknown policy or parameter, an
    /// illegal value, and a repeated policy with equal parameters.
    pub fn of_texts(
        texts: &[String],
        settings: &Settings,
        counted: Counted,
        rng: &mut dyn RngCore,
        seed: u64,
    ) -> Result<Vec<Arc<Self>>> {
        if texts.len() > MAX_SHADOWS {
            let count = texts.len();
            return Err(Error::invalid(format!(
                "{count} shadow policies; the limit is {MAX_SHADOWS}"
            )));
        }
        let (mut shadows, mut keys) = (Vec::new(), Vec::new());
        for (at, text) in (1..).zip(texts) {
            let (policy, key) = tuned::build(text, settings, counted, rng)?;
            if keys.contains(&key) {
                return Err(Error::invalid(format!("{text:?} is given twice")));
            }
            keys.push(key);
            shadows.push(Arc::new(Self::new(policy, seed.wrapping_add(at))));
        }
        Ok(shadows)
    }

    /// The name of its policy; with its own settings, as it was given.
    pub fn name(&self) -> &str {
        self.policy.name()
    }

    /// The policy, which receives all events like the deciding one. Requests that it can't route
    /// are counted in [`observe`](Self::observe).
    pub fn policy(&self) -> &dyn RoutePolicy {
        &*self.policy
    }

    /// Records a decided request; `active` is the real choice. Returns the shadow's choice; `None`
    /// if it had none.
    ///
    /// # Cost
    /// That of the policy's own decision.
    pub fn observe(
        &self,
        context: &Context<'_>,
        candidates: &Candidates<'_>,
        active: &Choice,
    ) -> Option<Worker> {
        let mut state = self.state.lock();
        let State { rng, costs, stats } = &mut *state;
        stats.decisions += 1;
        let wanted = self.policy.choose(context, candidates, costs, rng);
        let chosen = &candidates.list[active.index];
        stats.active_reused_blocks += u64::from(chosen.overlap_blocks);
        stats.active_requests += u64::from(candidates.requests(active.index));
        match wanted {
            None => stats.refused += 1,
            Some(wanted) => {
                stats.agreed += u64::from(wanted.index == active.index);
                let overlap = candidates.list[wanted.index].overlap_blocks;
                stats.shadow_reused_blocks += u64::from(overlap);
                stats.shadow_requests += u64::from(candidates.requests(wanted.index));
            }
        }
        // The policy remembers what really happened, with its own reason if the two agree.
        let happened = Choice {
            index: active.index,
            ..wanted.filter(|wanted| wanted.index == active.index).unwrap_or(*active)
        };
        self.policy.routed(context, candidates, &happened);
        wanted.map(|wanted| candidates.list[wanted.index].worker)
    }

    /// Its counters.
    pub fn stats(&self) -> ShadowStats {
        self.state.lock().stats
    }

    /// Reports every counter, labelled with the policy, for the metrics.
    pub fn samples(&self, visit: &mut dyn FnMut(Sample<'_>)) {
        let stats = self.stats();
        // The policy's own counters are omitted: their names are those of the deciding policy.
        for (name, help, value) in [
            ("shadow_decisions_total", "Decisions that the shadow compared", stats.decisions),
            ("shadow_agreed_total", "Decisions in which both chose the same worker", stats.agreed),
            ("shadow_refused_total", "Decisions in which the shadow chose none", stats.refused),
            (
                "shadow_active_reused_blocks_total",
                "Prompt blocks held by the workers that the deciding policy chose",
                stats.active_reused_blocks,
            ),
            (
                "shadow_reused_blocks_total",
                "Prompt blocks held by the workers that the shadow would have chosen",
                stats.shadow_reused_blocks,
            ),
            (
                "shadow_active_requests_total",
                "Sum over the decisions of the requests at the workers that the deciding policy chose",
                stats.active_requests,
            ),
            (
                "shadow_requests_total",
                "Sum over the decisions of the requests at the workers that the shadow would have chosen",
                stats.shadow_requests,
            ),
        ] {
            visit(Sample { name, help, label: ("policy", self.name()), value: value as f64 });
        }
    }
}
