//! Overlap of workers with engines that contradict their events.

use super::*;

const LONG: u32 = 12 * BLOCK_SIZE;

fn long() -> Vec<u32> {
    (0..=LONG).collect()
}

impl Bench {
    /// Route `tokens` to the pinned worker, and have its engine say what it reused.
    fn answer(&self, at: Worker, tokens: &[u32], reported: Option<u64>) -> Option<ReuseChange> {
        let prompt = self.prompt(tokens);
        let pin = Some(Pin { instance_id: at.instance_id, dp_rank: None });
        let (_held, selection) = self.selector.select(&Ask { pin, ..Ask::new(&prompt) }).unwrap();
        self.selector.compare(&prompt, &selection, reported)
    }

    fn distrust(&self, at: Worker) {
        self.answer(at, &long(), Some(u64::from(LONG)));
        for _ in 0..30 {
            self.answer(at, &long(), Some(0));
        }
    }
}

#[test]
fn broken_promises_cost_a_worker_its_overlap_until_they_are_kept() {
    for overlap in [Overlap::Events, Overlap::EventsAndPredictions] {
        let bench = bench(overlap, CatalogOptions::default(), 2);
        bench.store(worker(1), Tier::Device, &long());
        assert_eq!(bench.known(&long())[&1], 12);
        bench.distrust(worker(1));
        assert_eq!(bench.selector.reuse.views()[&worker(1)].credit, 0.0);
        assert_eq!(bench.known(&long()).get(&1), None, "{overlap:?}");
        let (selection, record) =
            bench.selector.preview(&Ask::new(&bench.prompt(&long()))).unwrap();
        let told = record.decision();
        let credit = |at: usize| told["candidates"][at]["reuse_credit"].as_f64();
        assert_eq!((credit(0), credit(1)), (None, Some(0.0)));
        // The comparison uses the blocks in the events, independent of their credit.
        assert_eq!(told["candidates"][1]["device_blocks"], 12);
        assert_eq!(selection.best_blocks, 12);
        let mut changes = Vec::new();
        for _ in 0..30 {
            changes.extend(bench.answer(worker(1), &long(), Some(u64::from(LONG))));
        }
        assert_eq!(changes, [ReuseChange::Recovered]);
        assert_eq!(bench.known(&long())[&1], 12);
    }
}

#[test]
fn half_the_credit_is_half_the_blocks_in_every_tier() {
    let bench = plain(2);
    bench.store(worker(1), Tier::Device, &long());
    bench.answer(worker(1), &long(), Some(u64::from(LONG)));
    let credit = || bench.selector.reuse.views()[&worker(1)].credit;
    while credit() > 0.5 {
        bench.answer(worker(1), &long(), Some(0));
    }
    let expected = (12.0 * credit()) as u32;
    assert!((1..=6).contains(&expected));
    assert_eq!(bench.known(&long())[&1], expected);
}

#[test]
fn events_that_come_before_the_answer_explain_its_reuse() {
    let bench = plain(2);
    for at in 0..100_u32 {
        let tokens: Vec<u32> = (at * 1_000..at * 1_000 + LONG).collect();
        let prompt = bench.prompt(&tokens);
        let pin = Some(Pin { instance_id: 1, dp_rank: None });
        let ask = Ask { pin, ..Ask::new(&prompt) };
        let (_held, selection) = bench.selector.select(&ask).unwrap();
        bench.store(worker(1), Tier::Device, &tokens);
        let reported = Some(u64::from(LONG - BLOCK_SIZE));
        assert_eq!(bench.selector.compare(&prompt, &selection, reported), None);
    }
    let view = bench.selector.reuse.views()[&worker(1)];
    assert_eq!((view.samples, view.finding, view.credit), (100, None, 1.0));
}

#[test]
fn reuse_that_events_never_mention_is_found_and_costs_credit() {
    let bench = plain(2);
    let mut found = None;
    for at in 0..20_u32 {
        let tokens: Vec<u32> = (at * 1_000..at * 1_000 + LONG).collect();
        found = found.or(bench.answer(worker(1), &tokens, Some(u64::from(LONG - BLOCK_SIZE))));
    }
    assert_eq!(found, Some(ReuseChange::Distrusted(ReuseFinding::ReuseNotInEvents)));
    assert_eq!(bench.selector.reuse.views()[&worker(1)].credit, 0.0);
}

#[test]
fn a_promise_that_was_evicted_before_the_engine_began_is_not_broken() {
    let bench = plain(1);
    let engine = worker(0);
    let model = bench.selector.model();
    let pressed = |at: u32, keeps: usize, evicts_before: bool, stores: bool| {
        let tokens: Vec<u32> = (at * 1_000..=at * 1_000 + LONG).collect();
        let prompt = bench.prompt(&tokens);
        bench.store_prompt(engine, Tier::Device, &prompt);
        let evict = || {
            bench.clock.advance(10);
            model.evict(engine, Tier::Device, &prompt.sequence_hashes[keeps..]);
            bench.clock.advance(10);
        };
        if evicts_before {
            evict();
            bench.store_prompt(engine, Tier::Device, &prompt);
        }
        let (_held, selection) = bench.selector.select(&Ask::new(&prompt)).unwrap();
        assert_eq!(selection.held_blocks, 12);
        if !evicts_before {
            evict();
        }
        if stores {
            // The engine computes and stores again what it had lost.
            bench.store_prompt(engine, Tier::Device, &prompt);
        }
        let reported = keeps as u64 * u64::from(BLOCK_SIZE);
        bench.selector.compare(&prompt, &selection, Some(reported))
    };
    for at in 0..100 {
        assert_eq!(pressed(at, at as usize % 12, false, at % 2 == 0), None);
    }
    let view = bench.selector.reuse.views()[&engine];
    assert_eq!((view.finding, view.credit), (None, 1.0));
    // Evictions before the decision excuse nothing.
    let mut changes = (100..120).filter_map(|at| pressed(at, at as usize % 4, true, true));
    assert_eq!(changes.next(), Some(ReuseChange::Distrusted(ReuseFinding::EventsNotReused)));
}

#[test]
fn a_cache_that_was_cleared_breaks_no_promise() {
    let bench = plain(1);
    bench.answer(worker(0), &long(), Some(u64::from(LONG)));
    for _ in 0..40 {
        bench.store(worker(0), Tier::Device, &long());
        let prompt = bench.prompt(&long());
        let (_held, selection) = bench.selector.select(&Ask::new(&prompt)).unwrap();
        bench.clock.advance(5);
        bench.selector.model().clear_worker(worker(0));
        assert_eq!(bench.selector.compare(&prompt, &selection, Some(0)), None);
    }
    assert_eq!(bench.selector.reuse.views()[&worker(0)].credit, 1.0);
}

#[test]
fn a_worker_that_left_leaves_no_evidence() {
    let bench = plain(3);
    bench.store(worker(1), Tier::Device, &long());
    let prompt = bench.prompt(&long());
    let (_held, selection) = bench.selector.select(&Ask::new(&prompt)).unwrap();
    assert_eq!(selection.worker, worker(1));
    bench.distrust(worker(1));
    bench.selector.set_workers(&[worker(0), worker(2)]).unwrap();
    assert!(bench.selector.reuse.views().is_empty());
    assert_eq!(bench.selector.compare(&prompt, &selection, Some(8)), None);
    assert!(bench.selector.reuse.views().is_empty());
    bench.selector.set_workers(&[worker(1)]).unwrap();
    bench.store(worker(1), Tier::Device, &long());
    assert_eq!(bench.known(&long())[&1], 12);
}

#[test]
fn only_prompts_that_were_looked_up_among_events_are_compared() {
    let bench = plain(1);
    let selector = &bench.selector;
    assert!(selector.is_comparable(&bench.prompt(&long())));
    assert!(!selector.is_comparable(&bench.prompt(&[1, 2])), "no whole block");
    assert!(!selector.is_comparable(&Prompt::unknown(100)));
    let guesses = super::bench(Overlap::Predictions, CatalogOptions::default(), 1);
    assert!(!guesses.selector.is_comparable(&guesses.prompt(&long())));
}
