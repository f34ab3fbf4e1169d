//! Names of blocks as vLLM makes them: computed by Python, and published by recorded engines.
#![allow(clippy::unwrap_used)]

use kvflash_core::hash::engine::{MediaItem, NameAlgorithm, NameKeys, NameScheme, names_into};
use serde_json::Value as Json;

fn read(name: &str) -> Vec<u8> {
    let path = format!("../../tests/vectors/{name}");
    std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// A prompt's keys, owned.
#[derive(Debug, Default)]
struct Keys {
    lora: Option<(String, String)>,
    cache_salt: Option<String>,
    media: Vec<MediaItem>,
    embeds: Vec<Vec<u8>>,
}

impl Keys {
    fn names(&self, scheme: &NameScheme, tokens: &[u32], unit: u32) -> Option<Vec<u64>> {
        let keys = NameKeys {
            lora: self.lora.as_ref().map(|(name, path)| (name.as_str(), path.as_str())),
            cache_salt: self.cache_salt.as_deref(),
            media: &self.media,
            embeds: &self.embeds,
        };
        let mut names = Vec::new();
        names_into(scheme, tokens, unit, &keys, &mut names).then_some(names)
    }
}

/// A string, or `{"text": "a", "times": 3}`.
fn text(value: &Json) -> Option<String> {
    let repeated = || Some(value["text"].as_str()?.repeat(value["times"].as_u64()? as usize));
    value.as_str().map(str::to_owned).or_else(repeated)
}

fn list(value: &Json) -> &[Json] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn number(value: &Json) -> u32 {
    value.as_u64().unwrap().try_into().unwrap()
}

fn bytes_of_hex(value: &Json) -> Vec<u8> {
    let hex = value.as_str().unwrap();
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

fn keys_of_case(case: &Json) -> Keys {
    let media = |item: &Json| MediaItem {
        identifier: text(&item["identifier"]).unwrap(),
        offset: number(&item["offset"]),
        length: number(&item["length"]),
    };
    Keys {
        lora: text(&case["lora"][0]).zip(text(&case["lora"][1])),
        cache_salt: text(&case["cache_salt"]),
        media: list(&case["media"]).iter().map(media).collect(),
        embeds: list(&case["embeds"]).iter().map(bytes_of_hex).collect(),
    }
}

#[test]
fn names_equal_those_that_python_makes() {
    let cases: Vec<Json> = serde_json::from_slice(&read("engine_names.json")).unwrap();
    assert_eq!(cases.len(), 47);
    let mut checked = 0;
    for case in &cases {
        let tokens: Vec<u32> = match list(&case["token_run"]) {
            [first, step, count] => {
                let token = |i: u32| number(first).wrapping_add(i.wrapping_mul(number(step)));
                (0..number(count)).map(token).collect()
            }
            _ => list(&case["tokens"]).iter().map(number).collect(),
        };
        let seed = text(&case["seed"]).unwrap_or_else(|| NameScheme::DEFAULT_SEED.to_owned());
        let keys = keys_of_case(case);
        for algorithm in NameAlgorithm::ALL {
            let scheme = NameScheme::new(algorithm, &seed);
            let names = keys.names(&scheme, &tokens, number(&case["unit"])).unwrap();
            let expected = list(&case["names"][algorithm.name()]).iter();
            let expected: Vec<u64> = expected
                .map(|name| u64::from_str_radix(name.as_str().unwrap(), 16).unwrap())
                .collect();
            let name = &case["name"];
            assert_eq!(names, expected, "{name}, {}", algorithm.name());
            checked += names.len();
        }
    }
    assert_eq!(checked, NAMES_OF_PYTHON);
}

/// Names in engine_names.json.
const NAMES_OF_PYTHON: usize = 768;

/// Blocks that begin a prompt, as an event names them.
#[derive(Debug)]
struct Stored {
    block_hashes: Vec<u64>,
    token_ids: Vec<u32>,
    block_size: u32,
    lora_name: Option<String>,
}

/// A recorded timeline: the requests, and the stored events that begin a prompt and have tokens.
struct Timeline {
    scheme: NameScheme,
    unit: u32,
    requests: Vec<(Vec<u32>, Keys)>,
    stored: Vec<Stored>,
}

fn field<'a>(map: &'a rmpv::Value, name: &str) -> Option<&'a rmpv::Value> {
    let found = map.as_map().unwrap().iter().find(|(key, _)| key.as_str() == Some(name));
    found.map(|(_, value)| value).filter(|value| !value.is_nil())
}

fn elements<'a>(map: &'a rmpv::Value, name: &str) -> &'a [rmpv::Value] {
    field(map, name).map_or(&[], |value| value.as_array().unwrap())
}

fn word(map: &rmpv::Value, name: &str) -> Option<String> {
    field(map, name).map(|value| value.as_str().unwrap().to_owned())
}

fn count(value: Option<&rmpv::Value>) -> u32 {
    value.unwrap().as_u64().unwrap().try_into().unwrap()
}

fn request(entry: &rmpv::Value) -> (Vec<u32>, Keys) {
    let media = |item: &rmpv::Value| MediaItem {
        identifier: word(item, "identifier").unwrap(),
        offset: count(field(item, "offset")),
        length: count(field(item, "length")),
    };
    let keys = Keys {
        lora: word(entry, "lora_name").zip(word(entry, "lora_path")),
        cache_salt: word(entry, "cache_salt"),
        media: elements(entry, "mm").iter().map(media).collect(),
        embeds: elements(entry, "embeds").iter().map(|it| it.as_slice().unwrap().into()).collect(),
    };
    (tokens(entry), keys)
}

fn tokens(map: &rmpv::Value) -> Vec<u32> {
    elements(map, "token_ids").iter().map(|token| count(Some(token))).collect()
}

/// Read without the codec, which turns away events that leave names out.
fn stored(event: &rmpv::Value) -> Option<Stored> {
    let hash = |value: &rmpv::Value| value.as_u64().unwrap();
    let event_type = word(event, "type").unwrap();
    let begins = event_type == "BlockStored" && field(event, "parent_block_hash").is_none();
    let found = begins.then(|| Stored {
        block_hashes: elements(event, "block_hashes").iter().map(hash).collect(),
        token_ids: tokens(event),
        block_size: count(field(event, "block_size")),
        lora_name: word(event, "lora_name"),
    });
    found.filter(|event| !event.token_ids.is_empty())
}

fn timeline(name: &str) -> Timeline {
    let (bytes, scheme) = (read(name), NameScheme::default());
    let mut rest = bytes.as_slice();
    let mut timeline = Timeline { scheme, unit: 0, requests: Vec::new(), stored: Vec::new() };
    while !rest.is_empty() {
        let entry = rmpv::decode::read_value(&mut rest).unwrap();
        match word(&entry, "kind").unwrap().as_str() {
            "meta" => {
                let algorithm = NameAlgorithm::from_name(&word(&entry, "hash").unwrap()).unwrap();
                let seed = word(&entry, "none_hash_seed").unwrap();
                timeline.scheme = NameScheme::new(algorithm, &seed);
                timeline.unit = count(field(&entry, "hash_block_size"));
            }
            "request" => timeline.requests.push(request(&entry)),
            "frames" => {
                let mut payload = elements(&entry, "parts")[2].as_slice().unwrap();
                let batch = rmpv::decode::read_value(&mut payload).unwrap();
                timeline.stored.extend(batch[1].as_array().unwrap().iter().filter_map(stored));
            }
            _ => {}
        }
    }
    timeline
}

impl Timeline {
    /// Whether the names of `event`, which begins a prompt, are those of a recorded request.
    ///
    /// The keys come from the requests: events have neither an adapter's path nor items' lengths.
    /// `is_whole`: it names each block of its tokens; else those that a window left out are missing.
    fn explains(&self, event: &Stored, is_whole: bool) -> bool {
        let units_per_block = (event.block_size / self.unit) as usize;
        self.requests.iter().any(|(tokens, keys)| {
            let lora = keys.lora.as_ref().map(|(name, _)| name);
            let shared = tokens.len().min(event.token_ids.len());
            if lora != event.lora_name.as_ref() || tokens[..shared] != event.token_ids[..shared] {
                return false;
            }
            // Another prompt with the same first tokens; its embeddings end before the event does.
            let Some(names) = keys.names(&self.scheme, &event.token_ids, self.unit) else {
                return false;
            };
            let mut names = names.into_iter().skip(units_per_block - 1).step_by(units_per_block);
            if is_whole {
                return names.eq(event.block_hashes.iter().copied());
            }
            event.block_hashes.iter().all(|hash| names.any(|name| name == *hash))
        })
    }
}

#[test]
fn names_equal_those_that_engines_published() {
    let mut files: Vec<String> = std::fs::read_dir("../../tests/vectors/engine_truth")
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".msgpack"))
        .collect();
    files.sort();
    assert_eq!(files.len(), 16);
    let (mut whole, mut masked, mut names) = (0, 0, 0);
    for file in files {
        let timeline = timeline(&format!("engine_truth/{file}"));
        for event in &timeline.stored {
            let blocks = event.token_ids.len() / event.block_size as usize;
            let is_whole = blocks == event.block_hashes.len();
            assert!(timeline.explains(event, is_whole), "{file}: {event:?}");
            *if is_whole { &mut whole } else { &mut masked } += 1;
            names += event.block_hashes.len();
        }
    }
    assert_eq!((whole, masked, names), (1_833, 449, 10_753), "whole events, masked ones; names");
}
