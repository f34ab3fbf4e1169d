//! The paper's guarantees in a simulated engine, over generated and adversarial workloads.

use proptest::prelude::*;

use super::super::*;
use super::config;
use super::server::{Job, Server, Swing};

/// Sizes of a client's requests: shortest and longest prompt, shortest and longest answer.
#[derive(Debug, Clone, Copy)]
struct Shape {
    input: (u64, u64),
    output: (u64, u64),
}

impl Shape {
    fn job(self, client: usize, random: u64) -> Job {
        let pick = |(low, high): (u64, u64), random: u64| low + random % (high - low + 1);
        let (input, output) = (pick(self.input, random), pick(self.output, random >> 20));
        Job { client, input, output }
    }
}

/// Numbers that look like chance.
fn scatter(seed: u64) -> u64 {
    let mut x = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The result of a run: the largest difference between two clients in any interval.
#[derive(Debug)]
struct Run {
    /// In intervals in which the engine always had something to do.
    between_pauses: f64,
    /// In all intervals.
    widest: f64,
    /// The paper's bound.
    bound: f64,
    /// Requests that ran at once, at most.
    running: usize,
}

/// A run with `shapes.len()` clients, all of which always have a request waiting, beside one more
/// client that comes and goes every `pause` steps.
fn run(config: FairConfig, shapes: &[Shape], memory: u64, pause: u64, seed: u64) -> Run {
    let count = shapes.len();
    let mut server = Server::new(config, memory, count + 1);
    let mut whole = Swing::new((0..count).collect());
    let mut part = Swing::new((0..count).collect());
    let (mut between_pauses, mut running): (f64, usize) = (0.0, 0);
    let mut number = seed;
    let mut next = || {
        number += 1;
        scatter(number)
    };
    let longest = shapes.iter().map(|shape| shape.input.1).max().unwrap();
    for step in 0..600 {
        for (client, shape) in shapes.iter().enumerate() {
            // More than a step can admit: no queue is ever empty.
            while server.waiting(client) <= memory as usize / 2 {
                server.push(shape.job(client, next()));
            }
        }
        if (step / pause) % 2 == 1 && server.waiting(count) < 3 {
            server.push(shapes[0].job(count, next()));
        }
        if server.running.is_empty() {
            between_pauses = between_pauses.max(part.widest());
            part = Swing::new((0..count).collect());
            part.see(&server.service);
        }
        server.step(|server| {
            whole.see(&server.service);
            part.see(&server.service);
            running = running.max(server.running.len());
        });
        assert!((0..count).all(|client| server.waiting(client) > 0), "backlogged throughout");
    }
    let (widest, bound) = (whole.widest(), server.bound(longest));
    Run { between_pauses: between_pauses.max(part.widest()), widest, bound, running }
}

/// The widest swing of a run, and the bound.
fn swing(config: FairConfig, shapes: &[Shape], memory: u64, pause: u64, seed: u64) -> (f64, f64) {
    let Run { widest, bound, .. } = run(config, shapes, memory, pause, seed);
    (widest, bound)
}

/// The bound with predictions: what is charged for answers that are still to come adds to it, for
/// each request that runs at most the longest answer.
fn bound_of_predictions(run: &Run, shapes: &[Shape]) -> f64 {
    let longest = shapes.iter().map(|shape| shape.output.1).max().unwrap();
    run.bound + 2.0 * price(0.0, longest as f64) * run.running as f64
}

fn shape() -> impl Strategy<Value = Shape> {
    let range = |most: u64| (1..=most, 0..=most).prop_map(|(low, more)| (low, low + more));
    (range(16), range(12)).prop_map(|(input, output)| Shape { input, output })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn backlogged_clients_stay_within_the_bound(
        shapes in prop::collection::vec(shape(), 2..5),
        memory in 56_u64..160,
        pause in 1_u64..90,
        seed in any::<u32>(),
    ) {
        let config = config(Discipline::VtcFair);
        let (widest, bound) = swing(config, &shapes, memory, pause, u64::from(seed));
        prop_assert!(widest > 0.0 && widest <= bound, "{widest} with a bound of {bound}");
    }

    #[test]
    fn without_a_pause_of_the_engine_max_fair_stays_within_it_too(
        shapes in prop::collection::vec(shape(), 2..5),
        memory in 56_u64..160,
        pause in 1_u64..90,
        seed in any::<u32>(),
    ) {
        let run = run(config(Discipline::VtcMaxFair), &shapes, memory, pause, u64::from(seed));
        prop_assert!(run.between_pauses > 0.0 && run.between_pauses <= run.bound, "{run:?}");
    }

    #[test]
    fn predictions_add_what_is_charged_ahead_to_the_bound(
        shapes in prop::collection::vec(shape(), 2..5),
        memory in 56_u64..160,
        pause in 1_u64..90,
        seed in any::<u32>(),
    ) {
        let run = run(config(Discipline::VtcPred), &shapes, memory, pause, u64::from(seed));
        let bound = bound_of_predictions(&run, &shapes);
        prop_assert!(run.widest > 0.0 && run.widest <= bound, "{run:?}, {bound}");
    }
}

/// Prompts as long as the memory allows against answers as long as it allows.
const EXTREMES: [Shape; 3] = [
    Shape { input: (95, 95), output: (1, 1) },
    Shape { input: (1, 1), output: (95, 95) },
    Shape { input: (1, 1), output: (1, 1) },
];

#[test]
fn extremes_stay_within_the_bound() {
    for pause in [1, 7, 100] {
        let config = config(Discipline::VtcFair);
        let (widest, bound) = swing(config, &EXTREMES, 96, pause, 5);
        assert!(widest > bound / 8.0 && widest <= bound, "{widest} with a bound of {bound}");
    }
}

#[test]
fn extremes_stay_within_the_bounds_of_the_others() {
    for (memory, pause) in [(96, 1), (200, 7), (400, 100)] {
        let fair = run(config(Discipline::VtcMaxFair), &EXTREMES, memory, pause, 5);
        assert!(fair.between_pauses > 0.0 && fair.between_pauses <= fair.bound, "{fair:?}");
        let pred = run(config(Discipline::VtcPred), &EXTREMES, memory, pause, 5);
        let bound = bound_of_predictions(&pred, &EXTREMES);
        assert!(pred.widest > 0.0 && pred.widest <= bound, "{pred:?}, {bound}");
    }
    // Room for one request: whenever it ends nothing runs, and what others are behind is forgiven.
    let fair = run(config(Discipline::VtcMaxFair), &EXTREMES, 96, 1_000, 5);
    assert!(fair.widest > 2.0 * fair.bound, "{fair:?}");
}

#[test]
fn predictions_narrow_the_swing_of_even_lengths() {
    let shapes = [Shape { input: (8, 8), output: (40, 40) }; 2];
    let widest = |discipline| swing(config(discipline), &shapes, 480, 50, 3).0;
    let (fair, pred) = (widest(Discipline::VtcFair), widest(Discipline::VtcPred));
    assert!(pred < fair, "{pred} with predictions, {fair} without");
}

#[test]
fn without_fairness_the_bound_does_not_hold() {
    let shapes =
        [Shape { input: (30, 30), output: (20, 20) }, Shape { input: (1, 1), output: (1, 1) }];
    let run = run(config(Discipline::Fcfs), &shapes, 100, 600, 1);
    assert!(run.widest > 2.0 * run.bound, "{run:?}");
    let of_predictions = bound_of_predictions(&run, &shapes);
    assert!(run.widest > of_predictions, "{run:?}, {of_predictions}");
}

/// The surplus of a client that was idle for 400 steps over one that was always busy: with
/// `is_crowded` the busy one always waits, else its requests run at once.
fn burst(discipline: Discipline, is_crowded: bool) -> (f64, f64) {
    let shape = Shape { input: (4, 8), output: (8, 16) };
    let mut server = Server::new(config(discipline), 100, 2);
    let mut swing = Swing::new(vec![0, 1]);
    let mut number = 0;
    let mut push = |server: &mut Server, client| {
        number += 1;
        server.push(shape.job(client, scatter(number)));
    };
    // Both are known: the second one had a request long ago.
    push(&mut server, 1);
    for step in 0..800 {
        // The returning client goes first: uncrowded, no other waits at that moment.
        while step >= 400 && server.waiting(1) < 40 {
            push(&mut server, 1);
        }
        let most = if is_crowded || step >= 400 { 40 } else { 1 };
        while server.waiting(0) < most && (most > 1 || server.running.len() < 3) {
            push(&mut server, 0);
        }
        server.step(|server| {
            if step >= 400 {
                swing.see(&server.service);
            }
        });
    }
    (swing.widest(), server.bound(8))
}

#[test]
fn a_client_that_was_idle_has_no_credit() {
    for is_crowded in [true, false] {
        for discipline in [Discipline::VtcFair, Discipline::VtcMaxFair, Discipline::VtcPred] {
            let (widest, bound) = burst(discipline, is_crowded);
            assert!(widest <= bound, "{discipline}: {widest} with a bound of {bound}");
        }
    }
}

#[test]
fn fairness_costs_no_throughput() {
    // Tokens that an overloaded engine generates. All clients send the same kind of requests: other
    // mixes fill the memory differently, in any order of service.
    let generated = |discipline| {
        let shape = Shape { input: (1, 60), output: (1, 60) };
        let mut server = Server::new(config(discipline), 2_000, 4);
        let mut number = 0;
        for _ in 0..2_000 {
            for client in 0..4 {
                // The first one asks for ten times as much as the others.
                let most = if client == 0 { 200 } else { 20 };
                while server.waiting(client) < most {
                    number += 1;
                    server.push(shape.job(client, scatter(number)));
                }
            }
            server.step(|_| ());
        }
        server.generated
    };
    let without = generated(Discipline::Fcfs);
    for discipline in [Discipline::VtcFair, Discipline::VtcMaxFair, Discipline::VtcPred] {
        let with = generated(discipline);
        assert!(with as f64 > 0.98 * without as f64, "{discipline}: {with} of {without}");
    }
}

#[test]
fn weights_share_the_service() {
    let config = config(Discipline::VtcFair);
    let shape = Shape { input: (1, 20), output: (1, 20) };
    let mut server = Server::new(config, 200, 2);
    server.queue.set_weight(&Server::name(1), 3.0).unwrap();
    for step in 0..4_000 {
        for client in 0..2 {
            while server.waiting(client) < 100 {
                server
                    .push(shape.job(client, scatter(step * 1_000 + server.waiting(client) as u64)));
            }
        }
        server.step(|_| ());
    }
    let ratio = server.service[1] / server.service[0];
    assert!((2.9..3.1).contains(&ratio), "{ratio}");
}
