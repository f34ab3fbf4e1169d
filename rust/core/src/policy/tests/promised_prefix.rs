//! Guarantees of `prefix-cache` beyond the recorded cases.

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::SmallRng;

use super::super::prefix::*;
use super::super::settings::{PrefixSettings, TokenizerKind};
use super::super::*;
use super::REQUEST;
use super::pods::{candidate, context, outcomes, policy};
use crate::ids::Worker;

const TTL_MS: u64 = 1_000;

fn settings(profile: Profile, max_blocks: usize) -> PrefixSettings {
    PrefixSettings {
        max_blocks,
        eviction_duration_ms: TTL_MS,
        eviction_interval_ms: 0,
        ..Settings::new(profile).prefix
    }
}

fn table(profile: Profile, max_blocks: usize) -> PrefixTable {
    PrefixTable::new(&settings(profile, max_blocks))
}

fn worker(id: u64) -> Worker {
    Worker::new(id, 0)
}

/// The share of `hashes` that each of the first `count` workers holds, in percent.
fn percents(table: &mut PrefixTable, hashes: &[u64], count: u64, now_ms: u64) -> Vec<Option<u32>> {
    let mut percents = vec![None; count as usize];
    let allowed = vec![true; count as usize];
    table.matches("m", hashes, (0..count).map(worker), &allowed, now_ms, &mut percents);
    percents
}

#[test]
fn equal_matches_are_counted_as_ties() {
    let mut rng = SmallRng::seed_from_u64(7);
    let percents = [Some(50), Some(100), Some(100), None, Some(100)];
    let mut found = |counts: &[i64]| select_matched(counts, &percents, 2.0, &mut rng);
    for _ in 0..8 {
        let (index, ties) = found(&[0; 5]).unwrap();
        assert!(percents[index] == Some(100) && ties == 3, "{index} {ties}");
        let (index, ties) = found(&[0, 1, 0, 0, 0]).unwrap();
        assert!([2, 4].contains(&index) && ties == 2, "{index} {ties}");
    }
    assert_eq!(found(&[0, 1, 0, 0, 1]), Some((2, 1)));
}

#[test]
fn the_end_of_a_prompt_is_forgotten_before_its_beginning() {
    let (one, other) = ([1, 2, 3, 4], [11, 12]);
    for (profile, wanted) in [(Profile::Document, Some(50)), (Profile::AibrixCompat, None)] {
        let mut table = table(profile, 4);
        table.record("m", &one, worker(0), 0);
        table.record("m", &other, worker(0), 0);
        assert_eq!(percents(&mut table, &other, 1, 0), [Some(100)]);
        assert_eq!(percents(&mut table, &one, 1, 0), [wanted], "{profile}");
        assert_eq!((table.stats().blocks, table.stats().evicted), (4, 2));
    }
}

#[test]
fn of_a_prompt_that_is_too_long_the_beginning_is_kept() {
    let mut table = table(Profile::Document, 3);
    table.record("m", &[9], worker(0), 0);
    table.record("m", &[1, 2, 3, 4, 5, 6], worker(0), 0);
    assert_eq!(percents(&mut table, &[1, 2, 3, 4, 5, 6], 1, 0), [Some(50)]);
    // Of one that is there the beginning stays for the sake of its end.
    table.record("m", &[1, 2, 7], worker(1), 0);
    assert_eq!(percents(&mut table, &[1, 2, 7], 2, 0), [Some(66), Some(100)]);
    let mut none = self::table(Profile::Document, 0);
    none.record("m", &[1, 2], worker(0), 0);
    assert_eq!((none.stats().blocks, percents(&mut none, &[1, 2], 1, 0)[0]), (0, None));
}

#[test]
fn a_worker_that_is_not_used_any_more_is_forgotten_by_itself() {
    for (profile, wanted) in [(Profile::Document, None), (Profile::AibrixCompat, Some(100))] {
        let mut table = table(profile, 100);
        table.record("m", &[1, 2], worker(0), 0);
        for now_ms in (0..5_000).step_by(500) {
            table.record("m", &[1, 2], worker(1), now_ms);
        }
        assert_eq!(percents(&mut table, &[1, 2], 2, 4_500), [wanted, Some(100)], "{profile}");
        assert_eq!(percents(&mut table, &[1, 2], 2, 4_500 + TTL_MS), [wanted, Some(100)]);
        let later = 4_500 + TTL_MS + 1;
        assert_eq!(percents(&mut table, &[1, 2], 2, later), [None, None], "strictly older");
        assert_eq!((table.stats().blocks, table.stats().expired), (0, 2));
    }
}

#[test]
fn bytes_are_bounded() {
    for profile in Profile::ALL {
        let max_bytes = 40_000;
        let mut table = PrefixTable::new(&PrefixSettings { max_bytes, ..settings(profile, 1_000) });
        for id in 0..50 {
            let hashes: Vec<u64> =
                (0..20).map(|at| if at < 10 { at } else { id * 100 + at }).collect();
            table.record("m", &hashes, worker(id), id);
            assert!(table.stats().bytes <= max_bytes, "{profile}: {:?}", table.stats());
        }
        assert!(table.stats().evicted > 0 && table.stats().blocks > 20);
        let shared: Vec<u64> = (0..10).collect();
        let is_kept = percents(&mut table, &shared, 1, 49) == [Some(100)];
        assert!(is_kept || profile == Profile::AibrixCompat, "what all share is used last");
    }
}

#[test]
fn a_worker_that_goes_is_forgotten() {
    for profile in Profile::ALL {
        let mut table = table(profile, 100);
        table.record("m", &[1, 2], worker(0), 0);
        table.record("m", &[1], worker(1), 0);
        table.forget(worker(0));
        assert_eq!(percents(&mut table, &[1, 2], 2, 0), [None, Some(50)]);
        assert_eq!(table.stats().blocks, 1);
    }
}

proptest! {
    #[test]
    fn matches_are_those_of_a_search_through_everything(
        records in prop::collection::vec((0..6_u64, 0..4_u64, 1..7_usize, 0..700_u64), 1..40),
        prompt in 0..4_u64,
        length in 1..8_usize,
        max_blocks in prop::sample::select(vec![3_usize, 7, 1_000]),
    ) {
        // Prompts share a beginning two by two.
        let hashes = |prompt: u64, length: usize| -> Vec<u64> {
            let of = |at: u64| if at < 3 { prompt / 2 * 100 + at } else { 1_000 + prompt * 100 + at };
            (0..length as u64).map(of).collect()
        };
        let mut table = table(Profile::Document, max_blocks);
        let mut known: Vec<(u64, Vec<u64>, u64)> = Vec::new();
        let mut now_ms = 0;
        for (id, prompt, length, wait_ms) in records {
            now_ms += wait_ms;
            let hashes = hashes(prompt, length);
            table.record("m", &hashes, worker(id), now_ms);
            known.push((id, hashes, now_ms));
            prop_assert!(table.stats().blocks <= max_blocks as u64);
        }
        let wanted = hashes(prompt, length);
        let found = percents(&mut table, &wanted, 6, now_ms);
        let held = |id: u64| {
            let fresh = known.iter().filter(|(by, _, at)| *by == id && now_ms - at <= TTL_MS);
            let blocks: BTreeSet<u64> = fresh.flat_map(|(_, hashes, _)| hashes.clone()).collect();
            wanted.iter().take_while(|hash| blocks.contains(hash)).count()
        };
        for (id, &found) in (0..).zip(&found) {
            let all = (held(id) > 0).then(|| (held(id) * 100 / length) as u32);
            if max_blocks == 1_000 {
                prop_assert_eq!(found, all);
            } else {
                prop_assert!(found <= all, "never more than was sent: {:?}, {:?}", found, all);
            }
        }
        // A chain without its start is not held.
        let present: Vec<bool> = wanted
            .iter()
            .map(|&hash| percents(&mut table, &[hash], 6, now_ms).iter().any(Option::is_some))
            .collect();
        prop_assert!(present.is_sorted_by(|before, after| before >= after), "{:?}", present);
    }
}

#[test]
fn engines_events_count_where_there_are_any() {
    let list = [
        Candidate { overlap_blocks: 1, ..candidate(0, Some(0)) },
        Candidate { overlap_blocks: 3, ..candidate(1, Some(2)) },
    ];
    let request = RequestTerms { isl_tokens: 70, block_size: 16, ..REQUEST };
    let prompt = [b'x'; 512];
    let indexed = Context { request, is_indexed: true, prompt: &prompt, ..context(0) };
    for (value, wanted) in [("auto", Some(75.0)), ("true", Some(75.0)), ("false", Some(0.0))] {
        let name = "KVFLASH_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED";
        let lookup = |asked: &str| (asked == name).then(|| value.to_owned());
        let settings = Settings::read(Profile::Document, lookup).unwrap();
        let policy = policy("prefix-cache", &settings);
        let mut rng = SmallRng::seed_from_u64(1);
        let candidates = Candidates::new(&list);
        policy.prepare(&indexed).unwrap();
        let choice = policy.choose(&indexed, &candidates, &mut Vec::new(), &mut rng).unwrap();
        assert_eq!(choice.score, wanted, "{value}");
        policy.routed(&indexed, &candidates, &choice);
        let mut blocks = f64::NAN;
        policy.samples(0, &mut |sample| {
            if sample.name == "prefix_cache_blocks" {
                blocks = sample.value;
            }
        });
        assert_eq!(blocks, if value == "false" { 4.0 } else { 0.0 });
    }
}

#[test]
fn imbalance_leaves_those_with_the_fewest_requests() {
    let settings = |profile| Settings {
        prefix: PrefixSettings { imbalance_abs_count: 16, ..Settings::new(profile).prefix },
        ..Settings::new(profile)
    };
    let held = |profile| choose_under_imbalance(&policy("prefix-cache", &settings(profile)));
    // Worker 2 is as idle as worker 0 and holds the prompt.
    let reason = Reason::LeastRequestFallback;
    assert_eq!(held(Profile::Document), (vec![0, 2], vec![reason; 2]));
    assert_eq!(held(Profile::AibrixCompat), (vec![2], vec![Reason::PrefixMatch]));
}

/// The workers that are chosen when the last of two idle ones holds the prompt, and the reasons.
fn choose_under_imbalance(policy: &Arc<dyn RoutePolicy>) -> (Vec<usize>, Vec<Reason>) {
    let context = Context { prompt: &[b'x'; 256], ..context(0) };
    let list = [candidate(0, Some(0)), candidate(1, Some(17)), candidate(2, Some(0))];
    let candidates = Candidates::new(&list);
    let to = |index| Choice { index, ties: 1, margin: None, reason: Reason::Turn, score: None };
    policy.routed(&context, &candidates, &to(2));
    let choose = |rng: &mut SmallRng| policy.choose(&context, &candidates, &mut Vec::new(), rng);
    let found = outcomes(|rng| choose(rng).map(|choice| choice.index));
    let reason = choose(&mut SmallRng::seed_from_u64(1)).unwrap().reason;
    let found = Vec::from_iter(found);
    let reasons = vec![reason; found.len()];
    (found, reasons)
}

#[test]
fn differences_within_the_count_are_no_imbalance() {
    let policy = policy("prefix-cache", &Settings::default());
    let context = Context { prompt: &[b'x'; 256], ..context(0) };
    let mut rng = SmallRng::seed_from_u64(1);
    let mut choose = |counts: [u32; 3]| {
        let list: Vec<_> = (0..3).map(|at| candidate(at, Some(counts[at]))).collect();
        let candidates = Candidates::new(&list);
        let choice = policy.choose(&context, &candidates, &mut Vec::new(), &mut rng).unwrap();
        policy.routed(&context, &candidates, &choice);
        (choice.index, choice.reason, choice.score)
    };
    assert_eq!(choose([1, 0, 1]), (1, Reason::LeastRequestFallback, Some(0.0)));
    assert_eq!(choose([0, 16, 0]), (1, Reason::PrefixMatch, Some(100.0)), "within 16");
    let (index, reason, _) = choose([0, 17, 1]);
    assert_eq!((index, reason), (0, Reason::LeastRequestFallback), "beyond it");
}

#[test]
fn a_match_that_is_too_busy_is_passed_over() {
    let name = "AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR";
    let lookup = |asked: &str| (asked == name).then(|| "0".to_owned());
    let settings = Settings::read(Profile::Document, lookup).unwrap();
    let policy = policy("prefix-cache", &settings);
    let context = Context { prompt: &[b'x'; 256], ..context(0) };
    let list = [candidate(0, Some(0)), candidate(1, Some(1)), candidate(2, Some(0))];
    let candidates = Candidates::new(&list);
    let to = |index| Choice { index, ties: 1, margin: None, reason: Reason::Turn, score: None };
    policy.routed(&context, &candidates, &to(1));
    let found = outcomes(|rng| {
        let choice = policy.choose(&context, &candidates, &mut Vec::new(), rng).unwrap();
        assert_eq!(choice.reason, Reason::PrefixMatchSkipped);
        Some(choice.index)
    });
    assert_eq!(Vec::from_iter(found), [0, 2]);
}

#[test]
fn tokenizers_cut_prompts_each_in_its_way() {
    let hashes = |kind, profile, block_size, context: &Context<'_>| {
        let prefix = Settings::new(profile).prefix;
        let settings = PrefixSettings { tokenizer: kind, block_size, ..prefix };
        BlockHasher::new(&settings, 5).hashes(context)
    };
    let text = "The quick brown fox jumps over the lazy dog. ".repeat(8);
    let token_ids: Vec<u32> = (0..40).collect();
    let context = Context { prompt: text.as_bytes(), token_ids: &token_ids, ..context(0) };
    let count = |kind, profile, block_size| hashes(kind, profile, block_size, &context).len();
    use Profile::{AibrixCompat, Document};
    assert_eq!(count(TokenizerKind::Character, Document, 90), 4);
    // 1 to 4 bytes a character.
    let prompt = "a\u{e9}\u{20ac}\u{1f600}".repeat(8);
    let characters = |size, profile, bytes: &[u8]| {
        let context = Context { prompt: bytes, ..self::context(0) };
        hashes(TokenizerKind::Character, profile, size, &context)
    };
    let all = characters(4, Document, prompt.as_bytes());
    assert_eq!((all.len(), characters(5, Document, prompt.as_bytes()).len()), (8, 6));
    assert_eq!(all, characters(10, AibrixCompat, prompt.as_bytes()), "the same text in each block");
    assert!(characters(32, Document, &prompt.as_bytes()[..76]).is_empty());
    assert_eq!(characters(32, Document, prompt.as_bytes()).len(), 1);
    assert!(characters(1, Document, b"").is_empty());
    assert_eq!(characters(1, Document, b"\x80\x80a").len(), 2, "not UTF-8");
    assert_eq!(count(TokenizerKind::Model, Document, 16), 2);
    assert_eq!(count(TokenizerKind::Model, AibrixCompat, 16), 10, "4 bytes a token");
    // 10 tokens a sentence; the last space is a token of its own.
    assert_eq!(count(TokenizerKind::Tiktoken, Document, 1), 81);
    assert_eq!(count(TokenizerKind::Tiktoken, AibrixCompat, 4), 81);
    assert_eq!(
        hashes(TokenizerKind::Tiktoken, Document, 1, &context),
        hashes(TokenizerKind::Tiktoken, AibrixCompat, 4, &context),
    );
    // Known ids of the vocabulary: "hello world".
    let hello = Context { prompt: b"hello world", token_ids: &[15_339, 1_917], ..self::context(0) };
    let ids = hashes(TokenizerKind::Model, Document, 1, &hello);
    assert_eq!(hashes(TokenizerKind::Tiktoken, Document, 1, &hello), ids);
}

#[test]
fn hashes_are_made_once_for_each_way_of_making_them() {
    let memo = Memo::default();
    let make = |value| move || vec![value];
    assert_eq!(*memo.hashes(1, make(10)), [10]);
    assert_eq!(*memo.hashes(1, make(11)), [10], "kept");
    assert_eq!(*memo.hashes(2, make(12)), [12], "another maker's own");
    assert_eq!(*memo.hashes(1, make(13)), [10]);
}
