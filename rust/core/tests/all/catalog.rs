//! Registrations, ownership of blocks, and results of recoveries, by the catalog's own calls.
#![allow(clippy::unwrap_used)]

use std::io::Read;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use kvflash_core::catalog::{
    Catalog, CatalogOptions, Code, EngineFacts, FrameOutcome, Identity, ListenerStatus, MAGIC,
    ModelKey, Publisher, Registration, Source, TransferError, Unheard, Watermark, findings, parts,
    restore, restore_json,
};
use kvflash_core::clock::ManualClock;
use kvflash_core::error::Error;
use kvflash_core::ids::{Tier, Worker};
use kvflash_core::index::{Block, DEFAULT_SEED};
use kvflash_core::repair::Feed;
use serde_json::json;

/// A batch without events that speaks for rank 1: `[0.0, [], 1]`.
const OF_RANK_1: [u8; 12] = [0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x90, 1];

fn key(model: &str) -> ModelKey {
    ModelKey { model_name: model.into(), tenant_id: "t".into() }
}

fn registration(worker: Worker, model: &str) -> Registration {
    Registration {
        worker,
        key: key(model),
        block_size: Some(4),
        endpoint: format!("tcp://127.0.0.1:{}", 1_000 + worker.dp_rank),
        replay_endpoint: None,
        capacity_blocks: None,
        identity: Identity::default(),
        facts: EngineFacts::default(),
        source: Source::Zmq,
    }
}

fn register(catalog: &Catalog, id: u64, dp_rank: u32) -> Arc<Publisher> {
    catalog.register(registration(Worker::new(id, dp_rank), "m")).unwrap()
}

/// Has `worker` hold these blocks, one behind the other.
fn hold(publisher: &Publisher, worker: Worker, names: std::ops::Range<u64>) {
    let blocks: Vec<Block> =
        names.map(|name| Block { engine_hash: name, local_hash: name }).collect();
    publisher.model.index.store(worker, Tier::Device, None, DEFAULT_SEED, &blocks);
}

#[test]
fn a_replay_that_succeeds_ends_the_error_of_one_that_failed() {
    let catalog = Catalog::default();
    let publisher = register(&catalog, 1, 0);
    let replay = |failure| {
        publisher.replay_started();
        publisher.replay_ended(failure, false);
        publisher.view().last_error
    };
    assert_eq!(replay(Some("no answer")).as_deref(), Some("replay failed: no answer"));
    assert_eq!(replay(None), None);
    publisher.set_status(ListenerStatus::Pending, Some("no route".to_owned()));
    assert_eq!(replay(None).as_deref(), Some("no route"), "the socket's own error stays");
}

fn binary(catalog: &Catalog) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    for part in parts(catalog) {
        bytes.extend(part.encode());
    }
    bytes.extend([0; 8]);
    bytes
}

fn limited(max_blocks: usize) -> Catalog {
    let options = CatalogOptions { max_blocks, ..CatalogOptions::default() };
    Catalog::new(options, Arc::new(ManualClock::default()))
}

#[test]
fn publishers_with_a_socket_are_as_many_as_there_are_files_for() {
    let catalog = Catalog::default();
    catalog.limit_sockets(16);
    let add = |id: u64, endpoint: &str| {
        let endpoint = endpoint.to_owned();
        catalog.register(Registration { endpoint, ..registration(Worker::new(id, 0), "m") })
    };
    for id in 0..8 {
        add(id, "tcp://a:1").unwrap().set_status(ListenerStatus::Active, None);
    }
    // Half of the places are taken: a host has an eighth of them for those that never connected.
    add(8, "tcp://b:1").unwrap();
    let connected = add(9, "tcp://b:2").unwrap();
    let error = add(10, "tcp://b:3").map(drop).unwrap_err().to_string();
    assert!(
        error.contains("2 publishers at tcp://b are registered but never connected"),
        "{error}"
    );
    connected.set_status(ListenerStatus::Active, None);
    // The ranks of one engine are registered before the first of them has connected.
    for dp_rank in 0..4 {
        let endpoint = format!("tcp://c:{dp_rank}");
        let worker = Worker::new(10, dp_rank);
        catalog.register(Registration { endpoint, ..registration(worker, "m") }).unwrap();
    }
    catalog.unregister(10, "m", None, None).unwrap();
    add(10, "tcp://b:3").unwrap();
    for id in 11..16 {
        add(id, &format!("tcp://host-{id}:1")).unwrap();
    }
    let error = add(16, "tcp://c:1").map(drop).unwrap_err();
    assert!(matches!(&error, Error::Overloaded(why) if why.contains("ulimit -n")), "{error}");
    // Events from a broker need no socket.
    add(16, "nats://subject/16/0").unwrap();
    catalog.unregister(15, "m", None, None).unwrap();
    add(17, "tcp://c:1").unwrap();
}

#[test]
fn a_rank_of_two_publishers_is_the_registered_ones() {
    let catalog = Catalog::default();
    let (first, second) = (register(&catalog, 1, 0), register(&catalog, 1, 1));
    let (own, other) = (first.worker, second.worker);
    hold(&first, own, 1..4);
    hold(&second, other, 11..14);
    assert_eq!(first.live(0, &OF_RANK_1), FrameOutcome::Applied);
    let blocks = || (second.model.index.blocks(own), second.model.index.blocks(other));
    first.restarted();
    assert_eq!(blocks(), (0, 3));
    hold(&first, own, 1..4);
    assert_eq!(catalog.unregister(1, "m", None, Some(0)), Ok(1));
    assert_eq!(blocks(), (0, 3));
    assert_eq!(catalog.unregister(1, "m", None, Some(1)), Ok(1));
    assert_eq!(blocks(), (0, 0));
}

#[test]
fn of_many_models_without_workers_the_last_stay_known() {
    let catalog = Catalog::default();
    let kept = key("kept");
    catalog.model_or_create(&kept, None).unwrap();
    let come = |name: &str| {
        catalog.register(registration(Worker::new(1, 0), name)).unwrap();
    };
    let go = |name: &str| {
        assert_eq!(catalog.unregister(1, name, None, None), Ok(1));
    };
    come("kept");
    go("kept");
    come("back");
    go("back");
    come("back");
    for number in 0..1_000 {
        let name = format!("of {number}");
        come(&name);
        go(&name);
        assert!(catalog.model(&name, "t").is_ok(), "its clients may still ask");
    }
    go("back");
    let known = catalog.models();
    assert_eq!(known.len(), 257, "256, and the kept one");
    let names = ["kept", "back", "of 999", "of 745"];
    assert!(names.iter().all(|name| catalog.model(name, "t").is_ok()));
    assert!(catalog.model("of 744", "t").is_err());
}

#[test]
fn a_model_without_workers_makes_room_unless_somebody_counts_on_it() {
    let options = CatalogOptions { max_models: 3, ..CatalogOptions::default() };
    let catalog = Catalog::new(options, Arc::new(ManualClock::default()));
    let kept = catalog.model_or_create(&key("m"), None).unwrap();
    catalog.register(registration(Worker::new(100, 0), "used")).unwrap();
    for id in 0..10 {
        // For weeks: tenants come and go.
        let name = format!("of {id}");
        catalog.register(registration(Worker::new(id, 0), &name)).unwrap();
        let late =
            catalog.register(registration(Worker::new(50, 0), "late")).map(drop).unwrap_err();
        assert!(late.to_string().contains("the limit of 3 models"), "{late}");
        catalog.unregister(id, &name, None, None).unwrap();
        assert!(catalog.model(&name, "t").is_ok(), "known as long as there is room");
    }
    assert_eq!(catalog.models().len(), 3);
    register(&catalog, 1, 0);
    catalog.unregister(1, "m", None, None).unwrap();
    assert_eq!(kept.block_size(), None);
    let mut other = registration(Worker::new(1, 0), "m");
    other.block_size = Some(64);
    assert!(Arc::ptr_eq(&catalog.register(other).unwrap().model, &kept));
}

#[test]
fn what_was_recovered_counts_as_long_as_it_is_there() {
    let source = Catalog::default();
    for id in [1, 2] {
        hold(&register(&source, id, 0), Worker::new(id, 0), 10 * id..10 * id + 4);
    }
    let catalog = Catalog::default();
    restore(&catalog, &mut binary(&source).as_slice(), &mut |_| {}).unwrap();
    // The one that publishes leaves: the other one's blocks are of this block size, too.
    let model = Arc::clone(&register(&catalog, 1, 0).model);
    catalog.unregister(1, "m", None, None).unwrap();
    assert_eq!((model.block_size(), model.index.blocks(Worker::new(2, 0))), (Some(4), 4));
    // With it nothing is left, and what comes next may differ.
    catalog.unregister(2, "m", None, None).unwrap();
    let mut other = registration(Worker::new(3, 0), "m");
    other.block_size = Some(64);
    catalog.register(other).unwrap();
}

/// Gives half of its bytes; then looks on while the other half is awaited.
struct Slow<'a> {
    halves: Vec<&'a [u8]>,
    between: Box<dyn FnMut() + 'a>,
}

impl Read for Slow<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        if self.halves[0].is_empty() && self.halves.len() > 1 {
            self.halves.remove(0);
            (self.between)();
        }
        self.halves[0].read(into)
    }
}

#[test]
fn nobody_waits_for_a_slow_peer() {
    let source = Catalog::default();
    hold(&register(&source, 1, 0), Worker::new(1, 0), 1..400);
    let bytes = binary(&source);
    let catalog = Arc::new(Catalog::default());
    let publisher = register(&catalog, 1, 0);
    let (first, second) = bytes.split_at(bytes.len() / 2);
    let between = || {
        let (sender, receiver) = channel();
        let (catalog, publisher) = (Arc::clone(&catalog), Arc::clone(&publisher));
        std::thread::spawn(move || {
            let seen =
                (publisher.view().last_sequence, catalog.unregister(9, "m", None, None).is_err());
            sender.send((seen, catalog.model("m", "t").is_ok())).unwrap();
        });
        let seen = receiver.recv_timeout(Duration::from_secs(30));
        assert_eq!(seen, Ok(((None, true), true)), "it is locked while the peer is awaited");
    };
    let mut slow = Slow { halves: vec![first, second], between: Box::new(between) };
    let progress = restore(&catalog, &mut slow, &mut |_| {}).unwrap();
    assert_eq!((progress.publishers, progress.blocks), (1, 399));
}

#[test]
fn blocks_of_a_registered_rank_outlive_the_recovered_one_that_named_it() {
    let source = Catalog::default();
    let publisher = register(&source, 1, 0);
    assert_eq!(publisher.live(0, &OF_RANK_1), FrameOutcome::Applied);
    hold(&publisher, Worker::new(1, 0), 1..5);
    for is_unregistered in [true, false] {
        let catalog = Catalog::default();
        restore(&catalog, &mut binary(&source).as_slice(), &mut |_| {}).unwrap();
        hold(&register(&catalog, 1, 1), Worker::new(1, 1), 11..15);
        let model = catalog.model("m", "t").unwrap();
        let blocks = || [0, 1].map(|rank| model.index.blocks(Worker::new(1, rank)));
        assert_eq!(blocks(), [4, 4]);
        let count = match is_unregistered {
            true => catalog.unregister(1, "m", None, Some(0)).unwrap(),
            false => catalog.drop_recovered(),
        };
        assert_eq!((count, blocks()), (1, [0, 4]), "{is_unregistered}");
    }
}

#[test]
fn a_place_that_promises_too_much_is_none() {
    let source = Catalog::default();
    let publisher = register(&source, 1, 0);
    assert_eq!(publisher.live(0, &OF_RANK_1), FrameOutcome::Applied);
    hold(&publisher, Worker::new(1, 0), 1..5);
    hold(&publisher, Worker::new(1, 1), 11..15);
    for (max_blocks, is_whole) in [(8, true), (7, false)] {
        let catalog = limited(max_blocks);
        let progress = restore(&catalog, &mut binary(&source).as_slice(), &mut |_| {}).unwrap();
        assert_eq!(progress.skipped_count, usize::from(!is_whole), "{progress:?}");
        let (_, worker, place) = catalog.recovered().pop().unwrap();
        assert_eq!((worker, place.cursor.is_some()), (Worker::new(1, 0), is_whole));
        assert_eq!(place.is_inexact, !is_whole);
    }
}

#[test]
fn a_place_without_its_blocks_is_not_handed_over() {
    let source = Catalog::default();
    let publisher = register(&source, 1, 0);
    for sequence in 0..3 {
        let payload = batch_of(vec![stored((0, "full_attention"), sequence, 4)]);
        assert_eq!(publisher.live(sequence, &payload), FrameOutcome::Applied);
    }
    for _ in 0..2 {
        source.unregister(1, "m", None, None).unwrap();
        let publisher = register(&source, 1, 0);
        assert_eq!(publisher.view().last_sequence, Some(2), "it returns to its own place");
    }
    let catalog = Catalog::default();
    restore(&catalog, &mut binary(&source).as_slice(), &mut |_| {}).unwrap();
    // Its blocks are requested from the first batch on.
    let replica = register(&catalog, 1, 0);
    assert_eq!(replica.view().last_sequence, None);
    let next = batch_of(vec![stored((0, "full_attention"), 3, 4)]);
    assert_eq!(replica.live(3, &next), FrameOutcome::Gap { from: 0, to: 2 });
}

/// A publisher that returns to its place, and the three batches that it applied before.
fn returned(catalog: &Catalog) -> (Arc<Publisher>, Vec<Vec<u8>>) {
    let replay_endpoint = Some("tcp://127.0.0.1:2000".to_owned());
    let registration = Registration { replay_endpoint, ..registration(Worker::new(1, 0), "m") };
    let publisher = catalog.register(registration.clone()).unwrap();
    let batch = |name| batch_of(vec![stored((0, "full_attention"), name, 4)]);
    let batches: Vec<Vec<u8>> = (0..3).map(batch).collect();
    for (sequence, payload) in batches.iter().enumerate() {
        assert_eq!(publisher.live(sequence as u64, payload), FrameOutcome::Applied);
    }
    catalog.unregister(1, "m", None, None).unwrap();
    let publisher = catalog.register(registration).unwrap();
    publisher.set_status(ListenerStatus::Active, None);
    (publisher, batches)
}

#[test]
fn one_that_returns_is_asked_for_its_blocks_whatever_arrives_first() {
    let catalog = Catalog::default();
    let (publisher, mut batches) = returned(&catalog);
    batches.push(batch_of(vec![stored((0, "full_attention"), 3, 4)]));
    // This is live, before the connection is checked.
    assert_eq!(publisher.live(3, &batches[3]), FrameOutcome::Applied);
    let has = |code| findings(&publisher.view().evidence).has(code);
    assert!(has(Code::CatchingUp));
    let mut dump = &binary(&catalog)[..];
    let replica = Catalog::default();
    assert_eq!(restore(&replica, &mut dump, &mut |_| {}).unwrap().blocks, 1);
    assert_eq!(replica.recovered()[0].2.cursor, None, "a replica needs the other blocks as well");
    assert_eq!(restore(&catalog, &mut &binary(&replica)[..], &mut |_| {}).unwrap().publishers, 0);
    assert!(!publisher.verify(Some((3, &batches[3]))));
    assert_eq!(publisher.position(), (0, None));
    for (sequence, payload) in batches.iter().enumerate() {
        assert_eq!(publisher.replayed(sequence as u64, payload), FrameOutcome::Applied);
    }
    let whole = Catalog::default();
    let other = register(&whole, 1, 0);
    for (sequence, payload) in batches.iter().enumerate() {
        assert_eq!(other.live(sequence as u64, payload), FrameOutcome::Applied);
    }
    assert_eq!(parts(&catalog)[0].digests(), parts(&whole)[0].digests());
    assert!(!has(Code::CatchingUp) && !has(Code::MissedFirstBatches));
}

#[test]
fn blocks_of_one_that_returns_and_can_t_replay_are_missed() {
    let catalog = Catalog::default();
    let (publisher, batches) = returned(&catalog);
    let has = |code| findings(&publisher.view().evidence).has(code);
    assert!(has(Code::CatchingUp));
    publisher.replay_started();
    publisher.replay_ended(Some("no answer"), false);
    assert!(has(Code::MissedFirstBatches));
    let next = batch_of(vec![stored((0, "full_attention"), 3, 4)]);
    assert_eq!(publisher.live(3, &next), FrameOutcome::Applied);
    assert!(has(Code::MissedFirstBatches) && !has(Code::CatchingUp));
    assert_eq!(publisher.model.unheard(Worker::new(1, 0)), Some(Unheard::Missed));
    // Another failure, or the next connection, changes nothing.
    publisher.replay_ended(Some("no answer"), false);
    assert!(publisher.verify(Some((3, &next))) && has(Code::MissedFirstBatches));
    assert_eq!(publisher.live(0, &batches[0]), FrameOutcome::Applied);
    assert!(!has(Code::MissedFirstBatches), "a new process has nothing else");
}

#[test]
fn an_instance_of_two_tenants_has_blocks_in_each() {
    let catalog = Catalog::default();
    let rank = Worker::new(1, 0);
    let of = |tenant: &str| ModelKey { tenant_id: tenant.into(), ..key("m") };
    let add = |tenant: &str| {
        catalog.register(Registration { key: of(tenant), ..registration(rank, "m") })
    };
    let (first, second) = (add("a").unwrap(), add("b").unwrap());
    register(&catalog, 1, 1);
    let error = add("a").map(drop).unwrap_err().to_string();
    assert!(error.contains("already registered for model=m tenant=a"), "{error}");
    hold(&first, rank, 1..4);
    let held = || [&first, &second].map(|publisher| publisher.model.index.blocks(rank));
    assert_eq!((held(), catalog.instance_count()), ([3, 0], 1));
    hold(&second, rank, 11..16);
    assert_eq!(catalog.known_workers(), [rank, Worker::new(1, 1)]);
    // Another replica keeps them apart, too, before the registrations and after them.
    let copy = Catalog::default();
    let progress = restore(&copy, &mut binary(&catalog).as_slice(), &mut |_| {}).unwrap();
    assert_eq!((progress.publishers, progress.blocks, progress.skipped_count), (3, 8, 0));
    let copied = ["a", "b"].map(|tenant| copy.model("m", tenant).unwrap().index.blocks(rank));
    assert_eq!(copied, [3, 5]);
    // A restart of one engine drops nothing of the other tenant.
    first.restarted();
    assert_eq!(held(), [0, 5]);
    hold(&first, rank, 1..4);
    assert_eq!(catalog.unregister(1, "m", Some("a"), None), Ok(1));
    assert_eq!(held(), [0, 5]);
    hold(&add("a").unwrap(), rank, 1..4);
    assert_eq!(held(), [3, 5]);
    assert_eq!(catalog.unregister(1, "m", None, Some(0)), Ok(2), "of every tenant");
    assert_eq!((held(), catalog.known_workers()), ([0, 0], vec![Worker::new(1, 1)]));
    assert_eq!(copy.unregister(1, "m", None, None), Ok(3));
}

#[test]
fn a_dump_s_blocks_stay_in_their_model() {
    let source = Catalog::default();
    hold(&register(&source, 7, 0), Worker::new(7, 0), 1..4);
    hold(&register(&source, 8, 0), Worker::new(8, 0), 1..4);
    let events: Vec<_> = parts(&source).iter().flat_map(|part| part.events().0).collect();
    let dump = json!({"m:t": {"block_size": 4, "events": events}}).to_string();
    let catalog = Catalog::default();
    catalog.register(registration(Worker::new(7, 0), "other")).unwrap();
    let progress = restore_json(&catalog, &mut dump.as_bytes(), &mut |_| {}).unwrap();
    let model = catalog.model("m", "t").unwrap();
    assert_eq!(model.index.workers(), [Worker::new(7, 0), Worker::new(8, 0)]);
    assert!(catalog.model("other", "t").unwrap().index.workers().is_empty());
    assert_eq!(progress.skipped_count, 0, "{progress:?}");
    // No number of a batch is the mark of a replay's end, wherever the stream may be.
    let publisher = register(&catalog, 8, 0);
    assert_eq!(publisher.live(u64::MAX, &OF_RANK_1), FrameOutcome::Applied);
    assert_eq!(publisher.view().last_sequence, None, "it was dropped");
    assert_eq!(publisher.live(5, &OF_RANK_1), FrameOutcome::Applied);
    assert_eq!(publisher.view().last_sequence, Some(5));
}

/// Events and watermarks of a dump in the JSON form.
fn events(catalog: &Catalog) -> (Vec<serde_json::Value>, Vec<Watermark>) {
    let (mut events, mut watermarks) = (Vec::new(), Vec::new());
    for part in parts(catalog) {
        let (of_part, mark) = part.events();
        events.extend(of_part.iter().map(|event| json!(event)));
        watermarks.push(mark);
    }
    (events, watermarks)
}

#[test]
fn a_worker_with_refused_events_of_a_json_dump_is_inexact() {
    let source = Catalog::default();
    for id in [7, 8] {
        hold(&register(&source, id, 0), Worker::new(id, 0), 1..4);
    }
    let (mut events, watermarks) = events(&source);
    let block = json!({"block_hash": 5, "tokens_hash": 5, "mm_extra_info": null});
    let data = json!({"stored": {"parent_hash": 99, "blocks": [block]}});
    let orphan = json!({"worker_id": 7, "event": {"event_id": 9, "data": data}});
    let restored = |events: &[serde_json::Value], max_blocks| {
        let catalog = limited(max_blocks);
        let model = json!({"block_size": 4, "events": events, "watermarks": watermarks});
        let dump = json!({"m:t": model}).to_string();
        let progress = restore_json(&catalog, &mut dump.as_bytes(), &mut |_| {}).unwrap();
        let inexact = catalog.recovered().iter().map(|(.., place)| place.is_inexact).collect();
        (progress.skipped_count, inexact)
    };
    assert_eq!(restored(&events, 0), (0, vec![false, false]));
    assert_eq!(restored(&events, 5), (1, vec![false, true]), "no room for the last block");
    events.push(orphan);
    assert_eq!(restored(&events, 0), (1, vec![true, false]));
}

#[test]
fn a_second_dump_does_not_replace_what_the_first_has_restored() {
    let source = Catalog::default();
    let publisher = register(&source, 7, 0);
    publisher.live(0, &OF_RANK_1);
    hold(&publisher, Worker::new(7, 0), 1..4);
    let (catalog, dump) = (Catalog::default(), binary(&source));
    // The first peer's dump broke off behind this worker.
    let first = restore(&catalog, &mut &dump[..dump.len() - 8], &mut |_| {});
    assert!(matches!(first, Err(TransferError::Cut)), "{first:?}");
    let place = || catalog.recovered().pop().map(|(_, worker, place)| (worker, place));
    let before = place();
    assert_eq!(before.as_ref().unwrap().1.cursor.unwrap().sequence, 0);
    let second = restore(&catalog, &mut dump.as_slice(), &mut |_| {}).unwrap();
    assert_eq!((second.publishers, second.skipped_count), (0, 1), "{second:?}");
    assert_eq!(place(), before);
}

#[test]
fn a_json_dump_does_not_replace_what_an_earlier_dump_has_restored() {
    let source = Catalog::default();
    let publisher = register(&source, 7, 0);
    publisher.live(0, &OF_RANK_1);
    hold(&publisher, Worker::new(7, 0), 1..4);
    let catalog = Catalog::default();
    restore(&catalog, &mut binary(&source).as_slice(), &mut |_| {}).unwrap();
    let places = || -> Vec<_> {
        let recovered = catalog.recovered().into_iter();
        recovered.map(|(_, worker, place)| (worker.instance_id, place)).collect()
    };
    let before = places();
    // Later this worker holds nothing.
    publisher.model.index.clear(Worker::new(7, 0));
    publisher.live(1, &OF_RANK_1);
    hold(&register(&source, 8, 0), Worker::new(8, 0), 1..4);
    let (events, watermarks) = events(&source);
    let model = json!({"block_size": 4, "events": events, "watermarks": watermarks});
    let dump = json!({"m:t": model}).to_string();
    let progress = restore_json(&catalog, &mut dump.as_bytes(), &mut |_| {}).unwrap();
    assert_eq!((progress.publishers, progress.skipped_count), (1, 1), "{progress:?}");
    let after = places();
    assert_eq!((&after[..1], after.len()), (&before[..], 2));
}

#[test]
fn every_rank_of_a_silent_publisher_is_unheard() {
    let source = Catalog::default();
    register(&source, 7, 0).live(0, &OF_RANK_1);
    let catalog = Catalog::default();
    let publisher = register(&catalog, 7, 0);
    restore(&catalog, &mut binary(&source).as_slice(), &mut |_| {}).unwrap();
    let model = &publisher.model;
    assert_eq!(model.workers().len(), 2);
    let unheard = |rank| model.unheard(Worker::new(7, rank));
    assert_eq!([unheard(0), unheard(1)], [Some(Unheard::Silent); 2]);
}

#[test]
fn of_a_json_dump_that_breaks_off_whole_models_stay() {
    let source = Catalog::default();
    hold(&register(&source, 7, 0), Worker::new(7, 0), 1..40);
    let events: Vec<_> = parts(&source).iter().flat_map(|part| part.events().0).collect();
    let entry = json!({"block_size": 4, "events": events});
    let dump = json!({"m:whole": &entry, "m:cut": &entry}).to_string();
    for at in [dump.len() - 2, dump.len() - 3, dump.len() - 40] {
        let catalog = Catalog::default();
        let registered = catalog.register(registration(Worker::new(8, 0), "m")).unwrap();
        let cut = restore_json(&catalog, &mut &dump.as_bytes()[..at], &mut |_| {});
        assert!(matches!(cut, Err(TransferError::Cut)), "{cut:?}");
        assert_eq!(catalog.model("m", "whole").unwrap().index.blocks(Worker::new(7, 0)), 39);
        assert!(catalog.model("m", "cut").is_err(), "nobody publishes for it");
        assert_eq!(catalog.recovered().len(), 1);
        // Its worker never registers.
        assert_eq!(catalog.drop_recovered(), 1);
        assert!(catalog.model("m", "whole").unwrap().index.workers().is_empty());
        assert!(catalog.publisher(registered.id).is_some());
    }
}

/// `[0.0, events]` with a stored event of `tokens` tokens in a block, of a group of that kind.
fn stored(group: (u64, &str), name: u64, tokens: u64) -> rmpv::Value {
    let field = |key: &str, value: rmpv::Value| (key.into(), value);
    rmpv::Value::Map(vec![
        field("type", "BlockStored".into()),
        field("block_hashes", vec![rmpv::Value::from(name)].into()),
        field("token_ids", (0..tokens).map(rmpv::Value::from).collect::<Vec<_>>().into()),
        field("block_size", tokens.into()),
        field("group_idx", group.0.into()),
        field("kv_cache_spec_kind", group.1.into()),
        field("kv_cache_spec_sliding_window", 64.into()),
    ])
}

fn batch_of(events: Vec<rmpv::Value>) -> Vec<u8> {
    let batch = rmpv::Value::Array(vec![0.0.into(), events.into()]);
    let mut payload = Vec::new();
    rmpv::encode::write_value(&mut payload, &batch).unwrap();
    payload
}

#[test]
fn the_block_size_of_metrics_stays_if_others_have_such_blocks() {
    let catalog = Catalog::default();
    let model = catalog.model_or_create(&key("m"), None).unwrap();
    assert_eq!(model.hint_block_size(16), 16);
    let publisher = |instance| {
        let worker = Worker::new(instance, 0);
        catalog.register(Registration { block_size: None, ..registration(worker, "m") }).unwrap()
    };
    let (plain, hybrid) = (publisher(1), publisher(2));
    let batch = batch_of(vec![stored((0, "full_attention"), 7, 16)]);
    assert_eq!(plain.live(0, &batch), FrameOutcome::Applied);
    for (sequence, size) in [(0, 64), (1, 32)] {
        let batch = batch_of(vec![
            stored((0, "sliding_window"), 8, 16),
            stored((1, "full_attention"), 9 + sequence, size),
        ]);
        assert_eq!(hybrid.live(sequence, &batch), FrameOutcome::Applied);
    }
    assert_eq!(model.block_size(), Some(16));
    assert_eq!(model.index.blocks(Worker::new(1, 0)), 1);
    assert_eq!(hybrid.counts().block_size_mismatch, 2);
    assert_eq!(plain.counts().block_size_mismatch, 0);
}

#[test]
fn the_block_size_of_metrics_yields_to_the_main_group() {
    for (others, wanted) in [(true, 64), (false, 16)] {
        let catalog = Catalog::default();
        let model = catalog.model_or_create(&key("m"), None).unwrap();
        assert_eq!(model.hint_block_size(16), 16);
        assert_eq!(model.hint_block_size(32), 16, "the first hint holds");
        let registration =
            Registration { block_size: None, ..registration(Worker::new(1, 0), "m") };
        let publisher = catalog.register(registration).unwrap();
        let mut events = vec![stored((1, "full_attention"), 9, 64)];
        if others {
            events.insert(0, stored((0, "sliding_window"), 8, 16));
        }
        let payload = batch_of(events);
        assert_eq!(publisher.live(0, &payload), FrameOutcome::Applied);
        assert_eq!(model.block_size(), Some(wanted), "another group has the blocks of the hint");
        assert!(model.fits_block_size(16));
        assert_eq!(publisher.counts().block_size_mismatch, u64::from(!others));
    }
}

#[test]
fn the_block_size_of_metrics_yields_to_the_first_event() {
    let catalog = Catalog::default();
    let model = catalog.model_or_create(&key("m"), None).unwrap();
    let publisher = |instance| {
        let worker = Worker::new(instance, 0);
        catalog.register(Registration { block_size: None, ..registration(worker, "m") }).unwrap()
    };
    let (first, second) = (publisher(1), publisher(2));
    for _ in [&first, &second] {
        assert_eq!(model.hint_block_size(16), 16, "the metrics of both agree");
    }
    // Context parallelism doubles the blocks; another size comes too late to be the index's.
    for (at, (engine, size)) in [(&first, 32), (&second, 32), (&first, 64)].into_iter().enumerate()
    {
        let sequence = engine.view().last_sequence.map_or(0, |last| last + 1);
        let batch = batch_of(vec![stored((0, "full_attention"), at as u64, size)]);
        assert_eq!(engine.live(sequence, &batch), FrameOutcome::Applied);
        assert_eq!(model.block_size(), Some(32));
    }
    assert_eq!([1, 2].map(|id| model.index.blocks(Worker::new(id, 0))), [1, 1]);
    assert_eq!([first, second].map(|engine| engine.counts().block_size_mismatch), [1, 0]);
    assert!(model.fits_block_size(16) && !model.fits_block_size(64) && !model.fits_block_size(24));
}

#[test]
fn the_block_size_of_metrics_stays_once_an_event_has_it() {
    let catalog = Catalog::default();
    let model = catalog.model_or_create(&key("m"), None).unwrap();
    assert_eq!(model.hint_block_size(16), 16);
    let registration = Registration { block_size: None, ..registration(Worker::new(1, 0), "m") };
    let publisher = catalog.register(registration).unwrap();
    for (sequence, size) in [(0, 16), (1, 32)] {
        let batch = batch_of(vec![stored((0, "full_attention"), sequence, size)]);
        assert_eq!(publisher.live(sequence, &batch), FrameOutcome::Applied);
    }
    assert_eq!((model.block_size(), publisher.counts().block_size_mismatch), (Some(16), 1));
}
