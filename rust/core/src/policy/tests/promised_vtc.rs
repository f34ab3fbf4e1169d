//! Guarantees of `vtc-basic` beyond the recorded cases.

use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::SmallRng;

use super::super::settings::{TimeUnit, VtcSettings};
use super::super::vtc_basic::*;
use super::super::*;
use super::pods::{candidate, context, outcomes, range_at};
use crate::ids::Worker;

fn document() -> VtcSettings {
    Settings::new(Profile::Document).vtc
}

fn tracker(settings: VtcSettings) -> TokenTracker {
    TokenTracker::new(&settings)
}

#[test]
fn shares_reach_every_worker() {
    let settings = VtcSettings { utilization_weight: 0.0, ..document() };
    let mut reached = Vec::new();
    for share in 0..=100 {
        let mut scores = Vec::new();
        share_scores(&settings, f64::from(share) / 100.0, [0.0; 8].into_iter(), &mut scores);
        let lowest = (0..8).min_by(|&a, &b| scores[a].total_cmp(&scores[b])).unwrap();
        reached.push(lowest);
    }
    assert!(reached.is_sorted());
    reached.dedup();
    assert_eq!(reached, (0..8).collect::<Vec<_>>());
}

#[test]
fn load_counts_beside_the_share() {
    let scores = |loads: [f64; 2]| {
        let mut scores = Vec::new();
        share_scores(&document(), 0.25, loads.into_iter(), &mut scores);
        scores
    };
    assert_eq!(scores([0.0, 0.0]), [0.25, 0.75]);
    assert_eq!(scores([60.0, 0.0]), [0.85, 0.75]);
    assert_eq!(scores([200.0, 300.0]), [2.25, 3.75], "no ceiling");
}

#[test]
fn idle_clients_leave() {
    let unit = TimeUnit::Seconds;
    let mut tracker = tracker(VtcSettings { time_unit: unit, window_size: 10, ..document() });
    tracker.charge("a", 100.0, 0.0, 1_000).unwrap();
    tracker.charge("b", 300.0, 0.0, 6_000).unwrap();
    assert_eq!(tracker.share("a", 6_000), 0.25);
    assert_eq!(range_at(&mut tracker, 11_999), (100.0, 300.0), "a bucket of the oldest second");
    assert_eq!(range_at(&mut tracker, 12_000), (300.0, 300.0));
    assert_eq!((tracker.share("b", 12_000), tracker.len()), (1.0, 1));
    assert_eq!((range_at(&mut tracker, 60_000), tracker.len()), ((1_000.0, 8_000.0), 0));
    assert_eq!(tracker.share("b", 60_000), 0.0);
}

#[test]
fn hours_are_hours() {
    let hours = VtcSettings { time_unit: TimeUnit::Hours, window_size: 2, ..document() };
    let mut tracker = tracker(hours);
    tracker.charge("a", 5.0, 0.0, 0).unwrap();
    assert_eq!(tracker.total("a", 7_200_000), 5.0);
    assert_eq!(tracker.total("a", 7_260_000), 0.0);
}

#[test]
fn what_was_really_used_replaces_the_estimate() {
    let list = [candidate(0, Some(0)), candidate(1, Some(0))];
    let candidates = Candidates::new(&list);
    let prompt = [b'x'; 400];
    let context = Context { user: Some("a"), prompt: &prompt, ..context(1_000) };
    let finished = Finished {
        model: "m",
        pool: "m",
        user: Some("a"),
        worker: Worker::new(0, 0),
        prompt_bytes: prompt.len(),
        routed_at_ms: 1_000,
        now_ms: 9_000,
        input_tokens: 90,
        cached_tokens: 0,
        output_tokens: 20,
        first_token_ms: None,
        ticket: None,
    };
    // Estimated: 100 and 150 tokens.
    for (profile, wanted) in [(Profile::Document, 130.0), (Profile::AibrixCompat, 400.0)] {
        let policy = VtcBasic::new(&Settings::new(profile).vtc);
        let mut rng = SmallRng::seed_from_u64(1);
        let choice = policy.choose(&context, &candidates, &mut Vec::new(), &mut rng).unwrap();
        assert_eq!(policy.tokens("a", 1_000), 0.0, "a choice charges nothing");
        policy.routed(&context, &candidates, &choice);
        assert_eq!(policy.tokens("a", 1_000), 400.0);
        policy.finished(&finished);
        assert_eq!(policy.tokens("a", 9_000), wanted, "{profile}");
        // Long after the estimate has left the window only what was used is charged.
        policy.routed(&context, &candidates, &choice);
        let late = Finished { now_ms: 1_000_000, ..finished };
        policy.finished(&late);
        let wanted = if profile == Profile::Document { 130.0 } else { 0.0 };
        assert_eq!(policy.tokens("a", 1_000_000), wanted);
    }
}

#[test]
fn the_same_seed_gives_the_same_worker() {
    let policy = VtcBasic::new(&VtcSettings { fairness_weight: 0.0, ..document() });
    let list: Vec<_> = (0..5).map(|at| candidate(at, Some(u32::from(at == 2)))).collect();
    let candidates = Candidates::new(&list);
    for user in [None, Some(""), Some("a")] {
        let context = Context { user, ..context(0) };
        let choose = |rng: &mut SmallRng| {
            policy.choose(&context, &candidates, &mut Vec::new(), rng).map(|choice| choice.index)
        };
        let found = outcomes(choose);
        assert_eq!(Vec::from_iter(found), [0, 1, 3, 4], "the least used ones");
        for seed in 0..20 {
            let mut rng = SmallRng::seed_from_u64(seed);
            assert_eq!(choose(&mut rng.clone()), choose(&mut rng));
        }
    }
    let compat = VtcBasic::new(&Settings::new(Profile::AibrixCompat).vtc);
    let context = context(0);
    let found = outcomes(|rng| {
        let choice = compat.choose(&context, &candidates, &mut Vec::new(), rng).unwrap();
        assert_eq!(choice.reason, Reason::Chance);
        Some(choice.index)
    });
    assert_eq!(found.len(), 5, "nobody's request goes anywhere");
}

#[test]
fn clients_are_bounded() {
    let mut tracker = tracker(VtcSettings { max_clients: 2, ..document() });
    for client in ["a", "b", "c", "a"] {
        tracker.charge(client, 10.0, 0.0, 0).unwrap();
    }
    assert_eq!((tracker.len(), tracker.uncounted(), tracker.total("c", 0)), (2, 1, 0.0));
    tracker.charge("c", 10.0, 0.0, 10_000_000).unwrap();
    assert_eq!((tracker.len(), tracker.total("c", 10_000_000)), (1, 10.0));
}

#[derive(Debug, Clone)]
enum Step {
    Charge(usize, f64),
    Refund(usize, usize),
    Wait(u64),
}

#[test]
fn what_was_charged_late_is_taken_back_whole() {
    let settings = VtcSettings { time_unit: TimeUnit::Milliseconds, window_size: 50, ..document() };
    let mut tracker = tracker(settings);
    // Another request's clock is ahead: this one's charge is counted by it.
    tracker.charge("b", 1.0, 0.0, 1_003).unwrap();
    tracker.charge("a", 10.0, 0.0, 1_000).unwrap();
    tracker.refund("a", 10.0, 0.0, 1_000);
    assert_eq!(tracker.total("a", 1_003), 0.0);
    // Usage that has left the window is not subtracted from later usage.
    tracker.charge("a", 7.0, 0.0, 1_100).unwrap();
    tracker.refund("a", 7.0, 0.0, 1_003);
    assert_eq!(tracker.total("a", 1_100), 7.0);
}

#[test]
fn clients_of_long_ago_make_room_for_new_ones() {
    for is_compat in [false, true] {
        let settings = VtcSettings {
            is_compat,
            time_unit: TimeUnit::Seconds,
            window_size: 5,
            max_clients: 3,
            ..document()
        };
        let mut tracker = tracker(settings);
        for second in 0..60 {
            for client in 0..2 {
                let name = format!("{second} {client}");
                tracker.charge(&name, 1.0, 0.0, second * 8_000).unwrap();
            }
        }
        assert_eq!((tracker.uncounted(), tracker.len() <= 3), (0, true), "compat: {is_compat}");
        let late: Vec<_> = (0..4).map(|n| format!("late {n}")).collect();
        late.iter().for_each(|name| tracker.charge(name, 1.0, 0.0, 470_000).unwrap());
        assert!(tracker.uncounted() > 0);
    }
}

proptest! {
    #[test]
    fn totals_are_those_of_a_list_of_everything(steps in prop::collection::vec(
        prop_oneof![
            3 => (0..4_usize, 0..20_u32).prop_map(|(who, n)| Step::Charge(who, f64::from(n))),
            1 => (0..4_usize, 0..8_usize).prop_map(|(who, nth)| Step::Refund(who, nth)),
            1 => (0..4_000_u64).prop_map(Step::Wait),
        ],
        1..60,
    )) {
        let settings = VtcSettings {
            time_unit: TimeUnit::Seconds,
            window_size: 5,
            output_token_weight: 0.0,
            ..document()
        };
        let mut tracker = tracker(settings);
        let mut charges: Vec<(usize, u64, f64)> = Vec::new();
        let mut now_ms = 100_000;
        for step in steps {
            match step {
                Step::Charge(who, tokens) => {
                    tracker.charge(&who.to_string(), tokens, 0.0, now_ms).unwrap();
                    charges.push((who, now_ms, tokens));
                }
                Step::Refund(who, nth) => {
                    let mut own = charges.iter_mut().filter(|charge| charge.0 == who);
                    if let Some(charge) = own.nth(nth) {
                        tracker.refund(&who.to_string(), charge.2, 0.0, charge.1);
                        charge.2 = 0.0;
                    }
                }
                Step::Wait(ms) => now_ms += ms,
            }
            let oldest = now_ms / 1_000 - 5;
            charges.retain(|&(_, at_ms, _)| at_ms / 1_000 >= oldest);
            let total = |who: usize| -> f64 {
                charges.iter().filter(|charge| charge.0 == who).map(|charge| charge.2).sum()
            };
            let all: f64 = (0..4).map(total).sum();
            let totals: Vec<f64> = (0..4).map(total).filter(|&total| total > 0.0).collect();
            let range = (
                totals.iter().copied().reduce(f64::min).unwrap_or(1_000.0),
                totals.iter().copied().reduce(f64::max).unwrap_or(8_000.0),
            );
            for who in 0..4 {
                let name = who.to_string();
                prop_assert_eq!(tracker.total(&name, now_ms), total(who));
                let share = if all > 0.0 { total(who) / all } else { 0.0 };
                prop_assert_eq!(tracker.share(&name, now_ms), share);
            }
            prop_assert_eq!(range_at(&mut tracker, now_ms), range);
        }
    }
}
