//! Requests that vLLM 0.32's own engine core has served, played through the simulated engine: it reuses the same
//! tokens. The recordings and their story: `tests/vectors/engine_truth`.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::Arc;

use kvflash_sim::engine::{Engine, EngineConfig, Job};
use kvflash_sim::groups::{Group, Reach};
use kvflash_sim::timing::Timing;
use rmpv::Value;

fn field<'a>(entry: &'a Value, name: &str) -> Option<&'a Value> {
    let map = entry.as_map()?;
    map.iter().find(|(key, _)| key.as_str() == Some(name)).map(|(_, value)| value)
}

fn number(entry: &Value, name: &str) -> Option<u64> {
    field(entry, name)?.as_u64()
}

fn by_instance(meta: &Value, name: &str, instance: u64) -> Option<u64> {
    let map = field(meta, name)?.as_map()?;
    map.iter().find(|(key, _)| key.as_u64() == Some(instance))?.1.as_u64()
}

/// Ids of the full blocks of a prompt and its answer: equal for equal tokens with equal keys behind equal ones.
fn ids(request: &Value, answer: &[Value], size: u64) -> Arc<[u64]> {
    let tokens = field(request, "token_ids").unwrap().as_array().unwrap();
    let all: Vec<u64> = tokens.iter().chain(answer).map(|token| token.as_u64().unwrap()).collect();
    let size = size as usize;
    let mut hash = DefaultHasher::new();
    for name in ["lora_name", "cache_salt"] {
        field(request, name).map(ToString::to_string).hash(&mut hash);
    }
    let media = field(request, "mm").and_then(Value::as_array);
    let block = |(at, block): (usize, &[u64])| {
        block.hash(&mut hash);
        for item in media.into_iter().flatten() {
            let (offset, length) =
                (number(item, "offset").unwrap(), number(item, "length").unwrap());
            let (start, end) = ((at * size) as u64, ((at + 1) * size) as u64);
            if offset < end && offset + length > start {
                item.to_string().hash(&mut hash);
            }
        }
        if let Some(embeds) = field(request, "embeds").and_then(Value::as_array) {
            embeds.get(at).map(ToString::to_string).hash(&mut hash);
        }
        hash.finish()
    };
    all.chunks_exact(size).enumerate().map(block).collect()
}

/// An engine with the groups that were recorded, the full one first; `None` where there are others.
fn engine(meta: &Value, instance: u64) -> Option<(Engine, Vec<Group>)> {
    let chunk = number(meta, "attention_chunk_size");
    let group = |entry: &Value| {
        let reach = match field(entry, "kind")?.as_str()? {
            "full_attention" => Reach::Full,
            "sliding_window" => Reach::Window(number(entry, "sliding_window")?),
            "chunked_local_attention" => Reach::Chunk(chunk?),
            _ => return None,
        };
        Some(Group { reach, block_size: number(entry, "block_size")? })
    };
    let groups: Option<Vec<Group>> = field(meta, "groups")?.as_array()?.iter().map(group).collect();
    let mut groups = groups?;
    groups.sort_by_key(|group| group.reach != Reach::Full);
    let config = EngineConfig {
        groups: groups.clone(),
        names_all_windows: by_instance(meta, "retention_interval", instance).is_none(),
        blocks: by_instance(meta, "num_blocks", instance)? as u32,
        max_running: 4,
        max_batched_tokens: 8_192,
        timing: Timing::H100_8B,
        slowness: 1.0,
    };
    Some((Engine::new(config), groups))
}

/// Timelines of engines with full attention; those with host memory, too: what they load from there is not simulated, and
/// changes nothing of what the device's cache holds.
const FULL: [&str; 7] = ["01", "05", "06", "07", "11", "12", "14"];

/// Requests and how many of them reuse what was recorded; 0 of 0 for engines that the simulated one is not like.
fn play(entries: &[Value], instance: u64, rank: u64) -> (u32, u32) {
    let meta = &entries[0];
    let Some((mut engine, groups)) = engine(meta, instance) else { return (0, 0) };
    let (mut requests, mut equal) = (0, 0);
    let mut asked = None;
    for entry in &entries[1..] {
        let place = (number(entry, "instance"), number(entry, "dp_rank").unwrap_or(0));
        if place != (Some(instance), rank) {
            continue;
        }
        match field(entry, "kind").and_then(Value::as_str) {
            Some("reset") => engine.clear(),
            Some("request") => asked = Some(entry),
            Some("response") => {
                let request = asked.take().unwrap();
                let answer = field(entry, "output_ids").unwrap().as_array().unwrap();
                let input = field(request, "token_ids").unwrap().as_array().unwrap().len() as u64;
                let of = |group: &Group| ids(request, answer, group.block_size);
                let job_ids = groups.iter().map(of).collect();
                let mut job = Job::new(requests as usize, input, answer.len() as u64, job_ids);
                job.skips_cache =
                    field(request, "skip_cache").and_then(Value::as_bool) == Some(true);
                let skips = job.skips_cache;
                engine.add(job);
                let mut admitted = Vec::new();
                while engine.begin(0, &mut admitted).is_some() {
                    engine.end(1);
                }
                if !skips {
                    requests += 1;
                    let recorded = number(entry, "cached_tokens").unwrap();
                    equal += u32::from(admitted[0].1 == recorded);
                }
            }
            _ => (),
        }
    }
    (requests, equal)
}

#[test]
fn the_engine_reuses_what_vllm_reuses() {
    let package = std::env::var("CARGO_MANIFEST_DIR");
    let package = package.unwrap_or_else(|_| env!("CARGO_MANIFEST_DIR").to_owned());
    let folder = Path::new(&package).join("../../tests/vectors/engine_truth");
    let mut paths: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ext| ext == "msgpack"))
        .collect();
    paths.sort();
    assert_eq!(paths.len(), 16);
    let (mut full, mut others, mut equal) = (0, 0, 0);
    for path in paths {
        let bytes = fs::read(&path).unwrap();
        let mut rest = bytes.as_slice();
        let mut entries = Vec::new();
        while !rest.is_empty() {
            entries.push(rmpv::decode::read_value(&mut rest).unwrap());
        }
        let case = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let of_full_attention = FULL.iter().any(|name| case.starts_with(name));
        for (instance, rank) in [(1, 0), (2, 0), (1, 1), (2, 1)] {
            let (of, same) = play(&entries, instance, rank);
            if of > 0 {
                println!("{case} {instance}.{rank}: {same} of {of}");
            }
            match of_full_attention {
                true => {
                    assert_eq!(same, of, "{case}, instance {instance}, rank {rank}");
                    full += of;
                }
                false => (others, equal) = (others + of, equal + same),
            }
        }
    }
    assert_eq!(full, 2_012);
    assert_eq!((others, equal), (1_700, 1_667), "windows and chunks");
}
