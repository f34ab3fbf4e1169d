//! The cost and benefit of fair turns; a run depends on its seeds alone.

use kvflash_core::fair::Discipline;
use kvflash_sim::play::{Fleet, play};
use kvflash_sim::row::Row;
use kvflash_sim::traffic::{Traffic, tenants};

#[test]
fn turns_cost_less_than_two_percent_of_the_throughput() {
    let workload = tenants(1, 60.0, 48.0);
    let fleet = Fleet::of(8);
    let without = play(&workload, &fleet, &Row::fair(Discipline::Fcfs, 32));
    assert!(without.jain() < 0.9, "four clients take what they can: {:.3}", without.jain());
    for discipline in [Discipline::VtcFair, Discipline::VtcMaxFair, Discipline::VtcPred] {
        let fair = play(&workload, &fleet, &Row::fair(discipline, 32));
        for (what, with, without) in [
            ("tokens a second while requests come", fair.tokens_per_s(), without.tokens_per_s()),
            ("all by the last answer", 1.0 / fair.makespan_s(), 1.0 / without.makespan_s()),
        ] {
            assert!(with > 0.98 * without, "{discipline}: {what} {with} instead of {without}");
        }
        assert!(fair.jain() > 0.95, "{discipline}: {:.3}", fair.jain());
        let (waited, before) = (fair.ttft_ms(0.99, true), without.ttft_ms(0.99, true));
        assert!(waited < 0.5 * before, "{discipline}: {waited} ms instead of {before}");
    }
}

#[test]
fn a_run_is_the_same_every_time() {
    let workload = Traffic::Mixed.make(3, 300).at_load(0.5, 3, &Fleet::of(3).timing);
    let alone = Fleet::of(3);
    let changes = vec![(20_000_000, 1, 3.0)];
    let together = Fleet {
        routers: 2,
        sync_us: Some(20_000),
        event_delay_us: 100_000,
        changes,
        ..Fleet::of(3)
    };
    for row in Row::matrix() {
        for fleet in [&alone, &together] {
            let [one, other] = [(); 2].map(|()| play(&workload, fleet, &row));
            assert_eq!(format!("{one:?}"), format!("{other:?}"), "{}", row.name);
            assert_eq!(one.ways.len(), workload.requests(), "{}", row.name);
            assert!(one.ways.iter().all(|way| way.end_us.is_some()), "{}", row.name);
        }
    }
}
