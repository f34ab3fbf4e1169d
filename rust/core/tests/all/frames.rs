//! Broken frames through the whole path from publisher to index: no panic, no growth, and a good frame
//! behind them counts. `KVFLASH_FUZZ_FRAMES` sets how many (default 30,000; `make soak` takes 10 million).
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use kvflash_core::catalog::{
    Catalog, CatalogOptions, EngineFacts, FrameOutcome, Identity, ModelKey, Publisher,
    Registration, Source,
};
use kvflash_core::clock::ManualClock;
use kvflash_core::ids::Worker;
use kvflash_core::index::Matches;
use kvflash_core::repair::Feed;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::Value;

/// One index may not outgrow this, whatever the frames say.
const MEMORY: usize = 8 * 1024 * 1024;

fn seeds() -> Vec<Vec<u8>> {
    let path = "../../tests/vectors/engine_wire.json";
    let engines: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let mut seeds = Vec::new();
    for engine in engines.as_array().unwrap() {
        for case in engine["cases"].as_array().unwrap() {
            let hex = case["hex"].as_str().unwrap();
            let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
            seeds.push((0..hex.len()).step_by(2).map(byte).collect());
        }
    }
    assert_eq!(seeds.len(), 49, "batches in engine_wire.json");
    seeds
}

/// Bytes that matter in MessagePack: lengths of every size, nil, negative and huge numbers.
const NASTY: [u8; 14] =
    [0x00, 0x7f, 0x80, 0x90, 0xc0, 0xc4, 0xc6, 0xcf, 0xd3, 0xdb, 0xdd, 0xdf, 0xe0, 0xff];

fn mutate(rng: &mut SmallRng, seeds: &[Vec<u8>], frame: &mut Vec<u8>) {
    frame.clear();
    frame.extend_from_slice(&seeds[rng.random_range(0..seeds.len())]);
    for _ in 0..rng.random_range(0..4) {
        let at = rng.random_range(0..frame.len().max(1)).min(frame.len());
        match rng.random_range(0..6) {
            0 => frame.truncate(at),
            1 if at < frame.len() => frame[at] ^= 1 << rng.random_range(0..8),
            2 if at < frame.len() => frame[at] = NASTY[rng.random_range(0..NASTY.len())],
            3 => frame.insert(at, NASTY[rng.random_range(0..NASTY.len())]),
            4 => {
                let other = &seeds[rng.random_range(0..seeds.len())];
                let from = rng.random_range(0..other.len());
                frame.truncate(at);
                frame.extend_from_slice(&other[from..]);
            }
            _ if at < frame.len() => drop(frame.remove(at)),
            _ => {}
        }
        if frame.is_empty() {
            break;
        }
    }
}

fn offer(publisher: &Publisher, sequence: u64, frame: &[u8]) {
    match publisher.live(sequence, frame) {
        FrameOutcome::Gap { to, .. } => {
            publisher.give_up(to + 1);
            assert_ne!(publisher.live(sequence, frame), FrameOutcome::Closed);
        }
        outcome => assert_ne!(outcome, FrameOutcome::Closed),
    }
}

#[test]
fn broken_frames_cost_nothing_but_themselves() {
    let frames: u64 =
        std::env::var("KVFLASH_FUZZ_FRAMES").map_or(30_000, |count| count.parse().unwrap());
    let options = CatalogOptions { index_memory_bytes: MEMORY, ..CatalogOptions::default() };
    let catalog = Catalog::new(options, Arc::new(ManualClock::default()));
    let key = ModelKey { model_name: "m".into(), tenant_id: "t".into() };
    let register = |instance_id| {
        let registration = Registration {
            worker: Worker::new(instance_id, 0),
            key: key.clone(),
            // That of most of the recorded batches.
            block_size: Some(4),
            endpoint: "tcp://127.0.0.1:1".into(),
            replay_endpoint: None,
            capacity_blocks: None,
            identity: Identity::default(),
            facts: EngineFacts::default(),
            source: Source::Zmq,
        };
        catalog.register(registration).unwrap()
    };
    let (broken, good) = (register(1), register(2));
    let (seeds, mut rng, mut frame) = (seeds(), SmallRng::seed_from_u64(29), Vec::new());
    // The first recorded batch: blocks of tokens 0..8.
    let whole = seeds[0].clone();
    let locals =
        kvflash_core::hash::local_hashes(&[0, 1, 2, 3, 4, 5, 6, 7], 4, kvflash_core::hash::SEED);
    let mut sequence = 0;
    for n in 0..frames {
        mutate(&mut rng, &seeds, &mut frame);
        // Now and then numbers jump, repeat or fall back, too.
        sequence = match rng.random_range(0..1_000) {
            0 => rng.random_range(0..10),
            1 => rng.random(),
            2 => sequence,
            _ => u64::wrapping_add(sequence, 1),
        };
        offer(&broken, sequence, &frame);
        if n % 10_000 == 0 {
            offer(&good, n / 10_000, &whole);
            let mut matches = Matches::default();
            good.model.index.find_matches(&locals, &mut matches);
            let held = matches.as_slice().iter().find(|found| found.worker.instance_id == 2);
            assert_eq!(held.map(|found| found.device), Some(2), "after {n} frames");
            let bytes = good.model.index.stats().bytes;
            assert!(bytes <= MEMORY, "{bytes} bytes after {n} frames");
        }
    }
    let counts = broken.view().counts;
    assert!(counts.batches > frames / 4, "most frames decode: {counts:?}");
    assert!(counts.undecodable > frames / 50, "many do not: {counts:?}");
    assert!(counts.stored > 0 && counts.removed > 0 && counts.cleared > 0, "{counts:?}");
    assert!(counts.restarts > 0 && counts.lost_batches > 0, "{counts:?}");
    assert!(broken.view().ranks.len() <= 1_024);
}
