//! Simple engines before simple events: who is distrusted, how soon, and who never.
#![allow(clippy::unwrap_used)]

use std::cmp::Ordering;
use std::collections::VecDeque;

use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::removals::REMOVALS;
use super::trust::SILENT_SAMPLES;
use super::*;
use crate::ids::Worker;

const BLOCK: u32 = 16;
/// So many agreeing answers bring all credit back, whatever was before.
const AGREEING: usize = 29;

fn sample(predicted_blocks: u64, reported_blocks: u64) -> ReuseSample {
    let tokens = |blocks| blocks * u64::from(BLOCK);
    ReuseSample {
        predicted_tokens: tokens(predicted_blocks),
        explained_tokens: tokens(predicted_blocks),
        reported_tokens: Some(tokens(reported_blocks)),
        block_size: BLOCK,
        is_silent: false,
    }
}

/// A worker that has proved that it reports.
fn reporting() -> ReuseTrust {
    let mut trust = ReuseTrust::default();
    assert_eq!(trust.take(&sample(4, 4)), None);
    trust
}

#[test]
fn zeros_before_the_first_report_count_once_it_comes() {
    let mut trust = ReuseTrust::default();
    for _ in 0..1_000 {
        assert_eq!(trust.take(&sample(9, 0)), None);
    }
    let is_bad = |trust: &ReuseTrust| trust.finding.is_some();
    trust.take(&sample(0, 9));
    assert!(!is_bad(&trust));
    assert_eq!(answers_until(&mut trust, &sample(9, 0), 10, is_bad), 3);
}

/// Answers until `is_so`, at most `limit`.
fn answers_until(
    trust: &mut ReuseTrust,
    sample: &ReuseSample,
    limit: usize,
    is_so: impl Fn(&ReuseTrust) -> bool,
) -> usize {
    for count in 0..limit {
        if is_so(trust) {
            return count;
        }
        trust.take(sample);
    }
    panic!("not within {limit} answers: {trust:?}");
}

#[test]
fn nothing_is_judged_before_the_engine_reports() {
    let mut trust = ReuseTrust::default();
    for at in 0..1_000 {
        let silent = ReuseSample { reported_tokens: None, ..sample(9, 0) };
        let said = if at % 2 == 0 { sample(9, 0) } else { silent };
        assert_eq!(trust.take(&said), None);
        let expected = (at + 1 >= SILENT_SAMPLES).then_some(false);
        assert_eq!(trust.view().is_reported, expected, "{at}");
    }
    assert_eq!((trust.credit(), trust.finding, trust.view().samples), (1.0, None, 0));
    trust.take(&sample(9, 9));
    assert_eq!(trust.view().is_reported, Some(true));
}

#[test]
fn answers_without_information_change_nothing() {
    let mut trust = reporting();
    for _ in 0..5 {
        trust.take(&sample(9, 0));
    }
    let absent = ReuseSample { reported_tokens: None, ..sample(9, 0) };
    for empty in [absent, sample(0, 0), sample(1, 0), sample(0, 1), sample(1, 1)] {
        for _ in 0..100 {
            assert_eq!(trust.take(&empty), None);
        }
    }
    let is_bad = |trust: &ReuseTrust| trust.finding.is_some();
    assert_eq!(answers_until(&mut trust, &sample(9, 0), 10, is_bad), 4);
}

#[test]
fn a_difference_of_one_block_is_none() {
    let mut trust = reporting();
    for _ in 0..1_000 {
        assert_eq!(trust.take(&sample(2, 1)), None);
        assert_eq!(trust.take(&sample(1, 2)), None);
        assert_eq!(trust.take(&sample(10, 9)), None);
    }
    assert_eq!(trust.credit(), 1.0);
}

type Row = (&'static str, &'static [(u64, u64)], ReuseFinding);

/// Promised and reported blocks, again and again; what is found.
const TABLE: &[Row] = &[
    ("promises are broken", &[(10, 0)], ReuseFinding::EventsNotReused),
    ("promises are kept by half", &[(10, 5)], ReuseFinding::EventsNotReused),
    ("reuse is not announced", &[(0, 10)], ReuseFinding::ReuseNotInEvents),
    ("more than announced", &[(4, 10)], ReuseFinding::ReuseNotInEvents),
    ("both, in turn", &[(10, 0), (0, 10)], ReuseFinding::EventsCrossed),
    ("both, mostly the one", &[(0, 9), (9, 0), (0, 9), (0, 9)], ReuseFinding::EventsCrossed),
    ("both, with agreement", &[(8, 0), (0, 8), (8, 0), (8, 8)], ReuseFinding::EventsCrossed),
];

#[test]
fn persistent_differences_are_found_within_twenty_answers_and_cost_credit_within_fifty() {
    for (name, answers, finding) in TABLE {
        let mut trust = reporting();
        let mut changes = Vec::new();
        let mut found_at = None;
        for (at, (predicted, reported)) in answers.iter().cycle().take(50).enumerate() {
            if let Some(change) = trust.take(&sample(*predicted, *reported)) {
                found_at = found_at.or(Some(at + 1));
                changes.push(change);
            }
        }
        assert!(found_at.is_some_and(|at| at <= 20), "{name}: {found_at:?}");
        assert_eq!(trust.finding, Some(*finding), "{name}");
        assert_eq!(changes.last(), Some(&ReuseChange::Distrusted(*finding)), "{name}");
        assert!(changes.len() <= 2, "{name}: {changes:?}");
        assert_eq!(trust.credit(), 0.0, "{name}");
    }
}

#[test]
fn trust_comes_back_after_a_bounded_number_of_agreeing_answers() {
    let mut trust = reporting();
    for _ in 0..100_000 {
        trust.take(&sample(10, 0));
        trust.take(&sample(0, 10));
    }
    assert_eq!((trust.credit(), trust.finding), (0.0, Some(ReuseFinding::EventsCrossed)));
    let mut changes = Vec::new();
    for _ in 0..AGREEING {
        changes.extend(trust.take(&sample(10, 10)));
    }
    assert_eq!(changes, [ReuseChange::Recovered]);
    assert_eq!((trust.credit(), trust.finding), (1.0, None));
}

#[test]
fn what_something_explains_is_no_contradiction() {
    let mut trust = reporting();
    for _ in 0..1_000 {
        let explained = ReuseSample { explained_tokens: 10 * u64::from(BLOCK), ..sample(2, 10) };
        assert_eq!(trust.take(&explained), None);
    }
    assert_eq!(trust.credit(), 1.0);
}

#[test]
fn honest_misses_are_never_distrusted() {
    for (share, least_credit) in [(0.0, 1.0), (0.1, 0.75), (0.2, 0.5)] {
        for seed in 0..20 {
            let mut random = SmallRng::seed_from_u64(seed);
            let mut trust = reporting();
            let mut lowest = 1.0_f64;
            for at in 0..5_000 {
                let held = random.random_range(1..200);
                let answer = match random.random_bool(share) {
                    // Evicted meanwhile, or stored meanwhile.
                    true if random.random_bool(0.5) => sample(held, random.random_range(0..held)),
                    true => sample(random.random_range(0..held), held),
                    false => sample(held, held),
                };
                assert_eq!(trust.take(&answer), None, "{share} {seed} {at}");
                lowest = lowest.min(trust.credit());
            }
            assert!(lowest >= least_credit, "{share} {seed}: {lowest}");
        }
    }
}

/// Every miss total and in the same direction: the worst that a share of misses can be.
#[test]
fn total_misses_under_eviction_pressure_are_not_distrusted() {
    for seed in 0..50 {
        let mut random = SmallRng::seed_from_u64(seed);
        let mut trust = reporting();
        for at in 0..2_000 {
            let is_missed = random.random_bool(0.2);
            let change = trust.take(&sample(10, if is_missed { 0 } else { 10 }));
            assert_eq!(change, None, "{seed} {at}");
        }
    }
}

/// An engine of some prompts, oldest out first, and the events that it publishes: prompt, held or not.
struct ToyEngine {
    held: VecDeque<u32>,
    capacity: usize,
}

impl ToyEngine {
    /// Serve a prompt. Returns whether it was held, and what it publishes.
    fn serve(&mut self, prompt: u32) -> (bool, Vec<(u32, bool)>) {
        let was_held = self.held.contains(&prompt);
        let mut events = Vec::new();
        self.held.retain(|one| *one != prompt);
        self.held.push_back(prompt);
        if !was_held {
            events.push((prompt, true));
        }
        if self.held.len() > self.capacity {
            events.extend(self.held.pop_front().map(|evicted| (evicted, false)));
        }
        (was_held, events)
    }
}

/// The history of a worker: its informative answers from its first report on, when it was first
/// distrusted, and when it had no credit.
#[derive(Default)]
struct Fate {
    trust: ReuseTrust,
    answers: usize,
    distrusted_at: Option<usize>,
    without_credit_at: Option<usize>,
}

/// Two engines, of which each one's events are taken for those of `heard_as[engine]`, a request late. New prompts
/// keep coming and are asked for several times; they go where they are credited, else to the workers in turn.
fn fleet(heard_as: [usize; 2], seed: u64, requests: u32) -> [Fate; 2] {
    let mut random = SmallRng::seed_from_u64(seed);
    let mut engines = [0, 1].map(|_| ToyEngine { held: VecDeque::new(), capacity: 40 });
    let mut known: [Vec<u32>; 2] = Default::default();
    let mut fates: [Fate; 2] = Default::default();
    let mut late: VecDeque<(usize, Vec<(u32, bool)>)> = VecDeque::new();
    for at in 0..requests {
        let prompt = 2 * at + random.random_range(0..16);
        let is_known = [0, 1].map(|worker: usize| known[worker].contains(&prompt));
        let credit = |worker: usize| f64::from(is_known[worker]) * fates[worker].trust.credit();
        let worker = match credit(0).total_cmp(&credit(1)) {
            Ordering::Greater => 0,
            Ordering::Less => 1,
            Ordering::Equal => at as usize % 2,
        };
        let predicted = if is_known[worker] { 10 } else { 0 };
        let (was_held, events) = engines[worker].serve(prompt);
        // Events after the decision explain reuse.
        let is_on_its_way =
            late.iter().any(|(heard, events)| *heard == worker && events.contains(&(prompt, true)));
        late.push_back((heard_as[worker], events));
        if late.len() > 1 {
            let (heard, events) = late.pop_front().unwrap();
            for (prompt, is_stored) in events {
                known[heard].retain(|one| *one != prompt);
                if is_stored {
                    known[heard].push(prompt);
                }
            }
        }
        let fate = &mut fates[worker];
        let mut answer = sample(predicted, if was_held { 10 } else { 0 });
        if is_on_its_way {
            answer.explained_tokens = 10 * u64::from(BLOCK);
        }
        fate.trust.take(&answer);
        let is_informative = predicted > 0 || was_held;
        fate.answers += usize::from(is_informative && fate.trust.view().is_reported == Some(true));
        if fate.trust.finding.is_some() {
            fate.distrusted_at.get_or_insert(fate.answers);
        }
        if fate.trust.credit() == 0.0 {
            fate.without_credit_at.get_or_insert(fate.answers);
        }
    }
    fates
}

#[test]
fn engines_with_their_own_events_are_trusted_and_crossed_ones_are_not() {
    let mut late = 0;
    for seed in 0..50 {
        for fate in fleet([0, 1], seed, 5_000) {
            assert_eq!(fate.distrusted_at, None, "{seed}: {:?}", fate.trust);
            assert_eq!(fate.trust.credit(), 1.0, "{seed}: {:?}", fate.trust);
        }
        for fate in fleet([1, 0], seed, 1_000) {
            let (distrusted, without) = (fate.distrusted_at, fate.without_credit_at);
            late += u32::from(distrusted.is_none_or(|at| at > 20));
            assert!(without.is_some_and(|at| at <= 50), "{seed}: {without:?} {:?}", fate.trust);
        }
    }
    // Crossed engines hold the same prompt now and then, by chance.
    assert!(late <= 5, "{late} of 100 workers were distrusted after more than 20 answers");
}

#[test]
fn every_finding_names_a_cause_and_a_fix() {
    use EventSource::{Announced, Heard, None, Silent};
    use ReuseFinding::{EventsCrossed, EventsNotReused, ReuseNotInEvents};
    for (finding, source, code) in [
        (ReuseNotInEvents, Heard, "reuse_not_in_events"),
        (ReuseNotInEvents, None, "events_missing"),
        (ReuseNotInEvents, Silent, "events_missing"),
        (EventsNotReused, Heard, "events_not_reused"),
        (EventsCrossed, Heard, "events_crossed"),
        (EventsCrossed, Silent, "events_missing"),
        (ReuseNotInEvents, Announced, "reuse_not_in_events"),
        (EventsNotReused, Announced, "events_not_reused"),
        (EventsCrossed, Announced, "events_crossed"),
    ] {
        let reason = finding.explain(Worker::new(7, 1), source);
        assert_eq!((reason.code, &*reason.worker), (code, "7:1"));
        assert!(reason.message.starts_with("worker 7:1 ") && reason.message.contains('?'));
        // Nobody sets a socket that its worker announces, or a stream.
        assert_eq!(reason.fix.contains("events="), source != Announced, "{}", reason.fix);
    }
}

/// Whether the socket or the engine's past is at fault can't be known before an event comes.
#[test]
fn the_first_event_ends_the_distrust_of_a_silent_socket() {
    let mut trust = reporting();
    let silent = ReuseSample { is_silent: true, ..sample(0, 9) };
    let found: Vec<_> = (0..30).filter_map(|_| trust.take(&silent)).collect();
    assert_eq!(found, [ReuseChange::Distrusted(ReuseFinding::ReuseNotInEvents)]);
    assert_eq!(trust.credit(), 0.0);
    assert_eq!(trust.take(&sample(9, 9)), Some(ReuseChange::Recovered));
    assert_eq!((trust.credit(), trust.finding), (1.0, None));
    // A socket of another engine is found again.
    assert!((0..30).any(|_| trust.take(&sample(0, 9)).is_some()));
}

#[test]
fn the_table_tells_decisions_only_of_those_with_less_credit() {
    let (table, one, two) = (ReuseTable::default(), Worker::new(1, 0), Worker::new(2, 0));
    for worker in [one, two] {
        table.take(worker, &sample(4, 4));
    }
    assert!(table.credits().is_none());
    for _ in 0..30 {
        table.take(two, &sample(4, 0));
        table.take(one, &sample(4, 4));
    }
    let credits = table.credits().unwrap();
    assert_eq!(credits.iter().collect::<Vec<_>>(), [(&two, &0.0)]);
    assert_eq!((table.views()[&one].credit, table.views()[&two].credit), (1.0, 0.0));
    table.keep(|worker| worker == one);
    assert!(table.credits().is_none() && table.views().len() == 1);
}

#[test]
fn the_latest_removals_of_a_worker_are_known() {
    let removals = Removals::default();
    let (one, two) = (Worker::new(1, 0), Worker::new(2, 0));
    for hash in 0..5_000 {
        removals.removed(one, &[hash], hash);
    }
    assert!(removals.has_removed(one, 4_999, 0) && removals.has_removed(one, 4_999, 4_999));
    assert!(!removals.has_removed(one, 4_999, 5_000), "before that time");
    assert!(removals.has_removed(one, 5_000 - REMOVALS as u64, 0));
    assert!(!removals.has_removed(one, 5_000 - REMOVALS as u64 - 1, 0), "too many came after it");
    assert!(!removals.has_removed(two, 4_999, 0));
    removals.cleared(two, 70);
    assert!(removals.has_removed(two, 1, 70) && !removals.has_removed(two, 1, 71));
    removals.keep(|worker| worker == two);
    assert!(!removals.has_removed(one, 4_999, 0));
}

proptest! {
    /// Whatever comes, scores and credit keep their bounds, and as many agreeing answers as a score can hold bring
    /// all credit back.
    #[test]
    fn credit_is_bounded_and_comes_back(
        answers in prop::collection::vec((0_u64..300, 0_u64..300, any::<bool>(), 1_u32..64), 0..200),
    ) {
        let mut trust = ReuseTrust::default();
        for (predicted, reported, is_told, block_size) in answers {
            let before = trust.finding;
            let change = trust.take(&ReuseSample {
                predicted_tokens: predicted,
                explained_tokens: predicted,
                reported_tokens: is_told.then_some(reported),
                block_size,
                is_silent: false,
            });
            prop_assert!((0.0..=1.0).contains(&trust.credit()));
            prop_assert_eq!(change.is_some(), before != trust.finding);
        }
        for _ in 0..AGREEING {
            trust.take(&sample(64, 64));
        }
        prop_assert_eq!((trust.credit(), trust.finding), (1.0, None));
    }
}
