//! Without events: what was sent to a worker of known size is believed until its cache has been turned over.

use super::*;
use crate::select::Report;

/// Blocks of one prompt.
const PROMPT: u32 = 8;
/// A cache of which 0.9 are 36 blocks, four prompts and a half.
const CAPACITY: u64 = 40;

fn without_events(has_histories: bool) -> Bench {
    let options =
        CatalogOptions { predicted_ttl_ms: 120_000, has_histories, ..CatalogOptions::default() };
    let bench = bench(Overlap::Predictions, options, 2);
    bench.report(0, CAPACITY);
    bench
}

fn session(id: u32) -> Vec<u32> {
    vec![id; (PROMPT * BLOCK_SIZE) as usize]
}

impl Bench {
    fn report(&self, id: u64, blocks: u64) {
        let report = Report { kv_total_blocks: Some(blocks), ..Report::default() };
        assert!(self.selector.busy.report(worker(id), &report));
    }

    fn send(&self, id: u64, tokens: &[u32]) {
        let pin = Some(Pin { instance_id: id, dp_rank: None });
        drop(self.selector.select(&Ask { pin, ..Ask::new(&self.prompt(tokens)) }).unwrap());
    }

    fn pass(&self, ms: u64) {
        self.clock.advance(ms);
        self.selector.tick();
    }
}

#[test]
fn a_session_that_comes_back_late_matches_until_the_cache_is_turned_over() {
    let bench = without_events(true);
    let one = session(1);
    bench.send(0, &one);
    // The size of worker 1 is unknown: there the lifetime stands.
    bench.send(1, &one);
    assert_eq!(bench.known(&one), BTreeMap::from([(0, PROMPT), (1, PROMPT)]));
    bench.pass(200_000);
    assert_eq!(bench.known(&one), BTreeMap::from([(0, PROMPT)]));
    // Three others fit beside it; the next one pushes the end of it out, and the one after that the rest.
    for (id, left) in [(2, PROMPT), (3, PROMPT), (4, PROMPT), (5, PROMPT / 2), (6, 0)] {
        bench.send(0, &session(id));
        let wanted = if left > 0 { BTreeMap::from([(0, left)]) } else { BTreeMap::new() };
        assert_eq!(bench.known(&one), wanted, "after session {id}");
    }
    assert_eq!(bench.selector.model().index.stats().predicted, 36);
    // However long that takes, what was sent last stays.
    bench.pass(86_400_000);
    assert_eq!(bench.known(&session(6)), BTreeMap::from([(0, PROMPT)]));
}

#[test]
fn a_session_that_comes_back_often_stays() {
    let bench = without_events(true);
    let one = session(1);
    for id in 2..100 {
        bench.send(0, &one);
        bench.send(0, &session(id));
        bench.pass(10_000);
        assert_eq!(bench.known(&one), BTreeMap::from([(0, PROMPT)]), "{id}");
    }
}

#[test]
fn asking_is_no_use() {
    let bench = without_events(true);
    let one = session(1);
    bench.send(0, &one);
    for id in 2..7 {
        assert!(!bench.known(&one).is_empty());
        bench.send(0, &session(id));
    }
    assert!(bench.known(&one).is_empty());
}

#[test]
fn the_lifetime_stands_until_the_size_is_known() {
    let bench = without_events(true);
    let (early, late) = (session(1), session(2));
    bench.send(1, &early);
    bench.pass(119_000);
    assert_eq!(bench.known(&early), BTreeMap::from([(1, PROMPT)]));
    // Time-limited assumptions are dropped with the first prompt after the report.
    bench.report(1, CAPACITY);
    bench.send(1, &late);
    assert!(bench.known(&early).is_empty());
    bench.pass(200_000);
    assert_eq!(bench.known(&late), BTreeMap::from([(1, PROMPT)]));
    // A cache that is smaller now keeps less.
    bench.report(1, 5);
    bench.send(1, &late);
    assert_eq!(bench.known(&late), BTreeMap::from([(1, 4)]));
}

#[test]
fn a_worker_that_goes_takes_its_history_along() {
    let bench = without_events(true);
    let one = session(1);
    bench.send(0, &one);
    bench.selector.set_workers(&[worker(1)]).unwrap();
    bench.selector.set_workers(&[worker(0), worker(1)]).unwrap();
    assert!(bench.known(&one).is_empty());
    // It told its size in its earlier life only.
    bench.send(0, &one);
    bench.pass(120_000);
    assert!(bench.known(&one).is_empty());
}

#[test]
fn a_given_time_rules() {
    let bench = without_events(false);
    for id in 1..7 {
        bench.send(0, &session(id));
    }
    bench.pass(119_999);
    assert!((1..7).all(|id| bench.known(&session(id)) == BTreeMap::from([(0, PROMPT)])));
    bench.pass(1);
    assert!((1..7).all(|id| bench.known(&session(id)).is_empty()));
}
