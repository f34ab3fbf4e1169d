//! Guarantees of the other policies, the registry, the settings and the shadow.

use std::sync::Arc;

use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::SmallRng;

use super::super::*;
use super::pods::{candidate, context, outcomes, policy};
use super::{REQUEST, candidates, select};
use crate::ids::Worker;

fn choose(policy: &dyn RoutePolicy, context: &Context<'_>, list: &[Candidate]) -> Choice {
    let mut rng = SmallRng::seed_from_u64(1);
    policy.choose(context, &Candidates::new(list), &mut Vec::new(), &mut rng).unwrap()
}

fn idle(count: usize) -> Vec<Candidate> {
    (0..count).map(|at| candidate(at, Some(0))).collect()
}

#[test]
fn every_policy_chooses_and_says_why() {
    for profile in Profile::ALL {
        let settings = Settings::new(profile);
        for (name, _) in registry::POLICIES {
            let policy = policy(name, &settings);
            assert_eq!(policy.name(), name);
            let (mut terms, mut rng) = (Vec::new(), SmallRng::seed_from_u64(1));
            let context = Context { user: Some("u"), prompt: b"some text", ..context(5) };
            let none = policy.choose(&context, &Candidates::new(&[]), &mut terms, &mut rng);
            assert!(none.is_none() && terms.is_empty(), "{name}");
            for count in [1, 3] {
                let list = idle(count);
                let candidates = Candidates::new(&list);
                policy.prepare(&context).unwrap();
                let choice = policy.choose(&context, &candidates, &mut terms, &mut rng).unwrap();
                assert!(choice.index < count && choice.ties >= 1 && terms.len() == count);
                policy.routed(&context, &candidates, &choice);
                let mut scores = Vec::new();
                let polarity = policy.scores(&context, &candidates, &mut scores, &mut rng);
                assert_eq!(polarity.is_some(), policy.is_scorer(), "{name}");
                assert!(polarity.is_none() || scores.len() == count);
            }
            policy.removed(Worker::new(0, 0));
            policy.samples(0, &mut |sample| {
                assert!(sample.value.is_finite() && !sample.name.is_empty())
            });
        }
    }
}

#[test]
fn names_are_found_either_way_and_unknown_ones_are_refused() {
    let settings = Settings::default();
    for name in ["round-robin", "round_robin", "least_request", "prefix_aware"] {
        assert!(!policy(name, &settings).name().is_empty());
    }
    let mut rng = SmallRng::seed_from_u64(1);
    for (strategy, wanted) in [
        ("fastest", "policy must be one of auto, kv, round_robin"),
        ("least-request:2,pd:1", "got \"pd\""),
        ("kv:1,random:1", "\"random\" has no scores that could be weighted"),
        ("kv,", "an item has no name"),
        ("kv:0", "every weight is 0"),
        ("kv:1.5", "the weight of \"kv\" must be an integer in 0..=1000000, got \"1.5\""),
    ] {
        let error = registry::build(strategy, &settings, &mut rng).unwrap_err().to_string();
        assert!(error.contains(wanted), "{strategy}: {error}");
    }
    let many = vec!["kv"; multi::MAX_MEMBERS + 1].join(",");
    assert!(multi::parse(&many).unwrap_err().to_string().contains("more than 32 items"));
}

proptest! {
    #[test]
    fn todays_policies_are_the_same_in_either_form(
        list in candidates(),
        kind in prop::sample::select(Policy::ALL.to_vec()),
        temperature in prop::sample::select(vec![0.0, 0.5]),
        seed in any::<u64>(),
    ) {
        let request = RequestTerms { temperature, isl_tokens: 40, block_size: 16, ..REQUEST };
        let mut rng = SmallRng::seed_from_u64(seed);
        let (mut terms, mut others) = (Vec::new(), Vec::new());
        let decision = select(kind, &request, &list, &mut terms, &mut rng.clone());
        let context = Context::new(request, "m", 0);
        let policy = policy(kind.name(), &Settings::default());
        let choice = policy.choose(&context, &Candidates::new(&list), &mut others, &mut rng);
        prop_assert_eq!(decision.is_some(), choice.is_some());
        if let Some((decision, choice)) = decision.zip(choice) {
            prop_assert_eq!(decision.choice.index, choice.index);
            prop_assert_eq!(
                (decision.choice.ties, decision.choice.margin, decision.choice.reason),
                (choice.ties, choice.margin, choice.reason)
            );
            prop_assert_eq!(decision.costs, &others[..]);
            let told: Vec<_> = decision.all_terms().collect();
            let meant: Vec<_> = list.iter().map(|one| decision.request.terms(kind, one)).collect();
            prop_assert_eq!(told, meant);
        }
    }
}

#[test]
fn without_metrics_any_candidate_is_taken() {
    let metrics = [EngineMetrics::default(); 3];
    let busy = EngineMetrics { busy_ratio: Some(0.9), utilization: Some(0.9), ..metrics[0] };
    let list = idle(3);
    for name in ["least-busy-time", "least-utilization"] {
        let policy = policy(name, &Settings::default());
        let found = |metrics: &[EngineMetrics]| {
            let candidates = Candidates { list: &list, metrics };
            outcomes(|rng| {
                let choice = policy.choose(&context(0), &candidates, &mut Vec::new(), rng);
                choice.map(|choice| choice.index)
            })
        };
        assert_eq!(policy.trouble(), None);
        assert_eq!(found(&metrics).len(), 3);
        let wanted = format!("policy {name} prefers no worker");
        assert!(policy.trouble().is_some_and(|trouble| trouble.starts_with(&wanted)));
        assert_eq!(Vec::from_iter(found(&[metrics[0], busy, metrics[0]])), [1]);
        assert_eq!(policy.trouble(), None);
    }
}

#[test]
fn weights_decide_and_every_member_learns() {
    let settings = Settings::default();
    let context = Context { prompt: &[b'x'; 512], ..context(0) };
    let busy = [candidate(0, Some(9)), candidate(1, Some(0))];
    for (strategy, wanted) in
        [("prefix-cache:3,least-request:1", 0), ("prefix-cache:1,least-request:3", 1)]
    {
        let policy = policy(strategy, &settings);
        assert_eq!(policy.name(), strategy);
        let choice =
            Choice { index: 0, ties: 1, margin: None, reason: Reason::HighestScore, score: None };
        policy.routed(&context, &Candidates::new(&busy), &choice);
        let choice = choose(&*policy, &context, &busy);
        assert_eq!((choice.index, choice.score), (wanted, Some(0.75)), "{strategy}");
        assert_eq!((choice.reason, choice.margin), (Reason::HighestScore, Some(0.5)));
    }
}

#[test]
fn a_session_key_belongs_to_one_worker_and_moves_only_when_that_is_gone() {
    let policy = policy("session-affinity", &Settings::default());
    let keyed = |key: &str, list: &[Candidate]| {
        let session = Session { worker: None, key: Some(key) };
        let choice = choose(&*policy, &Context { session, ..context(0) }, list);
        assert_eq!(choice.reason, Reason::SessionKey);
        list[choice.index].worker
    };
    // Ranks of one instance are workers of their own.
    let all: Vec<_> = (0..8)
        .map(|at| Candidate { worker: Worker::new(at / 2, (at % 2) as u32), ..candidate(0, None) })
        .collect();
    let mut counts = [0; 8];
    for key in 0..800 {
        let key = format!("session {key}");
        let worker = keyed(&key, &all);
        counts[(worker.instance_id * 2 + u64::from(worker.dp_rank)) as usize] += 1;
        let without: Vec<_> =
            all.iter().copied().filter(|one| one.worker != all[3].worker).collect();
        let then = keyed(&key, &without);
        assert_eq!(worker != then, worker == all[3].worker, "{key}");
    }
    assert!(counts.iter().all(|count| (60..140).contains(count)), "{counts:?}");
    let key = "x".repeat(257);
    let session = Session { worker: None, key: Some(&key) };
    let error = policy.prepare(&Context { session, ..context(0) }).unwrap_err().to_string();
    assert_eq!(error, "session_key may have at most 256 bytes, got 257");
}

#[test]
fn a_conversation_without_a_key_follows_its_prefix() {
    let policy = policy("session-affinity", &Settings::default());
    let list = [candidate(0, Some(5)), candidate(1, Some(0)), candidate(2, Some(3))];
    let turn = |hashes: &[u64], list: &[Candidate]| {
        let context = Context { sequence_hashes: hashes, ..context(0) };
        let choice = choose(&*policy, &context, list);
        policy.routed(&context, &Candidates::new(list), &choice);
        (list[choice.index].worker.instance_id, choice.reason)
    };
    assert_eq!(turn(&[1, 2], &list), (1, Reason::LowestCost));
    let busy = [list[0], candidate(1, Some(50)), list[2]];
    assert_eq!(turn(&[1, 2, 3, 4], &busy), (1, Reason::SessionPrefix));
    assert_eq!(turn(&[1, 9], &busy), (2, Reason::LowestCost), "another conversation");
    // Its worker is gone: it moves, and stays there when the worker is back.
    let left = [busy[0], busy[2]];
    assert_eq!(turn(&[1, 2, 3, 4, 5], &left), (2, Reason::LowestCost));
    assert_eq!(turn(&[1, 2, 3, 4, 5, 6], &busy), (2, Reason::SessionPrefix));
    policy.removed(Worker::new(2, 0));
    assert_eq!(turn(&[1, 2, 3, 4, 5, 6, 7], &busy).1, Reason::SessionPrefix, "an older turn");
    policy.removed(Worker::new(1, 0));
    assert_eq!(turn(&[1, 2, 3, 4, 5, 6, 8], &busy).1, Reason::LowestCost);
}

#[test]
fn a_conversation_has_a_worker_for_prefills_and_another_for_the_rest() {
    let policy = policy("session-affinity", &Settings::default());
    let (prefill, decode) =
        ([candidate(0, None), candidate(1, Some(5))], [candidate(8, Some(5)), candidate(9, None)]);
    let turn = |hashes: &[u64], stage, list: &[Candidate]| {
        let request = RequestTerms { stage, ..context(0).request };
        let context = Context { sequence_hashes: hashes, request, ..context(0) };
        let choice = choose(&*policy, &context, list);
        policy.routed(&context, &Candidates::new(list), &choice);
        (list[choice.index].worker.instance_id, choice.reason)
    };
    assert_eq!(turn(&[1, 2], Stage::Prefill, &prefill), (0, Reason::LowestCost));
    assert_eq!(turn(&[1, 2], Stage::Both, &decode), (9, Reason::LowestCost));
    let busy = [candidate(0, Some(7)), prefill[1]];
    assert_eq!(turn(&[1, 2, 3], Stage::Prefill, &busy), (0, Reason::SessionPrefix));
    let busy = [decode[0], candidate(9, Some(7))];
    assert_eq!(turn(&[1, 2, 3], Stage::Both, &busy), (9, Reason::SessionPrefix));
}

#[test]
fn pins_are_bounded() {
    let lookup = |name: &str| (name == "KVFLASH_SESSION_MAX_SESSIONS").then(|| "3".to_owned());
    let settings = Settings::read(Profile::Document, lookup).unwrap();
    let policy = policy("session-affinity", &settings);
    let list = idle(2);
    for hash in 0..10 {
        let hashes = [hash];
        let context = Context { sequence_hashes: &hashes, ..context(0) };
        let choice = choose(&*policy, &context, &list);
        policy.routed(&context, &Candidates::new(&list), &choice);
    }
    let mut found = Vec::new();
    policy.samples(0, &mut |sample| found.push(sample.value));
    assert_eq!(found, [3.0, 7.0]);
}

#[test]
fn what_all_conversations_begin_with_is_none_of_them() {
    let policy = policy("session-affinity", &Settings::default());
    let idle = [candidate(0, Some(9)), candidate(1, Some(0))];
    let ask = |hashes: &[u64]| {
        let context = Context { sequence_hashes: hashes, ..context(0) };
        let choice = choose(&*policy, &context, &idle);
        policy.routed(&context, &Candidates::new(&idle), &choice);
        (choice.index, choice.reason)
    };
    let begun =
        Choice { index: 0, ties: 1, margin: None, reason: Reason::SessionPrefix, score: None };
    policy.routed(
        &Context { sequence_hashes: &[1], ..context(0) },
        &Candidates::new(&idle),
        &begun,
    );
    // An edited turn, or answers drawn apart, are still of it.
    for turn in [2, 3, 4, 5, 6] {
        assert_eq!(ask(&[1, turn]), (0, Reason::SessionPrefix), "{turn}");
    }
    assert_eq!(ask(&[1, 7]).0, 1);
    // Those that went with it stay where they are.
    assert_eq!(ask(&[1, 2, 8]), (0, Reason::SessionPrefix));
    assert_eq!(ask(&[1, 7, 9]), (1, Reason::SessionPrefix));
}

#[test]
fn session_ids_name_address_and_rank() {
    for (address, rank) in [("10.0.0.1:8000", 0), ("[::1]:80", 7), ("a", 1), ("ab", 0), ("", 0)] {
        let id = session::session_id(address, rank);
        assert_eq!(session::read_session_id(&id), Some((address.to_owned(), rank)), "{id}");
    }
    for id in ["MTA", "====", "MT=A", "!!!!", "YS94", &"YWFh".repeat(200)] {
        assert_eq!(session::read_session_id(id), None, "{id}");
    }
}

#[test]
fn settings_have_the_defaults_of_their_profile() {
    let of = |profile| {
        let prefix = Settings::new(profile).prefix;
        (prefix.block_size, prefix.imbalance_abs_count, prefix.standard_deviation_factor)
    };
    assert_eq!(of(Profile::Document), (128, 16, 2.0));
    assert_eq!(of(Profile::AibrixCompat), (4, 8, 1.0));
    for profile in Profile::ALL {
        let settings = Settings::new(profile);
        assert_eq!(profile.name().parse(), Ok(profile));
        assert_eq!(settings.origins.len(), settings::VARIABLES.len());
        assert!(settings.origins.iter().all(|origin| origin.read_from.is_none()));
        assert_eq!(settings.vtc.default_totals, (1_000.0, 8_000.0));
        assert_eq!(settings.prefix.eviction_duration_ms, 20 * 60_000);
    }
    let lookup =
        |name: &str| (name == "AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE").then(|| "tiktoken".into());
    let block_size = |profile| Settings::read(profile, lookup).unwrap().prefix.block_size;
    assert_eq!((block_size(Profile::Document), block_size(Profile::AibrixCompat)), (16, 4));
}

#[test]
fn variables_are_read_and_zero_is_legal() {
    let lookup = |name: &str| {
        let value = match name {
            "AIBRIX_PREFIX_CACHE_BLOCK_SIZE" => "64",
            "KVFLASH_PREFIX_CACHE_BLOCK_SIZE" => "32",
            "KVFLASH_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT" => "0",
            "AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR" => "0.5",
            "AIBRIX_ROUTER_VTC_BASIC_FAIRNESS_WEIGHT" => "0",
            "AIBRIX_ROUTER_VTC_TOKEN_TRACKER_TIME_UNIT" => "hours",
            "AIBRIX_ROUTING_ALGORITHM" => "prefix-aware",
            "AIBRIX_STATESYNC_ENABLED" => "T",
            "KVFLASH_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED" => "false",
            _ => return None,
        };
        Some(value.to_owned())
    };
    let settings = Settings::read(Profile::Document, lookup).unwrap();
    assert_eq!(settings.prefix.block_size, 32);
    assert_eq!(settings.prefix.imbalance_abs_count, 0);
    assert_eq!(settings.prefix.standard_deviation_factor, 0.5);
    assert_eq!(settings.prefix.hash_seed, Some(0));
    assert_eq!(settings.prefix.source, settings::PrefixSource::Table);
    assert_eq!(settings.vtc.fairness_weight, 0.0);
    assert_eq!(settings.vtc.time_unit, settings::TimeUnit::Hours);
    assert_eq!(settings.algorithm.as_deref(), Some("prefix-aware"));
    let origin = settings.origins.iter().find(|one| one.name == "PREFIX_CACHE_BLOCK_SIZE").unwrap();
    assert_eq!(origin.read_from.as_deref(), Some("KVFLASH_PREFIX_CACHE_BLOCK_SIZE"));

    let compat = Settings::read(Profile::AibrixCompat, lookup).unwrap();
    let hours = "must be one of minutes, seconds, milliseconds, got \"hours\"";
    assert!(compat.warnings.iter().any(|one| one.contains(hours)), "{:?}", compat.warnings);
    assert_eq!(compat.prefix.imbalance_abs_count, 8);
    assert_eq!(compat.prefix.standard_deviation_factor, 1.0);
    assert_eq!(compat.vtc.time_unit, settings::TimeUnit::Minutes);
    assert_eq!(compat.warnings.len(), 4, "{:?}", compat.warnings);
    assert!(compat.warnings[0].contains("IMBALANCE_ABS_COUNT must be an integer of at least 1"));
}

#[test]
fn variables_that_change_nothing_are_named_with_what_lets_them_count() {
    let without_effect = |profile, source: &str, has_events| {
        let lookup = |name: &str| {
            let value = match name {
                "AIBRIX_PREFIX_CACHE_BLOCK_SIZE" => "64",
                "KVFLASH_ROUTER_VTC_TOKEN_TRACKER_MIN_TOKENS" => "10",
                "AIBRIX_ROUTER_VTC_TOKEN_TRACKER_MAX_TOKENS" => "20",
                "AIBRIX_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED" => source,
                _ => return None,
            };
            Some(value.to_owned())
        };
        let strategies = ["prefix_cache:2,vtc-basic"];
        Settings::read(profile, lookup).unwrap().without_effect(&strategies, has_events)
    };
    let size = "AIBRIX_PREFIX_CACHE_BLOCK_SIZE has no effect on models with engines that publish KV \
                events: prefix-cache counts the engines' own blocks there; \
                AIBRIX_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED=false makes it cut prompts by itself, with \
                this block size";
    let totals = |name| {
        format!(
            "{name} has no effect with the policy profile document: vtc-basic scores clients by their \
             shares of all tokens there; --policy-profile aibrix-compat lets it count"
        )
    };
    let least = totals("KVFLASH_ROUTER_VTC_TOKEN_TRACKER_MIN_TOKENS");
    let most = totals("AIBRIX_ROUTER_VTC_TOKEN_TRACKER_MAX_TOKENS");
    let all = [size.to_owned(), least.clone(), most.clone()];
    assert_eq!(without_effect(Profile::Document, "auto", true), all);
    assert_eq!(without_effect(Profile::Document, "true", false), all);
    assert_eq!(without_effect(Profile::Document, "auto", false), [least.clone(), most.clone()]);
    assert_eq!(without_effect(Profile::Document, "false", true), [least, most]);
    assert_eq!(without_effect(Profile::AibrixCompat, "auto", true), [size]);
    assert!(without_effect(Profile::AibrixCompat, "false", true).is_empty());
    for profile in Profile::ALL {
        assert!(Settings::new(profile).without_effect(&["auto"], true).is_empty());
    }
}

#[test]
fn variables_of_a_policy_that_is_not_used_are_named() {
    let lookup = |name: &str| {
        let value = match name {
            "AIBRIX_PREFIX_CACHE_BLOCK_SIZE" | "AIBRIX_SESSION_MAX_SESSIONS" => "16",
            "KVFLASH_ROUTER_VTC_BASIC_MAX_POD_LOAD" => "50",
            _ => return None,
        };
        Some(value.to_owned())
    };
    let settings = Settings::read(Profile::Document, lookup).unwrap();
    let unused = |strategies: &[&str]| settings.without_effect(strategies, false);
    let all = unused(&["auto"]);
    assert_eq!(
        all,
        [
            ("AIBRIX_PREFIX_CACHE_BLOCK_SIZE", "AIBRIX_", "prefix-cache"),
            ("KVFLASH_ROUTER_VTC_BASIC_MAX_POD_LOAD", "KVFLASH_", "vtc-basic"),
            ("AIBRIX_SESSION_MAX_SESSIONS", "AIBRIX_", "session-affinity"),
        ]
        .map(|(full, prefix, policy)| format!(
            "{full} has no effect without {prefix}ROUTING_ALGORITHM={policy} or --router-mode {policy}: \
             the policy is auto"
        ))
    );
    assert_eq!(unused(&["Prefix_Aware"]).len(), 2);
    assert_eq!(unused(&["vtc-basic:2,least-request", "session-affinity"]).len(), 1);
}

#[test]
fn values_out_of_range_are_refused_by_name() {
    for (name, value, wanted) in [
        ("PREFIX_CACHE_BLOCK_SIZE", "0", "an integer in 1..=1048576"),
        ("PREFIX_CACHE_BLOCK_NUMBER", "many", "an integer in 0..=1073741824"),
        ("PREFIX_CACHE_TOKENIZER_TYPE", "bytes", "one of character, tiktoken, model"),
        ("PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", "-1", "a finite number of at least 0"),
        ("PREFIX_CACHE_HASH_SEED", "-1", "an integer in 0..=18446744073709551615"),
        ("ROUTER_VTC_BASIC_MAX_POD_LOAD", "0", "a finite number above 0"),
        ("ROUTER_VTC_BASIC_MAX_POD_LOAD", "inf", "a finite number above 0"),
        ("ROUTER_VTC_TOKEN_TRACKER_TIME_UNIT", "days", "one of hours, minutes"),
        ("STATESYNC_ENABLED", "yes", "true or false"),
        ("PREFIX_CACHE_KV_EVENT_SYNC_ENABLED", "yes", "auto, true or false"),
    ] {
        let full = format!("AIBRIX_{name}");
        let lookup = |asked: &str| (asked == full).then(|| value.to_owned());
        let error = Settings::read(Profile::Document, lookup).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{full} must be {wanted}")), "{error}");
        assert!(error.ends_with(&format!("got {value:?}")), "{error}");
        let compat = Settings::read(Profile::AibrixCompat, lookup).unwrap();
        let defaults = Settings::new(Profile::AibrixCompat);
        assert_eq!((compat.prefix, compat.vtc), (defaults.prefix, defaults.vtc));
        assert_eq!(compat.warnings.len(), 1);
    }
}

#[test]
fn a_shadow_counts_and_changes_nothing() {
    let settings = Settings::default();
    let shadow = Shadow::new(policy("kv", &settings), 3);
    let active = policy("least-request", &settings);
    let request = RequestTerms { isl_tokens: 64, block_size: 16, ..REQUEST };
    let mut list = [candidate(0, Some(1)), candidate(1, Some(0))];
    list[0].overlap_blocks = 4;
    let candidates = Candidates::new(&list);
    let context = Context::new(request, "m", 0);
    let choice = choose(&*active, &context, &list);
    assert_eq!(choice.index, 1);
    assert_eq!(shadow.observe(&context, &candidates, &choice), Some(list[0].worker));
    list[0].overlap_blocks = 0;
    list[1].overlap_blocks = 3;
    shadow.observe(&context, &Candidates::new(&list), &choice);
    assert_eq!(
        shadow.stats(),
        ShadowStats {
            decisions: 2,
            agreed: 1,
            refused: 0,
            active_reused_blocks: 3,
            shadow_reused_blocks: 7,
            active_requests: 0,
            shadow_requests: 1,
        }
    );
    let mut names = Vec::new();
    shadow.samples(&mut |sample| names.push((sample.name.to_owned(), sample.label.1.to_owned())));
    assert_eq!(names.len(), 7);
    assert!(names.iter().all(|(name, label)| name.ends_with("_total") && label == "kv"));
}

#[test]
fn a_shadow_remembers_where_requests_really_went() {
    let settings = Settings::default();
    let prefix: Arc<dyn RoutePolicy> = policy("prefix-cache", &settings);
    let shadow = Shadow::new(prefix, 3);
    let list = [candidate(0, Some(1)), candidate(1, Some(0))];
    let candidates = Candidates::new(&list);
    let context = Context { prompt: &[b'x'; 512], ..context(0) };
    let to_first = Choice { index: 0, ties: 1, margin: None, reason: Reason::Turn, score: None };
    assert_eq!(shadow.observe(&context, &candidates, &to_first), Some(list[1].worker));
    assert_eq!(shadow.observe(&context, &candidates, &to_first), Some(list[0].worker));
    assert_eq!((shadow.stats().decisions, shadow.stats().agreed), (2, 1));
}
