//! The contract of [`BlockIndex`], run over the index and its twin, and the recorded cases.

use serde_json::Value;

use super::*;

const W: Worker = Worker::new(1, 0);

fn both(options: Options) -> [Box<dyn BlockIndex>; 2] {
    [Box::new(RadixIndex::new(options)), Box::new(OracleIndex::new(options))]
}

fn copies() -> Options {
    Options { count_mode: CountMode::Copies, ..Options::default() }
}

/// Blocks whose local hash is `id` and whose name is `100 * id`.
fn blocks(ids: &[u64]) -> Vec<Block> {
    ids.iter().map(|id| Block { engine_hash: id * 100, local_hash: *id }).collect()
}

fn store(index: &dyn BlockIndex, worker: Worker, ids: &[u64], parent: Option<u64>) -> StoreOutcome {
    let parent = parent.map(|id| Parent::Engine(id * 100));
    index.store(worker, Tier::Device, parent, DEFAULT_SEED, &blocks(ids))
}

fn matches(index: &dyn BlockIndex, locals: &[u64]) -> Vec<Match> {
    let mut out = Matches::new();
    index.find_matches(locals, &mut out);
    out.sort();
    out.as_slice().to_vec()
}

/// (worker's instance, device depth), ascending.
fn depths(index: &dyn BlockIndex, locals: &[u64]) -> Vec<(u64, u32)> {
    matches(index, locals).iter().map(|m| (m.worker.instance_id, m.device)).collect()
}

#[test]
fn chain_hashes_are_the_published_ones() {
    let locals = [14643705804678351452, 16777012769546811212, 483935686894639516];
    let mut parent = None;
    let chains = locals.map(|local| {
        parent = Some(chain(parent, local));
        parent
    });
    let expected = [14643705804678351452_u64, 4945711292740353085, 12583592247330656132];
    assert_eq!(chains, expected.map(Some));
}

#[test]
fn nothing_in_nothing_out() {
    for index in both(Options::default()) {
        assert_eq!(depths(&*index, &[]), []);
        assert_eq!(depths(&*index, &[1]), []);
        assert_eq!(store(&*index, W, &[], None), StoreOutcome::default());
        assert_eq!(index.workers(), []);
        assert_eq!(index.remove(W, Tier::Device, &[1, 2]).unknown, 2);
        assert_eq!(
            (index.clear(W), index.remove_worker(W), index.remove_instance(1)),
            (0, false, 0)
        );
        assert_eq!(index.stats().unknown_removals_total, 2);
    }
}

#[test]
fn a_hole_hides_what_is_behind_it_until_it_heals() {
    for index in both(Options::default()) {
        store(&*index, W, &[1, 2, 3, 4], None);
        assert_eq!(index.remove(W, Tier::Device, &[200]).removed, 1);
        assert_eq!(depths(&*index, &[1, 2, 3, 4]), [(1, 1)]);
        assert_eq!(index.blocks(W), 3);
        // The parent went, but lately: its child is held, out of sight.
        assert_eq!(store(&*index, W, &[9], Some(2)).added, 1);
        assert_eq!(depths(&*index, &[1, 2, 9]), [(1, 1)]);
        assert_eq!(store(&*index, W, &[2], Some(1)).added, 1);
        assert_eq!(depths(&*index, &[1, 2, 3, 4]), [(1, 4)]);
        assert_eq!(depths(&*index, &[1, 2, 9]), [(1, 3)]);
    }
}

#[test]
fn ghosts_are_few_and_go_with_a_clear() {
    let limits = Limits { min_ghosts: 2, ..Limits::default() };
    for index in both(Options { limits, ..Options::default() }) {
        store(&*index, W, &[1, 2, 3], None);
        index.remove(W, Tier::Device, &[300, 200, 100]);
        assert_eq!(store(&*index, W, &[4], Some(3)).rejected, Some(Rejection::Orphan));
        assert_eq!(store(&*index, W, &[4], Some(2)).added, 1);
        assert_eq!(index.parent_seed(W, 100), Some(DEFAULT_SEED));
        assert_eq!(index.clear(W), 1);
        assert_eq!(index.parent_seed(W, 100), None);
        assert_eq!(store(&*index, W, &[2], Some(1)).rejected, Some(Rejection::Orphan));
        assert_eq!(index.stats().orphans_total, 2);
    }
}

#[test]
fn copies_are_counted_only_where_asked() {
    for (options, expected) in [(Options::default(), 0), (copies(), 2)] {
        for index in both(options) {
            store(&*index, W, &[1, 2], None);
            assert_eq!(store(&*index, W, &[1, 2], None).duplicates, 2);
            assert_eq!(index.blocks(W), 2);
            let first = index.remove(W, Tier::Device, &[100, 200]);
            assert_eq!((first.removed, first.kept), (2 - expected, expected));
            assert_eq!(depths(&*index, &[1, 2]).len() as u32, expected / 2);
            let second = index.remove(W, Tier::Device, &[100, 200]);
            assert_eq!((second.removed, second.unknown), (expected, 2 - expected));
            assert_eq!(index.stats().unique_blocks, 0);
        }
    }
}

#[test]
fn two_names_of_one_block_hold_it_until_both_go() {
    for index in both(Options::default()) {
        for name in [7, 8, 9] {
            let block = Block { engine_hash: name, local_hash: 1 };
            index.store(W, Tier::Device, None, DEFAULT_SEED, &[block]);
        }
        assert_eq!((index.blocks(W), index.stats().unique_blocks), (3, 1));
        for (name, left) in [(8, 1), (7, 1), (9, 0)] {
            assert_eq!(index.remove(W, Tier::Device, &[name]).removed, 1);
            assert_eq!(depths(&*index, &[1]).len(), left);
        }
    }
}

#[test]
fn a_name_that_moves_leaves_nothing_behind() {
    for options in [Options::default(), copies()] {
        for index in both(options) {
            store(&*index, W, &[1, 2], None);
            store(&*index, W, &[1], None);
            index.store(W, Tier::Host, None, DEFAULT_SEED, &blocks(&[1]));
            let elsewhere = [Block { engine_hash: 100, local_hash: 5 }];
            let outcome = index.store(W, Tier::Device, None, DEFAULT_SEED, &elsewhere);
            assert_eq!(outcome, StoreOutcome { moved: 1, ..StoreOutcome::default() });
            assert_eq!(matches(&*index, &[1, 2]), []);
            assert_eq!(depths(&*index, &[5]), [(1, 1)]);
            assert_eq!(index.remove(W, Tier::Device, &[100]).removed, 1);
            assert_eq!(index.remove(W, Tier::Host, &[100]).unknown, 1);
        }
    }
}

#[test]
fn tiers_go_on_where_the_nearer_one_ends() {
    for index in both(Options::default()) {
        let ids = [1, 2, 3, 4, 5, 6];
        store(&*index, W, &ids[..2], None);
        // Parents are looked up across tiers.
        let parent = |id: u64| Some(Parent::Engine(id * 100));
        index.store(W, Tier::Host, parent(1), 5, &blocks(&ids[1..3]));
        index.store(W, Tier::Disk, parent(3), 5, &blocks(&ids[3..4]));
        index.store(W, Tier::External, parent(4), 5, &blocks(&ids[4..]));
        let full = Match { worker: W, device: 2, host: 3, disk: 4, external: 6 };
        assert_eq!(matches(&*index, &ids), [full]);
        assert_eq!(index.parent_seed(W, 300), Some(5));
        index.remove(W, Tier::Disk, &[400]);
        let cut = Match { disk: 3, external: 3, ..full };
        assert_eq!(matches(&*index, &ids), [cut]);
        assert_eq!(index.stats().holders, 3);
        let mut out = Matches::new();
        index.find_matches_early_exit(&ids, &mut out);
        let early = Match { worker: W, device: 1, host: 1, disk: 1, external: 1 };
        assert_eq!(out.as_slice(), [early]);
        index.remove(W, Tier::Device, &[100, 200]);
        assert_eq!(matches(&*index, &ids), [], "block 1 is nowhere");
    }
}

#[test]
fn host_alone_is_a_match() {
    for index in both(Options::default()) {
        index.store(W, Tier::Host, None, DEFAULT_SEED, &blocks(&[1, 2]));
        index.store(Worker::new(2, 0), Tier::Disk, None, DEFAULT_SEED, &blocks(&[1]));
        let host = Match { worker: W, device: 0, host: 2, disk: 2, external: 2 };
        let disk = Match { worker: Worker::new(2, 0), device: 0, host: 0, disk: 1, external: 1 };
        assert_eq!(matches(&*index, &[1, 2, 3]), [host, disk]);
    }
}

#[test]
fn a_full_index_refuses_and_keeps() {
    let limits = Limits { max_blocks: 3, max_workers: 2, ..Limits::default() };
    for index in both(Options { limits, ..Options::default() }) {
        assert_eq!(store(&*index, W, &[1, 2], None).added, 2);
        let outcome = store(&*index, Worker::new(2, 0), &[1, 2, 3], None);
        assert_eq!((outcome.added, outcome.refused), (1, 2));
        assert_eq!(depths(&*index, &[1, 2, 3]), [(1, 2), (2, 1)]);
        assert_eq!(store(&*index, W, &[1, 2, 3], None).duplicates, 2);
        let third = store(&*index, Worker::new(3, 0), &[1], None);
        assert_eq!(third.rejected, Some(Rejection::SlotsExhausted));
        assert!(index.remove_worker(W));
        assert_eq!(store(&*index, Worker::new(3, 0), &[1, 2], None).added, 2);
        let stats = index.stats();
        assert_eq!((stats.refused_blocks_total, stats.slots_exhausted_total), (3, 1));
        assert_eq!((stats.workers, stats.memberships), (2, 3));
    }
}

#[test]
fn ranks_are_workers_and_leave_together() {
    for index in both(Options::default()) {
        let ranks = [Worker::new(1, 0), Worker::new(1, 7), Worker::new(2, 0)];
        ranks.iter().for_each(|w| _ = store(&*index, *w, &[1, 2], None));
        assert_eq!(index.clear(ranks[1]), 2);
        assert_eq!(matches(&*index, &[1, 2]).len(), 2);
        assert_eq!(index.remove_instance(1), 2);
        assert_eq!(index.workers(), [ranks[2]]);
        assert_eq!(depths(&*index, &[1, 2]), [(2, 2)]);
        assert_eq!(index.stats().unique_blocks, 2);
    }
}

#[test]
fn frequencies_count_workers_per_depth() {
    for index in both(Options::default()) {
        for (worker, ids) in [(1, &[1, 2, 3][..]), (2, &[1]), (3, &[1, 2, 3]), (4, &[7])] {
            store(&*index, Worker::new(worker, 0), ids, None);
        }
        index.store(Worker::new(5, 0), Tier::Host, None, 0, &blocks(&[1]));
        let (mut out, mut counts) = (Matches::new(), vec![9]);
        index.find_matches(&[1, 2, 3, 4], &mut out);
        out.frequencies(&mut counts);
        assert_eq!(counts, [3, 2, 2]);
        index.find_matches(&[8], &mut out);
        out.frequencies(&mut counts);
        assert!(counts.is_empty());
    }
}

#[test]
fn long_events_are_searched_for_repetitions_too() {
    for index in both(Options::default()) {
        let mut ids: Vec<u64> = (1..=100).collect();
        assert_eq!(store(&*index, W, &ids, None).added, 100);
        ids[99] = 1;
        assert_eq!(store(&*index, W, &ids, None).rejected, Some(Rejection::SelfReference));
    }
}

#[test]
fn a_dump_with_holes_restores_to_the_same_answers() {
    for options in [Options::default(), copies()] {
        for index in both(options) {
            store(&*index, W, &[1, 2, 3, 4], None);
            store(&*index, W, &[1], None);
            index.store(W, Tier::Host, Some(Parent::Engine(200)), 9, &blocks(&[3, 8]));
            index.store(W, Tier::Device, None, 9, &[Block { engine_hash: 5, local_hash: 1 }]);
            index.remove(W, Tier::Device, &[200, 100, 5]);
            let dump = index.dump();
            for copy in both(options) {
                dump.iter().for_each(|block| _ = restore(&*copy, block));
                assert_eq!(copy.dump(), dump);
                store(&*copy, W, &[1], None);
                store(&*copy, W, &[2], Some(1));
                let healed = Match { worker: W, device: 4, host: 4, disk: 4, external: 4 };
                assert_eq!(matches(&*copy, &[1, 2, 3, 4]), [healed]);
            }
        }
    }
}

#[test]
fn bytes_come_back_when_everything_goes() {
    let index = RadixIndex::default();
    let empty = index.stats().estimated_bytes;
    for worker in 0..40 {
        store(&index, Worker::new(worker, 0), &(1..200).collect::<Vec<_>>(), None);
    }
    index.store(W, Tier::Disk, None, 0, &blocks(&[1]));
    assert!(index.stats().estimated_bytes > empty + 40 * 200 * 16);
    (0..40).for_each(|worker| _ = index.remove_worker(Worker::new(worker, 0)));
    assert_eq!(index.stats().estimated_bytes, empty);
    assert!(!index.nodes_have_lower());
}

fn ids(value: &Value) -> Vec<u64> {
    let list = value.as_array().expect("a list of ids");
    list.iter().map(|id| id.as_u64().expect("an id")).collect()
}

/// Plays a recorded case; returns the answers to its queries and the last rejection.
fn play(
    index: &dyn BlockIndex,
    fresh: &dyn BlockIndex,
    ops: &Value,
) -> (Vec<Vec<(u64, u32)>>, Option<Rejection>) {
    let (mut answers, mut rejection) = (Vec::new(), None);
    for op in ops.as_array().expect("a list of operations") {
        let worker = || Worker::new(op[1].as_u64().expect("a worker"), 0);
        match op[0].as_str().expect("an operation") {
            "store" => {
                let outcome = store(index, worker(), &ids(&op[2]), op[3].as_u64());
                rejection = rejection.or(outcome.rejected);
            }
            "remove" => {
                let hashes: Vec<u64> = ids(&op[2]).iter().map(|id| id * 100).collect();
                assert_eq!(index.remove(worker(), Tier::Device, &hashes).unknown, 0);
            }
            "clear" => _ = index.clear(worker()),
            "query" if op[2] == "early_exit" => {
                let mut out = Matches::new();
                index.find_matches_early_exit(&ids(&op[1]), &mut out);
                out.sort();
                let depth = |m: &Match| (m.worker.instance_id, m.device);
                answers.push(out.as_slice().iter().map(depth).collect());
            }
            "query" => answers.push(depths(index, &ids(&op[1]))),
            "dump" => index.dump().iter().for_each(|block| _ = restore(fresh, block)),
            "replay dump into empty tree" => {}
            "compare queries and dump" => {
                assert_eq!(index.dump(), fresh.dump());
                assert!(index.dump().len() >= 11);
                for query in [&[1, 2, 3][..], &[1, 4, 5], &[6, 7], &[1, 2, 4], &[4]] {
                    assert_eq!(matches(index, query), matches(fresh, query));
                }
            }
            other => panic!("unknown operation {other}"),
        }
    }
    (answers, rejection)
}

#[test]
fn recorded_cases() {
    let file = include_str!("../../../tests/vectors/radix_cases.json");
    let cases: Vec<Value> = serde_json::from_str(file).expect("the vectors are JSON");
    let mut played = 0;
    for case in cases.iter().filter(|case| case["area"] == "radix") {
        for options in [Options::default(), copies()] {
            let ([index, _], [fresh, _]) = (both(options), both(options));
            let ([_, twin], [_, fresh_twin]) = (both(options), both(options));
            for (index, fresh) in [(&index, &fresh), (&twin, &fresh_twin)] {
                let (answers, rejection) = play(&**index, &**fresh, &case["input"]["ops"]);
                let expected = &case["expected"];
                let queries = match expected.get("contiguous_score") {
                    Some(score) => vec![score.clone()],
                    None => expected["queries"].as_array().cloned().unwrap_or_default(),
                };
                let object = |answer: &Vec<(u64, u32)>| {
                    let pairs = answer.iter().map(|(w, d)| (w.to_string(), Value::from(*d)));
                    Value::Object(pairs.collect())
                };
                let answers: Vec<Value> = answers.iter().map(object).collect();
                assert_eq!(answers, queries, "{}", case["id"]);
                let error = match expected["error"].as_str() {
                    Some("ParentBlockNotFound") => Some(Rejection::Orphan),
                    Some("InvalidBlockSequence") => Some(Rejection::SelfReference),
                    _ => None,
                };
                assert_eq!(rejection, error, "{}", case["id"]);
                for (worker, blocks) in
                    expected["blocks_per_worker"].as_object().into_iter().flatten()
                {
                    let worker = Worker::new(worker.parse().expect("a worker"), 0);
                    assert_eq!(Value::from(index.blocks(worker)), *blocks, "{}", case["id"]);
                }
                played += 1;
            }
        }
    }
    assert_eq!(played, 8 * 4);
}

/// Stores `counts` blocks per tier, one tier after the other, on one chain; returns its length.
fn layered(index: &dyn BlockIndex, worker: Worker, counts: [u64; 4]) -> u64 {
    let mut next = 1;
    for (tier, count) in Tier::ALL.into_iter().zip(counts) {
        let parent = (next > 1).then(|| Parent::Engine((next - 1) * 100));
        let ids: Vec<u64> = (next..next + count).collect();
        index.store(worker, tier, parent, DEFAULT_SEED, &blocks(&ids));
        next += count;
    }
    next - 1
}

#[test]
fn recorded_tier_cases() {
    let file = include_str!("../../../tests/vectors/radix_cases.json");
    let cases: Vec<Value> = serde_json::from_str(file).expect("the vectors are JSON");
    let case = |id: &str| {
        cases.iter().find(|case| case["id"] == id).unwrap_or_else(|| panic!("no case {id}"))
    };
    let count = |value: &Value, key: &str| value[key].as_u64().unwrap_or(0);
    let (first, second) = (case("dynamo/tier-overlap/001"), case("dynamo/tier-overlap/002"));
    for index in both(Options::default()) {
        // Counts of each tier alone; shared storage counts as disk.
        let input = &first["input"];
        let counts = ["device", "host_pinned", "disk", "external"].map(|tier| count(input, tier));
        let len = layered(&*index, W, counts);
        let found = matches(&*index, &(1..=len).collect::<Vec<_>>())[0];
        let raw = &first["expected"]["raw"];
        assert_eq!(u64::from(found.device), count(raw, "device"));
        assert_eq!(u64::from(found.host - found.device), count(raw, "host_pinned"));
        assert_eq!(u64::from(found.external - found.host), count(raw, "disk"));
    }
    for index in both(Options::default()) {
        // Cumulative counts; a worker without a match is left out.
        let (key, worker) = ("7:1", Worker::new(7, 1));
        let input = &second["input"]["workers"][key];
        layered(&*index, worker, ["device", "host", "disk", "external"].map(|t| count(input, t)));
        store(&*index, Worker::new(3, 0), &[99], None);
        let blocks = count(&second["input"], "num_blocks");
        let found = matches(&*index, &(1..=blocks).collect::<Vec<_>>());
        assert_eq!(found.iter().map(|m| m.worker).collect::<Vec<_>>(), [worker]);
        let expected = &second["expected"][key];
        assert_eq!(u64::from(found[0].host), count(expected, "host_pinned_blocks"));
        assert_eq!(u64::from(found[0].external), count(expected, "disk_blocks"));
    }
}
