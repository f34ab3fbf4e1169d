//! What `auto` does before engines, over time.

use super::fleet::Fleet;

#[test]
fn a_new_prefix_that_many_want_at_once_spreads_over_the_fleet() {
    for tokens_per_ms in [10.0, 50.0, 200.0] {
        let mut fleet = Fleet::new(1, 32, tokens_per_ms);
        let shared: Vec<u32> = (0..30_000).collect();
        for _ in 0..300 {
            let prompt = fleet.prompt(&shared, 100);
            fleet.send(0, &prompt, 200);
            (0..10).for_each(|_| fleet.pass());
        }
        let shares = fleet.shares(3_000);
        assert_eq!(fleet.sent.len(), 300);
        assert!(shares.iter().all(|share| (0.3..=3.0).contains(share)), "{shares:?}");
    }
}

#[test]
fn a_worker_that_recovers_has_its_share_within_a_minute() {
    // Requests a second among four workers: many, and so few that a slow worker is hardly asked.
    for per_s in [20.0, 4.0, 1.0] {
        let mut fleet = Fleet::new(1, 4, 10.0);
        let next = |fleet: &mut Fleet| (fleet.prompt(&[], 1_000), 100);
        fleet.set_speed(2, 2.0);
        fleet.serve(120_000, per_s, next);
        let slow = fleet.shares(60_000);
        fleet.set_speed(2, 10.0);
        fleet.serve(60_000, per_s, next);
        fleet.serve(60_000, per_s, next);
        let healthy = fleet.shares(60_000);
        assert!(slow[2] < 0.6, "{per_s}: {slow:?}");
        assert!(healthy[2] > 0.7, "{per_s}: {healthy:?}");
    }
}

#[test]
fn a_hair_slower_than_the_others_is_no_reason_to_get_nothing() {
    // So few requests that all workers are mostly idle.
    let mut fleet = Fleet::new(1, 4, 10.0);
    fleet.scatter = 0.0;
    fleet.set_speed(1, 9.7);
    fleet.serve(300_000, 1.0, |fleet| (fleet.prompt(&[], 1_000), 20));
    let shares = fleet.shares(200_000);
    assert!(shares.iter().all(|share| (0.6..=1.4).contains(share)), "{shares:?}");
}

#[test]
fn replicas_that_do_not_hear_each_other_do_not_oscillate() {
    let mut fleet = Fleet::new(2, 8, 20.0);
    // Sixteen system prompts, each with questions that were never asked before.
    let prompts: Vec<Vec<u32>> =
        (0..16).map(|of| (of * 10_000..of * 10_000 + 1_000).collect()).collect();
    let mut turn = 0;
    let mut next = |fleet: &mut Fleet| {
        turn += 7;
        (fleet.prompt(&prompts[turn % 16], 500), 100)
    };
    fleet.serve(20_000, 40.0, &mut next);
    for window in 0..6 {
        fleet.serve(10_000, 40.0, &mut next);
        let shares = fleet.shares(10_000);
        assert!(shares.iter().all(|share| (0.5..=1.5).contains(share)), "{window}: {shares:?}");
    }
}
