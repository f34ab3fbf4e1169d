//! Requests that must wait: no worker has room to prefill.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::load::PrefillSpeed;

fn queueing(batches: f64, workers: u64) -> Bench {
    let router = sized();
    let queue = Some(QueueThreshold { batches, batched_tokens: 10 });
    let config =
        SelectorConfig { router, queue, overlap: Overlap::Events, ..SelectorConfig::default() };
    configured(config, CatalogOptions::default(), workers)
}

fn tokens(seed: u32, count: u32) -> Vec<u32> {
    (0..count).map(|at| seed * 1_000 + at).collect()
}

#[test]
fn requests_wait_when_every_worker_that_may_take_them_has_more_than_its_room() {
    let bench = queueing(2.0, 2);
    let small = bench.prompt(&tokens(1, 20));
    let ask = Ask { waits: true, ..Ask::new(&small) };
    // As much as the threshold is not more than it.
    let held: Vec<_> = (0..2).map(|_| bench.selector.select(&ask).unwrap().0).collect();
    let more: Vec<_> = (0..2).map(|_| bench.selector.select(&ask).unwrap().0).collect();
    let refused = bench.selector.select(&ask).err().unwrap();
    let Error::MustWait(text) = &refused else { panic!("{refused:?}") };
    assert!(text.contains("all 2 workers") && text.contains("router_queue_threshold"), "{text}");
    assert_eq!(bench.selector.totals().requests, 4, "nothing was booked");
    // Requests that can't wait are not held up, and neither are previews.
    drop(bench.selector.select(&Ask::new(&small)).unwrap());
    bench.selector.preview(&ask).unwrap();
    assert_eq!(bench.selector.potential_loads(&ask).unwrap().len(), 2);
    // Room at an ineligible worker does not count.
    let free = held[0].worker();
    for one in held.iter().chain(&more).filter(|one| one.worker() == free) {
        one.first_token();
    }
    let pin = |instance_id| Some(Pin { instance_id, dp_rank: None });
    let elsewhere = Ask { pin: pin(1 - free.instance_id), ..ask };
    assert!(matches!(bench.selector.select(&elsewhere), Err(Error::MustWait(_))));
    let there = Ask { pin: pin(free.instance_id), ..ask };
    assert_eq!(bench.selector.select(&there).unwrap().0.worker(), free);
    let not_there = |worker: Worker| worker != free;
    let others = Ask { allowed: Some(&not_there), ..ask };
    assert!(matches!(bench.selector.select(&others), Err(Error::MustWait(_))));
}

#[test]
fn a_worker_says_how_much_it_takes_and_other_routers_what_they_booked() {
    let bench = queueing(1.0, 1);
    let prompt = bench.prompt(&tokens(1, 40));
    let ask = Ask { waits: true, ..Ask::new(&prompt) };
    let _first = bench.selector.select(&ask).unwrap();
    assert!(matches!(bench.selector.select(&ask), Err(Error::MustWait(_))));
    let report = Report { max_num_batched_tokens: Some(80), ..Report::default() };
    assert!(bench.selector.busy.report(worker(0), &report));
    let _second = bench.selector.select(&ask).unwrap();
    let share = Share { active_prefill_tokens: Some(1), ..Share::default() };
    assert!(bench.selector.busy.share(9, worker(0), share, 1));
    assert!(matches!(bench.selector.select(&ask), Err(Error::MustWait(_))));
    bench.selector.busy.expire_shares(2);
    assert!(bench.selector.select(&ask).is_ok());
}

#[test]
fn whoever_makes_room_says_so() {
    let bench = queueing(1.0, 1);
    let told = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&told);
    bench.selector.router.watch_room(Box::new(move || {
        count.fetch_add(1, Ordering::SeqCst);
    }));
    let take = || told.swap(0, Ordering::SeqCst);
    let prompt = bench.prompt(&tokens(1, 40));
    let ask = Ask { waits: true, ..Ask::new(&prompt) };
    let (held, _) = bench.selector.select(&ask).unwrap();
    assert!(bench.selector.select(&ask).is_err());
    assert_eq!(take(), 0);
    held.first_token();
    assert_eq!(take(), 1);
    drop(held);
    assert_eq!(take(), 1);
    bench.selector.reserve("a", &ask).unwrap();
    bench.selector.mark_prefill_completed("a").unwrap();
    assert!(take() > 0);
    bench.clock.advance(3_600_000);
    assert_eq!(bench.selector.tick(), 1);
    assert!(take() > 0);
    bench.selector.set_workers(&[worker(0), worker(1)]).unwrap();
    assert_eq!(take(), 1);
}

#[test]
fn the_best_of_those_that_may_take_it_counts() {
    let bench = queueing(1.0, 3);
    let prompt = tokens(1, 16);
    bench.store(worker(1), Tier::Device, &prompt[..8]);
    bench.store(worker(2), Tier::Device, &prompt[..12]);
    let prompt = bench.prompt(&prompt);
    let ask = Ask::new(&prompt);
    assert_eq!(bench.selector.most_held_tokens(&ask), 12);
    let not_the_best = |one: Worker| one != worker(2);
    assert_eq!(bench.selector.most_held_tokens(&Ask { allowed: Some(&not_the_best), ..ask }), 8);
    let pin = Some(Pin { instance_id: 0, dp_rank: None });
    assert_eq!(bench.selector.most_held_tokens(&Ask { pin, ..ask }), 0);
}

#[test]
fn a_threshold_that_is_none_is_refused() {
    for batches in [-1.0, f64::NAN, f64::INFINITY] {
        let queue = Some(QueueThreshold { batches, batched_tokens: 1 });
        let error = SelectorConfig { queue, ..SelectorConfig::default() }.validate().err().unwrap();
        assert!(error.to_string().contains("router_queue_threshold"), "{error}");
    }
}

#[test]
fn prompts_that_are_worked_on_make_room_as_time_passes() {
    let prefill_speed = PrefillSpeed::Told(10.0);
    let router = of_load(LoadConfig { prefill_speed, ..sized().load });
    let queue = Some(QueueThreshold { batches: 1.0, batched_tokens: 30 });
    let config = SelectorConfig { router, queue, ..SelectorConfig::default() };
    let bench = configured(config, CatalogOptions::default(), 1);
    let left = || bench.selector.loads()[0].active.prefill_tokens;
    let (first, second) = (bench.prompt(&tokens(1, 20)), bench.prompt(&tokens(2, 40)));
    let (held, _) = bench.selector.select(&Ask::new(&first)).unwrap();
    let (other, _) = bench.selector.select(&Ask::new(&second)).unwrap();
    assert_eq!(left(), 60);
    let ask = Ask { waits: true, ..Ask::new(&first) };
    assert!(matches!(bench.selector.select(&ask), Err(Error::MustWait(_))));
    bench.clock.advance(1_000);
    assert_eq!(left(), 50);
    // The first one is late: the next one is taken for begun, until it is known to be.
    bench.clock.advance(2_000);
    assert_eq!(left(), 30);
    drop(bench.selector.select(&ask).unwrap());
    held.first_token();
    assert_eq!((left(), bench.selector.totals().prefill_tokens), (40, 40));
    bench.clock.advance(1_000);
    assert_eq!(left(), 30);
    drop(other);
    assert_eq!(left(), 0);
    drop(held);
    assert!(bench.is_idle());
    for rate in [0.0, -1.0, f64::NAN] {
        let prefill_speed = PrefillSpeed::Told(rate);
        let wrong = of_load(LoadConfig { prefill_speed, ..LoadConfig::default() });
        let error = wrong.validate().err().unwrap().to_string();
        assert!(error.contains("prefill_tokens_per_second"), "{error}");
    }
}
