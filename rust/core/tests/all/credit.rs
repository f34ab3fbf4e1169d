//! What an engine's events do not say clearly earns less credit, never credit of others.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use kvflash_core::catalog::{
    Catalog, EngineFacts, FrameOutcome, Identity, MAGIC, ModelKey, Publisher, Registration, Source,
    parts, restore,
};
use kvflash_core::hash::engine::NameKeys;
use kvflash_core::ids::Worker;
use kvflash_core::index::Matches;
use kvflash_core::repair::Feed;
use serde_json::{Value as Json, json};

const SIZE: usize = 4;

/// One engine, and a catalog that hears it.
struct Engine {
    catalog: Catalog,
    publisher: Arc<Publisher>,
    sent: u64,
}

impl Engine {
    fn start() -> Self {
        let catalog = Catalog::default();
        let publisher = register(&catalog);
        Self { catalog, publisher, sent: 0 }
    }

    fn publish(&mut self, events: &[Json]) {
        let batch = rmpv::Value::Array(vec![0.0.into(), events.iter().map(value).collect()]);
        let mut payload = Vec::new();
        rmpv::encode::write_value(&mut payload, &batch).unwrap();
        assert_eq!(self.publisher.live(self.sent, &payload), FrameOutcome::Applied);
        self.sent += 1;
    }

    /// Another replica, which has the blocks from this one and hears the engine from now on.
    fn replica(&self) -> Self {
        let mut dump = MAGIC.to_vec();
        for part in parts(&self.catalog) {
            dump.extend(part.encode().unwrap());
        }
        dump.extend([0; 8]);
        let catalog = Catalog::default();
        restore(&catalog, &mut dump.as_slice(), &mut |_| {}).unwrap();
        let publisher = register(&catalog);
        Self { catalog, publisher, sent: self.sent }
    }

    /// Blocks of the first `blocks` that the engine can reuse on its device, and with host memory.
    fn reuse(&self, blocks: usize, lora: Option<&str>, cache_salt: Option<&str>) -> (u32, u32) {
        let model = self.catalog.model("m", "t").unwrap();
        let keys =
            NameKeys { lora: lora.map(|name| (name, "")), cache_salt, ..NameKeys::default() };
        let tokens: Vec<u32> = (0..blocks * SIZE + 1).map(|token| token as u32).collect();
        let (mut matches, mut exact) = (Matches::new(), Vec::new());
        let (locals, names) = (model.locals(&tokens, &keys), model.names(&tokens, &keys));
        model.find(&locals, &names, tokens.len() as u64, &mut matches, &mut exact);
        matches.as_slice().first().map_or((0, 0), |found| (found.device, found.host))
    }
}

fn register(catalog: &Catalog) -> Arc<Publisher> {
    let registration = Registration {
        worker: Worker::new(1, 0),
        key: ModelKey { model_name: "m".into(), tenant_id: "t".into() },
        block_size: Some(SIZE as u32),
        endpoint: "tcp://127.0.0.1:1".into(),
        replay_endpoint: None,
        capacity_blocks: None,
        identity: Identity::default(),
        facts: EngineFacts::default(),
        source: Source::Zmq,
    };
    catalog.register(registration).unwrap()
}

fn value(json: &Json) -> rmpv::Value {
    match json {
        Json::Null => rmpv::Value::Nil,
        Json::Bool(flag) => (*flag).into(),
        Json::Number(number) => match (number.as_u64(), number.as_i64(), number.as_f64()) {
            (Some(number), ..) => number.into(),
            (None, Some(number), _) => number.into(),
            (.., number) => number.unwrap().into(),
        },
        Json::String(text) => text.as_str().into(),
        Json::Array(items) => items.iter().map(value).collect(),
        Json::Object(fields) => {
            let field = |(key, of): (&String, &Json)| (key.as_str().into(), value(of));
            rmpv::Value::Map(fields.iter().map(field).collect())
        }
    }
}

/// A stored event of the blocks `from..to` of the prompt, with more fields.
fn stored(from: usize, to: usize, more: Json) -> Json {
    let name = |at: usize| 100 + at;
    let mut event = json!({
        "type": "BlockStored",
        "block_hashes": (from..to).map(name).collect::<Vec<_>>(),
        "parent_block_hash": from.checked_sub(1).map(name),
        "token_ids": (from * SIZE..to * SIZE).collect::<Vec<_>>(),
        "block_size": SIZE,
    });
    let fields = event.as_object_mut().unwrap();
    fields.extend(more.as_object().unwrap().clone());
    event
}

fn removed(from: usize, to: usize, more: Json) -> Json {
    let mut event = stored(from, to, more);
    event["type"] = "BlockRemoved".into();
    event
}

#[test]
fn blocks_behind_another_adapter_s_are_not_its() {
    for (first, second) in [(Some("a"), Some("b")), (None, Some("b")), (Some("b"), None)] {
        let mut engine = Engine::start();
        engine.publish(&[stored(0, 2, json!({"lora_name": first}))]);
        // The engine gives the blocks of both the same names.
        engine.publish(&[stored(0, 2, json!({"lora_name": second}))]);
        engine.publish(&[stored(2, 4, json!({"lora_name": first}))]);
        assert_eq!(engine.reuse(4, second, None), (2, 2), "{first:?} {second:?}");
        assert_eq!(engine.publisher.counts().identity_conflict, 1);
    }
}

#[test]
fn behind_names_of_two_salts_nothing_is_inherited() {
    let mut engine = Engine::start();
    engine.publish(&[stored(0, 2, json!({"cache_salt": "x"})), stored(2, 3, json!({}))]);
    assert_eq!(engine.reuse(4, None, Some("x")), (3, 3), "a salt counts for later blocks");
    let mut engine = Engine::start();
    engine.publish(&[stored(0, 2, json!({})), stored(0, 2, json!({"cache_salt": "x"}))]);
    engine.publish(&[stored(2, 4, json!({}))]);
    assert_eq!(engine.reuse(4, None, Some("x")), (2, 2));
}

#[test]
fn a_numbered_adapter_is_no_named_one() {
    let mut engine = Engine::start();
    engine.publish(&[stored(0, 2, json!({"lora_id": 5}))]);
    for name in [None, Some("5"), Some("lora_id:5")] {
        assert_eq!(engine.reuse(2, name, None), (0, 0), "{name:?}");
    }
}

#[test]
fn stores_of_host_memory_without_keys_follow_the_device_s() {
    let device = || stored(0, 2, json!({"group_idx": 0, "extra_keys": [["alice"], null]}));
    let host = || stored(0, 2, json!({"medium": "CPU"}));
    let mut engine = Engine::start();
    engine.publish(&[device()]);
    let mut replica = engine.replica();
    for engine in [&mut engine, &mut replica] {
        engine.publish(&[host()]);
        assert_eq!(engine.reuse(2, None, Some("alice")), (2, 2));
        assert_eq!(engine.reuse(2, None, None), (0, 0));
    }
    // What it is can be told only afterwards.
    let mut late = Engine::start();
    late.publish(&[host()]);
    late.publish(&[device()]);
    assert_eq!(late.reuse(2, None, None), (0, 0));
}

#[test]
fn a_store_of_host_memory_may_name_blocks_without_their_tokens() {
    for block_size in [0, SIZE] {
        let mut engine = Engine::start();
        let nameless = json!({"medium": "CPU", "token_ids": [], "block_size": block_size});
        engine.publish(&[stored(0, 2, json!({})), stored(0, 2, nameless)]);
        engine.publish(&[removed(0, 2, json!({}))]);
        assert_eq!(engine.reuse(2, None, None), (0, 2));
        assert_eq!(engine.publisher.counts().malformed, 0);
    }
}

#[test]
fn a_report_before_the_first_that_goes_on_is_no_copy() {
    let group = || json!({"group_idx": 0, "kv_cache_spec_kind": "full_attention"});
    let mut engine = Engine::start();
    // Computed, reused by a prompt that is no longer, and by one that is.
    engine.publish(&[stored(0, 4, group())]);
    engine.publish(&[stored(0, 4, group())]);
    engine.publish(&[stored(0, 4, group()), stored(4, 5, group())]);
    assert_eq!(engine.reuse(5, None, None), (5, 5));
    assert_eq!(engine.publisher.counts().reuse_reports, 2);
    engine.publish(&[removed(0, 5, json!({"group_idx": 0}))]);
    assert_eq!(engine.reuse(5, None, None), (0, 0));
    // Without any that goes on they are copies, also at a replica.
    let mut engine = Engine::start();
    engine.publish(&[stored(0, 4, group())]);
    engine.publish(&[stored(0, 4, group())]);
    engine.publish(&[removed(0, 4, json!({"group_idx": 0}))]);
    assert_eq!(engine.reuse(5, None, None), (4, 4));
    assert_eq!(engine.replica().reuse(5, None, None), (4, 4));
}

#[test]
fn a_window_that_can_t_be_read_withholds_credit() {
    for window in [json!(5), json!(5.0), json!("5"), json!(-5), json!(u64::MAX)] {
        let mut engine = Engine::start();
        let full = json!({"group_idx": 0, "kv_cache_spec_kind": "full_attention"});
        let other = json!({
            "group_idx": 1,
            "kv_cache_spec_kind": "sliding_window",
            "kv_cache_spec_sliding_window": window,
        });
        engine.publish(&[stored(0, 4, full), stored(0, 4, other)]);
        assert_eq!(engine.reuse(4, None, None), (4, 4), "{window}");
        engine.publish(&[removed(0, 4, json!({"group_idx": 1}))]);
        assert_eq!(engine.reuse(4, None, None), (0, 0), "{window}");
    }
}

#[test]
fn a_shared_store_s_names_go_with_its_last_worker() {
    let mut engine = Engine::start();
    let remote = json!({
        "medium": "EXTERNAL", "locality": "REMOTE", "ownership": "pool",
        "group_idx": 0, "token_ids": [], "block_size": 0,
    });
    engine.publish(&[stored(0, 2, json!({"group_idx": 0})), stored(0, 2, remote)]);
    let model = engine.catalog.model("m", "t").unwrap();
    assert_eq!(model.groups.stats().names, 2);
    engine.catalog.unregister(1, "m", Some("t"), None).unwrap();
    assert_eq!(model.groups.stats().names, 0);
}
