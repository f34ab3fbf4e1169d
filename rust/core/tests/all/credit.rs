//! What an engine's events do not say clearly earns less credit, never credit of others.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use kvflash_core::catalog::{
    Catalog, Code, EngineFacts, FrameOutcome, Identity, ListenerStatus, MAGIC, ModelKey, Publisher,
    Registration, Source, findings, parts, restore,
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

    /// The engine's batches up to number `sent` are lost.
    fn lose_up_to(&mut self, sent: u64) {
        self.publisher.give_up(sent);
        self.sent = sent;
    }

    fn dump(&self) -> Vec<u8> {
        let mut dump = MAGIC.to_vec();
        for part in parts(&self.catalog) {
            dump.extend(part.encode());
        }
        dump.extend([0; 8]);
        dump
    }

    /// Another replica, which has the blocks from this one and hears the engine from now on.
    fn replica(&self) -> Self {
        let catalog = Catalog::default();
        restore(&catalog, &mut self.dump().as_slice(), &mut |_| {}).unwrap();
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

fn registration() -> Registration {
    Registration {
        worker: Worker::new(1, 0),
        key: ModelKey { model_name: "m".into(), tenant_id: "t".into() },
        block_size: Some(SIZE as u32),
        endpoint: "tcp://127.0.0.1:1".into(),
        replay_endpoint: None,
        capacity_blocks: None,
        identity: Identity::default(),
        facts: EngineFacts::default(),
        source: Source::Zmq,
    }
}

fn register(catalog: &Catalog) -> Arc<Publisher> {
    catalog.register(registration()).unwrap()
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
    assert_eq!(engine.publisher.counts().reuse_reports, 1);
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

fn full(more: Json) -> Json {
    let mut fields = json!({"group_idx": 0, "kv_cache_spec_kind": "full_attention"});
    fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    fields
}

/// Events that show that the engine sends reports of reuse.
fn send_reports(engine: &mut Engine) {
    for from in [20, 30, 40] {
        engine.publish(&[other(from, json!({}))]);
        let mut next = other(from + 1, json!({}));
        next["parent_block_hash"] = json!(1_000 + from);
        engine.publish(&[other(from, json!({})), next]);
    }
}

/// A block of another prompt.
fn other(number: usize, more: Json) -> Json {
    let mut event = stored(0, 1, full(more));
    event["block_hashes"] = json!([1_000 + number]);
    event["token_ids"] = json!([number, number, number, number]);
    event
}

#[test]
fn a_report_in_the_step_of_its_stores_is_no_copy() {
    for is_known in [false, true] {
        let mut engine = Engine::start();
        if is_known {
            send_reports(&mut engine);
        }
        // One request computes four blocks; the next one of the step hits them and goes on.
        let all = || stored(0, 4, full(json!({})));
        engine.publish(&[all(), all(), stored(4, 5, full(json!({})))]);
        assert_eq!(engine.reuse(5, None, None), (5, 5));
        engine.publish(&[removed(0, 5, json!({"group_idx": 0}))]);
        assert_eq!(engine.reuse(5, None, None), (0, 0), "{is_known}");
    }
}

#[test]
fn a_report_of_more_than_is_known_is_no_copy_of_the_rest() {
    let mut engine = Engine::start();
    engine.sent = 50;
    engine.publisher.give_up(50);
    engine.publish(&[stored(0, 2, full(json!({}))), other(7, json!({}))]);
    assert_eq!(engine.publisher.counts().lost_batches, 50);
    engine.publish(&[stored(0, 4, full(json!({})))]);
    assert_eq!(engine.reuse(4, None, None), (4, 4));
    engine.publish(&[removed(0, 4, json!({"group_idx": 0}))]);
    assert_eq!(engine.reuse(4, None, None), (0, 0));
}

#[test]
fn beside_a_report_other_prompts_are_stored() {
    let salted = |salt: &str, from: usize| {
        let mut event = stored(0, 2, full(json!({"extra_keys": [[salt], null]})));
        event["block_hashes"] = json!([from, from + 1]);
        event
    };
    let mut engine = Engine::start();
    send_reports(&mut engine);
    engine.publish(&[salted("alice", 1)]);
    engine.publish(&[salted("alice", 1), salted("bob", 11)]);
    for salt in ["alice", "bob"] {
        assert_eq!(engine.reuse(2, None, Some(salt)), (2, 2), "{salt}");
    }
    // Evicted and computed again in one step.
    let gone = json!({"type": "BlockRemoved", "block_hashes": [1, 2], "group_idx": 0});
    engine.publish(&[gone, salted("alice", 1)]);
    assert_eq!(engine.reuse(2, None, Some("alice")), (2, 2));
}

#[test]
fn copies_are_told_from_reports_by_their_second_removal() {
    let mut engine = Engine::start();
    let all = || stored(0, 2, full(json!({})));
    let gone = || removed(0, 2, json!({"group_idx": 0}));
    // By chance another request goes on behind blocks that were computed twice.
    engine.publish(&[all()]);
    engine.publish(&[all(), stored(2, 3, full(json!({})))]);
    engine.publish(&[gone()]);
    assert_eq!(engine.reuse(2, None, None), (0, 0));
    engine.publish(&[gone()]);
    // Now copies count.
    engine.publish(&[all()]);
    engine.publish(&[all()]);
    engine.publish(&[gone()]);
    assert_eq!(engine.reuse(2, None, None), (2, 2));
    engine.publish(&[gone()]);
    assert_eq!(engine.reuse(2, None, None), (0, 0));
}

#[test]
fn losses_before_a_clear_or_a_restart_do_not_cost_copies() {
    for is_restart in [false, true] {
        let mut engine = Engine::start();
        engine.publish(&[stored(0, 1, full(json!({})))]);
        engine.lose_up_to(50);
        if is_restart {
            engine.sent = 0;
        } else {
            engine.publish(&[json!({"type": "AllBlocksCleared"})]);
        }
        // The first block is computed again with one that is gone.
        engine.publish(&[stored(0, 1, full(json!({})))]);
        engine.publish(&[stored(0, 2, full(json!({})))]);
        engine.publish(&[removed(0, 1, json!({"group_idx": 0}))]);
        assert_eq!(engine.reuse(2, None, None), (2, 2), "restart: {is_restart}");
        engine.publish(&[removed(0, 1, json!({"group_idx": 0}))]);
        assert_eq!(engine.reuse(2, None, None), (0, 0), "restart: {is_restart}");
    }
}

#[test]
fn copies_that_are_gone_leave_no_doubt() {
    let window = || {
        json!({
            "group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8,
        })
    };
    let known = |times: usize, removals: usize| {
        let mut engine = Engine::start();
        for _ in 0..times {
            engine.publish(&[stored(0, 4, full(json!({}))), stored(0, 4, window())]);
        }
        for _ in 0..removals {
            engine.publish(&[0, 1].map(|group| removed(0, 4, json!({"group_idx": group}))));
        }
        parts(&engine.catalog)[0].events().1.cache
    };
    assert_eq!(known(2, 2), known(1, 1));
    assert_ne!(known(2, 1), known(1, 1), "the other copy may have been a report of reuse");
}

#[test]
fn no_more_copies_are_taken_back_than_are_counted() {
    let window = |from: usize, to: usize| {
        let more = json!({
            "group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8,
        });
        stored(from, to, more)
    };
    for has_window in [false, true] {
        for repeats in [62, 63, 64, 100] {
            let mut engine = Engine::start();
            let take = if has_window { 2 } else { 1 };
            let first = [stored(0, 1, full(json!({}))), window(0, 1)];
            for _ in 0..=repeats {
                engine.publish(&first[..take]);
            }
            let next = [stored(1, 2, full(json!({}))), window(1, 2)];
            engine.publish(&[&first[..take], &next[..take]].concat());
            assert_eq!(engine.reuse(2, None, None), (2, 2), "{repeats}");
        }
    }
}

#[test]
fn blocks_removed_since_their_report_are_taken_back_too() {
    let mut engine = Engine::start();
    engine.publish(&[stored(0, 4, full(json!({})))]);
    // A report of reuse, but nothing shows that yet.
    engine.publish(&[stored(0, 4, full(json!({})))]);
    engine.publish(&[removed(0, 4, json!({"group_idx": 0}))]);
    assert_eq!(engine.reuse(4, None, None), (4, 4));
    send_reports(&mut engine);
    assert_eq!(engine.reuse(4, None, None), (0, 0));
}

#[test]
fn a_replica_takes_back_copies_that_were_reports() {
    for blocks in [4, 8_000] {
        let mut engine = Engine::start();
        engine.publish(&[stored(0, blocks, full(json!({})))]);
        engine.publish(&[stored(0, blocks, full(json!({})))]);
        let mut replica = engine.replica();
        let [own, others] = [&engine, &replica].map(|it| parts(&it.catalog)[0].digests());
        assert_eq!(own, others);
        let next = stored(blocks, blocks + 1, full(json!({})));
        replica.publish(&[stored(0, blocks, full(json!({}))), next]);
        replica.publish(&[removed(0, blocks + 1, json!({"group_idx": 0}))]);
        assert_eq!(replica.reuse(blocks + 1, None, None), (0, 0), "{blocks}");
    }
}

#[test]
fn a_clear_keeps_host_memory_only_of_engines_that_keep_it() {
    let clear = || json!({"type": "AllBlocksCleared"});
    let host = |more: Json| {
        let mut event = stored(0, 2, more);
        event["medium"] = "CPU".into();
        event
    };
    let mut vllm = Engine::start();
    vllm.publish(&[stored(0, 2, full(json!({}))), host(json!({})), clear()]);
    assert_eq!(vllm.reuse(2, None, None), (0, 2));
    // SGLang's flush empties both.
    let mut sglang = Engine::start();
    sglang.publish(&[stored(0, 2, json!({})), host(json!({})), clear()]);
    assert_eq!(sglang.reuse(2, None, None), (0, 0));
}

#[test]
fn a_clear_does_not_settle_what_was_lost_about_host_memory() {
    let host = |more: Json| {
        let mut event = stored(0, 2, more);
        event["medium"] = "CPU".into();
        event
    };
    let lost = |events: &[Json], is_replica: bool| {
        let mut engine = Engine::start();
        engine.publish(events);
        if is_replica {
            engine = engine.replica();
        }
        engine.lose_up_to(50);
        engine.publish(&[json!({"type": "AllBlocksCleared"})]);
        (
            findings(&engine.publisher.view().evidence).has(Code::LostBatches),
            engine.reuse(2, None, None),
        )
    };
    for is_replica in [false, true] {
        let vllm = || stored(0, 2, full(json!({})));
        assert_eq!(lost(&[vllm()], is_replica), (false, (0, 0)));
        // It may have evicted them from there.
        assert_eq!(lost(&[vllm(), host(json!({}))], is_replica), (true, (0, 2)));
        let sglang = [stored(0, 2, json!({})), host(json!({}))];
        assert_eq!(lost(&sglang, is_replica), (false, (0, 0)));
    }
}

#[test]
fn a_replica_notices_a_restart_after_a_new_connection() {
    let mut engine = Engine::start();
    for at in 0..8 {
        engine.publish(&[stored(at, at + 1, json!({}))]);
    }
    let mut replica = engine.replica();
    assert_eq!(replica.reuse(8, None, None), (8, 8));
    for status in [ListenerStatus::Active, ListenerStatus::Pending, ListenerStatus::Active] {
        replica.publisher.set_status(status, None);
    }
    replica.sent = 0;
    replica.publish(&[stored(0, 1, json!({}))]);
    assert_eq!(replica.reuse(8, None, None), (1, 1));
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
    let remote = json!({
        "medium": "EXTERNAL", "locality": "REMOTE", "ownership": "pool",
        "group_idx": 0, "token_ids": [], "block_size": 0,
    });
    for restarts in [false, true] {
        let mut engine = Engine::start();
        let own = stored(0, 2, json!({"group_idx": 0}));
        engine.publish(&[own, stored(0, 2, remote.clone())]);
        let model = engine.catalog.model("m", "t").unwrap();
        assert_eq!(model.groups.stats().names, 2);
        if restarts {
            engine.sent = 0;
            engine.publish(&[other(7, json!({}))]);
        } else {
            engine.catalog.unregister(1, "m", Some("t"), None).unwrap();
        }
        assert_eq!(model.groups.stats().names, 0, "{restarts}");
    }
}

#[test]
fn names_of_more_stores_than_are_kept_are_refused() {
    let mut engine = Engine::start();
    for at in 0..20_usize {
        let remote = json!({
            "medium": "EXTERNAL", "locality": "REMOTE", "ownership": format!("pool {at}"),
            "group_idx": 0, "token_ids": [], "block_size": 0,
        });
        engine.publish(&[stored(at, at + 1, remote)]);
    }
    let model = engine.catalog.model("m", "t").unwrap();
    assert_eq!((model.groups.stats().names, engine.publisher.counts().refused_blocks), (16, 4));
    engine.catalog.unregister(1, "m", Some("t"), None).unwrap();
    assert_eq!(model.groups.stats().names, 0);
}

#[test]
fn a_chunk_longer_than_any_prompt_adds_nothing() {
    let mut engine = Engine::start();
    let chunk = u32::MAX / SIZE as u32 * SIZE as u32;
    let lower = json!({"medium": "CPU", "group_idx": 0, "token_ids": [], "block_size": chunk});
    engine.publish(&[stored(0, 2, json!({"group_idx": 0})), stored(1, 2, lower)]);
    assert_eq!(engine.reuse(4, None, None), (2, 2));
}

#[test]
fn a_worker_that_does_not_fit_a_dump_is_skipped_and_the_dump_goes_on() {
    let mut engine = Engine::start();
    for at in 0..2_usize {
        let remote = json!({
            "medium": "EXTERNAL", "locality": "REMOTE", "ownership": at.to_string().repeat(40_000),
            "group_idx": 0, "token_ids": [], "block_size": 0,
        });
        engine.publish(&[stored(at, at + 1, remote)]);
    }
    let replica = Catalog::default();
    let progress = restore(&replica, &mut engine.dump().as_slice(), &mut |_| {}).unwrap();
    assert_eq!((progress.publishers, progress.skipped_count), (0, 1));
    let reason = &progress.skipped[0];
    assert!(reason.contains("the peer says: ") && reason.contains("at most 65536"), "{reason}");
}

#[test]
fn a_dump_says_that_it_lacks_the_names_of_shared_stores() {
    for (ownership, is_inexact) in [(None, false), (Some("pool"), true)] {
        let mut engine = Engine::start();
        let remote = json!({
            "medium": "EXTERNAL", "locality": ownership.map(|_| "REMOTE"), "ownership": ownership,
            "group_idx": 0, "token_ids": [], "block_size": 0,
        });
        engine.publish(&[stored(0, 2, json!({"group_idx": 0})), stored(0, 2, remote)]);
        let replica = Catalog::default();
        restore(&replica, &mut engine.dump().as_slice(), &mut |_| {}).unwrap();
        assert_eq!(replica.recovered()[0].2.is_inexact, is_inexact, "{ownership:?}");
    }
}

#[test]
fn the_groups_of_a_rank_outlive_the_restart_of_another_publisher() {
    let mut engine = Engine::start();
    let full = json!({"group_idx": 0, "kv_cache_spec_kind": "full_attention"});
    let other = json!({
        "group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8,
    });
    engine.publish(&[stored(0, 4, full), stored(0, 4, other)]);
    engine.publish(&[removed(0, 4, json!({"group_idx": 1}))]);
    assert_eq!(engine.reuse(4, None, None), (0, 0));
    let mut second = registration();
    second.worker = Worker::new(1, 1);
    let second = engine.catalog.register(second).unwrap();
    let of_rank_0 = rmpv::Value::Array(vec![0.0.into(), rmpv::Value::Array(vec![]), 0.into()]);
    let mut payload = Vec::new();
    rmpv::encode::write_value(&mut payload, &of_rank_0).unwrap();
    assert_eq!(second.live(0, &payload), FrameOutcome::Applied);
    second.restarted();
    assert_eq!(engine.reuse(4, None, None), (0, 0));
}
