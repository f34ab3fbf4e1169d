//! The busy table: recorded cases, what decisions make of it, and its twin.

use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::load::{ActiveLoad, WorkerLoad};
use crate::policy::Policy;

const LOAD: WorkerLoad = WorkerLoad {
    worker: Worker::new(1, 0),
    active: ActiveLoad {
        requests: 0,
        prefill_tokens: 0,
        queued_tokens: 0,
        context_tokens: 0,
        blocks: 0,
        last_booked: 0,
    },
    prefill_tokens_per_s: None,
};

fn report(value: &Value) -> Report {
    let field = |name: &str| value[name].as_u64();
    Report {
        kv_used_blocks: field("kv_used_blocks"),
        active_decode_blocks: field("active_decode_blocks"),
        active_prefill_tokens: field("active_prefill_tokens"),
        kv_total_blocks: field("kv_total_blocks"),
        max_num_batched_tokens: field("max_num_batched_tokens"),
    }
}

fn idle(ranks: u32) -> Vec<WorkerLoad> {
    (0..ranks).map(|rank| WorkerLoad { worker: Worker::new(1, rank), ..LOAD }).collect()
}

#[test]
fn recorded_signals_are_judged_as_recorded() {
    let mut seen = 0;
    for case in cases("busy") {
        let (input, expected) = (&case["input"], &case["expected"]);
        if !input["decode_ok"].is_null() {
            check_limits(input);
            seen += 1;
            continue;
        }
        let limits = &input["thresholds"];
        let thresholds = Thresholds {
            active_decode_blocks: limits["decode"].as_f64(),
            active_prefill_tokens: limits["prefill_tokens"].as_u64(),
            active_prefill_tokens_frac: None,
        };
        let table = BusyTable::new(thresholds).unwrap();
        let ranks = input["dp_size"].as_u64().unwrap_or(1) as u32;
        let loads = idle(ranks);
        table.set_workers(&loads.iter().map(|load| load.worker).collect::<Vec<_>>());
        for load in &loads {
            let total = input["kv_total_blocks"].as_u64();
            let first = input["initial_active_prefill_tokens"].as_u64();
            let known = Report {
                kv_total_blocks: total,
                active_prefill_tokens: first,
                ..Report::default()
            };
            assert!(table.report(load.worker, &known));
        }
        let is_busy = || !table.busy(loads.iter().copied()).is_empty();
        if let Some(rank) = input["ranks"].as_object() {
            table.report(Worker::new(1, 0), &report(&rank["0"]));
            assert_eq!(is_busy(), expected["busy"].as_bool().unwrap(), "{}", case["id"]);
        }
        for (at, event) in input["events"].as_array().into_iter().flatten().enumerate() {
            let worker = Worker::new(1, event["dp_rank"].as_u64().unwrap_or(0) as u32);
            table.report(worker, &report(event));
            if let Some(wanted) = expected["busy_after_each"][at].as_bool() {
                assert_eq!(is_busy(), wanted, "{} event {at}", case["id"]);
            } else {
                let tokens = table.reported(worker).unwrap().active_prefill_tokens;
                let wanted = expected["active_prefill_tokens_after_each"][at].as_u64();
                assert_eq!(tokens, wanted, "{} event {at}", case["id"]);
            }
        }
        seen += 1;
    }
    assert_eq!(seen, 11);
}

/// Whether the only worker gets no request, and is not looked at otherwise.
fn is_refused(selector: &Selector, prompt: &Prompt) -> bool {
    selector.select(&Ask::new(prompt)).is_err()
}

#[test]
fn looking_at_a_worker_makes_it_no_busier() {
    let thresholds = Thresholds { active_decode_blocks: Some(0.5), ..Thresholds::default() };
    let router = sized();
    let config = SelectorConfig { router, thresholds, ..SelectorConfig::default() };
    let known = Report { kv_total_blocks: Some(10), ..Report::default() };
    let used = |blocks| Report { kv_used_blocks: Some(blocks), ..Report::default() };
    // Of two routers alike one is looked at while its own request fills the worker.
    let refused = [false, true].map(|is_looked_at| {
        let bench = configured(config.clone(), CatalogOptions::default(), 1);
        let selector = &bench.selector;
        let active = Report { active_decode_blocks: Some(6), kv_used_blocks: Some(0), ..known };
        assert!(selector.busy.report(worker(0), &active));
        let prompt = bench.prompt(&[1; 6 * BLOCK_SIZE as usize]);
        let (held, _) = selector.select(&Ask::new(&prompt)).unwrap();
        if is_looked_at {
            assert!(selector.preview(&Ask::new(&prompt)).is_err());
            assert!(selector.query(&Ask::new(&prompt)).is_err());
            assert_eq!(selector.busy.busy(selector.loads()), [worker(0).instance_id]);
        }
        drop(held);
        is_refused(selector, &prompt)
    });
    assert_eq!(refused, [false, false]);
    // A report is news, whether or not a decision follows.
    let bench = configured(config, CatalogOptions::default(), 1);
    let busy = &bench.selector.busy;
    assert!(busy.report(worker(0), &Report { active_decode_blocks: Some(6), ..known }));
    assert!(busy.report(worker(0), &used(6)) && busy.report(worker(0), &used(1)));
    assert!(is_refused(&bench.selector, &bench.prompt(&[1; 8])));
}

fn check_limits(input: &Value) {
    let number = |value: &Value| match value.as_str() {
        Some("nan") => f64::NAN,
        Some("inf") => f64::INFINITY,
        _ => value.as_f64().unwrap(),
    };
    for (list, field, is_legal) in [
        ("decode_ok", "active_decode_blocks_threshold", true),
        ("decode_bad", "active_decode_blocks_threshold", false),
        ("prefill_frac_ok", "active_prefill_tokens_threshold_frac", true),
        ("prefill_frac_bad", "active_prefill_tokens_threshold_frac", false),
    ] {
        for value in input[list].as_array().unwrap() {
            let value = Some(number(value));
            let thresholds = match list.starts_with("decode") {
                true => Thresholds { active_decode_blocks: value, ..Thresholds::default() },
                false => Thresholds { active_prefill_tokens_frac: value, ..Thresholds::default() },
            };
            match thresholds.validate() {
                Ok(()) => assert!(is_legal, "{list}: {value:?}"),
                Err(error) => {
                    let text = error.to_string();
                    assert!(!is_legal && text.starts_with(field), "{list}: {text}");
                }
            }
        }
    }
}

#[test]
fn busy_workers_get_nothing_whatever_the_policy() {
    for policy in Policy::ALL {
        let router = sized();
        let thresholds = Thresholds { active_decode_blocks: Some(0.5), ..Thresholds::default() };
        let config = SelectorConfig { router, thresholds, ..SelectorConfig::default() };
        let policies = Policies { active: Arc::new(policy), ..Policies::default() };
        let bench = with_policies(config, policies, CatalogOptions::default(), 3);
        let full = |used| Report {
            kv_used_blocks: Some(used),
            kv_total_blocks: Some(100),
            ..Report::default()
        };
        assert!(bench.selector.busy.report(worker(0), &full(51)));
        assert!(bench.selector.busy.report(worker(2), &full(50)), "strictly above");
        let prompt = bench.prompt(&[1; 8]);
        let ask = Ask { request_id: Some("x"), ..Ask::new(&prompt) };
        for _ in 0..12 {
            let (_, selection) = bench.selector.select(&ask).unwrap();
            assert_ne!(selection.worker, worker(0), "{policy}");
        }
        let record = bench.selector.journal.find("x").pop().unwrap();
        let busy: Vec<_> =
            record.candidates().iter().map(|one| (one.terms.worker, one.is_busy)).collect();
        assert_eq!(busy, [(worker(1), false), (worker(2), false), (worker(0), true)]);
        for id in [1, 2] {
            bench.selector.busy.report(worker(id), &full(90));
        }
        let error = bench.selector.select(&ask).err().unwrap();
        let Error::AllBusy(text) = &error else { panic!("{error:?}") };
        assert!(text.contains("Service temporarily unavailable: all 3 workers"), "{text}");
        assert!(text.contains("active_decode_blocks_threshold=0.5"), "{text}");
        let pin = Some(Pin { instance_id: 1, dp_rank: None });
        let error = bench.selector.select(&Ask { pin, ..ask }).err().unwrap().to_string();
        assert!(error.contains("the pinned worker 1 is busy"), "{error}");
        let nobody = |_: Worker| false;
        let none = bench.selector.select(&Ask { allowed: Some(&nobody), ..ask }).err().unwrap();
        assert!(matches!(none, Error::NoWorker(_)), "nobody is allowed, busy or not: {none:?}");
        // Without the threshold no worker is busy.
        bench.selector.busy.set_thresholds(Thresholds::default()).unwrap();
        assert!(bench.selector.select(&ask).is_ok());
    }
}

#[test]
fn what_routers_book_is_added_up_and_never_overwritten() {
    let thresholds = Thresholds { active_prefill_tokens: Some(20), ..Thresholds::default() };
    let router = sized();
    let config = SelectorConfig { router, thresholds, ..SelectorConfig::default() };
    let bench = configured(config, CatalogOptions::default(), 1);
    let selector = &bench.selector;
    let prompt = bench.prompt(&[1; 9]);
    let is_busy = || !selector.busy.busy(selector.loads()).is_empty();
    let (held, _) = selector.select(&Ask::new(&prompt)).unwrap();
    let share = |tokens| Share { active_prefill_tokens: Some(tokens), ..Share::default() };
    assert!(selector.busy.share(71, worker(0), share(6), 5) && !is_busy());
    assert!(selector.busy.share(72, worker(0), share(6), 3) && is_busy(), "9 + 6 + 6");
    // The worker's own report of less takes nothing away, nor does it come on top.
    let few = Report { active_prefill_tokens: Some(1), ..Report::default() };
    assert!(selector.busy.report(worker(0), &few) && is_busy());
    assert!(selector.busy.share(71, worker(0), share(5), 5) && !is_busy(), "replaced, not added");
    assert!(selector.busy.share(71, worker(0), share(6), 5) && is_busy());
    let refused = selector.select(&Ask::new(&prompt)).err().unwrap();
    assert!(matches!(refused, Error::AllBusy(_)), "{refused:?}");
    held.first_token();
    assert!(!is_busy());
    drop(held);
    selector.busy.expire_shares(4);
    assert!(selector.busy.share(71, worker(0), share(20), 6) && !is_busy(), "72 is gone");
    assert!(
        !selector.busy.report(worker(9), &few) && !selector.busy.share(1, worker(9), share(1), 6)
    );
}

#[test]
fn a_router_that_tells_nothing_more_is_gone_after_a_time() {
    let thresholds = Thresholds { active_prefill_tokens: Some(5), ..Thresholds::default() };
    let router = of_load(LoadConfig { expiry_ms: 1_000, ..LoadConfig::default() });
    let config = SelectorConfig { router, thresholds, ..SelectorConfig::default() };
    let Bench { selector, clock, .. } = configured(config, CatalogOptions::default(), 1);
    let is_busy = || !selector.busy.busy(selector.loads()).is_empty();
    let tell = |share| assert!(selector.busy.share(7, worker(0), share, selector.now_ms()));
    tell(Share { active_prefill_tokens: Some(6), ..Share::default() });
    clock.advance(900);
    // A word of anything is a sign of life.
    tell(Share { active_decode_blocks: Some(1), ..Share::default() });
    clock.advance(1_000);
    selector.tick();
    assert!(is_busy());
    clock.advance(1);
    selector.tick();
    assert!(!is_busy());
}

/// The table as one sentence of its description after the other.
#[derive(Debug, Default, Clone)]
struct TwinRank {
    told: Report,
    /// Blocks, tokens and time.
    shares: BTreeMap<u64, (u64, u64, u64)>,
    is_latched: bool,
}

impl TwinRank {
    fn is_busy(&mut self, limits: &Thresholds, own: &ActiveLoad) -> bool {
        let blocks = own.blocks + self.shares.values().map(|share| share.0).sum::<u64>();
        let tokens = own.prefill_tokens + self.shares.values().map(|share| share.1).sum::<u64>();
        let expected = self.told.active_decode_blocks.into_iter().chain([blocks]).max().unwrap();
        let mut signals = vec![expected];
        signals.extend(self.told.kv_used_blocks.map(|used| used.max(blocks)));
        let first = signals[signals.len() - 1];
        self.is_latched = match (limits.active_decode_blocks, self.told.kv_total_blocks) {
            (Some(share), Some(total)) if total > 0 => {
                let above = |used: u64| used as f64 / total as f64 > share;
                above(first) || (self.is_latched && signals.iter().any(|used| above(*used)))
            }
            _ => false,
        };
        let tokens = self.told.active_prefill_tokens.into_iter().chain([tokens]).max().unwrap();
        let batch = self.told.max_num_batched_tokens.unwrap_or(10_000_000) as f64;
        self.is_latched
            || limits.active_prefill_tokens.is_some_and(|limit| tokens > limit)
            || limits.active_prefill_tokens_frac.is_some_and(|f| tokens > (f * batch) as u64)
    }
}

#[derive(Debug, Clone)]
enum Op {
    Report(usize, [Option<u64>; 5]),
    Share(usize, u64, u64, u64),
    Expire(u64),
    Own(usize, u64, u64),
    Limits(Option<u8>, Option<u64>, Option<u8>),
    Leave(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let some = || prop::option::weighted(0.4, 0u64..12);
    let total = prop::option::weighted(0.5, prop::sample::select(vec![0u64, 8, 10]));
    let told = (some(), some(), some(), total, prop::option::weighted(0.3, 4u64..9));
    prop_oneof![
        6 => (0usize..4, told)
            .prop_map(|(rank, (a, b, c, d, e))| Op::Report(rank, [a, b, c, d, e])),
        3 => (0usize..4, 0u64..3, 0u64..8, 0u64..8)
            .prop_map(|(rank, router, blocks, tokens)| Op::Share(rank, router, blocks, tokens)),
        1 => (0u64..20).prop_map(Op::Expire),
        3 => (0usize..4, 0u64..8, 0u64..8).prop_map(|(rank, b, t)| Op::Own(rank, b, t)),
        2 => (prop::option::of(0u8..=4), prop::option::of(0u64..9), prop::option::of(0u8..=6))
            .prop_map(|(share, tokens, frac)| Op::Limits(share, tokens, frac)),
        1 => (0usize..4).prop_map(Op::Leave),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn the_table_agrees_with_its_twin(ops in prop::collection::vec(op(), 1..80)) {
        // Two engines, one with three ranks.
        let workers = [Worker::new(1, 0), Worker::new(1, 1), Worker::new(1, 2), Worker::new(4, 0)];
        let mut loads = workers.map(|worker| WorkerLoad { worker, ..LOAD });
        let mut limits = Thresholds::default();
        let mut twin = workers.map(|_| TwinRank::default());
        let table = BusyTable::new(limits).unwrap();
        table.set_workers(&workers);
        for (now_ms, op) in (100..).zip(ops) {
            match op {
                Op::Report(rank, [a, b, c, d, e]) => {
                    let newer = Report {
                        kv_used_blocks: a,
                        active_decode_blocks: b,
                        active_prefill_tokens: c,
                        kv_total_blocks: d,
                        max_num_batched_tokens: e,
                    };
                    table.report(workers[rank], &newer);
                    let told = &mut twin[rank].told;
                    told.kv_used_blocks = a.or(told.kv_used_blocks);
                    told.active_decode_blocks = b.or(told.active_decode_blocks);
                    told.active_prefill_tokens = c.or(told.active_prefill_tokens);
                    told.kv_total_blocks = d.or(told.kv_total_blocks);
                    told.max_num_batched_tokens = e.or(told.max_num_batched_tokens);
                    prop_assert_eq!(table.reported(workers[rank]), Some(*told));
                }
                Op::Share(rank, router, blocks, tokens) => {
                    let share = Share {
                        active_decode_blocks: Some(blocks),
                        active_prefill_tokens: Some(tokens),
                    };
                    table.share(router, workers[rank], share, now_ms);
                    twin[rank].shares.insert(router, (blocks, tokens, now_ms));
                }
                Op::Expire(age_ms) => {
                    table.expire_shares(now_ms - age_ms);
                    let is_young = |share: &(u64, u64, u64)| share.2 + age_ms >= now_ms;
                    twin.iter_mut().for_each(|rank| rank.shares.retain(|_, share| is_young(share)));
                }
                Op::Own(rank, blocks, tokens) => {
                    let active = &mut loads[rank].active;
                    (active.blocks, active.prefill_tokens) = (blocks, tokens);
                }
                Op::Limits(share, tokens, frac) => {
                    limits = Thresholds {
                        active_decode_blocks: share.map(|quarters| f64::from(quarters) / 4.0),
                        active_prefill_tokens: tokens,
                        active_prefill_tokens_frac: frac.map(|halves| f64::from(halves) / 2.0),
                    };
                    table.set_thresholds(limits).unwrap();
                }
                Op::Leave(rank) => {
                    // It leaves and comes back: nothing is known of it.
                    let others: Vec<_> =
                        workers.into_iter().filter(|worker| *worker != workers[rank]).collect();
                    table.set_workers(&others);
                    table.set_workers(&workers);
                    twin[rank] = TwinRank::default();
                }
            }
            let ranks: Vec<bool> =
                twin.iter_mut().zip(&loads).map(|(rank, own)| rank.is_busy(&limits, &own.active)).collect();
            let mut wanted = Vec::new();
            wanted.extend(ranks[..3].iter().all(|busy| *busy).then_some(1));
            wanted.extend(ranks[3].then_some(4));
            prop_assert_eq!(table.busy(loads), wanted.clone());
            let mut decided = Vec::new();
            table.collect(loads.into_iter(), true, &mut decided);
            prop_assert_eq!(decided, wanted);
        }
    }
}
