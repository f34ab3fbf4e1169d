//! Random batches, written in both eras and read back.

use proptest::prelude::*;

use super::decode;
use super::wire::{Bytes, Float, Int, List, Map, Nil, Uint, Wire, optional, text, uints};
use crate::event::{Batch, Event, ExtraKey, Removed, Stored};

/// How an engine writes a block's hash.
#[derive(Debug, Clone, Copy)]
enum HashForm {
    Unsigned,
    Signed,
    Digest,
}

fn hash(form: HashForm, hash: u64) -> Wire {
    match form {
        HashForm::Unsigned => Uint(hash),
        HashForm::Signed => Int(hash.cast_signed()),
        HashForm::Digest => Bytes([&[0xab; 24][..], &hash.to_be_bytes()].concat()),
    }
}

fn hashes(form: HashForm, hashes: &[u64]) -> Wire {
    List(hashes.iter().map(|&value| hash(form, value)).collect())
}

fn extra_keys(blocks: &[Option<Vec<ExtraKey>>]) -> Wire {
    if blocks.is_empty() {
        return Nil;
    }
    let key = |key: &ExtraKey| match key {
        ExtraKey::Text(name) => text(name),
        ExtraKey::Item { identifier, offset } => List(vec![text(identifier), Int(*offset)]),
        ExtraKey::Digest(digest) => Bytes(digest.clone()),
        ExtraKey::Opaque(_) => unreachable!("not generated: the wire form is lost"),
    };
    List(
        blocks
            .iter()
            .map(|keys| optional(keys, |keys| List(keys.iter().map(key).collect())))
            .collect(),
    )
}

fn positional(event: &Event, form: HashForm) -> Wire {
    List(match event {
        Event::Cleared => vec![text("AllBlocksCleared")],
        Event::Removed(event) => vec![
            text("BlockRemoved"),
            hashes(form, &event.block_hashes),
            optional(&event.medium, |medium| text(medium)),
            optional(&event.group_idx, |&group| Uint(group.into())),
            text("a field of the future"),
        ],
        Event::Stored(event) => {
            let mut fields = vec![
                text("BlockStored"),
                hashes(form, &event.block_hashes),
                optional(&event.parent, |&parent| hash(form, parent)),
                uints(&event.token_ids),
                Uint(event.block_size.into()),
                optional(&event.lora_id, |&id| Int(id)),
                optional(&event.medium, |medium| text(medium)),
            ];
            let lora_name = optional(&event.lora_name, |name| text(name));
            match &event.cache_salt {
                Some(salt) => fields.extend([text(salt), text("session"), lora_name]),
                None => fields.extend([
                    lora_name,
                    extra_keys(&event.extra_keys),
                    optional(&event.group_idx, |&group| Uint(group.into())),
                    optional(&event.spec_kind, |kind| text(kind)),
                    optional(&event.sliding_window, |&tokens| Uint(tokens.into())),
                    List(vec![Map(vec![("of", text("the future"))])]),
                ]),
            }
            fields
        }
    })
}

/// The fields that are not at their default, in an order of their own and with an unknown one.
fn named(event: &Event, form: HashForm, rotation: usize) -> Wire {
    let mut entries = match event {
        Event::Cleared => vec![("type", text("AllBlocksCleared"))],
        Event::Removed(event) => vec![
            ("type", text("BlockRemoved")),
            ("block_hashes", hashes(form, &event.block_hashes)),
            ("medium", optional(&event.medium, |medium| text(medium))),
            ("group_idx", optional(&event.group_idx, |&group| Uint(group.into()))),
            ("locality", optional(&event.locality, |locality| text(locality))),
            ("ownership", optional(&event.ownership, |store| text(store))),
        ],
        Event::Stored(event) => vec![
            ("type", text("BlockStored")),
            ("block_hashes", hashes(form, &event.block_hashes)),
            ("parent_block_hash", optional(&event.parent, |&parent| hash(form, parent))),
            ("token_ids", uints(&event.token_ids)),
            ("block_size", Uint(event.block_size.into())),
            ("lora_id", optional(&event.lora_id, |&id| Int(id))),
            ("lora_name", optional(&event.lora_name, |name| text(name))),
            ("medium", optional(&event.medium, |medium| text(medium))),
            ("cache_salt", optional(&event.cache_salt, |salt| text(salt))),
            ("extra_keys", extra_keys(&event.extra_keys)),
            ("group_idx", optional(&event.group_idx, |&group| Uint(group.into()))),
            ("kv_cache_spec_kind", optional(&event.spec_kind, |kind| text(kind))),
            (
                "kv_cache_spec_sliding_window",
                optional(&event.sliding_window, |&tokens| Uint(tokens.into())),
            ),
            ("locality", optional(&event.locality, |locality| text(locality))),
            ("ownership", optional(&event.ownership, |store| text(store))),
        ],
    };
    // Every other event omits what is nil, as engines do; the others write it.
    if rotation.is_multiple_of(2) {
        entries.retain(|(_, value)| !matches!(value, Nil));
    }
    entries.push(("of_the_future", List(vec![Nil, Map(vec![("type", text("x"))])])));
    let length = entries.len();
    entries.rotate_left(rotation % length);
    Map(entries)
}

fn name() -> impl Strategy<Value = Option<String>> {
    prop::option::of("[a-zé]{0,40}")
}

fn extra_key() -> impl Strategy<Value = ExtraKey> {
    prop_oneof![
        "[a-z]{0,5}".prop_map(ExtraKey::Text),
        ("[a-z]{0,5}", any::<i64>())
            .prop_map(|(identifier, offset)| ExtraKey::Item { identifier, offset }),
        prop::collection::vec(any::<u8>(), 0..33).prop_map(ExtraKey::Digest),
    ]
}

fn stored() -> impl Strategy<Value = Stored> {
    let shape = (0..5_usize, 1..20_u32).prop_flat_map(|(blocks, block_size)| {
        let tokens = blocks * block_size as usize;
        let keys = prop::option::of(prop::collection::vec(extra_key(), 0..3));
        let lists = (
            prop::collection::vec(any::<u64>(), blocks),
            prop_oneof![
                prop::collection::vec(any::<u32>(), tokens),
                prop::collection::vec(0..200_u32, tokens),
                Just(Vec::new()),
            ],
            prop_oneof![prop::collection::vec(keys, blocks), Just(Vec::new())],
        );
        (lists, Just(block_size))
    });
    let numbers =
        (any::<Option<u64>>(), any::<Option<i64>>(), any::<Option<u32>>(), any::<Option<u32>>());
    let place = (name(), name(), name());
    (shape, numbers, name(), place, name(), name()).prop_map(
        |(shape, numbers, lora_name, (medium, locality, ownership), cache_salt, spec_kind)| {
            let (parent, lora_id, group_idx, sliding_window) = numbers;
            let ((block_hashes, token_ids, extra_keys), block_size) = shape;
            Stored {
                block_hashes,
                parent,
                token_ids,
                block_size,
                lora_id,
                lora_name,
                medium,
                cache_salt,
                extra_keys,
                group_idx,
                spec_kind,
                sliding_window,
                locality,
                ownership,
            }
        },
    )
}

fn event() -> impl Strategy<Value = Event> {
    let names = prop::collection::vec(any::<u64>(), 0..9);
    let removed = (names, name(), any::<Option<u32>>(), name(), name());
    prop_oneof![
        3 => stored().prop_map(Event::Stored),
        2 => removed.prop_map(|(block_hashes, medium, group_idx, locality, ownership)| {
            Event::Removed(Removed { block_hashes, medium, group_idx, locality, ownership })
        }),
        1 => Just(Event::Cleared),
    ]
}

fn form() -> impl Strategy<Value = HashForm> {
    prop_oneof![Just(HashForm::Unsigned), Just(HashForm::Signed), Just(HashForm::Digest)]
}

fn batch() -> impl Strategy<Value = Batch> {
    let events = prop::collection::vec(event(), 0..6);
    (-1e12..1e12_f64, any::<Option<u32>>(), events).prop_map(|(ts, dp_rank, events)| Batch {
        ts,
        dp_rank,
        events,
        ..Batch::default()
    })
}

/// Fields without a place in arrays: a salt beside a group, a name of nothing that identifies the
/// engine, and the store that holds the blocks.
fn without_what_arrays_cannot_say(mut batch: Batch) -> Batch {
    for event in &mut batch.events {
        match event {
            Event::Stored(stored) => {
                (stored.locality, stored.ownership) = (None, None);
                if stored.cache_salt.is_some() {
                    stored.extra_keys = Vec::new();
                    (stored.group_idx, stored.spec_kind, stored.sliding_window) =
                        (None, None, None);
                }
            }
            Event::Removed(removed) => (removed.locality, removed.ownership) = (None, None),
            Event::Cleared => {}
        }
    }
    batch
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn arrays_are_read_back(batch in batch(), form in form(), with_rank: bool) {
        let mut batch = without_what_arrays_cannot_say(batch);
        let events = batch.events.iter().map(|event| positional(event, form)).collect();
        let mut fields = vec![Float(batch.ts), List(events)];
        if with_rank {
            let rank = optional(&batch.dp_rank, |&rank| Uint(rank.into()));
            fields.extend([rank, text("of the future")]);
        } else {
            batch.dp_rank = None;
        }
        prop_assert_eq!(decode(&List(fields)), Ok(batch));
    }

    #[test]
    fn maps_are_read_back(
        batch in batch(),
        form in form(),
        rotation in 0..40_usize,
        is_map: bool,
    ) {
        let events = batch.events.iter().enumerate();
        let events = List(events.map(|(at, event)| named(event, form, rotation + at)).collect());
        let rank = optional(&batch.dp_rank, |&rank| Uint(rank.into()));
        let wire = if is_map {
            let rank_key = ["attn_dp_rank", "data_parallel_rank", "dp_rank"][rotation % 3];
            let mut entries =
                vec![("ts", Float(batch.ts)), ("events", events), (rank_key, rank), ("x", Nil)];
            entries.rotate_left(rotation % 4);
            Map(entries)
        } else {
            List(vec![Float(batch.ts), events, rank])
        };
        prop_assert_eq!(decode(&wire), Ok(batch));
    }
}
