//! `vtc-basic`: sends clients with many recent tokens to other workers than clients with few.
//!
//! It moves heavy clients; it does not delay them. For that see [`crate::fair`].

mod tracker;

use parking_lot::Mutex;
use rand::{Rng, RngCore};

pub(super) use tracker::TokenTracker;

use super::by_metric::choose_lowest;
use super::contract::{Candidates, Context, Finished, Polarity, RoutePolicy, Sample};
use super::cost::CandidateCost;
use super::decision::{Choice, Reason};
use super::settings::VtcSettings;

/// The maximum that chance adds to a score in `aibrix-compat`.
const JITTER: f64 = 0.1;

/// The policy and its clients.
#[derive(Debug)]
pub struct VtcBasic {
    settings: VtcSettings,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    tracker: TokenTracker,
    values: Vec<f64>,
    scores: Vec<Option<f64>>,
    corrected: u64,
}

impl VtcBasic {
    /// The policy without clients.
    pub fn new(settings: &VtcSettings) -> Self {
        let state = State {
            tracker: TokenTracker::new(settings),
            values: Vec::new(),
            scores: Vec::new(),
            corrected: 0,
        };
        Self { settings: settings.clone(), state: Mutex::new(state) }
    }

    /// Weighted tokens of `user` in the window.
    #[cfg(test)]
    pub fn tokens(&self, user: &str, now_ms: u64) -> f64 {
        self.state.lock().tracker.total(user, now_ms)
    }

    /// Scores of all candidates, in order, without chance; low ones are good.
    fn judge(
        &self,
        state: &mut State,
        user: &str,
        candidates: &Candidates<'_>,
        now_ms: u64,
    ) -> f64 {
        let State { tracker, values, .. } = state;
        let total = tracker.total(user, now_ms);
        let loads = (0..candidates.len()).map(|index| candidates.running(index));
        values.clear();
        if self.settings.is_compat {
            position_scores(&self.settings, total, tracker.range(), loads, values);
            return total;
        }
        let share = tracker.share(user, now_ms);
        share_scores(&self.settings, share, loads, values);
        share
    }
}

impl RoutePolicy for VtcBasic {
    fn name(&self) -> &str {
        "vtc-basic"
    }

    fn choose(
        &self,
        context: &Context<'_>,
        candidates: &Candidates<'_>,
        costs: &mut Vec<CandidateCost>,
        rng: &mut dyn RngCore,
    ) -> Option<Choice> {
        let user = context.user.unwrap_or("");
        let mut state = self.state.lock();
        let mut score = None;
        if user.is_empty() {
            // No client has tokens: any worker, or the least used one.
            state.values.clear();
            let load = |index| candidates.running(index) / self.settings.max_pod_load;
            state.values.extend((0..candidates.len()).map(load));
            if self.settings.is_compat {
                state.values.fill(0.0);
            }
        } else {
            score = Some(self.judge(&mut state, user, candidates, context.now_ms));
            if self.settings.is_compat {
                state.values.iter_mut().for_each(|value| *value += rng.random_range(0.0..JITTER));
            }
        }
        let State { values, scores, .. } = &mut *state;
        candidates.fill(costs, |index| values[index]);
        scores.clear();
        scores.extend(values.iter().map(|&value| Some(value)));
        let choice = choose_lowest(scores, rng)?;
        let is_chance = user.is_empty() && self.settings.is_compat && choice.ties > 1;
        let reason = if is_chance { Reason::Chance } else { choice.reason };
        Some(Choice { score, reason, ..choice })
    }

    fn is_scorer(&self) -> bool {
        true
    }

    fn scores(
        &self,
        context: &Context<'_>,
        candidates: &Candidates<'_>,
        scores: &mut Vec<Option<f64>>,
        rng: &mut dyn RngCore,
    ) -> Option<Polarity> {
        let user = context.user.filter(|user| !user.is_empty())?;
        let mut state = self.state.lock();
        self.judge(&mut state, user, candidates, context.now_ms);
        scores.clear();
        let jitter = if self.settings.is_compat { JITTER } else { 0.0 };
        scores.extend(state.values.iter().map(|&value| {
            Some(if jitter > 0.0 { value + rng.random_range(0.0..jitter) } else { value })
        }));
        Some(Polarity::Least)
    }

    fn routed(&self, context: &Context<'_>, _candidates: &Candidates<'_>, _choice: &Choice) {
        let Some(user) = context.user.filter(|user| !user.is_empty()) else { return };
        let (input, output) = estimate(context.prompt.len());
        let mut state = self.state.lock();
        let _has_a_name = state.tracker.charge(user, input as f64, output as f64, context.now_ms);
    }

    /// In `document` the estimate is refunded and the actual usage charged; in `aibrix-compat` the
    /// estimate stays.
    fn finished(&self, finished: &Finished<'_>) {
        let Some(user) = finished.user.filter(|user| !user.is_empty()) else { return };
        if self.settings.is_compat {
            return;
        }
        let (input, output) = estimate(finished.prompt_bytes);
        let mut state = self.state.lock();
        state.tracker.refund(user, input as f64, output as f64, finished.routed_at_ms);
        let (input, output) = (finished.input_tokens as f64, finished.output_tokens as f64);
        let _has_a_name = state.tracker.charge(user, input, output, finished.now_ms);
        state.corrected += 1;
    }

    fn samples(&self, _now_ms: u64, visit: &mut dyn FnMut(Sample<'_>)) {
        let state = self.state.lock();
        visit(Sample::plain(
            "vtc_clients",
            "Clients with counted tokens",
            state.tracker.len() as f64,
        ));
        let help = "Requests of clients beyond ROUTER_VTC_MAX_CLIENTS";
        let uncounted = state.tracker.uncounted() as f64;
        visit(Sample::plain("vtc_uncounted_requests_total", help, uncounted));
        let help = "Requests with token counts corrected at their end";
        visit(Sample::plain("vtc_corrected_requests_total", help, state.corrected as f64));
    }
}

/// Estimated tokens of a prompt of `prompt_bytes`, and of its answer.
pub const fn estimate(prompt_bytes: usize) -> (u64, u64) {
    let input = (prompt_bytes as u64).div_ceil(4);
    (input, (3 * input).div_ceil(2))
}

/// The scores of `aibrix-compat`, without chance, appended to `scores`.
///
/// A client's total, divided by the midpoint between the lowest and the highest total (at least
/// `default_totals.0`), is a position among the workers; each scores its distance from it. That
/// position is always below 2, so only the first three workers are ever preferred.
pub fn position_scores(
    settings: &VtcSettings,
    total: f64,
    (lowest, highest): (f64, f64),
    loads: impl ExactSizeIterator<Item = f64>,
    scores: &mut Vec<f64>,
) {
    let bucket = ((lowest + highest) / 2.0).max(settings.default_totals.0);
    let place = (total / bucket).min(loads.len().saturating_sub(1) as f64);
    weigh(settings, place, |index| index as f64, loads, scores);
}

/// The scores of `document`, appended to `scores`.
///
/// `share` is the client's part of all clients' tokens, 0 to 1. The workers are spread evenly
/// between 0 and 1, in order; each scores its distance from the share.
pub fn share_scores(
    settings: &VtcSettings,
    share: f64,
    loads: impl ExactSizeIterator<Item = f64>,
    scores: &mut Vec<f64>,
) {
    let last = loads.len().saturating_sub(1).max(1) as f64;
    weigh(settings, share, |index| index as f64 / last, loads, scores);
}

fn weigh(
    settings: &VtcSettings,
    place: f64,
    place_of: impl Fn(usize) -> f64,
    loads: impl Iterator<Item = f64>,
    scores: &mut Vec<f64>,
) {
    scores.extend(loads.enumerate().map(|(index, load)| {
        let fairness = (place_of(index) - place).abs();
        let used = load / settings.max_pod_load;
        // With documented values, a worker with twice the maximum load is worse than a full one.
        let utilization = if settings.is_compat { used.min(1.0) } else { used };
        settings.fairness_weight * fairness + settings.utilization_weight * utilization
    }));
}
