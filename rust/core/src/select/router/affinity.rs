//! Keeps sessions on their workers, under any policy.

use super::route::Router;
use crate::ids::Worker;
use crate::policy::{AUTO, Candidate, CandidateCost, Choice, Policy};
use crate::select::ask::Ask;

impl Router {
    /// The candidate with the session of `ask`, whatever a policy has chosen; `costs` are those of
    /// the candidates.
    pub(super) fn kept(
        &self,
        ask: &Ask<'_>,
        candidates: &[Candidate],
        costs: &[CandidateCost],
        now_ms: u64,
    ) -> Option<Choice> {
        let affinity = self.policies.affinity.as_ref()?;
        let kept = affinity.kept(self.seat?, ask.session, candidates, now_ms)?;
        let has_costs = match &self.policies.active {
            Some(active) => active.name() == AUTO,
            None => self.config.policy == Policy::Kv,
        };
        let others = costs.iter().enumerate().filter(|&(at, _)| at != kept.index);
        let next = others.map(|(_, one)| one.cost).reduce(f64::min);
        let margin = next.filter(|_| has_costs).map(|next| next - costs[kept.index].cost);
        Some(Choice { margin, ..kept })
    }

    /// The worker of the session of `ask`, by its key.
    pub(in crate::select) fn session_place(&self, ask: &Ask<'_>) -> Option<Worker> {
        let affinity = self.policies.affinity.as_ref()?;
        affinity.place(self.seat?, ask.session, self.clock.now_ms())
    }

    /// Records that the session of `ask` is at `worker` from now on. Called under the lock of the
    /// choice, so that the session's next request sees it.
    pub(super) fn keep(&self, ask: &Ask<'_>, worker: Worker, now_ms: u64) {
        if let (Some(affinity), Some(seat)) = (&self.policies.affinity, self.seat) {
            affinity.routed(seat, ask.session, worker, now_ms);
        }
    }
}
