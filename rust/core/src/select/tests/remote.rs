//! Bookings that replicas of a router tell each other.

use super::*;

#[test]
fn bookings_of_another_router_count_in_every_decision() {
    let bench = plain(2);
    let tokens: Vec<u32> = (0..16).collect();
    let prompt = bench.prompt(&tokens);
    let hashes = prompt.sequence_hashes.clone();
    let add = |name: &str, at| bench.selector.remote_add(7, name, at, Some(&hashes), 16, 1);
    assert!(add("a", worker(0)));
    assert!(add("a", worker(0)), "again it changes nothing");
    assert!(!add("b", worker(9)), "a worker that is not known here");
    let totals = bench.selector.totals();
    assert_eq!((totals.requests, totals.prefill_tokens, totals.blocks), (1, 12, 4));
    let other = bench.prompt(&[99; 16]);
    let (selection, _) = bench.selector.preview(&Ask::new(&other)).unwrap();
    assert_eq!(selection.worker, worker(1), "the other one is idle");
    assert!(bench.selector.remote_prefilled(7, "a"));
    assert_eq!(bench.selector.totals().prefill_tokens, 0);
    assert!(!bench.selector.remote_free(8, "a"), "of another router");
    assert!(bench.selector.remote_free(7, "a"));
    assert!(!bench.selector.remote_free(7, "a"));
    assert!(bench.is_idle());

    assert!(add("c", worker(0)) && add("d", worker(1)));
    assert_eq!(bench.selector.remote_drop_router(7), 2);
    assert!(bench.is_idle());
    assert!(add("e", worker(0)));
    bench.selector.set_workers(&[worker(1)]).unwrap();
    assert!(bench.is_idle());
    assert_eq!(bench.selector.remote_stats(), RemoteStats::default());
}

#[test]
fn a_booking_of_another_router_counts_no_more_tokens_than_a_prompt_can_have() {
    let bench = plain(2);
    for name in ["a", "b"] {
        assert!(bench.selector.remote_add(7, name, worker(0), None, u64::MAX, 0));
    }
    let most = 2 * u64::from(u32::MAX);
    let active = bench.selector.loads()[0].active;
    assert_eq!((active.prefill_tokens, active.context_tokens), (most, most));
    assert_eq!(bench.selector.totals().prefill_tokens, most);
    assert_eq!(bench.selector.remote_drop_router(7), 2);
    assert!(bench.is_idle());
}

#[test]
fn bookings_of_others_take_none_of_this_routers_room() {
    let router = of_load(LoadConfig { max_requests: 1, ..sized().load });
    let config = SelectorConfig { router, ..SelectorConfig::default() };
    let bench = configured(config, CatalogOptions::default(), 1);
    for name in ["a", "b", "c"] {
        assert!(bench.selector.remote_add(7, name, worker(0), None, 16, 0));
    }
    let prompt = bench.prompt(&[1; 16]);
    let held = bench.selector.select(&Ask::new(&prompt)).unwrap();
    let full = bench.selector.select(&Ask::new(&prompt)).err().unwrap();
    assert!(matches!(full, Error::Overloaded(_)), "{full:?}");
    drop(held);
    assert_eq!(bench.selector.remote_drop_router(7), 3);
    assert!(bench.is_idle());
}

#[test]
fn bookings_of_others_expire_unless_their_router_says_that_they_live() {
    let bench = plain(1);
    for router_id in [7, 8] {
        assert!(bench.selector.remote_add(router_id, "a", worker(0), None, 16, 0));
    }
    for _ in 0..7 {
        bench.clock.advance(50_000);
        bench.selector.remote_heard(7);
        bench.selector.tick();
    }
    assert_eq!(bench.selector.remote_stats().routers, 1);
    assert!(bench.selector.remote_free(7, "a"), "its router has told of it");
    assert!(bench.is_idle());
}

#[test]
fn a_word_that_comes_between_a_tick_and_its_work_is_no_time_gone_back() {
    let bench = plain(1);
    let tick_ms = bench.selector.now_ms();
    bench.clock.advance(5);
    assert!(bench.selector.remote_add(7, "a", worker(0), None, 16, 0));
    bench.clock.advance(5);
    bench.selector.remote_heard(7);
    bench.selector.touch_remote(tick_ms);
    assert!(bench.selector.remote_free(7, "a"));
}

#[test]
fn a_prompt_that_is_only_decoded_is_no_prefill_at_the_others() {
    let elsewhere = RouteOverride {
        overlap_score_weight: Some(0.0),
        assume_kv_reuse: Some(false),
        ..RouteOverride::default()
    };
    let (here, there) = (plain(1), plain(1));
    let outbox = here.selector.outbox();
    outbox.turn_on(8);
    // With a part of a block, shorter than one, and with unknown tokens.
    let prompts = [here.prompt(&[7; 18]), here.prompt(&[7; 3]), Prompt::unknown(1_000)];
    let ask =
        |prompt| here.selector.select(&Ask { overrides: elsewhere, ..Ask::new(prompt) }).unwrap();
    let _held: Vec<_> = prompts.iter().map(ask).collect();
    for tiding in outbox.take(std::time::Duration::ZERO, 100) {
        let Tiding::Added { name, worker, hashes, isl_tokens, overlap_blocks } = tiding else {
            panic!("{tiding:?}")
        };
        let (name, hashes) = (name.to_string(), hashes.as_deref());
        assert!(there.selector.remote_add(7, &name, worker, hashes, isl_tokens, overlap_blocks));
    }
    for bench in [&here, &there] {
        let totals = bench.selector.totals();
        assert_eq!((totals.requests, totals.prefill_tokens), (3, 0));
    }
}

#[test]
fn blocks_that_are_not_shared_count_in_full_at_the_others_too() {
    let (here, there) = (plain(1), plain(1));
    let outbox = here.selector.outbox();
    outbox.turn_on(8);
    let prompt = here.prompt(&[7; 16]);
    let mut held = Vec::new();
    for reuse in [None, Some(false), Some(false)] {
        let overrides = RouteOverride { assume_kv_reuse: reuse, ..RouteOverride::default() };
        held.push(here.selector.select(&Ask { overrides, ..Ask::new(&prompt) }).unwrap());
    }
    for tiding in outbox.take(std::time::Duration::ZERO, 100) {
        let Tiding::Added { name, worker, hashes, isl_tokens, overlap_blocks } = tiding else {
            panic!("{tiding:?}")
        };
        let (name, hashes) = (name.to_string(), hashes.as_deref());
        assert!(there.selector.remote_add(7, &name, worker, hashes, isl_tokens, overlap_blocks));
    }
    assert_eq!((here.selector.totals().blocks, there.selector.totals().blocks), (12, 12));
}

#[test]
fn what_is_booked_here_is_told_once_and_in_order() {
    let bench = plain(1);
    let outbox = bench.selector.outbox();
    let take = || outbox.take(std::time::Duration::ZERO, 100);
    let prompt = bench.prompt(&[1; 9]);
    drop(bench.selector.select(&Ask::new(&prompt)).unwrap());
    assert!(take().is_empty(), "nobody wants to hear");
    outbox.turn_on(1);
    let (held, _) = bench.selector.select(&Ask::new(&prompt)).unwrap();
    let (unheard, _) = bench.selector.select(&Ask::new(&prompt)).unwrap();
    held.first_token();
    held.first_token();
    drop(held);
    drop(unheard);
    let told = take();
    let Tiding::Added { name, worker: at, hashes, isl_tokens, .. } = told[0].clone() else {
        panic!("{told:?}")
    };
    assert_eq!((at, isl_tokens), (worker(0), 9));
    assert_eq!(hashes.as_deref(), Some(&prompt.sequence_hashes[..]));
    assert_eq!(told[1..], [Tiding::Prefilled(name), Tiding::Freed(name)]);
    assert_eq!(outbox.counts(), (0, 1), "the second one found no room");

    let (expiring, _) = bench.selector.select(&Ask::new(&prompt)).unwrap();
    bench.clock.advance(400_000);
    bench.selector.tick();
    drop(expiring);
    assert_eq!(take().len(), 2, "expired is freed, once");
}
