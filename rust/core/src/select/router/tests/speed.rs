//! How fast decisions are. Run it alone and optimised:
//! `cargo test --profile fast --package kvflash-core --lib router::tests::speed -- --ignored --nocapture`
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::*;
use crate::clock::SystemClock;
use crate::ids::Worker;

const PROMPT_BLOCKS: u64 = 100;
const BLOCK_SIZE: u32 = 16;

/// The common part of the prompts.
#[derive(Clone, Copy, Debug)]
enum Traffic {
    /// Nothing.
    Own,
    /// The first ten blocks.
    SystemPrompt,
    /// Everything: the worst case for counting blocks that are active on every worker.
    Same,
    /// A first part of random length: workers drop out all along the prompt.
    Staggered,
}

fn prompt(traffic: Traffic, turn: u64, mixed: u64) -> Vec<u64> {
    let shared = match traffic {
        Traffic::Own => 0,
        Traffic::SystemPrompt => 10,
        Traffic::Same => PROMPT_BLOCKS,
        Traffic::Staggered => mixed % PROMPT_BLOCKS,
    };
    let own = |at: u64| (turn * PROMPT_BLOCKS + at).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1 << 63;
    (0..PROMPT_BLOCKS).map(|at| if at < shared { at } else { own(at) }).collect()
}

#[derive(Debug)]
struct Speed {
    per_s: f64,
    us_p50: f64,
    us_p99: f64,
}

/// `active` requests at a time; a turn frees the oldest one, routes a new one, marks it prefilled.
fn measure(worker_count: u64, active: usize, traffic: Traffic, has_overlaps: bool) -> Speed {
    let config = sized(BLOCK_SIZE);
    let router = Arc::new(
        Router::with_policies(config, Policies::default(), Arc::new(SystemClock::default()))
            .unwrap(),
    );
    let workers: Vec<Worker> = (0..worker_count).map(|id| Worker::new(id * 7919, 0)).collect();
    router.set_workers(&workers).unwrap();
    let overlaps: Vec<(Worker, u32)> = match has_overlaps {
        true => workers.iter().map(|&worker| (worker, 10)).collect(),
        false => workers.iter().take(4).map(|&worker| (worker, 50)).collect(),
    };
    let mut considered = Considered::default();
    let mut held = VecDeque::new();
    let mut times: Vec<Duration> = Vec::new();
    let mut mixed = 1_u64;
    let mut turn = 0;
    while times.len() < 20_000 {
        mixed = mixed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let hashes = prompt(traffic, turn, mixed >> 33);
        turn += 1;
        let isl_tokens = PROMPT_BLOCKS * u64::from(BLOCK_SIZE) + 5;
        let prompt = Prompt { isl_tokens, sequence_hashes: hashes, ..Prompt::default() };
        let ask = Ask { known: holding(&overlaps), ..Ask::new(&prompt) };
        let oldest = (held.len() >= active).then(|| held.pop_front());
        let is_warm = oldest.is_some();
        let start = Instant::now();
        drop(oldest);
        let (booking, _) = router.route(&ask, &mut considered).unwrap();
        booking.first_token();
        if is_warm {
            times.push(start.elapsed());
        }
        held.push_back(booking);
    }
    let total: Duration = times.iter().sum();
    times.sort_unstable();
    let us = |at: usize| times[at].as_secs_f64() * 1e6;
    Speed {
        per_s: times.len() as f64 / total.as_secs_f64(),
        us_p50: us(times.len() / 2),
        us_p99: us(times.len() * 99 / 100),
    }
}

#[test]
#[ignore = "a measurement: meaningless unoptimised or beside other work"]
fn decisions_per_second() {
    for worker_count in [4, 200, 2_000] {
        for traffic in [Traffic::Own, Traffic::SystemPrompt, Traffic::Same, Traffic::Staggered] {
            for has_overlaps in [false, true] {
                let active = worker_count as usize * 4;
                let speed = measure(worker_count, active, traffic, has_overlaps);
                println!(
                    "{worker_count:>5} workers, {active:>5} active, {:<12} overlaps on {:<7} \
                     {:>8.0} decisions/s, p50 {:>6.1} us, p99 {:>6.1} us",
                    format!("{traffic:?},"),
                    if has_overlaps { "all:" } else { "four:" },
                    speed.per_s,
                    speed.us_p50,
                    speed.us_p99
                );
            }
        }
    }
}
