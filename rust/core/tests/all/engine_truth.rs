//! Sixteen recorded timelines of vLLM 0.32's own engine core: what its events make known must be what it
//! reuses. The files and their story: `tests/vectors/engine_truth`.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use kvflash_core::catalog::{
    Catalog, CatalogOptions, EngineFacts, FrameOutcome, Identity, ListenerStatus, MAGIC, ModelKey,
    Publisher, Registration, Source, Trust, TrustState, parts, restore,
};
use kvflash_core::clock::ManualClock;
use kvflash_core::hash::engine::{MediaItem, NameKeys};
use kvflash_core::ids::Worker;
use kvflash_core::index::Matches;
use kvflash_core::repair::Feed;
use rmpv::Value;

/// Totals of a file's predictions.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Score {
    requests: u32,
    exact: u32,
    over: u32,
    under: u32,
}

impl Score {
    fn add(&mut self, predicted: u32, reused: u32) {
        self.requests += 1;
        self.exact += u32::from(predicted == reused);
        self.over += u32::from(predicted > reused);
        self.under += u32::from(predicted < reused);
    }
}

fn field<'a>(entry: &'a Value, name: &str) -> Option<&'a Value> {
    let map = entry.as_map()?;
    map.iter().find(|(key, _)| key.as_str() == Some(name)).map(|(_, value)| value)
}

fn number(entry: &Value, name: &str) -> Option<u64> {
    field(entry, name)?.as_u64()
}

fn text<'a>(entry: &'a Value, name: &str) -> Option<&'a str> {
    field(entry, name)?.as_str()
}

struct Replay {
    catalog: Catalog,
    publishers: BTreeMap<Worker, Arc<Publisher>>,
    block_size: u32,
}

impl Replay {
    fn worker(entry: &Value) -> Worker {
        let rank = number(entry, "dp_rank").unwrap_or(0) as u32;
        Worker::new(number(entry, "instance").unwrap(), rank)
    }

    fn new(meta: &Value, entries: &[Value]) -> Self {
        let block_size = number(meta, "block_size").unwrap() as u32;
        let catalog = Catalog::new(CatalogOptions::default(), Arc::new(ManualClock::default()));
        let mut publishers = BTreeMap::new();
        for entry in entries {
            let worker = Self::worker(entry);
            let chunks = field(meta, "offload_chunk").and_then(Value::as_map);
            let chunk = chunks.and_then(|chunks| {
                let own = chunks.iter().find(|(key, _)| key.as_u64() == Some(worker.instance_id));
                own.and_then(|(_, chunk)| chunk.as_u64())
            });
            let facts = EngineFacts {
                attention_chunk_size: number(meta, "attention_chunk_size").map(|size| size as u32),
                offload_chunk: chunk.map(|chunk| chunk as u32),
            };
            publishers.entry(worker).or_insert_with(|| {
                let publisher = catalog.register(Registration {
                    worker,
                    key: ModelKey { model_name: "m".into(), tenant_id: "default".into() },
                    block_size: Some(block_size),
                    endpoint: format!("tcp://127.0.0.1:{}", 5_000 + worker.instance_id),
                    replay_endpoint: None,
                    capacity_blocks: None,
                    identity: Identity::default(),
                    facts,
                    source: Source::Zmq,
                });
                let publisher = publisher.unwrap();
                publisher.set_status(ListenerStatus::Active, None);
                publisher
            });
        }
        Self { catalog, publishers, block_size }
    }

    fn publish(&self, entry: &Value) {
        let parts = field(entry, "parts").unwrap().as_array().unwrap();
        let sequence = u64::from_be_bytes(parts[1].as_slice().unwrap().try_into().unwrap());
        let publisher = &self.publishers[&Self::worker(entry)];
        let outcome = publisher.live(sequence, parts[2].as_slice().unwrap());
        assert_eq!(outcome, FrameOutcome::Applied);
    }

    /// Tokens that the engine is predicted to reuse, on the device and with what it loads.
    fn predict(&self, entry: &Value) -> (u32, u32) {
        let ids = field(entry, "token_ids").unwrap().as_array().unwrap();
        let tokens: Vec<u32> = ids.iter().map(|id| id.as_u64().unwrap() as u32).collect();
        let items = field(entry, "mm").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let media: Vec<MediaItem> = items
            .iter()
            .map(|item| MediaItem {
                identifier: text(item, "identifier").unwrap().to_owned(),
                offset: number(item, "offset").unwrap() as u32,
                length: number(item, "length").unwrap() as u32,
            })
            .collect();
        let digests = field(entry, "embeds").and_then(Value::as_array);
        let embeds: Vec<Vec<u8>> = digests
            .map_or(&[][..], Vec::as_slice)
            .iter()
            .map(|digest| digest.as_slice().unwrap().to_vec())
            .collect();
        let lora = text(entry, "lora_name").zip(Some(text(entry, "lora_path").unwrap_or("")));
        let keys = NameKeys {
            lora,
            cache_salt: text(entry, "cache_salt"),
            media: &media,
            embeds: &embeds,
        };
        let model = self.catalog.model("m", "default").unwrap();
        let (mut matches, mut exact) = (Matches::new(), Vec::new());
        let (locals, names) = (model.locals(&tokens, &keys), model.names(&tokens, &keys));
        model.find(&locals, &names, tokens.len() as u64, &mut matches, &mut exact);
        let worker = Self::worker(entry);
        let size = self.block_size;
        let (device, host) = match exact.iter().find(|reuse| reuse.worker == worker) {
            Some(reuse) => (reuse.device, reuse.host),
            None => {
                let found = matches.as_slice().iter().find(|found| found.worker == worker);
                found.map_or((0, 0), |found| (found.device * size, found.host * size))
            }
        };
        // Clients cap the answer themselves: the last token is computed in any case, but what is loaded may
        // be the whole prompt.
        let len = tokens.len() as u32;
        let cap = (len - 1) / size * size;
        let on_device = device.min(cap);
        let most = if host > device { len / size * size } else { cap };
        (on_device, on_device.max(host.min(most)))
    }

    fn trust(&self) -> TrustState {
        let reports = self.catalog.reports(|_| true);
        let trusts = reports.iter().map(|report| Trust::of(&report.view.evidence, None).state);
        trusts.max().unwrap()
    }
}

/// The recorded start, and the events after it.
fn read(name: &str) -> (Value, Vec<Value>) {
    let path = Path::new("../../tests/vectors/engine_truth").join(name).with_extension("msgpack");
    let bytes = fs::read(&path).unwrap();
    let (mut rest, mut entries) = (bytes.as_slice(), Vec::new());
    while !rest.is_empty() {
        entries.push(rmpv::decode::read_value(&mut rest).unwrap());
    }
    (entries.remove(0), entries)
}

/// Plays a file; what it came to on the device, and with what is loaded from farther tiers.
fn play(name: &str) -> (Score, Score, TrustState) {
    let (meta, entries) = read(name);
    let replay = Replay::new(&meta, &entries);
    let (mut device, mut loaded) = (Score::default(), Score::default());
    // The clear of a reset comes with the next request's events.
    let mut dark = std::collections::BTreeSet::new();
    let mut asked = None;
    for entry in &entries {
        let worker = Replay::worker(entry);
        match text(entry, "kind").unwrap() {
            "frames" => {
                replay.publish(entry);
                dark.remove(&worker);
            }
            "reset" => drop(dark.insert(worker)),
            "request" => {
                let skips = field(entry, "skip_cache").and_then(Value::as_bool).unwrap_or(false);
                let is_left_out = skips || dark.contains(&worker);
                asked = (!is_left_out).then(|| replay.predict(entry));
            }
            "response" => {
                let own = number(entry, "cached_tokens").unwrap() as u32;
                let more = number(entry, "external_cached_tokens").unwrap_or(0) as u32;
                if let Some((on_device, with_loaded)) = asked.take() {
                    device.add(on_device, own);
                    loaded.add(with_loaded, own + more);
                }
            }
            other => panic!("{other}"),
        }
    }
    (device, loaded, replay.trust())
}

/// File, requests, exact ones and too high ones on the device, and exact and too high with what is loaded.
const WANTED: [(&str, u32, [u32; 2], [u32; 2]); 16] = [
    ("01_full_salt_lora", 288, [288, 0], [288, 0]),
    ("02_full_window", 259, [259, 0], [259, 0]),
    ("03_full_mamba", 199, [199, 0], [199, 0]),
    ("04_window_only", 299, [299, 0], [299, 0]),
    ("05_reports", 299, [299, 0], [299, 0]),
    ("06_images", 299, [299, 0], [299, 0]),
    ("07_offload", 258, [258, 0], [258, 0]),
    ("08_fine_hash", 209, [181, 0], [181, 0]),
    ("09_mixed_blocks", 299, [299, 0], [299, 0]),
    ("10_chunked_local", 229, [229, 0], [229, 0]),
    ("11_embeds", 299, [299, 0], [299, 0]),
    ("12_dp_ranks", 298, [298, 0], [298, 0]),
    ("13_reports_window", 209, [209, 0], [209, 0]),
    ("14_offload_plain", 258, [258, 0], [252, 6]),
    ("15_many_windows", 199, [199, 0], [199, 0]),
    ("16_offload_window", 199, [199, 0], [199, 0]),
];

#[test]
fn engines_reuse_what_is_predicted() {
    let mut wrong = Vec::new();
    let (mut requests, mut exact, mut over) = (0, 0, 0);
    for (name, count, [on_device, too_high], [with_loaded, loaded_too_high]) in WANTED {
        let (device, loaded, trust) = play(name);
        println!("{name}: {device:?} with loaded {loaded:?} {trust:?}");
        requests += device.requests;
        exact += device.exact;
        over += device.over;
        let found =
            (device.requests, [device.exact, device.over], [loaded.exact, loaded.over], trust);
        let wanted =
            (count, [on_device, too_high], [with_loaded, loaded_too_high], TrustState::Exact);
        if found != wanted {
            wrong.push(format!("{name}: {found:?}, not {wanted:?}"));
        }
    }
    println!("{exact} of {requests} exact, {over} too high");
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!(requests, 4_100);
}

#[test]
fn a_replica_that_takes_over_predicts_the_same() {
    for name in ["01_full_salt_lora", "02_full_window", "03_full_mamba", "04_window_only"]
        .into_iter()
        .chain(["07_offload", "08_fine_hash", "14_offload_plain", "16_offload_window"])
    {
        let (meta, entries) = read(name);
        let first = Replay::new(&meta, &entries);
        let frames = entries.iter().filter(|entry| text(entry, "kind") == Some("frames"));
        frames.for_each(|entry| first.publish(entry));
        let mut bytes = MAGIC.to_vec();
        for part in parts(&first.catalog) {
            bytes.extend(part.encode());
        }
        bytes.extend([0; 8]);
        let second = Replay::new(&meta, &entries);
        let progress = restore(&second.catalog, &mut bytes.as_slice(), &mut |_| ()).unwrap();
        assert_eq!(progress.skipped, Vec::<String>::new(), "{name}");
        let mut reused = 0;
        for entry in entries.iter().filter(|entry| text(entry, "kind") == Some("request")) {
            let wanted = first.predict(entry);
            assert_eq!(second.predict(entry), wanted, "{name}");
            reused += u64::from(wanted.1);
        }
        assert!(reused > 0, "{name}: nothing was compared");
        assert_eq!(second.trust(), TrustState::Exact, "{name}");
    }
}
