//! Decoding of batches: good ones, odd ones and bad ones.
#![allow(clippy::unwrap_used)]

mod round_trip;
mod wire;

use self::wire::{Bytes, Float, Int, List, Map, Nil, Uint, Wire, text, tokens, uints};
use super::{Limits, decode_batch};
use crate::error::Error;
use crate::event::{Batch, Event, ExtraKey, Stored};

fn decode(wire: &Wire) -> Result<Batch, Error> {
    decode_batch(&wire.bytes(), &Limits::default())
}

fn decode_events(events: Vec<Wire>) -> Result<Batch, Error> {
    decode(&List(vec![Float(1.0), List(events)]))
}

#[track_caller]
fn only_stored(batch: Result<Batch, Error>) -> Stored {
    let batch = batch.unwrap();
    assert_eq!((batch.skipped, batch.malformed), (0, 0));
    match &batch.events[..] {
        [Event::Stored(stored)] => stored.clone(),
        _ => panic!("{batch:?}"),
    }
}

#[test]
fn a_malformed_event_costs_only_itself() {
    let removed = || List(vec![text("BlockRemoved"), uints(&[1_u64])]);
    let bad = [
        List(vec![]),
        Nil,
        Int(3),
        Map(vec![]),
        Map(vec![("block_hashes", uints(&[1_u64]))]),
        Map(vec![("type", Int(1))]),
        List(vec![Int(1), uints(&[1_u64])]),
        List(vec![text("BlockRemoved"), text("hash")]),
        List(vec![text("BlockRemoved"), List(vec![Nil])]),
        List(vec![text("BlockRemoved"), List(vec![Bytes(vec![])])]),
        List(vec![text("BlockRemoved"), List(vec![Float(1.0)])]),
        List(vec![text("BlockRemoved"), uints(&[1_u64]), Int(4)]),
        List(vec![text("BlockRemoved"), uints(&[1_u64]), Nil, Uint(1 << 32)]),
        // Tokens that do not fit the blocks, a block size of 0, tokens that are no integers.
        List(vec![text("BlockStored"), uints(&[1_u64]), Nil, tokens(&[1, 2, 3]), Uint(4)]),
        List(vec![text("BlockStored"), uints(&[1_u64]), Nil, tokens(&[1, 2, 3]), Uint(0)]),
        List(vec![text("BlockStored"), uints(&[1_u64]), Nil, List(vec![text("a")]), Uint(1)]),
        Map(vec![("type", text("BlockStored")), ("lora_name", Int(1))]),
        Map(vec![("type", text("BlockStored")), ("block_size", Int(-1))]),
        Map(vec![("type", text("BlockStored")), ("extra_keys", List(vec![Nil]))]),
        Map(vec![("type", text("BlockStored")), ("lora_id", Uint(u64::MAX))]),
    ];
    for bad in bad {
        let batch = decode_events(vec![removed(), bad.clone(), removed()]).unwrap();
        assert_eq!((batch.events.len(), batch.skipped, batch.malformed), (2, 0, 1), "{bad:?}");
        assert!(batch.malformed_reason.is_some(), "{bad:?}");
    }
    let bad = [Int(3), List(vec![text("BlockRemoved"), List(vec![Nil])])];
    let batch = decode_events(bad.to_vec()).unwrap();
    assert_eq!(batch.malformed_reason, Some("an event must be an array or a map"), "the first one");
}

#[test]
fn what_means_nothing_here_is_skipped_and_counted() {
    let pairs = List(vec![uints(&[1_u64, 2]), uints(&[2_u64, 3])]);
    let unknown = [
        List(vec![text("BlockMoved"), Nil, Map(vec![("a", Nil)])]),
        Map(vec![("type", text("BlockMoved")), ("block_hashes", text("not a list"))]),
        Map(vec![("block_hashes", text("not a list")), ("type", text("BlockMoved"))]),
        // Pairs of tokens, as under EAGLE speculation.
        List(vec![text("BlockStored"), uints(&[1_u64]), Nil, pairs, Uint(2)]),
    ];
    for unknown in unknown {
        let cleared = List(vec![text("AllBlocksCleared"), Nil, text("of the future")]);
        let batch = decode_events(vec![unknown.clone(), cleared]).unwrap();
        let counts = (batch.skipped, batch.malformed);
        assert_eq!((batch.events, counts), (vec![Event::Cleared], (1, 0)), "{unknown:?}");
    }
}

#[test]
fn groups_may_leave_out_blocks_that_they_do_not_keep() {
    let event = |kind: &str, medium: &str| {
        Map(vec![
            ("type", text("BlockStored")),
            ("block_hashes", uints(&[1_u64])),
            ("token_ids", tokens(&[1, 2, 3, 4])),
            ("block_size", Uint(2)),
            ("medium", text(medium)),
            ("kv_cache_spec_kind", text(kind)),
            ("kv_cache_spec_sliding_window", Uint(64)),
        ])
    };
    for (kind, medium, kept) in [
        ("sliding_window", "GPU", 1),
        ("full_attention", "CPU", 1),
        ("sink_full_attention", "GPU", 0),
    ] {
        let batch = decode_events(vec![event(kind, medium)]).unwrap();
        assert_eq!((batch.events.len(), batch.malformed), (kept, 1 - kept as u32), "{kind}");
        for event in batch.events {
            let Event::Stored(stored) = event else { panic!("{event:?}") };
            assert_eq!((stored.block_hashes, stored.sliding_window), (vec![1], Some(64)));
        }
    }
}

#[test]
fn what_is_no_batch_is_refused() {
    let events = || List(vec![]);
    let bad = [
        Nil,
        Int(1),
        List(vec![]),
        List(vec![Float(1.0)]),
        List(vec![text("1.0"), events()]),
        List(vec![Float(1.0), text("events")]),
        List(vec![Float(1.0), events(), Int(-1)]),
        List(vec![Float(1.0), events(), Uint(1 << 32)]),
        List(vec![Float(1.0), events(), text("0")]),
        Map(vec![]),
        Map(vec![("ts", Float(1.0))]),
        Map(vec![("events", events()), ("events", events())]),
        Map(vec![("events", events()), ("attn_dp_rank", Int(-1))]),
    ];
    for bad in bad {
        assert!(matches!(decode(&bad), Err(Error::Decode { .. })), "{bad:?}");
    }
    assert_eq!(decode(&List(vec![Nil, Nil, Nil])), Ok(Batch::default()));
    let ts = |ts: Wire| decode(&List(vec![ts, events()])).unwrap().ts;
    assert_eq!([ts(Int(-3)), ts(Uint(5)), ts(Float(f64::NAN))], [-3.0, 5.0, 0.0]);
}

#[test]
fn a_map_names_its_rank_by_any_of_three_names() {
    for name in ["data_parallel_rank", "attn_dp_rank", "dp_rank"] {
        let wire = Map(vec![("events", List(vec![])), (name, Uint(3))]);
        assert_eq!(decode(&wire).unwrap().dp_rank, Some(3), "{name}");
    }
}

#[test]
fn a_token_outside_of_32_bits_is_named_by_its_index() {
    let hashes = || uints(&[7_u64]);
    for bad in [Uint(1 << 32), Int(-1)] {
        let tokens = List(vec![Uint(1), Uint(2), bad]);
        let stored = List(vec![text("BlockStored"), hashes(), Nil, tokens, Uint(3)]);
        let Err(Error::Decode { reason, .. }) = decode_events(vec![stored]) else { panic!() };
        assert!(reason.contains("token_ids[2]"), "{reason}");
    }
}

#[test]
fn byte_strings_keep_their_last_eight_bytes() {
    let hashes = [vec![1], vec![1, 2], (0..8).collect(), (0..9).collect(), vec![255; 64]];
    let hashes = List(hashes.into_iter().map(Bytes).collect());
    let batch = decode_events(vec![List(vec![text("BlockRemoved"), hashes])]).unwrap();
    let Event::Removed(removed) = &batch.events[0] else { panic!("{batch:?}") };
    let expected = [1, 0x0102, 0x0001_0203_0405_0607, 0x0102_0304_0506_0708, u64::MAX];
    assert_eq!(removed.block_hashes, expected);
}

#[test]
fn an_event_without_tokens_names_blocks_by_hash_alone() {
    let fields = vec![
        text("BlockStored"),
        uints(&[5_u64, 6]),
        Nil,
        List(vec![]),
        Uint(0),
        Nil,
        text("CPU"),
        Nil,
    ];
    let stored = only_stored(decode_events(vec![List(fields)]));
    assert_eq!((stored.block_hashes, stored.medium.as_deref()), (vec![5, 6], Some("CPU")));
}

/// `["BlockStored", [1], nil, [9], 1, nil, nil, ...tail]`
fn with_tail(tail: Vec<Wire>) -> Stored {
    let head = vec![text("BlockStored"), uints(&[1_u64]), Nil, tokens(&[9]), Uint(1), Nil, Nil];
    only_stored(decode_events(vec![List([head, tail].concat())]))
}

#[test]
fn the_types_of_trailing_fields_tell_whose_they_are() {
    let vllm = with_tail(vec![text("a"), List(vec![Nil]), Uint(2), text("mamba")]);
    assert_eq!((vllm.lora_name.as_deref(), vllm.cache_salt), (Some("a"), None));
    assert_eq!((vllm.extra_keys, vllm.group_idx), (vec![None], Some(2)));
    assert_eq!(vllm.spec_kind.as_deref(), Some("mamba"));
    for (tail, lora_name) in [
        (vec![text("a"), text("session")], None),
        (vec![text("a"), text("session"), Nil], None),
        (vec![text("a"), text("session"), text("b")], Some("b")),
        (vec![text("a"), Nil, text("b")], Some("b")),
    ] {
        let sglang = with_tail(tail);
        assert_eq!(sglang.cache_salt.as_deref(), Some("a"));
        assert_eq!(sglang.lora_name.as_deref(), lora_name);
    }
    let salted = with_tail(vec![Map(vec![("origin", Nil), ("cache_salt", text("a"))])]);
    assert_eq!((salted.cache_salt.as_deref(), salted.lora_name), (Some("a"), None));
    // Nothing tells: a block under a name that no request has is never matched.
    let either = with_tail(vec![text("a"), Nil, Nil]);
    assert_eq!((either.lora_name.as_deref(), either.cache_salt), (Some("a"), None));
    // Types that no engine has published yet.
    let future = with_tail(vec![Nil, Float(1.0), Map(vec![("a", Nil)]), Int(3), Int(4)]);
    assert_eq!(future.extra_keys, []);
    assert_eq!((future.group_idx, future.spec_kind), (None, None));
}

#[test]
fn extra_keys_of_any_kind_keep_blocks_apart() {
    let keys = |keys: Wire| {
        let stored = with_tail(vec![Nil, List(vec![keys])]);
        stored.extra_keys.into_iter().next().unwrap()
    };
    assert_eq!(keys(List(vec![])), Some(vec![]));
    assert_eq!(keys(text("salt")), Some(vec![ExtraKey::Text("salt".to_owned())]));
    let item = ExtraKey::Item { identifier: "m".to_owned(), offset: -3 };
    assert_eq!(keys(List(vec![List(vec![text("m"), Int(-3)])])), Some(vec![item]));
    assert_eq!(keys(List(vec![Bytes(vec![1])])), Some(vec![ExtraKey::Digest(vec![1])]));
    let mut seen = std::collections::BTreeSet::new();
    let opaque = [
        Int(1),
        List(vec![text("m")]),
        List(vec![text("m"), text("n")]),
        List(vec![List(vec![text("m")]), Int(1)]),
        List(vec![text("m"), Uint(u64::MAX)]),
        List(vec![text("m"), Int(1), Int(2)]),
        Map(vec![("m", Int(1))]),
    ];
    for wire in &opaque {
        match keys(List(vec![wire.clone(), text("salt")])).as_deref() {
            Some([ExtraKey::Opaque(hash), ExtraKey::Text(_)]) => assert!(seen.insert(*hash)),
            other => panic!("{wire:?}: {other:?}"),
        }
    }
    assert_eq!(seen.len(), opaque.len());
}

#[test]
fn each_limit_holds() {
    let stored = |blocks: u64| {
        let hashes: Vec<u64> = (0..blocks).collect();
        let key = List(vec![List(vec![text("k")]); blocks as usize]);
        let head = vec![text("BlockStored"), uints(&hashes), Nil, uints(&hashes), Uint(1), Nil];
        List([head, vec![text("GPU"), Nil, key]].concat())
    };
    let payload = List(vec![Float(1.0), List(vec![stored(2), stored(3)])]).bytes();
    let none = Limits::default();
    let malformed = |limits: Limits| decode_batch(&payload, &limits).unwrap().malformed;
    assert_eq!(malformed(none), 0);
    assert_eq!(malformed(Limits { max_blocks_per_event: 2, ..none }), 1);
    assert_eq!(malformed(Limits { max_tokens_per_event: 2, ..none }), 1);
    assert_eq!(malformed(Limits { max_extra_keys: 4, ..none }), 1);
    assert_eq!(malformed(Limits { max_extra_keys: 5, ..none }), 0);
    assert_eq!(malformed(Limits { max_text_bytes: 2, ..none }), 2);
    for limits in [
        Limits { max_events: 1, ..none },
        Limits { max_payload_bytes: payload.len() - 1, ..none },
        Limits { max_blocks_per_event: 2, max_depth: 1, ..none },
    ] {
        assert!(matches!(decode_batch(&payload, &limits), Err(Error::Decode { .. })));
    }
}
