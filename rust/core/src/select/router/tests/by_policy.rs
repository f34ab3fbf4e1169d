//! When custom policies are called, and their input.

use std::sync::{OnceLock, Weak};

use parking_lot::Mutex;
use rand::RngCore;

use super::*;
use crate::load::PrefillSpeed;
use crate::policy::desk::Interests;
use crate::policy::{
    Advice, CandidateCost, Candidates, Choice, Context, Desk, EngineMetrics, Finished, KvScale,
    Outside, RoutePolicy, Settings, Shadow, registry,
};

/// Takes the last candidate, writes down every call, and comes back to the router in those that are
/// made without its lock.
#[derive(Debug, Default)]
struct Witness {
    router: OnceLock<Weak<Router>>,
    calls: Mutex<Vec<String>>,
}

impl Witness {
    fn note(&self, call: String) {
        self.calls.lock().push(call);
    }

    fn come_back(&self) {
        // It would wait for ever if the lock were held.
        let router = self.router.get().and_then(Weak::upgrade);
        let _totals = router.map(|router| router.totals());
    }

    fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.calls.lock())
    }
}

impl RoutePolicy for Witness {
    fn name(&self) -> &str {
        "witness"
    }

    fn prepare(&self, context: &Context<'_>) -> crate::error::Result<()> {
        self.come_back();
        if context.user == Some("nobody") {
            return Err(Error::invalid("user must not be nobody"));
        }
        self.note(format!("prepare {} {:?}", context.request.isl_tokens, context.user));
        Ok(())
    }

    fn choose(
        &self,
        _context: &Context<'_>,
        candidates: &Candidates<'_>,
        costs: &mut Vec<CandidateCost>,
        _rng: &mut dyn RngCore,
    ) -> Option<Choice> {
        candidates.fill(costs, |index| index as f64);
        let index = candidates.len().checked_sub(1)?;
        let running = candidates.metrics(index).running_requests;
        self.note(format!("choose of {} {running:?}", candidates.len()));
        Some(Choice { index, ties: 1, margin: None, reason: Reason::Turn, score: Some(7.0) })
    }

    fn routed(&self, context: &Context<'_>, candidates: &Candidates<'_>, choice: &Choice) {
        self.come_back();
        let worker = candidates.list[choice.index].worker;
        self.note(format!("routed {} to {worker}", context.prompt.len()));
    }

    fn finished(&self, one: &Finished<'_>) {
        self.come_back();
        let (input, output) = (one.input_tokens, one.output_tokens);
        self.note(format!("finished {:?} at {}: {input} {output}", one.user, one.worker));
    }

    fn removed(&self, worker: Worker) {
        self.come_back();
        self.note(format!("removed {worker}"));
    }
}

/// `auto`, with workers that leave between a choice and the news of it.
#[derive(Debug)]
struct Leaving {
    router: OnceLock<Weak<Router>>,
    auto: [Arc<dyn RoutePolicy>; 1],
}

impl RoutePolicy for Leaving {
    fn name(&self) -> &str {
        "leaving"
    }

    fn members(&self) -> &[Arc<dyn RoutePolicy>] {
        &self.auto
    }

    fn choose(
        &self,
        context: &Context<'_>,
        candidates: &Candidates<'_>,
        costs: &mut Vec<CandidateCost>,
        rng: &mut dyn RngCore,
    ) -> Option<Choice> {
        self.auto[0].choose(context, candidates, costs, rng)
    }

    fn routed(&self, context: &Context<'_>, candidates: &Candidates<'_>, choice: &Choice) {
        let router = self.router.get().and_then(Weak::upgrade).unwrap();
        router.set_workers(&workers([2])).unwrap();
        self.auto[0].routed(context, candidates, choice);
    }
}

#[test]
fn a_worker_that_leaves_while_it_is_chosen_stays_forgotten() {
    let auto = registry::build("auto", &Settings::default(), &mut SmallRng::seed_from_u64(1));
    let leaving = Arc::new(Leaving { router: OnceLock::new(), auto: [auto.unwrap()] });
    let active: Arc<dyn RoutePolicy> = Arc::<Leaving>::clone(&leaving);
    let policies = Policies { active, ..Policies::default() };
    let clock = Arc::new(ManualClock::default());
    let router = Arc::new(Router::with_policies(sized(4), policies, clock).unwrap());
    leaving.router.set(Arc::downgrade(&router)).unwrap();
    let known = || {
        let mut known = Vec::new();
        router.policies.samples(0, &mut |one| {
            known.extend((one.label.0 == "worker").then(|| one.label.1.to_owned()));
        });
        known
    };
    router.set_workers(&workers([1])).unwrap();
    let mut considered = Considered::default();
    let (booking, _) = router.route(&request(8, &[1, 2]), &mut considered).unwrap();
    assert_eq!(known(), [""; 0]);
    drop(booking);
    assert_eq!(known(), [""; 0]);
    let (_booking, decision) = router.route(&request(8, &[1, 2]), &mut considered).unwrap();
    assert_eq!((decision.worker, known().is_empty()), (Worker::new(2, 0), false));
}

fn with_witness(shadows: Vec<Arc<Shadow>>) -> (Arc<Router>, Arc<Witness>) {
    let witness = Arc::new(Witness::default());
    let active: Arc<dyn RoutePolicy> = Arc::<Witness>::clone(&witness);
    let policies = Policies { active, shadows, ..Policies::default() };
    let clock = Arc::new(ManualClock::default());
    let router = Arc::new(Router::with_policies(sized(4), policies, clock).unwrap());
    witness.router.set(Arc::downgrade(&router)).unwrap();
    router.set_workers(&workers([1, 2, 3])).unwrap();
    (router, witness)
}

#[test]
fn policies_are_asked_in_order_and_told_what_became_of_it() {
    let (router, witness) = with_witness(Vec::new());
    let mut considered = Considered::default();
    let metrics = EngineMetrics { running_requests: Some(5.0), ..EngineMetrics::default() };
    let metrics = workers([1, 2, 3]).into_iter().map(|worker| (worker, metrics)).collect();
    let known = Known { metrics: Some(&metrics), ..Known::default() };
    let asked = Ask { text: b"hello", user: Some("u"), known, ..request(8, &[1, 2]) };
    let decision = router.preview(&asked, &mut considered).unwrap();
    assert_eq!((decision.worker, decision.policy), (Worker::new(3, 0), None));
    assert_eq!(decision.choice.score, Some(7.0));
    assert_eq!(witness.calls(), ["prepare 8 Some(\"u\")", "choose of 3 Some(5.0)"]);
    assert!(is_idle(&router.loads()));

    let (booking, decision) = router.route(&asked, &mut considered).unwrap();
    assert_eq!(decision.worker, Worker::new(3, 0));
    assert_eq!(
        witness.calls(),
        ["prepare 8 Some(\"u\")", "choose of 3 Some(5.0)", "routed 5 to 3:0"]
    );
    booking.first_token();
    booking.used(Usage { output_tokens: Some(9), ..Usage::default() });
    drop(booking);
    assert_eq!(witness.calls(), ["finished Some(\"u\") at 3:0: 8 9"]);

    // No answer, nothing used.
    drop(router.route(&asked, &mut considered).unwrap());
    assert_eq!(witness.calls().last().unwrap(), "finished Some(\"u\") at 3:0: 0 0");
    router.set_workers(&workers([1, 2, 4])).unwrap();
    router.set_workers(&workers([1, 4])).unwrap();
    router.set_workers(&workers([1, 4])).unwrap();
    assert_eq!(witness.calls(), ["removed 3:0", "removed 2:0"]);
}

#[test]
fn a_request_that_a_policy_refuses_books_nothing() {
    let (router, witness) = with_witness(Vec::new());
    let asked = Ask { user: Some("nobody"), ..request(8, &[]) };
    let refused = router.route(&asked, &mut Considered::default()).err().unwrap();
    assert!(refused.to_string().contains("user"), "{refused}");
    let nobody = |_| false;
    let asked = Ask { allowed: Some(&nobody), ..request(8, &[]) };
    let refused = router.route(&asked, &mut Considered::default()).err().unwrap();
    assert!(matches!(refused, Error::NoWorker(_)), "{refused:?}");
    assert!(
        is_idle(&router.loads()) && !witness.calls().iter().any(|call| call.contains("routed"))
    );
}

#[test]
fn built_in_policies_decide_the_same_beside_shadows() {
    let mut rng = SmallRng::seed_from_u64(1);
    for policy in Policy::ALL {
        let config = RouterConfig { seed: 3, ..sized(4) };
        let other = registry::build("least-request", &Settings::default(), &mut rng).unwrap();
        let shadow = Arc::new(Shadow::new(other, 9));
        let routers: Vec<Arc<Router>> = [vec![], vec![Arc::clone(&shadow)]]
            .into_iter()
            .map(|shadows| {
                let active = Arc::new(policy);
                let policies = Policies { active, shadows, ..Policies::default() };
                let clock = Arc::new(ManualClock::default());
                let router = Router::with_policies(config.clone(), policies, clock).unwrap();
                router.set_workers(&workers(1..=6)).unwrap();
                Arc::new(router)
            })
            .collect();
        let mut held: Vec<Vec<Reservation>> = vec![Vec::new(), Vec::new()];
        for n in 0..200_u64 {
            let hashes = [n % 7, 100 + n % 11];
            let asked = request(8 + n % 5, &hashes);
            let chosen: Vec<_> = routers
                .iter()
                .zip(&mut held)
                .map(|(router, held)| {
                    let mut considered = Considered::default();
                    let (booking, decision) = router.route(&asked, &mut considered).unwrap();
                    held.push(booking);
                    let costs: Vec<f64> = decision.costs.iter().map(|one| one.cost).collect();
                    (decision.choice, costs)
                })
                .collect();
            assert_eq!(chosen[0], chosen[1], "{policy} beside a shadow, request {n}");
            if n % 3 == 0 {
                held.iter_mut().for_each(|held| drop(held.remove(0)));
            }
        }
        assert_eq!(shadow.stats().decisions, 200);
    }
}

#[test]
fn a_policy_outside_is_asked_about_those_that_may_take_it_and_its_scores_choose() {
    let desk = Arc::new(Desk::new("outside", 5, Interests::default()));
    let policies = Policies { active: Arc::new(Outside::new(desk)), ..Policies::default() };
    let clock = Arc::new(ManualClock::default());
    let router = Arc::new(Router::with_policies(sized(4), policies, clock).unwrap());
    router.set_workers(&workers([1, 2, 3])).unwrap();
    let mut considered = Considered::default();
    let allowed = |worker: Worker| worker.instance_id != 3;
    let ask = Ask { allowed: Some(&allowed), ..request(8, &[1, 2]) };
    let question = router.question(&ask).unwrap().unwrap();
    let ids = question.candidates.iter().map(|one| one.candidate.worker.instance_id);
    assert_eq!(ids.collect::<Vec<_>>(), [1, 2]);
    assert_eq!((question.request.isl_tokens, question.request.block_size), (8, 4));
    assert!(is_idle(&router.loads()), "a question books nothing");
    let advice = Advice::new(&question, &[Some(0.0), Some(1.0)]);
    let advice = Some(&advice);
    let (held, decision) = router.route(&Ask { advice, ..ask }, &mut considered).unwrap();
    assert_eq!((held.worker().instance_id, decision.choice.reason), (2, Reason::HighestScore));
    // The second one may not take it any more; of those that may, the scores know one.
    let allowed = |worker: Worker| worker.instance_id != 2;
    let late = Ask { allowed: Some(&allowed), advice, ..ask };
    assert_eq!(router.preview(&late, &mut considered).unwrap().worker.instance_id, 1);
    // A single worker is no choice, and the routing itself reports a fault.
    let allowed = |worker: Worker| worker.instance_id == 1;
    assert!(router.question(&Ask { allowed: Some(&allowed), ..ask }).unwrap().is_none());
    assert!(router.question(&request(0, &[])).is_err());
    assert!(super::router(sized(4), [1, 2]).question(&request(8, &[])).unwrap().is_none());
}

#[test]
fn a_policy_outside_sees_what_workers_have_left_to_prefill_now() {
    let desk = Arc::new(Desk::new("outside", 5, Interests::default()));
    let policies = Policies { active: Arc::new(Outside::new(desk)), ..Policies::default() };
    let prefill_speed = PrefillSpeed::Told(1_000.0);
    let config = of_load(LoadConfig { prefill_speed, ..LoadConfig::default() });
    let clock = Arc::new(ManualClock::default());
    let router = Router::with_policies(config, policies, Arc::clone(&clock) as _).unwrap();
    let router = Arc::new(router);
    router.set_workers(&workers([1, 2])).unwrap();
    let mut considered = Considered::default();
    let (held, _) = router.route(&request(800, &[]), &mut considered).unwrap();
    clock.advance(300);
    let question = router.question(&request(8, &[])).unwrap().unwrap();
    let mut candidates = question.candidates.iter().map(|one| one.candidate);
    let busy = candidates.find(|one| one.worker == held.worker()).unwrap();
    assert_eq!(busy.load.prefill_tokens, 500);
}

#[test]
fn a_decision_that_the_formula_took_in_place_of_a_policy_shows_its_own_costs() {
    let desk = Arc::new(Desk::new("outside", 5, Interests::default()));
    let policies = Policies { active: Arc::new(Outside::new(desk)), ..Policies::default() };
    let scale = KvScale { overlap_score_credit_decay: 1.0, ..KvScale::default() };
    let config = RouterConfig { scale, ..sized(4) };
    let clock = Arc::new(ManualClock::default());
    let router = Arc::new(Router::with_policies(config, policies, clock).unwrap());
    router.set_workers(&workers([1, 2])).unwrap();
    let mut considered = Considered::default();
    // The idlest has something queued too: a credit fades with what is queued beyond that.
    let _queued = [16, 24]
        .map(|tokens| router.route(&request(tokens, &[]), &mut considered).map(|(held, _)| held));
    let overlaps = [(Worker::new(1, 0), 2), (Worker::new(2, 0), 2)];
    let asked = Ask { known: holding(&overlaps), ..request(16, &[1, 2, 3, 4]) };
    let decision = router.preview(&asked, &mut considered).unwrap();
    assert_eq!((decision.policy, decision.costs.len()), (Some(Policy::Kv), 2));
    for (formula, one) in decision.formulas().zip(decision.costs) {
        let (line, cost) = (formula.to_string(), format!(": {:.3} = ", one.cost));
        assert!(line.contains(&cost), "{cost} in {line}");
    }
}

#[test]
fn under_auto_the_formula_decides_where_one_of_its_settings_is_overridden() {
    let mut rng = SmallRng::seed_from_u64(1);
    let active = registry::build("auto", &Settings::default(), &mut rng).unwrap();
    let policies = Policies { active, ..Policies::default() };
    let clock = Arc::new(ManualClock::default());
    let auto = Arc::new(Router::with_policies(sized(4), policies, clock).unwrap());
    auto.set_workers(&workers([1, 2])).unwrap();
    let formula = router(sized(4), [1, 2]);
    let overlaps = [(Worker::new(2, 0), 2)];
    let known = Known { overlaps: &overlaps, ..Known::default() };
    let plain = Ask { known, ..request(16, &[1, 2, 3, 4]) };
    let mut considered = Considered::default();
    let warmer = RouteOverride { temperature: Some(0.5), ..RouteOverride::default() };
    let elsewhere = RouteOverride {
        overlap_score_weight: Some(0.0),
        assume_kv_reuse: Some(false),
        ..RouteOverride::default()
    };
    for overrides in [RouteOverride::default(), warmer, elsewhere] {
        let asked = Ask { overrides, ..plain };
        assert_eq!(auto.preview(&asked, &mut considered).unwrap().policy, None);
    }
    let (weight, no_reuse) = (Some(5.0), Some(false));
    for overrides in [
        RouteOverride { overlap_score_weight: weight, ..RouteOverride::default() },
        RouteOverride { overlap_score_credit: weight, ..RouteOverride::default() },
        RouteOverride { prefill_load_scale: weight, ..RouteOverride::default() },
        RouteOverride { assume_kv_reuse: no_reuse, ..RouteOverride::default() },
    ] {
        let mut found = [&auto, &formula].map(|router| {
            let mut considered = Considered::default();
            let asked = Ask { overrides, ..plain };
            let (_booking, decision) = router.route(&asked, &mut considered).unwrap();
            let costs: Vec<f64> = decision.costs.iter().map(|one| one.cost).collect();
            (decision.policy, decision.choice, costs)
        });
        let by_formula = std::mem::take(&mut found[1].2);
        assert_eq!((found[0].0, found[1].0), (Some(Policy::Kv), Some(Policy::Kv)));
        assert_eq!((found[0].1, &found[0].2), (found[1].1, &by_formula), "{overrides:?}");
    }
}
