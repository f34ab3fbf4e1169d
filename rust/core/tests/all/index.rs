//! The contract of [`BlockIndex`], run over the index and its twin, and the recorded cases.

use std::time::{Duration, Instant};

use kvflash_core::ids::{Tier, Worker};
use kvflash_core::index::*;
use serde_json::Value;

use crate::oracle::{BlockIndex, OracleIndex, replay};

const W: Worker = Worker::new(1, 0);

fn both(options: Options) -> [Box<dyn BlockIndex>; 2] {
    [Box::new(RadixIndex::new(options)), Box::new(OracleIndex::new(options))]
}

fn copies() -> Options {
    Options { count_mode: CountMode::Copies, ..Options::default() }
}

/// Blocks with the local hash `id` and the name `100 * id`.
fn blocks(ids: &[u64]) -> Vec<Block> {
    ids.iter().map(|id| Block { engine_hash: id * 100, local_hash: *id }).collect()
}

fn store(index: &dyn BlockIndex, worker: Worker, ids: &[u64], parent: Option<u64>) -> StoreOutcome {
    let parent = parent.map(|id| id * 100);
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
    let expected = [14643705804678351452_u64, 4945711292740353085, 12583592247330656132];
    for index in both(Options::default()) {
        let block = |(name, local_hash)| Block { engine_hash: name, local_hash };
        let blocks: Vec<Block> = (1..).zip(locals).map(block).collect();
        index.store(W, Tier::Device, None, DEFAULT_SEED, &blocks);
        let mut memberships = index.memberships(W);
        assert!(memberships.is_sorted());
        memberships.sort_by_key(|membership| membership.engine_hash);
        let chains: Vec<u64> = memberships.iter().map(|membership| membership.chain).collect();
        assert_eq!(chains, expected);
    }
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
        assert_eq!(index.copy(W, Tier::Host, &[1]).unknown, 1);
        assert_eq!((index.predict(W, DEFAULT_SEED, &[]), index.advance_to(9)), (0, 0));
        assert_eq!((index.memberships(W), index.dump_worker(W)), (vec![], vec![]));
        assert_eq!((index.workers(), index.blocks(W)), (vec![], 0));
    }
}

#[test]
fn a_hole_hides_what_is_behind_it_until_it_heals() {
    for index in both(Options::default()) {
        store(&*index, W, &[1, 2, 3, 4], None);
        assert_eq!(index.remove(W, Tier::Device, &[200]).removed, 1);
        assert_eq!(depths(&*index, &[1, 2, 3, 4]), [(1, 1)]);
        assert_eq!(index.blocks(W), 3);
        // The parent is gone, so the place of its children is unknown.
        assert_eq!(store(&*index, W, &[9], Some(2)).rejected, Some(Rejection::Orphan));
        // One behind the hole has a place, out of sight.
        assert_eq!(store(&*index, W, &[9], Some(3)).added, 1);
        assert_eq!(depths(&*index, &[1, 2, 3, 9]), [(1, 1)]);
        assert_eq!(store(&*index, W, &[2], Some(1)).added, 1);
        assert_eq!(depths(&*index, &[1, 2, 3, 4]), [(1, 4)]);
        assert_eq!(depths(&*index, &[1, 2, 3, 9]), [(1, 4)]);
        assert_eq!(index.stats().orphans_total, 1);
    }
}

#[test]
fn a_clear_forgets_names_and_predictions() {
    for index in both(Options::default()) {
        store(&*index, W, &[1, 2, 3], None);
        assert_eq!(index.parent_seed(W, 300), Some(DEFAULT_SEED));
        index.predict(W, DEFAULT_SEED, &[1, 2, 3, 4]);
        assert_eq!(index.clear(W), 3);
        assert_eq!(index.parent_seed(W, 300), None);
        assert_eq!(store(&*index, W, &[4], Some(3)).rejected, Some(Rejection::Orphan));
        assert_eq!((matches(&*index, &[1, 2]), index.workers()), (vec![], vec![W]));
        assert_eq!((index.stats().predicted, index.clear(W)), (0, 0));
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
fn copies_beyond_the_limit_are_one_and_the_same() {
    for index in both(copies()) {
        for _ in 0..1_000 {
            store(&*index, W, &[1], None);
        }
        assert_eq!(index.memberships(W)[0].copies, MAX_COPIES);
        for _ in 1..MAX_COPIES {
            assert_eq!(index.remove(W, Tier::Device, &[100]).kept, 1);
        }
        assert_eq!(index.remove(W, Tier::Device, &[100]).removed, 1);
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
        let seed = DEFAULT_SEED;
        index.store(W, Tier::Host, Some(100), seed, &blocks(&ids[1..3]));
        index.store(W, Tier::Disk, Some(300), seed, &blocks(&ids[3..4]));
        index.store(W, Tier::External, Some(400), seed, &blocks(&ids[4..]));
        let full = Match { worker: W, device: 2, host: 3, disk: 4, external: 6, predicted: 0 };
        assert_eq!(matches(&*index, &ids), [full]);
        assert_eq!(Tier::ALL.map(|tier| index.blocks_in(W, tier)), [2, 2, 1, 2]);
        assert_eq!(index.blocks_in(Worker::new(9, 9), Tier::Host), 0, "not known");
        assert_eq!(index.parent_seed(W, 300), Some(seed));
        index.remove(W, Tier::Disk, &[400]);
        let cut = Match { disk: 3, external: 3, ..full };
        assert_eq!(matches(&*index, &ids), [cut]);
        assert_eq!(index.stats().holders, 3);
        let mut out = Matches::new();
        index.find_matches_early_exit(&ids, &mut out);
        let early = Match { host: 1, disk: 1, external: 1, device: 1, ..full };
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
        let host = Match { worker: W, device: 0, host: 2, disk: 2, external: 2, predicted: 0 };
        let disk = Match { worker: Worker::new(2, 0), host: 0, disk: 1, external: 1, ..host };
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
        let cut = store(&*index, W, &[1, 2, 3], None);
        assert_eq!((cut.duplicates, cut.refused), (2, 1));
        // The first block without room cuts the event, known ones behind it included.
        let cut = store(&*index, W, &[5, 1, 2], None);
        assert_eq!((cut.duplicates, cut.refused), (0, 3));
        let copied = index.copy(W, Tier::Host, &[100, 200]);
        assert_eq!((copied.added, copied.refused), (0, 2));
        let third = store(&*index, Worker::new(3, 0), &[1], None);
        assert_eq!(third.rejected, Some(Rejection::SlotsExhausted));
        assert!(index.remove_worker(W));
        assert_eq!(store(&*index, Worker::new(3, 0), &[1, 2], None).added, 2);
        let stats = index.stats();
        assert_eq!((stats.refused_blocks_total, stats.slots_exhausted_total), (8, 1));
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
        frequencies(out.as_slice(), &mut counts);
        assert_eq!(counts, [3, 2, 2]);
        index.find_matches(&[8], &mut out);
        frequencies(out.as_slice(), &mut counts);
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

/// Depth on the device of each worker, and blocks predicted.
fn foretold(index: &dyn BlockIndex, locals: &[u64]) -> Vec<(u32, u32)> {
    matches(index, locals).iter().map(|found| (found.device, found.predicted)).collect()
}

#[test]
fn copies_go_on_where_the_device_ends() {
    for index in both(Options::default()) {
        store(&*index, W, &[1, 2, 3], None);
        let outcome = index.copy(W, Tier::Host, &[200, 900, 300, 200]);
        assert_eq!((outcome.added, outcome.duplicates, outcome.unknown), (2, 1, 1));
        assert_eq!(index.remove(W, Tier::Device, &[300, 200]).removed, 2);
        let found = Match { worker: W, device: 1, host: 3, disk: 3, external: 3, predicted: 0 };
        assert_eq!(matches(&*index, &[1, 2, 3]), [found]);
        // From the lower tier to one below it, without the device.
        assert_eq!(index.copy(W, Tier::External, &[300]).added, 1);
        assert_eq!((index.blocks(W), index.stats().holders), (4, 3));
    }
}

#[test]
fn predictions_are_no_facts_and_end() {
    let limits = Limits { predicted_ttl_ms: 10, ..Limits::default() };
    for index in both(Options { limits, ..Options::default() }) {
        assert_eq!(index.predictions_due_ms(), u64::MAX);
        assert_eq!(index.predict(W, DEFAULT_SEED, &[1, 2, 3]), 3);
        assert_eq!(index.predictions_due_ms(), 10);
        assert_eq!(index.workers(), [W]);
        assert_eq!(foretold(&*index, &[1, 2, 9]), [(0, 2)]);
        store(&*index, W, &[1], None);
        assert_eq!(foretold(&*index, &[1, 2, 3]), [(1, 3)]);
        assert_eq!(index.advance_to(5), 0);
        // The beginning is predicted anew, the rest runs out.
        assert_eq!(index.predict(W, DEFAULT_SEED, &[1, 7]), 1);
        assert_eq!((index.stats().predicted, index.stats().memberships), (4, 1));
        assert_eq!((index.advance_to(9), index.advance_to(10)), (0, 2));
        assert_eq!(foretold(&*index, &[1, 2, 3]), [(1, 1)]);
        assert_eq!((index.advance_to(3), index.advance_to(14)), (0, 0));
        assert_eq!(index.remove(W, Tier::Device, &[100]).removed, 1);
        // Evicted blocks are no longer predicted either; later blocks wait for their time.
        assert_eq!(foretold(&*index, &[1, 7]), []);
        assert_eq!(index.advance_to(15), 1);
        assert_eq!(matches(&*index, &[1, 7]), []);
        assert_eq!((index.stats().predicted, index.stats().expired_blocks_total), (0, 3));
        assert_eq!(index.predictions_due_ms(), u64::MAX);
        index.predict(W, DEFAULT_SEED, &[1]);
        assert!(index.remove_worker(W));
        assert_eq!((matches(&*index, &[1]), index.advance_to(99)), (vec![], 0));
    }
}

#[test]
fn blocks_run_out_unless_they_are_stored_again() {
    let limits = Limits { ttl_ms: 100, ..Limits::default() };
    for index in both(Options { limits, ..copies() }) {
        index.advance_to(1_000);
        store(&*index, W, &[1, 2, 3, 4], None);
        store(&*index, Worker::new(2, 0), &[1, 2], None);
        index.copy(W, Tier::Host, &[100, 200, 300]);
        index.advance_to(1_050);
        // A continuation of a block renews it and all blocks above, in every tier, but none after
        // it.
        assert_eq!(store(&*index, W, &[9], Some(2)).added, 1);
        assert_eq!(index.advance_to(1_099), 0);
        assert_eq!(depths(&*index, &[1, 2, 3, 4]), [(1, 4), (2, 2)]);
        assert_eq!(
            index.advance_to(1_100),
            2 + 1 + 2,
            "3 and 4, the copy of 3, the other worker's"
        );
        assert_eq!(depths(&*index, &[1, 2, 3, 4]), [(1, 2)]);
        // They stay renewed when that which renewed them goes.
        index.remove(W, Tier::Device, &[900]);
        assert_eq!((index.advance_to(1_149), index.advance_to(1_150)), (0, 4));
        assert_eq!(store(&*index, W, &[5], Some(2)).rejected, Some(Rejection::Orphan));
        // After any time without a clock update.
        store(&*index, W, &[1, 2], None);
        let late = 1 << 41;
        assert_eq!(index.advance_to(late), 2);
        store(&*index, W, &[1, 2], None);
        store(&*index, W, &[1, 2], None);
        assert_eq!((index.advance_to(late + 99), index.advance_to(late + 100)), (0, 2));
        let stats = index.stats();
        assert_eq!((stats.memberships, stats.expired_blocks_total, stats.workers), (0, 13, 2));
    }
}

/// The lifetime of a block by the time of its store, where that is counted in ticks.
#[test]
fn blocks_stand_as_long_as_said_and_little_longer() {
    for ttl_ms in [1, 100, 128, 129, 1_000, 12_345, 600_000] {
        let limits = Limits { ttl_ms, ..Limits::default() };
        for start in [0, 1, 77, 1_000_003] {
            for index in both(Options { limits, ..Options::default() }) {
                index.advance_to(start);
                store(&*index, W, &[1], None);
                assert_eq!(index.advance_to(start + ttl_ms - 1), 0, "{ttl_ms} from {start}");
                assert_eq!(index.advance_to(start + ttl_ms + ttl_ms / 64 + 2), 1);
            }
        }
    }
}

#[test]
fn predictions_need_a_seat() {
    let limits = Limits { max_workers: 1, ..Limits::default() };
    for index in both(Options { limits, ..Options::default() }) {
        assert_eq!(index.predict(W, DEFAULT_SEED, &[1, 2]), 2);
        assert_eq!(index.predict(Worker::new(2, 0), DEFAULT_SEED, &[1]), 0);
        assert_eq!(index.advance_to(u64::MAX), 0, "without a time to live they stay");
        assert_eq!(foretold(&*index, &[1, 2]), [(0, 2)]);
        let mut out = Matches::new();
        index.find_matches_early_exit(&[1, 2], &mut out);
        assert!(out.is_empty(), "an early exit looks at the device only");
    }
}

#[test]
fn the_deepest_matches_come_first() {
    for index in both(Options::default()) {
        for (worker, len) in [(1, 2), (2, 4), (3, 4), (4, 1), (5, 3)] {
            store(&*index, Worker::new(worker, 0), &[1, 2, 3, 4][..len], None);
        }
        for (count, expected) in
            [(0, &[][..]), (2, &[2, 3]), (4, &[2, 3, 5, 1]), (9, &[2, 3, 5, 1, 4])]
        {
            let mut out = Matches::new();
            index.find_matches(&[1, 2, 3, 4], &mut out);
            out.keep_top(count);
            let kept: Vec<u64> = out.as_slice().iter().map(|m| m.worker.instance_id).collect();
            assert_eq!(kept, expected);
        }
    }
}

fn replay_all(into: &dyn BlockIndex, from: &dyn BlockIndex) {
    for worker in from.workers() {
        for event in from.dump_worker(worker) {
            assert_eq!(replay(into, worker, &event).rejected, None, "{event:?}");
        }
    }
}

#[test]
fn a_dump_with_holes_replays_to_the_same_answers() {
    for options in [Options::default(), copies()] {
        for index in both(options) {
            store(&*index, W, &[1, 2, 3, 4], None);
            store(&*index, W, &[1], None);
            index.store(W, Tier::Host, Some(200), DEFAULT_SEED, &blocks(&[3, 8]));
            let second = [Block { engine_hash: 5, local_hash: 1 }];
            index.store(W, Tier::Device, None, DEFAULT_SEED, &second);
            index.remove(W, Tier::Device, &[200, 100, 5]);
            for copy in both(options) {
                replay_all(&*copy, &*index);
                assert_eq!(copy.memberships(W), index.memberships(W));
                store(&*copy, W, &[1], None);
                store(&*copy, W, &[2], Some(1));
                let depth = (4, 4);
                let found = matches(&*copy, &[1, 2, 3, 4])[0];
                assert_eq!((found.device, found.external), depth);
            }
        }
    }
}

#[test]
fn a_worker_keeps_no_more_than_its_capacity() {
    let limits = Limits { capacity_blocks: 100, ..Limits::default() };
    let (index, twin) = (
        RadixIndex::new(Options { limits, ..Options::default() }),
        OracleIndex::new(Options::default()),
    );
    let prompt = |n: u64| -> Vec<u64> { (n * 1_000..n * 1_000 + 40).collect() };
    let mut added = 0;
    for n in 1..=30 {
        for index in [&index as &dyn BlockIndex, &twin] {
            store(index, W, &prompt(n), None);
            index.predict(W, DEFAULT_SEED, &prompt(n));
        }
        added += 40;
        let stats = index.stats();
        assert!(index.blocks(W) <= 100 && stats.predicted <= 100, "{stats:?}");
        assert!(index.blocks(W) >= 80.min(n as usize * 40), "{stats:?}");
        assert_eq!(
            index.blocks(W) + stats.predicted + stats.evicted_blocks_total as usize,
            2 * added
        );
        // The last two fit; of what was before, at most a beginning is left, and no more than was.
        for m in 1..=n {
            let [mine, all] = [&index as &dyn BlockIndex, &twin].map(|i| foretold(i, &prompt(m)));
            match n - m {
                0 | 1 => assert_eq!(mine, all),
                _ => assert!(mine.iter().all(|found| found.0 <= 40 && found.1 <= 40)),
            }
        }
        let reached: u32 = (1..=n).flat_map(|m| foretold(&index, &prompt(m))).map(|f| f.0).sum();
        assert_eq!(reached as usize, index.blocks(W), "the deepest went first: no holes");
    }
    // More than there is room for in one event: its beginning stays.
    let long: Vec<u64> = (90_000..90_300).collect();
    store(&index, W, &long, None);
    assert_eq!(depths(&index, &long), [(1, index.blocks(W) as u32)]);
    assert!((1..=100).contains(&index.blocks(W)));
    index.audit();
}

#[test]
fn predictions_of_all_workers_are_pruned_together() {
    let limits = Limits { max_predicted: 100, predicted_target: 80, ..Limits::default() };
    let index = RadixIndex::new(Options { limits, ..Options::default() });
    let prompt = |n: u64| -> Vec<u64> { (n * 1_000..n * 1_000 + 30).collect() };
    for n in 1..=40 {
        let worker = Worker::new(n % 3, 0);
        store(&index, worker, &prompt(n), None);
        // Half of each prompt is everybody's, and with each the shared half was used last.
        let shared: Vec<u64> = (1..=15).chain(prompt(n)).collect();
        index.predict(worker, DEFAULT_SEED, &shared);
        let predicted = index.stats().predicted;
        assert!((n < 3 || predicted >= 50) && predicted <= 100, "{predicted}");
        let now = matches(&index, &shared);
        assert!(now.iter().any(|found| found.worker == worker && found.predicted == 45));
        index.audit();
    }
    let stats = index.stats();
    assert_eq!(stats.memberships, 40 * 30, "facts are not touched");
    assert!(stats.evicted_blocks_total > 0);
    // One that is longer than all: its beginning stays.
    let long: Vec<u64> = (90_000..90_300).collect();
    index.predict(W, DEFAULT_SEED, &long);
    assert_eq!(index.stats().predicted, 80);
    assert_eq!(foretold(&index, &long).iter().map(|found| found.1).collect::<Vec<_>>(), [80]);
    index.audit();
}

#[test]
fn an_index_stays_within_its_bytes() {
    let max_bytes = 4 << 20;
    let limits = Limits { max_bytes, ..Limits::default() };
    let index = RadixIndex::new(Options { limits, ..Options::default() });
    for n in 0..4_000_u64 {
        let ids: Vec<u64> = (n * 1_000..n * 1_000 + 200).collect();
        let worker = Worker::new(n % 7, 0);
        store(&index, worker, &ids, None);
        // Retired memory is free once all readers have moved on, including those of other tests.
        let end = Instant::now() + Duration::from_secs(30);
        while depths(&index, &ids).is_empty() && Instant::now() < end {
            std::thread::yield_now();
            store(&index, worker, &ids, None);
        }
        let stats = index.stats();
        assert!(stats.bytes <= max_bytes, "event {n}: {stats:?}");
        // The newest block is the last to go.
        assert_eq!(depths(&index, &ids), [(n % 7, 200)], "event {n}: {stats:?}");
    }
    let stats = index.stats();
    assert!(stats.evicted_blocks_total > 100_000, "{stats:?}");
    assert!(stats.memberships * 16 > max_bytes / 4, "the room is used: {stats:?}");
    index.audit();
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
            "dump" => replay_all(fresh, index),
            "replay dump into empty tree" => {}
            "compare queries and dump" => {
                let all = |index: &dyn BlockIndex| -> Vec<_> {
                    index.workers().iter().map(|worker| index.memberships(*worker)).collect()
                };
                assert_eq!(all(index), all(fresh));
                assert!(all(index).iter().flatten().count() >= 11);
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
    let file = include_str!("../../../../tests/vectors/radix_cases.json");
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
        let parent = (next > 1).then(|| (next - 1) * 100);
        let ids: Vec<u64> = (next..next + count).collect();
        index.store(worker, tier, parent, DEFAULT_SEED, &blocks(&ids));
        next += count;
    }
    next - 1
}

#[test]
fn recorded_tier_cases() {
    let file = include_str!("../../../../tests/vectors/radix_cases.json");
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
