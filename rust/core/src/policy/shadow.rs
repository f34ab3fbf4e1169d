//! A policy that runs beside the one that decides, and is only counted.

use std::sync::Arc;

use parking_lot::Mutex;
use rand::rngs::SmallRng;
use rand::{RngCore, SeedableRng};

use super::contract::{Candidates, Context, RoutePolicy};
use super::cost::CandidateCost;
use super::decision::Choice;
use super::sample::Sample;
use super::settings::Settings;
use super::tuned::{self, Counted};
use crate::error::{Error, Result};
use crate::ids::Worker;

/// Most policies that only watch: each costs as much as a decision.
pub const MAX_SHADOWS: usize = 4;

/// What a policy would have done with requests that another one decided.
///
/// It sees the world as it is: what it remembers of earlier requests is where they really went,
/// not where it would have sent them. It has a generator of its own, so that the one that decides
/// draws the same numbers with and without it.
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

/// What a shadow was counted for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ShadowStats {
    /// Requests it saw.
    pub decisions: u64,
    /// Of these, requests for which it chose the same worker.
    pub agreed: u64,
    /// Requests that it could not route.
    pub refused: u64,
    /// Blocks that the chosen workers held of the prompts it saw.
    pub active_reused_blocks: u64,
    /// Blocks that the workers held that it would have chosen.
    pub shadow_reused_blocks: u64,
    /// Active requests on the chosen workers, added up.
    pub active_requests: u64,
    /// Active requests on the workers that it would have chosen, added up.
    pub shadow_requests: u64,
}

impl Shadow {
    /// `policy` as a shadow, its chance starting at `seed`.
    pub fn new(policy: Arc<dyn RoutePolicy>, seed: u64) -> Self {
        let state = State {
            rng: SmallRng::seed_from_u64(seed),
            costs: Vec::new(),
            stats: ShadowStats::default(),
        };
        Self { policy, state: Mutex::new(state) }
    }

    /// One for each of `texts`: a strategy as for [`registry::build`](super::registry::build), or one policy with
    /// settings of its own, `NAME:PARAMETER=VALUE,...`. `counted` is what the router's load table counts, `rng`
    /// gives what a policy draws once, and the shadows' own chance starts behind `seed`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for more than [`MAX_SHADOWS`], an unknown policy or parameter, a value that
    /// is not legal, and the same policy with the same parameters twice.
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

    /// The name of its policy, as it was given where it has settings of its own.
    pub fn name(&self) -> &str {
        self.policy.name()
    }

    /// What is told of everything as the policy that chooses is. What it can't route is counted in
    /// [`observe`](Self::observe).
    pub fn policy(&self) -> &dyn RoutePolicy {
        &*self.policy
    }

    /// The request was decided: `active` is the choice that counts. What the shadow would have
    /// chosen; `None` when it had no choice.
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
        // What the policy remembers is what really happened, for its own reasons where they agree.
        let happened = Choice {
            index: active.index,
            ..wanted.filter(|wanted| wanted.index == active.index).unwrap_or(*active)
        };
        self.policy.routed(context, candidates, &happened);
        wanted.map(|wanted| candidates.list[wanted.index].worker)
    }

    /// What it was counted for.
    pub fn stats(&self) -> ShadowStats {
        self.state.lock().stats
    }

    /// Name every counter, labelled with the policy, for the metrics.
    pub fn samples(&self, visit: &mut dyn FnMut(Sample<'_>)) {
        let stats = self.stats();
        // What its policy says of itself has the names of the one that decides: it is left out.
        for (name, value) in [
            ("shadow_decisions_total", stats.decisions),
            ("shadow_agreed_total", stats.agreed),
            ("shadow_refused_total", stats.refused),
            ("shadow_active_reused_blocks_total", stats.active_reused_blocks),
            ("shadow_reused_blocks_total", stats.shadow_reused_blocks),
            ("shadow_active_requests_total", stats.active_requests),
            ("shadow_requests_total", stats.shadow_requests),
        ] {
            visit(Sample { name, label: ("policy", self.name()), value: value as f64 });
        }
    }
}
