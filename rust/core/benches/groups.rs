//! The cost of cache groups: a recorded hybrid engine, repeated for the size of a fleet.
//!
//! `cargo bench --profile fast --bench groups`: memory of the index, with and without the further
//! groups, and the time of a query.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use kvflash_core::catalog::{
    Catalog, CatalogOptions, EngineFacts, Identity, ModelKey, Registration, Source,
};
use kvflash_core::clock::ManualClock;
use kvflash_core::hash::engine::NameKeys;
use kvflash_core::ids::Worker;
use kvflash_core::index::Matches;
use kvflash_core::repair::Feed;
use rmpv::Value;

const WORKERS: u64 = 2_000;
/// Prompts that are asked for, again and again.
const ROUNDS: usize = 20;

fn field<'a>(entry: &'a Value, name: &str) -> Option<&'a Value> {
    let map = entry.as_map()?;
    map.iter().find(|(key, _)| key.as_str() == Some(name)).map(|(_, value)| value)
}

fn main() {
    for name in ["01_full_salt_lora", "02_full_window", "03_full_mamba", "15_many_windows"] {
        let path =
            Path::new("../../tests/vectors/engine_truth").join(name).with_extension("msgpack");
        let bytes = fs::read(path).unwrap();
        let (mut rest, mut entries) = (bytes.as_slice(), Vec::new());
        while !rest.is_empty() {
            entries.push(rmpv::decode::read_value(&mut rest).unwrap());
        }
        let block_size = field(&entries[0], "block_size").unwrap().as_u64().unwrap() as u32;
        let kind = |entry: &Value, kind: &str| field(entry, "kind").unwrap().as_str() == Some(kind);
        let instance = |entry: &Value| field(entry, "instance").and_then(Value::as_u64);
        let frames: Vec<(u64, u64, Vec<u8>)> = entries
            .iter()
            .filter(|entry| kind(entry, "frames"))
            .map(|entry| {
                let parts = field(entry, "parts").unwrap().as_array().unwrap();
                let number = u64::from_be_bytes(parts[1].as_slice().unwrap().try_into().unwrap());
                (instance(entry).unwrap(), number, parts[2].as_slice().unwrap().to_vec())
            })
            .collect();
        let prompts: Vec<Vec<u32>> = entries
            .iter()
            .filter(|entry| kind(entry, "request"))
            .map(|entry| {
                let ids = field(entry, "token_ids").unwrap().as_array().unwrap();
                ids.iter().map(|id| id.as_u64().unwrap() as u32).collect()
            })
            .collect();
        let catalog = Catalog::new(CatalogOptions::default(), Arc::new(ManualClock::default()));
        let began = Instant::now();
        for id in 0..WORKERS {
            let publisher = catalog
                .register(Registration {
                    worker: Worker::new(id, 0),
                    key: ModelKey { model_name: "m".into(), tenant_id: "t".into() },
                    block_size: Some(block_size),
                    endpoint: "tcp://127.0.0.1:1".into(),
                    replay_endpoint: None,
                    capacity_blocks: None,
                    identity: Identity::default(),
                    facts: EngineFacts::default(),
                    source: Source::Zmq,
                })
                .unwrap();
            // Every other worker lives the life of the other recorded engine.
            for (_, number, payload) in frames.iter().filter(|(of, ..)| of % 2 == id % 2) {
                publisher.live(*number, payload);
            }
        }
        let fed = began.elapsed();
        let model = catalog.model("m", "t").unwrap();
        let (stats, groups) = (model.index.stats(), model.groups.stats());
        let (mut matches, mut exact, mut times, mut found) = (Matches::new(), vec![], vec![], 0);
        for _ in 0..ROUNDS {
            for prompt in prompts.iter().rev().take(50) {
                let began = Instant::now();
                let keys = NameKeys::default();
                let (locals, names) = (model.locals(prompt, &keys), model.names(prompt, &keys));
                model.find(&locals, &names, prompt.len() as u64, &mut matches, &mut exact);
                times.push(began.elapsed().as_secs_f64() * 1e6);
                found += matches.len();
            }
        }
        times.sort_by(f64::total_cmp);
        let per = |bytes: usize, of: usize| bytes as f64 / of.max(1) as f64;
        println!(
            "{name}: {WORKERS} workers, fed in {:.1} s; {} memberships of the main group in {} bytes ({:.1} each), \
             {} names of further groups in {} bytes ({:.1} each), +{:.0} %; query p50 {:.0} us, p99 {:.0} us, \
             {:.0} workers found",
            fed.as_secs_f64(),
            stats.memberships,
            stats.bytes,
            per(stats.bytes, stats.memberships),
            groups.names,
            groups.bytes,
            per(groups.bytes, groups.names),
            100.0 * groups.bytes as f64 / stats.bytes as f64,
            times[times.len() / 2],
            times[times.len() * 99 / 100],
            found as f64 / times.len() as f64,
        );
    }
}
