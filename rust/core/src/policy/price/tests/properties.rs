//! Properties that hold for any history and any numbers.

use proptest::sample::select;

use super::*;

/// Blocks of the prompt that all requests here begin with.
const BLOCKS: u64 = 64;

fn hash(at: u64) -> u64 {
    (at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// A policy's history before the question.
#[derive(Debug, Clone)]
struct Past {
    /// By worker: its time for a token, over that of the others.
    slowness: Vec<f64>,
    /// By worker: whether it evicts.
    is_full: Vec<bool>,
    /// Time between two tokens of an answer.
    step_ms: u64,
    /// Time between two turns of a session.
    gap_ms: u64,
    /// Depths of the prompts that run now.
    wanted: Vec<usize>,
}

fn past(workers: usize) -> impl Strategy<Value = Past> {
    let slowness = prop::collection::vec(select(vec![1.0, 0.3, 1.02, 2.0, 8.0]), workers);
    let is_full = prop::collection::vec(any::<bool>(), workers);
    let wanted = prop::collection::vec(1..BLOCKS as usize, 0..8);
    let step_ms = select(vec![0, 1, 12, 5_000]);
    (slowness, is_full, step_ms, 100..20_000_u64, wanted).prop_map(
        |(slowness, is_full, step_ms, gap_ms, wanted)| Past {
            slowness,
            is_full,
            step_ms,
            gap_ms,
            wanted,
        },
    )
}

/// A policy with that past among workers of these ids, and the time.
fn taught(past: &Past, ids: &[u64]) -> (PricePolicy, u64) {
    let policy = PricePolicy::default();
    let mut list: Vec<Candidate> = ids.iter().map(|id| candidate(*id, 0, load(0, 0))).collect();
    list.sort_by_key(|one| one.worker);
    let mut now_ms = 2_000_000;
    let route = |at: usize, hashes: &[u64], now_ms| {
        let context = Context {
            sequence_hashes: hashes,
            local_hashes: hashes,
            is_indexed: true,
            ..Context::new(request(BLOCKS * u64::from(BLOCK)), "m", now_ms)
        };
        let index = list.iter().position(|one| one.worker.instance_id == ids[at]).unwrap();
        let (choice, _) = choose(&policy, &context, &list);
        policy.routed(&context, &Candidates::new(&list), &Choice { index, ..choice });
        context.memo.into_ticket().unwrap()
    };
    for turn in 0..40 {
        for (at, id) in ids.iter().enumerate() {
            now_ms += past.gap_ms / ids.len() as u64;
            let own: Vec<u64> =
                (0..turn + 8).map(|block| hash(1_000 + 100 * at as u64 + block)).collect();
            let ticket = route(at, &own, now_ms);
            if past.is_full[at] && turn > 8 {
                policy.evicted(Worker::new(*id, 0), &own[..4]);
            }
            let ticket = Ticket { work_tokens: 100.0 + (37 * turn % 64) as f64, ..ticket };
            let first_token_ms = (past.slowness[at] * (20.0 + ticket.work_tokens)) as u64;
            let finished = finished(*id, &ticket, first_token_ms, 150 + turn, now_ms);
            let routed_at_ms = finished.routed_at_ms - past.step_ms * (149 + turn);
            policy.finished(&Finished { routed_at_ms, ..finished });
        }
    }
    let hashes: Vec<u64> = (0..BLOCKS).map(hash).collect();
    for (at, depth) in past.wanted.iter().enumerate() {
        route(at % ids.len(), &hashes[..*depth], now_ms);
    }
    let state = policy.state.lock();
    let traffic = &state.traffic["m"];
    assert_eq!(traffic.most_pressure.value() > 0.0, past.is_full.contains(&true));
    assert_eq!(traffic.steps.ms() > 0.0, past.step_ms > 0);
    drop(state);
    (policy, now_ms)
}

#[test]
fn metrics_show_what_decisions_use_now() {
    let past = Past {
        slowness: vec![1.0, 3.0, 1.0],
        is_full: vec![false, true, false],
        step_ms: 12,
        gap_ms: 1_000,
        wanted: vec![],
    };
    let (policy, now_ms) = taught(&past, &[1, 2, 3]);
    let told = |name, now_ms| samples_at(&policy, name, now_ms);
    let slow = told("auto_worker_slowness_ratio", now_ms);
    assert!(slow[1] > 2.0 && slow[0] == 1.0 && slow[2] == 1.0, "{slow:?}");
    assert!(told("auto_answer_tokens", now_ms)[0] < 190.0);
    // Without traffic both fade.
    let later_ms = now_ms + 600_000;
    assert!(told("auto_worker_slowness_ratio", later_ms)[1] < 1.01);
    assert!(told("auto_answer_tokens", later_ms)[0] > 199.0);
    // Nor does a look change anything.
    assert_eq!(told("auto_worker_slowness_ratio", now_ms), slow);
}

#[test]
fn the_price_of_evicting_does_not_depend_on_the_speed_of_traffic() {
    let list = [candidate(1, 0, load(0, 0)), candidate(2, 0, load(0, 0))];
    // Three sessions in turn, the first one at a worker that evicts the blocks of two turns ago.
    let price = |pauses_ms: [u64; 2]| {
        let (policy, mut now_ms) = (PricePolicy::default(), 0);
        for number in 1..=60 {
            now_ms += pauses_ms[number as usize / 8 % 2];
            let is_first = number % 3 == 0;
            let own: Vec<u64> =
                (0..8 + number / 3).map(|at| hash(1_000 * (number % 3) + at)).collect();
            let local = [hash(5_000 + number)];
            let context = Context {
                sequence_hashes: &own,
                local_hashes: &local,
                is_indexed: true,
                ..Context::new(request(1_000), "m", now_ms)
            };
            let (choice, _) = choose(&policy, &context, &list);
            let index = usize::from(is_first);
            policy.routed(&context, &Candidates::new(&list), &Choice { index, ..choice });
            if is_first {
                policy.evicted(list[1].worker, &[hash(5_000 + number - 6)]);
            }
        }
        ask(&policy, now_ms, 1_000, &list);
        let told = |name| samples_at(&policy, name, now_ms);
        assert!((told("auto_session_gap_requests")[0] - 3.0).abs() < 1e-9);
        assert_eq!(told("auto_worker_retention_requests"), [6.0]);
        told("auto_worker_eviction_price_ratio")
    };
    let steady = price([100, 100]);
    assert!(steady[0] == 0.0 && steady[1] > 0.25, "{steady:?}");
    assert_eq!(price([10, 9_000]), steady);
}

pub(super) fn finished(
    id: u64,
    ticket: &Ticket,
    ms: u64,
    output_tokens: u64,
    now_ms: u64,
) -> Finished<'_> {
    Finished {
        model: "m",
        pool: "m",
        user: None,
        worker: Worker::new(id, 0),
        prompt_bytes: 0,
        routed_at_ms: now_ms.saturating_sub(ms),
        now_ms,
        input_tokens: 1_024,
        cached_tokens: 0,
        output_tokens,
        first_token_ms: Some(ms),
        ticket: Some(ticket),
    }
}

/// The choice for a prompt of those blocks, and everybody's cost.
fn ask(
    policy: &PricePolicy,
    now_ms: u64,
    isl_tokens: u64,
    list: &[Candidate],
) -> (Choice, Vec<f64>) {
    let hashes: Vec<u64> = (0..BLOCKS).map(hash).collect();
    let request = request(isl_tokens);
    let context = Context { sequence_hashes: &hashes, ..Context::new(request, "m", now_ms) };
    choose(policy, &context, list)
}

/// Workers of ids 1, 2, ... and what was learned of them.
fn fleet() -> impl Strategy<Value = (Vec<Candidate>, Past)> {
    candidates().prop_flat_map(|list| {
        let past = past(list.len());
        (Just(list), past)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_better_worker_keeps_the_request_whatever_was_learned(
        (list, past) in fleet(), isl_tokens in 1..2_000_u64, less in 0..20_000_u64,
        blocks in 0..9_u32,
    ) {
        let ids: Vec<u64> = list.iter().map(|one| one.worker.instance_id).collect();
        let (policy, now_ms) = taught(&past, &ids);
        let (before, costs) = ask(&policy, now_ms, isl_tokens, &list);
        let at = before.index;
        let mut better = list;
        better[at].overlap_blocks += blocks;
        let load = &mut better[at].load;
        load.queued_tokens = load.queued_tokens.saturating_sub(less);
        let (after, lower) = ask(&policy, now_ms, isl_tokens, &better);
        prop_assert!(lower[at] <= costs[at], "{} {}", lower[at], costs[at]);
        prop_assert_eq!(after.index, at);
    }

    #[test]
    fn permuting_workers_permutes_the_choice(
        (list, past) in fleet(), isl_tokens in 1..2_000_u64, mix in any::<u64>(),
    ) {
        let ids: Vec<u64> = list.iter().map(|one| one.worker.instance_id).collect();
        let mut mixed = ids.clone();
        mixed.sort_by_key(|id| hash(id ^ mix));
        let (policy, now_ms) = taught(&past, &ids);
        let (choice, costs) = ask(&policy, now_ms, isl_tokens, &list);
        let renamed = |(one, id): (&Candidate, &u64)| {
            Candidate { worker: Worker::new(*id, 0), ..*one }
        };
        let mut renamed: Vec<Candidate> = list.iter().zip(&mixed).map(renamed).collect();
        renamed.sort_by_key(|one| one.worker);
        let (other, others) = ask(&taught(&past, &mixed).0, now_ms, isl_tokens, &renamed);
        for (id, cost) in mixed.iter().zip(&costs) {
            prop_assert_eq!(others[*id as usize - 1], *cost, "{:?} {:?}", costs, others);
        }
        prop_assert_eq!(other.ties, choice.ties);
        if choice.ties == 1 {
            prop_assert_eq!(renamed[other.index].worker.instance_id, mixed[choice.index]);
        }
    }

    #[test]
    fn of_equal_candidates_the_least_loaded_one_is_chosen(
        loads in prop::collection::vec((0..50_u32, 0..9_u64, 0..9_u64), 2..9),
        overlap in 0..80_u32, isl_tokens in 1..50_000_u64, least in 0..9_usize,
    ) {
        let least = least % loads.len();
        let list: Vec<Candidate> = (0..).zip(&loads).map(|(at, (requests, queued, context))| {
            let more = u32::from(at != least);
            let load = ActiveLoad {
                requests: more * (requests + 1),
                queued_tokens: u64::from(more) * queued * 1_000,
                context_tokens: u64::from(more) * (context * 1_000),
                ..ActiveLoad::default()
            };
            candidate(at as u64, overlap, load)
        }).collect();
        prop_assert_eq!(chosen(&PricePolicy::default(), isl_tokens, &list), list[least].worker);
    }

    #[test]
    fn what_is_unknown_counts_as_its_neutral_value(
        list in candidates(), isl_tokens in 1..5_000_u64,
    ) {
        let hashes: Vec<u64> = (0..BLOCKS).map(hash).collect();
        let context = Context {
            sequence_hashes: &hashes,
            ..Context::new(request(isl_tokens), "m", 1_000)
        };
        let unknown = choose(&PricePolicy::default(), &context, &list);
        // Answers of 200 tokens, equally fast workers, no other request for the prompt, and gaps
        // between turns with caches that have room.
        let ids: Vec<u64> = list.iter().map(|one| one.worker.instance_id).collect();
        let past = Past {
            slowness: vec![1.0; ids.len()],
            is_full: vec![false; ids.len()],
            step_ms: 12,
            gap_ms: 1_000,
            wanted: vec![],
        };
        let (policy, now_ms) = taught(&past, &ids);
        let mut state = policy.state.lock();
        prop_assert!(state.workers.0.iter().all(|known| known.learned.pace.slowness(now_ms) == 1.0));
        let traffic = state.traffic.get_mut("m").unwrap();
        let is_taught = traffic.prefills[0].seconds_per_token() > 0.0;
        prop_assert!(is_taught && traffic.gaps.density(1_000.0).is_some());
        traffic.answers = pace::Answers::default();
        (0..40).for_each(|_| traffic.answers.see(200.0, now_ms));
        drop(state);
        let context = Context { now_ms, memo: Default::default(), ..context };
        prop_assert_eq!(&choose(&policy, &context, &list), &unknown);
    }

    #[test]
    fn imbalance_is_worth_no_more_than_a_full_miss(
        list in candidates(), isl_tokens in 1..50_000_u64,
    ) {
        let policy = PricePolicy::default();
        let context = Context::new(request(isl_tokens), "m", 0);
        let (choice, terms) = decide(&policy, &context, &list);
        let own = terms[choice.index].price;
        let missed: Vec<Candidate> =
            list.iter().map(|one| Candidate { overlap_blocks: 0, ..*one }).collect();
        for (at, CandidateCost { price: other, .. }) in decide(&policy, &context, &missed).1.iter().enumerate() {
            let more = f64::from(own.queue + own.decode) - f64::from(other.queue + other.decode);
            let miss = f64::from(other.prefill + other.eviction);
            prop_assert!(more <= miss * 1.000_001, "{at}: {more} {miss}");
        }
    }
}

#[test]
fn requests_for_one_cache_leave_it_when_it_is_a_full_miss_ahead() {
    let policy = PricePolicy::default();
    let mut list: Vec<Candidate> = (1..5).map(|id| candidate(id, 0, load(0, 0))).collect();
    list[0].overlap_blocks = BLOCKS as u32;
    let isl_tokens = BLOCKS * u64::from(BLOCK) + 5;
    for turn in 0..400 {
        let worker = chosen(&policy, isl_tokens, &list);
        let at = list.iter().position(|one| one.worker == worker).unwrap();
        let load = &mut list[at].load;
        load.requests += 1;
        load.context_tokens += isl_tokens;
        let requests = |one: &Candidate| one.load.requests;
        let (most, least) = (list.iter().map(requests).max(), list.iter().map(requests).min());
        // A request on the way costs 0.1 * 200 * 2 * (0.2 + 0.002 * 1029) = 90 tokens, a miss 1,045 beside the
        // stalls of up to four more.
        assert!(most.unwrap() - least.unwrap() <= 1_045 * 5 / 90, "{turn}: {most:?} {least:?}");
        assert!(turn < 399 || least.unwrap() > 50, "{list:?}");
    }
}

/// Nothing, one, more than can be, and what is usual.
fn wild() -> impl Strategy<Value = u64> {
    prop_oneof![
        select(vec![0, 1, u64::from(u32::MAX), u64::MAX - 1, u64::MAX]),
        0..100_000_u64,
        any::<u64>()
    ]
}

fn wild_u32() -> impl Strategy<Value = u32> {
    wild().prop_map(|value| u32::try_from(value).unwrap_or(u32::MAX))
}

fn wild_candidate() -> impl Strategy<Value = Candidate> {
    let load = (wild_u32(), wild(), wild(), wild(), wild());
    let load =
        load.prop_map(|(requests, prefill_tokens, queued_tokens, blocks, context_tokens)| {
            let rest = ActiveLoad::default();
            ActiveLoad { requests, prefill_tokens, queued_tokens, blocks, context_tokens, ..rest }
        });
    let held = (wild_u32(), wild_u32(), wild_u32());
    (held, load).prop_map(|(held, load)| Candidate {
        predicted_blocks: held.1,
        lower_milliblocks: held.2,
        ..candidate(1, held.0, load)
    })
}

proptest! {
    #[test]
    fn every_cost_is_a_number_whatever_comes_in(
        mut list in prop::collection::vec(wild_candidate(), 1..6),
        steps in prop::collection::vec((wild(), wild(), wild(), wild(), any::<bool>()), 1..60),
        (isl_tokens, block_size, tracked_blocks) in (wild(), wild_u32(), wild_u32()),
        temperature in select(vec![0.0, 0.5, f64::MAX]),
        stage in select(vec![Stage::Both, Stage::Prefill, Stage::Decode]),
    ) {
        let policy = PricePolicy::default();
        (1..).zip(&mut list).for_each(|(id, one)| one.worker = Worker::new(id, 0));
        let request = RequestTerms {
            isl_tokens, block_size, tracked_blocks, temperature, stage, ..request(1)
        };
        let hashes: Vec<u64> = (0..BLOCKS).map(hash).collect();
        let candidates = Candidates::new(&list);
        for (now_ms, ms, output_tokens, seed, is_whole) in steps {
            let context = Context {
                sequence_hashes: &hashes[..(output_tokens % BLOCKS) as usize],
                local_hashes: &hashes,
                is_indexed: true,
                is_whole,
                ..Context::new(request, "m", now_ms)
            };
            let (mut terms, mut rng) = (Vec::new(), SmallRng::seed_from_u64(seed));
            let choice = policy.choose(&context, &candidates, &mut terms, &mut rng).unwrap();
            prop_assert!(terms.iter().all(|one| one.cost.is_finite() && one.cost >= 0.0), "{terms:?}");
            for one in &terms {
                let parts = one.price.parts();
                prop_assert!(parts.iter().all(|(_, part)| part.is_finite()), "{one:?}");
            }
            prop_assert!(choice.margin.is_none_or(|margin| !margin.is_nan()), "{choice:?}");
            policy.routed(&context, &candidates, &choice);
            let worker = list[choice.index].worker;
            policy.evicted(worker, &hashes[..seed as usize % 9]);
            let ticket = context.memo.into_ticket().unwrap();
            policy.finished(&finished(worker.instance_id, &ticket, ms, output_tokens, now_ms));
            let mut samples = Vec::new();
            policy.samples(now_ms, &mut |sample| samples.push((sample.name.to_owned(), sample.value)));
            prop_assert!(samples.iter().all(|(_, value)| value.is_finite()), "{samples:?}");
        }
    }
}
