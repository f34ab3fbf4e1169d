//! A query never gets a block stored under another identity: random engines against a simple one.
//!
//! Engines store the same few prompts under random mixes of cache salts, adapters, pictures and
//! embeddings, copy blocks to host memory in events without keys, evict and clear. Predictions of
//! the catalog are compared with sets of the engines' own names.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::sync::Arc;

use kvflash_core::catalog::{
    Catalog, CatalogOptions, EngineFacts, FrameOutcome, Identity, ModelKey, Publisher,
    Registration, Source,
};
use kvflash_core::clock::ManualClock;
use kvflash_core::hash::engine::{MediaItem, NameAlgorithm, NameKeys, NameScheme, names_into};
use kvflash_core::ids::Worker;
use kvflash_core::index::Matches;
use kvflash_core::repair::Feed;
use proptest::prelude::*;
use rmpv::Value;

const SIZE: u32 = 4;
/// An adapter and a salt of one name, and others.
const NAMES: [&str; 3] = ["a", "b", "c"];

/// The identity of a query, besides its tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Asker {
    lora: Option<&'static str>,
    salt: Option<&'static str>,
    media: Vec<MediaItem>,
    embeds: Vec<Vec<u8>>,
}

impl Asker {
    fn keys(&self) -> NameKeys<'_> {
        NameKeys {
            lora: self.lora.map(|name| (name, "/adapters")),
            cache_salt: self.salt,
            media: &self.media,
            embeds: &self.embeds,
        }
    }
}

#[derive(Debug, Clone)]
struct Prompt {
    asker: Asker,
    tokens: Vec<u32>,
}

#[derive(Debug, Clone)]
enum Step {
    /// The engine computes a prompt and keeps its full blocks.
    Compute(Prompt),
    /// It copies some of them to host memory: with tokens or without.
    Offload(Prompt, bool),
    /// It evicts a prompt's last blocks, from the device or from host memory.
    Evict(Prompt, usize, bool),
    Clear,
}

fn asker() -> impl Strategy<Value = Asker> {
    let name = || prop::option::of(prop::sample::select(NAMES.as_slice()));
    let item = (prop::sample::select(NAMES.as_slice()), 0..12_u32, 1..6_u32);
    let media = prop::collection::vec(item, 0..2);
    (name(), name(), media, prop::option::weighted(0.2, 0..2_u8)).prop_map(
        |(lora, salt, media, embeds)| Asker {
            lora,
            salt,
            media: media
                .into_iter()
                .map(|(name, offset, length)| MediaItem { identifier: name.into(), offset, length })
                .collect(),
            embeds: embeds.map_or(Vec::new(), |byte| vec![vec![byte; 32]; 4]),
        },
    )
}

fn prompt() -> impl Strategy<Value = Prompt> {
    let tokens = (prop::collection::vec(1..3_u32, 2), 4..17_usize)
        .prop_map(|(two, len)| (0..len).map(|at| if at < 8 { two[0] } else { two[1] }).collect());
    (asker(), tokens).prop_map(|(mut asker, tokens): (Asker, Vec<u32>)| {
        asker.embeds.truncate(tokens.len() / SIZE as usize);
        Prompt { asker, tokens }
    })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => prompt().prop_map(Step::Compute),
        4 => (prompt(), any::<bool>()).prop_map(|(prompt, plain)| Step::Offload(prompt, plain)),
        3 => (prompt(), 1..4_usize, any::<bool>())
            .prop_map(|(prompt, count, is_host)| Step::Evict(prompt, count, is_host)),
        1 => Just(Step::Clear),
    ]
}

/// An engine that keeps names in sets, and what it publishes.
struct Engine {
    scheme: NameScheme,
    publisher: Arc<Publisher>,
    sequence: u64,
    device: BTreeSet<u64>,
    host: BTreeSet<u64>,
}

fn map(fields: Vec<(&str, Value)>) -> Value {
    Value::Map(fields.into_iter().map(|(key, value)| (key.into(), value)).collect())
}

fn list<T: Into<Value>>(values: impl IntoIterator<Item = T>) -> Value {
    Value::Array(values.into_iter().map(Into::into).collect())
}

impl Engine {
    fn names(&self, prompt: &Prompt) -> Vec<u64> {
        let mut names = Vec::new();
        assert!(names_into(&self.scheme, &prompt.tokens, SIZE, &prompt.asker.keys(), &mut names));
        names
    }

    fn publish(&mut self, event: Value) {
        let batch = Value::Array(vec![1.0.into(), Value::Array(vec![event]), 0.into()]);
        let mut payload = Vec::new();
        rmpv::encode::write_value(&mut payload, &batch).unwrap();
        assert_eq!(self.publisher.live(self.sequence, &payload), FrameOutcome::Applied);
        self.sequence += 1;
    }

    /// The keys of a block as vLLM publishes them: without tags.
    fn extra_keys(asker: &Asker, block: usize) -> Value {
        let start = block as u32 * SIZE;
        let mut keys: Vec<Value> = asker.lora.iter().map(|name| (*name).into()).collect();
        for item in &asker.media {
            if item.offset < start + SIZE && item.offset + item.length > start {
                let offset = i64::from(item.offset) - i64::from(start);
                keys.push(Value::Array(vec![item.identifier.as_str().into(), offset.into()]));
            }
        }
        keys.extend(asker.salt.iter().filter(|_| block == 0).map(|salt| (*salt).into()));
        keys.extend(asker.embeds.get(block).map(|digest| Value::Binary(digest.clone())));
        if keys.is_empty() { Value::Nil } else { Value::Array(keys) }
    }

    fn compute(&mut self, prompt: &Prompt) {
        let names = self.names(prompt);
        let held = names.iter().take_while(|name| self.device.contains(name)).count();
        if held == names.len() {
            return;
        }
        let event = map(vec![
            ("type", "BlockStored".into()),
            ("block_hashes", list(names[held..].iter().copied())),
            ("parent_block_hash", held.checked_sub(1).map_or(Value::Nil, |at| names[at].into())),
            (
                "token_ids",
                list(
                    prompt.tokens[held * SIZE as usize..names.len() * SIZE as usize]
                        .iter()
                        .copied(),
                ),
            ),
            ("block_size", SIZE.into()),
            ("medium", "GPU".into()),
            ("lora_name", prompt.asker.lora.map_or(Value::Nil, Value::from)),
            (
                "extra_keys",
                Value::Array(
                    (held..names.len()).map(|at| Self::extra_keys(&prompt.asker, at)).collect(),
                ),
            ),
            ("group_idx", 0.into()),
            ("kv_cache_spec_kind", "full_attention".into()),
        ]);
        self.publish(event);
        // A block behind an evicted one may be held still: it is not stored twice here.
        self.device.extend(&names[held..]);
    }

    fn offload(&mut self, prompt: &Prompt, is_plain: bool) {
        let names = self.names(prompt);
        let held: Vec<usize> = (0..names.len())
            .filter(|at| self.device.contains(&names[*at]) && !self.host.contains(&names[*at]))
            .collect();
        // Children may come before their parents.
        for at in held.into_iter().rev() {
            let tokens = &prompt.tokens[at * SIZE as usize..][..SIZE as usize];
            let mut fields = vec![
                ("type", "BlockStored".into()),
                ("block_hashes", list([names[at]])),
                ("medium", "CPU".into()),
                ("group_idx", 0.into()),
            ];
            if is_plain {
                fields.extend([("token_ids", list::<u32>([])), ("block_size", 0.into())]);
            } else {
                let parent = at.checked_sub(1).map_or(Value::Nil, |at| names[at].into());
                fields.extend([
                    ("parent_block_hash", parent),
                    ("token_ids", list(tokens.iter().copied())),
                    ("block_size", SIZE.into()),
                    ("kv_cache_spec_kind", "full_attention".into()),
                ]);
            }
            self.publish(map(fields));
            self.host.insert(names[at]);
        }
    }

    fn evict(&mut self, prompt: &Prompt, count: usize, is_host: bool) {
        let names = self.names(prompt);
        let held = if is_host { &mut self.host } else { &mut self.device };
        let gone: Vec<u64> =
            names.iter().rev().copied().filter(|name| held.contains(name)).take(count).collect();
        for name in &gone {
            held.remove(name);
        }
        if gone.is_empty() {
            return;
        }
        let medium = if is_host { "CPU" } else { "GPU" };
        self.publish(map(vec![
            ("type", "BlockRemoved".into()),
            ("block_hashes", list(gone)),
            ("medium", medium.into()),
            ("group_idx", 0.into()),
        ]));
    }

    fn clear(&mut self) {
        self.device.clear();
        self.publish(map(vec![("type", "AllBlocksCleared".into())]));
    }

    /// Blocks that the prompt's asker can reuse: on the device, and with what host memory goes on with.
    fn reach(&self, prompt: &Prompt) -> (u32, u32) {
        let names = self.names(prompt);
        let device = names.iter().take_while(|name| self.device.contains(name)).count();
        let host = names[device..].iter().take_while(|name| self.host.contains(name)).count();
        (device as u32, (device + host) as u32)
    }
}

fn engine(catalog: &Catalog, seed: &str) -> Engine {
    let publisher = catalog.register(Registration {
        worker: Worker::new(1, 0),
        key: ModelKey { model_name: "m".into(), tenant_id: "t".into() },
        block_size: Some(SIZE),
        endpoint: "tcp://127.0.0.1:1".into(),
        replay_endpoint: None,
        capacity_blocks: None,
        identity: Identity::default(),
        facts: EngineFacts::default(),
        source: Source::Zmq,
    });
    Engine {
        scheme: NameScheme::new(NameAlgorithm::Sha256, seed),
        publisher: publisher.unwrap(),
        sequence: 0,
        device: BTreeSet::new(),
        host: BTreeSet::new(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_block_is_credited_to_another_identity(
        steps in prop::collection::vec(step(), 1..24),
        others in prop::collection::vec(prompt(), 4),
        // The seed of one engine can be guessed, that of the other can't.
        is_secret in any::<bool>(),
    ) {
        let catalog =
            Catalog::new(CatalogOptions::default(), Arc::new(ManualClock::default()));
        let mut engine = engine(&catalog, if is_secret { "secret" } else { NameScheme::DEFAULT_SEED });
        let model = catalog.model("m", "t").unwrap();
        let (mut matches, mut exact) = (Matches::new(), Vec::new());
        let mut asked: Vec<Prompt> = others;
        for step in &steps {
            match step {
                Step::Compute(prompt) => engine.compute(prompt),
                Step::Offload(prompt, is_plain) => engine.offload(prompt, *is_plain),
                Step::Evict(prompt, count, is_host) => engine.evict(prompt, *count, *is_host),
                Step::Clear => engine.clear(),
            }
            if let Step::Compute(prompt) | Step::Offload(prompt, _) | Step::Evict(prompt, ..) = step {
                asked.push(prompt.clone());
            }
            for prompt in &asked {
                let keys = prompt.asker.keys();
                let locals = model.locals(&prompt.tokens, &keys);
                let names = model.names(&prompt.tokens, &keys);
                model.find(&locals, &names, prompt.tokens.len() as u64, &mut matches, &mut exact);
                let found = matches.as_slice().first();
                let (device, host) = found.map_or((0, 0), |found| (found.device, found.host));
                let (most, most_with_host) = engine.reach(prompt);
                // An engine computes the last token in any case; the catalog may leave that to its callers.
                let whole = (prompt.tokens.len() as u32 - 1) / SIZE;
                prop_assert!(device <= most, "{device} of {most}: {prompt:?}");
                prop_assert!(host <= most_with_host, "{host} of {most_with_host}: {prompt:?}");
                prop_assert!(device >= most.min(whole), "{device} of {most}: {prompt:?}");
                if !is_secret && most <= whole {
                    prop_assert_eq!(host, most_with_host, "{:?}", prompt);
                }
            }
        }
    }
}
