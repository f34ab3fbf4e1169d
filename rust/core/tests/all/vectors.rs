//! Recorded bytes and literal values, which the tests of both languages read from tests/vectors.
#![allow(clippy::unwrap_used)]

use std::sync::LazyLock;

use kvflash_core::codec::{Limits, decode_batch};
use kvflash_core::error::Error;
use kvflash_core::event::{Batch, Event, ExtraKey, Removed, Stored};
use kvflash_core::hash;
use kvflash_core::ids::Tier;
use proptest::prelude::*;
use serde_json::Value;

fn vectors(name: &str) -> Vec<u8> {
    let path = format!("../../tests/vectors/{name}");
    std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn json(name: &str) -> Value {
    serde_json::from_slice(&vectors(name)).unwrap()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

/// A hash written as a decimal string, or as a number of either sign.
fn hash_of(value: &Value) -> u64 {
    match value {
        Value::String(text) => text.parse().unwrap(),
        _ => value.as_u64().or(value.as_i64().map(i64::cast_unsigned)).unwrap(),
    }
}

fn hashes(value: &Value) -> Vec<u64> {
    list(value).iter().map(hash_of).collect()
}

fn tokens(value: &Value) -> Vec<u32> {
    list(value).iter().map(|token| token.as_u64().unwrap().try_into().unwrap()).collect()
}

fn identity_seed(case: &Value) -> u64 {
    hash::identity_seed(case["lora_name"].as_str(), case["cache_salt"].as_str())
}

#[test]
fn hashes_of_prompts_equal_their_vectors() {
    let vectors = json("hash.json");
    let identities = list(&vectors["identity"]);
    assert_eq!(identities.len(), 5);
    for case in identities {
        assert_eq!(identity_seed(case), hash_of(&case["seed"]), "{case}");
    }
    let prompts = list(&vectors["prompts"]);
    assert_eq!(prompts.len(), 9);
    for case in prompts {
        let tokens = match case["tokens"].as_u64() {
            Some(count) => vec![case["token_id"].as_u64().unwrap() as u32; count as usize],
            None => tokens(&case["token_ids"]),
        };
        let block_size = case["block_size"].as_u64().unwrap() as u32;
        let locals = match case["eagle"].as_bool() {
            Some(true) => hash::local_hashes_eagle(&tokens, block_size, identity_seed(case)),
            _ => hash::local_hashes(&tokens, block_size, identity_seed(case)),
        };
        assert_eq!(locals, hashes(&case["local"]), "{case}");
        let mut sequence = Vec::new();
        hash::sequence_hashes_into(&locals, &mut sequence);
        assert_eq!(sequence, hashes(&case["sequence"]), "{case}");
    }
    let counts = list(&vectors["block_counts"]);
    assert_eq!(counts.len(), 2);
    for case in counts {
        let block_size = case["block_size"].as_u64().unwrap() as u32;
        for (count, blocks) in tokens(&case["tokens"]).iter().zip(tokens(&case["blocks"])) {
            let tokens: Vec<u32> = (0..*count).collect();
            let found = hash::local_hashes(&tokens, block_size, hash::SEED).len();
            assert_eq!(found, blocks as usize, "{case}");
        }
    }
}

#[test]
fn hashes_of_items_and_texts_equal_their_vectors() {
    let vectors = json("hash.json");
    let (texts, items) = (list(&vectors["text"]), list(&vectors["items"]));
    let identifiers = list(&vectors["identifiers"]);
    assert_eq!((texts.len(), items.len(), identifiers.len()), (1, 3, 1));
    for case in texts {
        let text = case["text"].as_str().unwrap();
        let found = xxhash_rust::xxh3::xxh3_64_with_seed(text.as_bytes(), hash_of(&case["seed"]));
        assert_eq!(found, hash_of(&case["hash"]));
    }
    for case in items {
        let mm_hashes = hashes(&case["mm_hashes"]);
        let tokens = tokens(&case["token_ids"]);
        let found = hash::local_hash_with_items(&tokens, &mm_hashes, hash::SEED);
        assert_eq!(found, hash_of(&case["hash"]), "{case}");
    }
    for case in identifiers {
        let found = hash::item_hash(case["identifier"].as_str().unwrap());
        assert_eq!(found, hash_of(&case["hash"]), "{case}");
    }
}

/// A batch of engine_wire.json.
struct WireCase {
    name: String,
    payload: Vec<u8>,
    expect: Value,
}

static WIRE_CASES: LazyLock<Vec<WireCase>> = LazyLock::new(|| {
    let mut cases = Vec::new();
    for engine in list(&json("engine_wire.json")) {
        for case in list(&engine["cases"]) {
            let hex = case["hex"].as_str().unwrap();
            let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
            let name = |value: &Value| text(value).unwrap();
            cases.push(WireCase {
                name: format!("{} {}", name(&engine["engine"]), name(&case["name"])),
                payload: (0..hex.len()).step_by(2).map(byte).collect(),
                expect: case["expect"].clone(),
            });
        }
    }
    assert_eq!(cases.len(), CASES, "batches in engine_wire.json");
    cases
});

/// Batches in engine_wire.json.
const CASES: usize = 49;

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

/// The last 8 bytes of each hash, written in hex.
fn hashes_of_hex(value: &Value) -> Vec<u64> {
    let last = |hex: &Value| {
        let hex = hex.as_str().unwrap();
        u64::from_str_radix(&hex[hex.len() - 16..], 16).unwrap()
    };
    list(value).iter().map(last).collect()
}

fn extra_keys(value: &Value) -> Vec<Option<Vec<ExtraKey>>> {
    let key = |key: &Value| match key {
        Value::String(text) => ExtraKey::Text(text.clone()),
        item => ExtraKey::Item {
            identifier: text(&item[0]).unwrap(),
            offset: item[1].as_i64().unwrap(),
        },
    };
    let block = |keys: &Value| keys.as_array().map(|keys| keys.iter().map(key).collect());
    list(value).iter().map(block).collect()
}

fn check_stored(stored: &Stored, key: &str, value: &Value) {
    match key {
        "type" => assert_eq!(value, "BlockStored"),
        "block_hashes" => assert_eq!(stored.block_hashes, hashes(value)),
        "block_hashes_hex" => assert_eq!(stored.block_hashes, hashes_of_hex(value)),
        "parent" => assert_eq!(stored.parent, value.as_u64()),
        "token_ids" => assert_eq!(stored.token_ids, tokens(value)),
        "block_size" => assert_eq!(Some(u64::from(stored.block_size)), value.as_u64()),
        "lora_id" => assert_eq!(stored.lora_id, value.as_i64()),
        "lora_name" => assert_eq!(stored.lora_name, text(value)),
        "medium" => assert_eq!(stored.medium, text(value)),
        "cache_salt" => assert_eq!(stored.cache_salt, text(value)),
        "extra_keys" => assert_eq!(stored.extra_keys, extra_keys(value)),
        "group_idx" => assert_eq!(stored.group_idx.map(u64::from), value.as_u64()),
        _ => panic!("nothing compares {key}"),
    }
}

fn check_removed(removed: &Removed, key: &str, value: &Value) {
    match key {
        "type" => assert_eq!(value, "BlockRemoved"),
        "block_hashes" => assert_eq!(removed.block_hashes, hashes(value)),
        "medium" => assert_eq!(removed.medium, text(value)),
        _ => panic!("nothing compares {key}"),
    }
}

fn check_cleared(key: &str, value: &Value) {
    assert_eq!((key, value.as_str()), ("type", Some("AllBlocksCleared")));
}

#[test]
fn every_engine_version_decodes_to_what_it_meant() {
    let mut compared = 0;
    for case in WIRE_CASES.iter() {
        println!("{}", case.name);
        let batch = decode_batch(&case.payload, &Limits::default()).unwrap();
        assert_eq!((batch.skipped, batch.malformed), (0, 0));
        for (key, value) in case.expect.as_object().unwrap() {
            match key.as_str() {
                "ts" => assert_eq!(Some(batch.ts), value.as_f64()),
                "dp_rank" => assert_eq!(batch.dp_rank.map(u64::from), value.as_u64()),
                "events" => assert_eq!(batch.events.len(), list(value).len()),
                _ => panic!("nothing compares {key}"),
            }
        }
        for (event, expect) in batch.events.iter().zip(list(&case.expect["events"])) {
            for (key, value) in expect.as_object().unwrap() {
                match event {
                    Event::Stored(stored) => check_stored(stored, key, value),
                    Event::Removed(removed) => check_removed(removed, key, value),
                    Event::Cleared => check_cleared(key, value),
                }
                compared += 1;
            }
        }
    }
    assert_eq!(compared, 196, "keys of events in engine_wire.json");
}

#[test]
fn attention_kinds_of_hybrid_models_are_kept() {
    let mut seen = 0;
    for case in WIRE_CASES.iter().filter(|case| case.name.ends_with("stored-hybrid-groups")) {
        let batch = decode_batch(&case.payload, &Limits::default()).unwrap();
        let kind = |event: &Event| match event {
            Event::Stored(stored) => stored.spec_kind.clone().unwrap(),
            _ => panic!("{event:?}"),
        };
        let kinds: Vec<_> = batch.events.iter().map(kind).collect();
        assert_eq!(kinds, ["full_attention", "sliding_window"]);
        seen += 1;
    }
    assert_eq!(seen, 3);
}

/// The payloads among the entries of a recorded timeline, a stream of maps.
fn payloads_of_timeline(mut timeline: &[u8]) -> Vec<Vec<u8>> {
    let mut payloads = Vec::new();
    while !timeline.is_empty() {
        for _ in 0..rmp::decode::read_map_len(&mut timeline).unwrap() {
            let length = rmp::decode::read_str_len(&mut timeline).unwrap() as usize;
            let key;
            (key, timeline) = timeline.split_at(length);
            if key != b"parts" {
                skip(&mut timeline);
                continue;
            }
            let parts = rmp::decode::read_array_len(&mut timeline).unwrap();
            assert_eq!(parts, 3, "topic, sequence number, payload");
            for part in 0..parts {
                let length = rmp::decode::read_bin_len(&mut timeline).unwrap() as usize;
                let bytes;
                (bytes, timeline) = timeline.split_at(length);
                if part == 2 {
                    payloads.push(bytes.to_vec());
                }
            }
        }
    }
    payloads
}

/// Reads past what the timeline's other keys hold: texts, integers, nil, lists of tokens.
fn skip(bytes: &mut &[u8]) {
    use rmp::Marker;
    let mut ahead = *bytes;
    match rmp::decode::read_marker(&mut ahead).unwrap() {
        Marker::Null => *bytes = ahead,
        Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32 => {
            let length = rmp::decode::read_str_len(bytes).unwrap() as usize;
            *bytes = &bytes[length..];
        }
        Marker::FixArray(_) | Marker::Array16 | Marker::Array32 => {
            for _ in 0..rmp::decode::read_array_len(bytes).unwrap() {
                skip(bytes);
            }
        }
        _ => assert!(rmp::decode::read_int::<i64, _>(bytes).is_ok()),
    }
}

#[test]
fn a_recorded_engine_is_understood_without_remainder() {
    let payloads = payloads_of_timeline(&vectors("vllm_0_32_timeline.msgpack"));
    let (mut stored, mut removed, mut cleared, mut salted) = (0, 0, 0, 0);
    for payload in &payloads {
        let batch = decode_batch(payload, &Limits::default()).unwrap();
        assert_eq!((batch.skipped, batch.malformed), (0, 0));
        for event in batch.events {
            match event {
                Event::Stored(event) => {
                    stored += event.block_hashes.len();
                    let is_salted = |keys: &&Option<Vec<ExtraKey>>| {
                        **keys == Some(vec![ExtraKey::Text("tenant-a".to_owned())])
                    };
                    salted += event.extra_keys.iter().filter(is_salted).count();
                }
                Event::Removed(event) => removed += event.block_hashes.len(),
                Event::Cleared => cleared += 1,
            }
        }
    }
    let counts = (payloads.len(), stored, removed, cleared, salted);
    assert_eq!(counts, (554, 1_552, 883, 3, 27), "frames, blocks stored, removed, clears, salted");
}

/// Asserts that whatever comes out of `payload` respects `limits`, and that errors are of bytes.
fn check_bounded(payload: &[u8], limits: &Limits) -> Option<Batch> {
    let batch = match decode_batch(payload, limits) {
        Ok(batch) => batch,
        Err(Error::Decode { offset, .. }) => {
            assert!(offset <= payload.len(), "{offset} of {}", payload.len());
            return None;
        }
        Err(error) => panic!("not a decode error: {error}"),
    };
    assert!(batch.events.len() <= limits.max_events);
    let check_text = |text: &Option<String>| {
        assert!(text.as_ref().is_none_or(|text| text.len() <= limits.max_text_bytes));
    };
    for event in &batch.events {
        match event {
            Event::Stored(event) => {
                let (blocks, tokens) = (event.block_hashes.len(), event.token_ids.len());
                assert!(blocks <= limits.max_blocks_per_event);
                assert!(tokens <= limits.max_tokens_per_event);
                // Other groups leave out blocks that they do not keep.
                if event.is_full_attention() && event.tier() == Some(Tier::Device) {
                    assert!(tokens == 0 || tokens == blocks * event.block_size as usize);
                    assert!(event.extra_keys.is_empty() || event.extra_keys.len() == blocks);
                }
                let keys: usize = event.extra_keys.iter().flatten().map(Vec::len).sum();
                assert!(keys <= limits.max_extra_keys);
                for text in [&event.medium, &event.lora_name, &event.cache_salt, &event.spec_kind] {
                    check_text(text);
                }
            }
            Event::Removed(event) => {
                assert!(event.block_hashes.len() <= limits.max_blocks_per_event);
                check_text(&event.medium);
            }
            Event::Cleared => {}
        }
    }
    Some(batch)
}

#[test]
fn no_prefix_of_a_batch_is_a_batch() {
    for WireCase { name, payload, .. } in WIRE_CASES.iter() {
        for length in 0..payload.len() {
            let batch = check_bounded(&payload[..length], &Limits::default());
            assert_eq!(batch, None, "{name} cut at {length}");
        }
        let trailing = [&payload[..], &[0xc0]].concat();
        assert_eq!(check_bounded(&trailing, &Limits::default()), None, "{name}");
    }
}

#[test]
fn any_byte_may_be_any_other() {
    let tight = Limits {
        max_events: 2,
        max_blocks_per_event: 1,
        max_tokens_per_event: 4,
        max_text_bytes: 8,
        max_extra_keys: 1,
        max_depth: 5,
        ..Limits::default()
    };
    let mut decoded = 0;
    for WireCase { payload, .. } in WIRE_CASES.iter() {
        let mut mutated = payload.clone();
        for at in 0..payload.len() {
            for byte in 0..=u8::MAX {
                mutated[at] = byte;
                decoded += u32::from(check_bounded(&mutated, &Limits::default()).is_some());
                check_bounded(&mutated, &tight);
            }
            mutated[at] = payload[at];
        }
    }
    assert!(decoded > 100_000, "damaged batches that decode nevertheless: {decoded}");
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 20_000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn damaged_batches_are_refused_or_bounded(
        case in 0..CASES,
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3_u8), 1..12),
    ) {
        let mut payload = WIRE_CASES[case].payload.clone();
        for (at, byte, how) in damage {
            let at = at.index(payload.len() + 1);
            match how {
                0 if at < payload.len() => payload[at] = byte,
                1 if at < payload.len() => drop(payload.remove(at)),
                _ => payload.insert(at, byte),
            }
        }
        check_bounded(&payload, &Limits::default());
    }

    #[test]
    fn noise_is_refused_or_bounded(payload in prop::collection::vec(any::<u8>(), 0..200)) {
        check_bounded(&payload, &Limits::default());
    }
}
