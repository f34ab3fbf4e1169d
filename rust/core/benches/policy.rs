//! The cost of a decision with 1,000 workers and 10,000 clients: policies, and the fair queue.
//! Prints the median and the 99th percentile of single calls.
//!
//! `cargo bench --bench policy`, or with `-- prefix-cache` for benches with that prefix.
//! `-- decision` compares `auto` with `kv`: they take turns at the same requests.

use std::collections::VecDeque;
use std::hint::black_box;
use std::time::Instant;

use kvflash_core::fair::{Cost, Discipline, FairConfig, FairQueue, Standing, Used};
use kvflash_core::ids::Worker;
use kvflash_core::load::ActiveLoad;
use kvflash_core::policy::{
    AUTO, Candidate, Candidates, Context, EngineMetrics, Finished, KvScale, Profile, RequestTerms,
    Session, Settings, Stage, registry,
};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

const WORKERS: u64 = 1_000;
const CLIENTS: usize = 10_000;
const CALLS: usize = 20_000;

/// Median and 99th percentile of `calls` single calls, in microseconds.
fn spread(calls: usize, mut call: impl FnMut(usize)) -> (f64, f64) {
    let mut times: Vec<f64> = (0..calls)
        .map(|n| {
            let start = Instant::now();
            call(n);
            start.elapsed().as_nanos() as f64 / 1e3
        })
        .collect();
    times.sort_by(f64::total_cmp);
    (times[calls / 2], times[calls * 99 / 100])
}

fn print(name: &str, (median, p99): (f64, f64)) {
    println!("{name:44} median {median:8.2} us   p99 {p99:8.2} us");
}

fn main() {
    let mut rng = SmallRng::seed_from_u64(1);
    let list: Vec<Candidate> = (0..WORKERS)
        .map(|id| {
            let overlap_blocks = rng.random_range(0..20);
            let load = ActiveLoad {
                requests: rng.random_range(0..12),
                prefill_tokens: rng.random_range(0..10_000),
                blocks: rng.random_range(0..4_000),
                ..ActiveLoad::default()
            };
            Candidate { overlap_blocks, ..Candidate::new(Worker::new(id, 0), load) }
        })
        .collect();
    let metrics: Vec<EngineMetrics> = (0..WORKERS)
        .map(|_| EngineMetrics {
            running_requests: Some(rng.random_range(0.0..12.0)),
            gpu_kv_usage: Some(rng.random()),
            queue_s: Some(rng.random()),
            mean_prefill_s: Some(rng.random()),
            mean_decode_s: Some(rng.random()),
            avg_prompt_tokens: Some(500.0),
            avg_generation_tokens: Some(100.0),
            ..EngineMetrics::default()
        })
        .collect();
    let candidates = Candidates { list: &list, metrics: &metrics };
    let request = RequestTerms {
        isl_tokens: 4_000,
        block_size: 16,
        tracked_blocks: 250,
        overlap_score_weight: 1.0,
        temperature: 0.0,
        scale: KvScale::PLAIN,
        least_prefill_tokens: 0,
        stage: Stage::Both,
    };
    let users: Vec<String> = (0..CLIENTS).map(|id| format!("client {id}")).collect();
    // A common start and a distinct end: 16 KB, 125 blocks of 128.
    let prompts: Vec<Vec<u8>> = (0..256_u64)
        .map(|id| {
            let mut own = SmallRng::seed_from_u64(id);
            let mut prompt = vec![b's'; 4_000];
            prompt.extend((0..12_000).map(|_| own.random_range(b'a'..=b'z')));
            prompt
        })
        .collect();
    println!("{WORKERS} workers, {CLIENTS} clients; choose, without and with routed");
    let wanted: Vec<String> =
        std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let is_wanted =
        |name: &str| wanted.is_empty() || wanted.iter().any(|one| name.starts_with(one.as_str()));
    let names = [
        AUTO,
        "kv",
        "least-request",
        "least-kv-cache",
        "least-latency",
        "session-affinity",
        "vtc-basic",
        "prefix-cache",
        "prefix-cache:2,least-request:1",
    ];
    for name in names.into_iter().filter(|name| is_wanted(name)) {
        let policy = registry::build(name, &Settings::new(Profile::Document), &mut rng)
            .expect("the names are those of the registry");
        let mut terms = Vec::new();
        let context = |n: usize| Context {
            user: Some(&users[n % CLIENTS]),
            prompt: &prompts[n % prompts.len()],
            session: Session { worker: None, key: Some(&users[n % CLIENTS]) },
            ..Context::new(request, "model", n as u64 / 10)
        };
        for n in 0..CLIENTS {
            let context = context(n);
            let choice = policy.choose(&context, &candidates, &mut terms, &mut rng);
            let mut choice = choice.expect("there are candidates");
            // All workers hold some prompts, whatever the policy would have.
            choice.index = n % WORKERS as usize;
            policy.routed(&context, &candidates, &choice);
        }
        let (mut choices, mut both) = (Vec::new(), Vec::new());
        for n in 0..CALLS {
            let context = context(n);
            policy.prepare(&context).expect("every prompt can be routed");
            let start = Instant::now();
            let choice = policy.choose(&context, &candidates, &mut terms, &mut rng);
            choices.push(start.elapsed().as_nanos() as f64 / 1e3);
            policy.routed(&context, &candidates, &choice.expect("there are candidates"));
            both.push(start.elapsed().as_nanos() as f64 / 1e3);
        }
        for (what, mut times) in [(name.to_owned(), choices), (format!("{name} + routed"), both)] {
            times.sort_by(f64::total_cmp);
            print(&what, (times[CALLS / 2], times[CALLS * 99 / 100]));
        }
    }
    for discipline in Discipline::ALL.into_iter().filter(|one| is_wanted(&one.to_string())) {
        queue(discipline, &users);
    }
    if is_wanted("decision") {
        for workers in [200, 2_000] {
            for tokens in [1_000, 100_000] {
                decision(workers, tokens);
            }
        }
    }
}

/// The workers' blocks of the prompts, and their load.
fn fleet(workers: u64, blocks: u32, rng: &mut SmallRng) -> Vec<Candidate> {
    let held = |rng: &mut SmallRng| match rng.random_range(0..10) {
        // The system prompt that all have; parts of conversations; nothing at all.
        0..4 => 16.min(blocks),
        4..6 => rng.random_range(0..blocks),
        _ => 0,
    };
    let candidate = |id| {
        let requests = rng.random_range(0..12);
        let overlap_blocks = held(rng);
        let load = ActiveLoad {
            requests,
            prefill_tokens: rng.random_range(0..10_000),
            queued_tokens: rng.random_range(0..10_000),
            blocks: rng.random_range(0..4_000),
            context_tokens: u64::from(requests) * 2_000,
            ..ActiveLoad::default()
        };
        Candidate { overlap_blocks, ..Candidate::new(Worker::new(id, 0), load) }
    };
    (0..workers).map(candidate).collect()
}

/// Requests of a worker until a full cache evicts what the first of them brought.
const KEPT_REQUESTS: usize = 16;

/// The choice alone, by `kv` and by `auto`, a thousand times a second of the policies' clock: half of the
/// caches are full and evict with every request what came some requests earlier, a tenth of the workers is slow,
/// 4 requests a worker run. The candidates were written just before, as the router does.
fn decision(workers: u64, tokens: u64) {
    let blocks = tokens as u32 / 16;
    let mut rng = SmallRng::seed_from_u64(3);
    let fleets: Vec<Vec<Candidate>> = (0..64).map(|_| fleet(workers, blocks, &mut rng)).collect();
    let prompts: Vec<Vec<u64>> = (0..64)
        .map(|_| {
            let own = (16..blocks).map(|_| rng.random());
            (0..16.min(blocks)).map(u64::from).chain(own).collect()
        })
        .collect();
    let request = RequestTerms {
        isl_tokens: tokens,
        block_size: 16,
        tracked_blocks: blocks,
        overlap_score_weight: 1.0,
        temperature: 0.0,
        scale: KvScale::PLAIN,
        least_prefill_tokens: 0,
        stage: Stage::Both,
    };
    let settings = Settings::new(Profile::Document);
    let policies = ["kv", AUTO].map(|name| {
        registry::build(name, &settings, &mut rng).expect("the names are those of the registry")
    });
    let [_, auto] = &policies;
    let (mut terms, mut running) = (Vec::new(), VecDeque::new());
    let mut caches: Vec<VecDeque<&[u64]>> = (0..workers).map(|_| VecDeque::new()).collect();
    let mut list = Vec::new();
    let mut times = [const { Vec::new() }; 3];
    let warm = 20 * workers as usize;
    for n in 0..warm + CALLS {
        list.clone_from(&fleets[n * 7 % 64]);
        // No worker gets a prompt twice within as many requests as there are prompts.
        let prompt = &prompts[(n + n / workers as usize) % 64];
        let candidates = Candidates::new(&list);
        let context = |now_ms| Context {
            sequence_hashes: prompt,
            local_hashes: prompt,
            is_indexed: true,
            ..Context::new(request, "model", now_ms)
        };
        let now_ms = n as u64;
        for at in [n % 2, 1 - n % 2] {
            let context = context(now_ms);
            let start = Instant::now();
            let choice = policies[at].choose(&context, &candidates, &mut terms, &mut rng);
            let took = start.elapsed();
            black_box(choice);
            if n >= warm {
                times[at].push(took.as_nanos() as f64 / 1e3);
            }
        }
        // All that the policy learns of requests, which are everywhere, whatever it would have.
        let context = context(now_ms);
        let mut choice =
            auto.choose(&context, &candidates, &mut terms, &mut rng).expect("there are candidates");
        choice.index = n * 13 % workers as usize;
        let worker = list[choice.index].worker;
        let start = Instant::now();
        auto.routed(&context, &candidates, &choice);
        if n >= warm {
            times[2].push(start.elapsed().as_nanos() as f64 / 1e3);
        }
        running.push_back((worker, now_ms, context.memo.into_ticket()));
        if worker.instance_id % 2 == 0 {
            let cache = &mut caches[choice.index];
            cache.push_back(&prompt[prompt.len() - prompt.len().min(8)..]);
            if cache.len() > KEPT_REQUESTS {
                let evicted = cache.pop_front().expect("it is full");
                auto.evicted(worker, evicted);
            }
        }
        if running.len() > 4 * workers as usize {
            let (worker, routed_at_ms, ticket) = running.pop_front().expect("it is full");
            let slowness = if worker.instance_id % 10 == 3 { 3 } else { 1 };
            auto.finished(&Finished {
                model: "model",
                pool: "model",
                user: None,
                worker,
                prompt_bytes: 0,
                routed_at_ms,
                now_ms,
                input_tokens: tokens,
                cached_tokens: 0,
                output_tokens: 150 + n as u64 % 100,
                first_token_ms: Some(slowness * (100 + n as u64 % 7)),
                ticket: ticket.as_ref(),
            });
        }
    }
    let [kv, auto, routed] = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        (times[CALLS / 2], times[CALLS * 99 / 100])
    });
    let row = format!("decision {workers} workers {tokens} tokens");
    print(&format!("{row} kv"), kv);
    print(&format!("{row} {AUTO}"), auto);
    print(&format!("{row} {AUTO}, routed"), routed);
}

fn queue(discipline: Discipline, users: &[String]) {
    let config = FairConfig { discipline, max_queued: 10 * CLIENTS, ..FairConfig::default() };
    let mut queue: FairQueue<u64> = FairQueue::new(config).expect("the limits are legal");
    let mut rng = SmallRng::seed_from_u64(2);
    let mut push = |queue: &mut FairQueue<u64>, n: usize| {
        let cost = Cost { input_tokens: rng.random_range(1..4_000), cached_tokens: 100 };
        let client = users[n % CLIENTS].as_str();
        let pushed = queue.push(client, n as u64, cost, Standing::default(), n as u64 / 100);
        assert!(pushed.is_ok());
    };
    (0..2 * CLIENTS).for_each(|n| push(&mut queue, n));
    let step = spread(CALLS, |n| {
        push(&mut queue, n * 7);
        let granted = queue.pop(n as u64 / 100, |item| *black_box(item) < u64::MAX);
        let granted = granted.expect("there is always one that fits");
        queue.tokens(granted.grant, 1);
        queue.tokens(granted.grant, 20);
        queue
            .finish(granted.grant, Used { output_tokens: Some(25), input_tokens: Some((900, 80)) });
    });
    print(&format!("{discipline}: push, pop, 2 x tokens, finish"), step);
}
