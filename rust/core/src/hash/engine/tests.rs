#![allow(clippy::unwrap_used)]

use super::*;
use proptest::prelude::*;

fn names(scheme: &NameScheme, tokens: &[u32], unit: u32, keys: &NameKeys<'_>) -> (bool, Vec<u64>) {
    let mut out = vec![7];
    let is_complete = names_into(scheme, tokens, unit, keys, &mut out);
    assert_eq!(out.remove(0), 7, "names are appended");
    (is_complete, out)
}

fn item(identifier: &str, offset: u32, length: u32) -> MediaItem {
    MediaItem { identifier: identifier.to_owned(), offset, length }
}

#[test]
fn an_algorithm_has_a_name() {
    for algorithm in NameAlgorithm::ALL {
        assert_eq!(NameAlgorithm::from_name(algorithm.name()), Some(algorithm));
    }
    assert_eq!(NameAlgorithm::from_name("md5"), None);
}

#[test]
fn an_adapter_without_a_path_has_no_names() {
    let keys = NameKeys { lora: Some(("sql", "")), ..NameKeys::default() };
    assert_eq!(names(&NameScheme::default(), &[1; 8], 4, &keys), (false, vec![]));
}

#[test]
fn empty_names_are_none() {
    let (scheme, plain) = (NameScheme::default(), NameKeys::default());
    let keys = NameKeys { lora: Some(("", "")), cache_salt: Some(""), ..plain };
    assert_eq!(names(&scheme, &[1; 8], 4, &keys), names(&scheme, &[1; 8], 4, &plain));
}

#[test]
fn names_end_where_a_digest_of_embeddings_is_missing() {
    let embeds = [vec![1; 32]];
    let keys = NameKeys { embeds: &embeds, ..NameKeys::default() };
    let (is_complete, found) = names(&NameScheme::default(), &[1; 8], 4, &keys);
    assert_eq!((is_complete, found.len()), (false, 1));
}

#[test]
fn twins_in_a_block_have_a_name_in_cbor_only() {
    let media = [item("same", 5, 1), item("same", 6, 4)];
    let keys = NameKeys { media: &media, ..NameKeys::default() };
    for algorithm in NameAlgorithm::ALL {
        let scheme = NameScheme::new(algorithm, "0");
        let (is_complete, found) = names(&scheme, &[1; 12], 4, &keys);
        let expected = if algorithm.is_pickle() { (false, 1) } else { (true, 3) };
        assert_eq!((is_complete, found.len()), expected, "{algorithm:?}");
    }
    // In blocks of their own they are no twins.
    let media = [item("same", 0, 4), item("same", 4, 4)];
    let keys = NameKeys { media: &media, ..NameKeys::default() };
    assert!(names(&NameScheme::default(), &[1; 12], 4, &keys).0);
}

proptest! {
    #[test]
    fn a_chain_tells_its_digests(
        tokens in prop::collection::vec(any::<u32>(), 0..200),
        unit in 1_u32..20,
        algorithm in prop::sample::select(NameAlgorithm::ALL.to_vec()),
    ) {
        let scheme = NameScheme::new(algorithm, "seed");
        let mut namer = Namer::new(&scheme);
        let mut found = Vec::new();
        for (i, block) in tokens.chunks_exact(unit as usize).enumerate() {
            found.push(namer.next(block, [].into_iter()));
            prop_assert_eq!(namer.parent.name(), found[i]);
        }
        prop_assert_eq!((true, found), names(&scheme, &tokens, unit, &NameKeys::default()));
    }
}

fn by_cache(cache: &NameCache, tokens: &[u32], unit: u32, keys: &NameKeys<'_>) -> (bool, Vec<u64>) {
    let mut out = vec![7];
    let is_complete = cache.names(&NameScheme::default(), tokens, unit, keys, &mut out);
    assert_eq!(out.remove(0), 7, "names are appended");
    (is_complete, out)
}

#[test]
fn a_returning_conversation_pays_for_its_new_blocks() {
    let (cache, keys) = (NameCache::default(), NameKeys::default());
    let tokens: Vec<u32> = (0..10_000).collect();
    by_cache(&cache, &tokens[..5_000], 16, &keys);
    assert_eq!((cache.stats().hits_total, cache.stats().misses_total), (0, 312));
    let returned = by_cache(&cache, &tokens, 16, &keys);
    assert_eq!(returned, names(&NameScheme::default(), &tokens, 16, &keys));
    // Four chunks of 64 blocks were complete the first time.
    let stats = cache.stats();
    assert_eq!((stats.hits_total, stats.misses_total), (256, 312 + 625 - 256));
    assert_eq!((stats.held_entries, stats.evictions_total), (9, 0));
}

#[test]
fn known_names_stay_under_their_limit() {
    let (cache, keys) = (NameCache::new(64 * 1024), NameKeys::default());
    for first in 0..500 {
        by_cache(&cache, &vec![first; 1_024], 16, &keys);
        assert!(cache.stats().held_bytes <= 64 * 1024);
    }
    let stats = cache.stats();
    assert!(stats.held_entries > 32, "{stats:?}");
    assert_eq!(stats.held_entries + stats.evictions_total, 500);
    let off = NameCache::new(0);
    assert_eq!(by_cache(&off, &[1; 32], 16, &keys).1.len(), 2);
    assert_eq!((off.stats().held_entries, off.stats().misses_total), (0, 2));
}

#[test]
fn chunks_of_other_keys_do_not_meet() {
    let (cache, tokens, plain) = (NameCache::default(), [1; 4_096], NameKeys::default());
    let (media, moved) = ([item("a", 2_000, 100)], [item("a", 2_001, 100)]);
    let embeds = [vec![vec![1; 32]; 256], vec![vec![2; 32]; 256]];
    let cases = [
        plain,
        NameKeys { cache_salt: Some("sql"), ..plain },
        NameKeys { lora: Some(("sql", "path")), ..plain },
        NameKeys { lora: Some(("sqlp", "ath")), ..plain },
        NameKeys { lora: Some(("sql", "path")), cache_salt: Some("sql"), ..plain },
        NameKeys { media: &media, ..plain },
        NameKeys { media: &moved, ..plain },
        NameKeys { embeds: &embeds[0], ..plain },
        NameKeys { embeds: &embeds[1], ..plain },
    ];
    for keys in cases.iter().chain(&cases) {
        let expected = names(&NameScheme::default(), &tokens, 16, keys);
        assert_eq!(by_cache(&cache, &tokens, 16, keys), expected, "{keys:?}");
    }
    // All of the second round; in the first, the 64 blocks before the item, which is in two cases.
    let stats = cache.stats();
    assert_eq!(stats.hits_total, 9 * 256 + 64 + 64);
    assert_eq!(stats.hits_total + stats.misses_total, 2 * 9 * 256);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn a_cache_equals_the_chain_on_growing_conversations(
        unit in prop::sample::select(vec![1_u32, 7, 16, 100, 1_024, 1_500]),
        capacity_bytes in prop::sample::select(vec![0_usize, 40_000, 1 << 20]),
        media in prop::collection::vec((0_u32..200, 0_u32..1_500, 0_u32..40), 0..6),
        turns in prop::collection::vec((0_usize..3, 1_usize..2_500, 0_u8..8), 1..12),
        digests in 0_usize..2_000,
    ) {
        let (cache, scheme) = (NameCache::new(capacity_bytes), NameScheme::default());
        let mut at = 0;
        let media: Vec<MediaItem> = media.iter().map(|&(name, gap, length)| {
            at += gap;
            item(&format!("item {}", name % 20), at, length)
        }).collect();
        let embeds = vec![vec![3; 32]; digests];
        let mut conversations = vec![vec![]; 3];
        for (which, grown, keys) in turns {
            let tokens: &mut Vec<u32> = &mut conversations[which];
            let from = tokens.len() as u32;
            tokens.extend((from..from + grown as u32).map(|token| token * 7));
            let keys = NameKeys {
                lora: (keys == 1).then_some(("sql", "path")),
                cache_salt: (keys == 2).then_some("tenant"),
                media: if keys & 4 != 0 { &media } else { &[] },
                embeds: if keys == 3 { &embeds } else { &[] },
            };
            let expected = names(&scheme, tokens, unit, &keys);
            prop_assert_eq!(by_cache(&cache, tokens, unit, &keys), expected);
            prop_assert!(cache.stats().held_bytes <= capacity_bytes as u64);
        }
    }
}
