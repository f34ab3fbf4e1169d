//! What fair turns cost and what they bring, before the simulated engines of `make policies`.

// The command uses more of it.
#[allow(dead_code)]
#[path = "../benches/policies/sim/mod.rs"]
mod sim;

use kvflash::fair::Discipline;
use sim::play::play;
use sim::row::Row;
use sim::workload::Workload;

#[test]
fn turns_cost_less_than_two_percent_of_the_throughput() {
    let workload = Workload::tenants(1, 60.0, 24.0);
    let without = play(&workload, &Row::fair(Discipline::Fcfs, 32));
    assert!(without.jain() < 0.9, "four clients take what they can: {:.3}", without.jain());
    for discipline in [Discipline::VtcFair, Discipline::VtcMaxFair, Discipline::VtcPred] {
        let fair = play(&workload, &Row::fair(discipline, 32));
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
    let workload = Workload::made_up(300, 5.0);
    for row in [Row::new("kv"), Row::new("random"), Row::new("vtc-basic")] {
        let [one, other] = [(); 2].map(|()| format!("{:?}", play(&workload, &row)));
        assert_eq!(one, other, "{}", row.name);
    }
}
