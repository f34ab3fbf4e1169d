//! Snapshots: what comes back, and what damage costs.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvflash_core::ids::{Tier, Worker};
use kvflash_core::index::snapshot::{
    Cause, Cursor, LoadError, Loaded, Meta, load, save, save_to_path,
};
use kvflash_core::index::{Block, CountMode, Limits, Matches, Membership, Options, RadixIndex};
use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use xxhash_rust::xxh3::xxh3_64;

use crate::oracle::{BlockIndex, OracleIndex, replay};

const HEAD: usize = 56;

fn meta() -> Meta {
    Meta { block_size: 16, created_ms: 1_700_000_000_000, key: b"a model".to_vec() }
}

fn cursor(worker: Worker) -> Option<Cursor> {
    let fingerprint = (worker.dp_rank == 0).then_some(worker.instance_id ^ 77);
    (worker.instance_id > 0).then_some(Cursor { sequence: worker.instance_id * 10, fingerprint })
}

fn saved(index: &RadixIndex) -> Vec<u8> {
    let mut bytes = Vec::new();
    let saved = save(index, &meta(), cursor, &mut bytes).unwrap();
    assert_eq!((saved.workers, saved.bytes), (index.workers().len(), bytes.len() as u64));
    bytes
}

fn loaded(index: &RadixIndex, mut bytes: &[u8]) -> Result<Loaded, LoadError> {
    load(index, &mut bytes, None)
}

type Held = BTreeMap<Worker, Vec<Membership>>;

/// Blocks of all workers that hold any.
fn held(index: &dyn BlockIndex) -> Held {
    let all = index.workers().into_iter().map(|worker| (worker, index.memberships(worker)));
    all.filter(|(_, held)| !held.is_empty()).collect()
}

/// The seed that a prompt with this first block was hashed with: identity belongs to the content.
fn seed_of(first: u64) -> u64 {
    if first.is_multiple_of(3) { 1337 } else { first }
}

/// Random events: all tiers, copies, further names, moved names, holes, predictions.
fn play(index: &RadixIndex, rng: &mut SmallRng, events: usize, names: u64) {
    // The seed of each worker's names, to keep seeds with their content.
    let mut seeds: BTreeMap<(Worker, u64), u64> = BTreeMap::new();
    for _ in 0..events {
        let worker = Worker::new(rng.random_range(0..4), rng.random_range(0..2));
        let tier = Tier::ALL[rng.random_range(0..4_usize).saturating_sub(1)];
        let name = |rng: &mut SmallRng| rng.random_range(1..names);
        let some: Vec<u64> = (0..rng.random_range(1..6)).map(|_| name(rng)).collect();
        match rng.random_range(0..20) {
            0..11 => {
                let mut local = |_| rng.random_range(1..4_u64);
                let locals: Vec<u64> = (0..some.len()).map(&mut local).collect();
                let parent = some.last().copied().filter(|_| rng.random_bool(0.7));
                let seed = match parent {
                    None => seed_of(locals[0]),
                    Some(parent) => {
                        let known = index.parent_seed(worker, parent);
                        assert!(known.is_none() || known == seeds.get(&(worker, parent)).copied());
                        let Some(seed) = known else { continue };
                        seed
                    }
                };
                let from = if rng.random_bool(0.5) { some[0] } else { name(rng) };
                let blocks = locals.iter().zip(from..).map(|(local_hash, engine_hash)| Block {
                    engine_hash,
                    local_hash: *local_hash,
                });
                let blocks: Vec<Block> = blocks.collect();
                if index.store(worker, tier, parent, seed, &blocks).rejected.is_none() {
                    seeds.extend(blocks.iter().map(|b| ((worker, b.engine_hash), seed)));
                }
            }
            11..16 => drop(index.remove(worker, tier, &some)),
            16..18 => drop(index.copy(worker, tier, &some)),
            18 => drop(index.predict(worker, seed_of(2), &[2, 1, 2])),
            _ if rng.random_bool(0.2) => drop(index.clear(worker)),
            _ => {}
        }
    }
}

fn answers(index: &dyn BlockIndex) -> Vec<Vec<kvflash_core::index::Match>> {
    let mut out = Matches::default();
    let prompts = (0..729_u64).map(|n| (0..6).map(|at| n / 3_u64.pow(at) % 3 + 1).collect());
    let mut answer = |prompt: Vec<u64>| {
        index.find_matches(&prompt, &mut out);
        out.sort();
        let mut found = out.as_slice().to_vec();
        // Predictions are not saved.
        found.iter_mut().for_each(|found| found.predicted = 0);
        found.retain(|found| found.external > 0);
        found
    };
    prompts.map(&mut answer).collect()
}

fn options(count_mode: CountMode) -> Options {
    Options { count_mode, ..Options::default() }
}

#[test]
fn what_is_saved_comes_back() {
    let (mut memberships, mut holes, mut matches) = (0, 0, 0);
    for seed in 0..60 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mode = if seed.is_multiple_of(2) { CountMode::Set } else { CountMode::Copies };
        let index = RadixIndex::new(options(mode));
        play(&index, &mut rng, 40 * (1 + seed as usize % 8), 8 + seed);
        let bytes = saved(&index);
        let again = RadixIndex::new(Options { hash_seed: seed, ..options(mode) });
        let twin = OracleIndex::new(options(mode));
        let result = loaded(&again, &bytes).unwrap();
        assert_eq!((&result.lost[..], result.cut, &result.meta), (&[][..], false, &meta()));
        let mut workers = Vec::new();
        for restored in &result.workers {
            assert_eq!(restored.cursor, cursor(restored.worker));
            assert_eq!(restored.blocks, index.blocks(restored.worker));
            workers.push(restored.worker);
            for event in again.dump_worker(restored.worker) {
                replay(&twin, restored.worker, &event);
            }
        }
        assert_eq!(workers, index.workers());
        for copy in [&again as &dyn BlockIndex, &twin] {
            assert_eq!(held(copy), held(&index));
            assert_eq!(answers(copy), answers(&index));
        }
        again.audit();
        // The dump of what was loaded is as good.
        let third = RadixIndex::new(options(mode));
        assert!(loaded(&third, &saved(&again)).unwrap().lost.is_empty());
        assert_eq!(held(&third), held(&index));
        third.audit();
        memberships += index.stats().memberships;
        let has_hole = |found: &kvflash_core::index::Match| found.external > found.device;
        holes += answers(&index).iter().flatten().filter(|found| has_hole(found)).count();
        matches += answers(&index).iter().filter(|found| !found.is_empty()).count();
    }
    assert!(memberships > 1_000 && holes > 100 && matches > 1_000, "{memberships} {holes}");
}

fn small() -> (RadixIndex, Vec<u8>) {
    let index = RadixIndex::default();
    let block = |n| Block { engine_hash: 100 + n, local_hash: n };
    let blocks: Vec<Block> = (1..6).map(block).collect();
    for worker in [Worker::new(1, 0), Worker::new(1, 3), Worker::new(9, 0)] {
        index.store(worker, Tier::Device, None, 5, &blocks);
        index.copy(worker, Tier::Host, &[102]);
        index.remove(worker, Tier::Device, &[101]);
    }
    let bytes = saved(&index);
    (index, bytes)
}

/// A load restores everything saved, except for workers reported as lost.
fn check_damaged(index: &RadixIndex, bytes: &[u8]) -> Option<Loaded> {
    let copy = RadixIndex::default();
    let result = match loaded(&copy, bytes) {
        Ok(result) => result,
        Err(error) => {
            assert!(held(&copy).is_empty(), "{error}");
            return None;
        }
    };
    let mut expected = held(index);
    for lost in &result.lost {
        assert!(expected.remove(&lost.worker).is_some(), "{lost:?}");
        assert!(!copy.workers().contains(&lost.worker));
    }
    assert_eq!(held(&copy), expected);
    for restored in &result.workers {
        assert_eq!(restored.cursor, cursor(restored.worker));
    }
    assert_eq!(result.workers.len(), expected.len());
    copy.audit();
    Some(result)
}

#[test]
fn a_flipped_byte_costs_one_worker() {
    let (index, bytes) = small();
    let (mut refused, mut lost) = (0, BTreeMap::new());
    for at in 0..bytes.len() {
        for flip in [1, 0x80, 0xff] {
            let mut damaged = bytes.clone();
            damaged[at] ^= flip;
            let Some(result) = check_damaged(&index, &damaged) else {
                refused += 1;
                continue;
            };
            // Each byte counts.
            let [one] = &result.lost[..] else { panic!("byte {at}: {:?}", result.lost) };
            assert!(!result.cut);
            *lost.entry((one.worker, matches!(one.cause, Cause::Header))).or_insert(0) += 1;
        }
    }
    let head = HEAD + 8 + 3 * 16 + 8;
    assert_eq!((refused, lost.len()), (head * 3, 6), "{lost:?}");
}

#[test]
fn a_cut_snapshot_keeps_whole_sections() {
    let (index, bytes) = small();
    let mut kept = BTreeMap::new();
    for len in 0..bytes.len() {
        match check_damaged(&index, &bytes[..len]) {
            None => assert!(matches!(loaded(&index, &bytes[..len]), Err(LoadError::Cut))),
            Some(result) => {
                assert!(result.cut && result.lost.iter().all(|lost| lost.cause == Cause::Cut));
                *kept.entry(result.workers.len()).or_insert(0) += 1;
            }
        }
    }
    assert_eq!(kept.keys().copied().collect::<Vec<_>>(), [0, 1, 2]);
    // Behind the last section nothing is read.
    let mut longer = bytes.clone();
    longer.extend([7; 100]);
    let mut rest = &longer[..];
    let result = load(&RadixIndex::default(), &mut rest, None).unwrap();
    assert_eq!((result.workers.len(), rest), (3, &[7; 100][..]));
}

#[test]
fn sections_are_found_again_behind_lost_bytes() {
    let (index, bytes) = small();
    let second = bytes.windows(7).enumerate().filter(|(_, w)| *w == b"kvfpart").nth(1).unwrap().0;
    for gone in [1, 7, 8, 88, 100] {
        let mut damaged = bytes.clone();
        damaged.drain(second..second + gone);
        let result = check_damaged(&index, &damaged).unwrap();
        assert_eq!((result.workers.len(), result.lost[0].cause.clone()), (2, Cause::Header));
    }
    for more in [1, 8, 3_000_000] {
        let mut damaged = bytes.clone();
        damaged.splice(second..second, std::iter::repeat_n(b'k', more));
        assert_eq!(check_damaged(&index, &damaged).unwrap().workers.len(), 3);
    }
}

/// The head with one field set and the checksum made anew.
fn with_field(bytes: &[u8], at: usize, value: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at..at + value.len()].copy_from_slice(value);
    let head = HEAD + 8 + 3 * 16;
    let checksum = xxh3_64(&bytes[..head]);
    bytes[head..head + 8].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

#[test]
fn a_wrong_head_is_refused_with_what_was_found() {
    let (_, bytes) = small();
    let refusal = |bytes: &[u8], block_size| {
        let index = RadixIndex::default();
        let error = load(&index, &mut &bytes[..], block_size).unwrap_err().to_string();
        assert!(index.workers().is_empty());
        error
    };
    let wrong = |at, value: &[u8]| refusal(&with_field(&bytes, at, value), None);
    let other = wrong(0, b"notasnap");
    assert!(other.starts_with("is not a snapshot: it begins with notasnap, not with"), "{other}");
    assert_eq!(wrong(8, &[2]), "snapshot's version: expected 1, found 2");
    let swapped = [0, 0, 0, 1, 1, 2, 3, 4];
    assert_eq!(
        wrong(8, &swapped),
        "snapshot's byte order: expected little-endian, found big-endian"
    );
    assert_eq!(wrong(16, &[9]), "snapshot's hash scheme: expected 1, found 9");
    assert_eq!(wrong(24, &[0, 0]), "snapshot's hash seed: expected 1337, found 0");
    assert_eq!(
        wrong(40, &70_000_u64.to_le_bytes()),
        "snapshot's number of workers: expected at most 65535, found 70000"
    );
    assert!(wrong(48, &[0xff; 8]).starts_with("snapshot's length of the key"));
    assert!(wrong(HEAD + 8, &[0xff; 8]).starts_with("snapshot's order of workers"));
    assert!(wrong(HEAD + 20, &[1]).starts_with("snapshot's dp rank"));
    assert_eq!(refusal(&bytes, Some(32)), "snapshot's block size: expected 32, found 16");
    assert!(load(&RadixIndex::default(), &mut &bytes[..], Some(16)).is_ok());
}

#[test]
fn a_section_that_the_index_refuses_is_taken_back() {
    let (index, bytes) = small();
    let per_worker = index.blocks(Worker::new(1, 0));
    let limits = Limits { max_blocks: 2 * per_worker + 1, ..Limits::default() };
    let copy = RadixIndex::new(Options { limits, ..Options::default() });
    let result = loaded(&copy, &bytes).unwrap();
    assert_eq!(result.lost[0].cause, Cause::Refused("no more blocks"));
    assert_eq!((result.workers.len(), copy.stats().memberships), (2, 2 * per_worker));
    let limits = Limits { max_workers: 1, ..Limits::default() };
    let copy = RadixIndex::new(Options { limits, ..Options::default() });
    let result = loaded(&copy, &bytes).unwrap();
    assert_eq!(result.lost[1].cause, Cause::Refused("no more workers"));
    assert_eq!((result.lost.len(), copy.workers().len()), (2, 1));
    copy.audit();
    // A worker's own events are newer.
    let result = loaded(&copy, &bytes).unwrap();
    assert_eq!(result.lost[0].cause, Cause::Held(per_worker));
    assert_eq!(copy.blocks(Worker::new(1, 0)), per_worker);
}

/// A writer or reader that fails after some bytes.
struct Failing(usize);

impl Write for Failing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 = self.0.checked_sub(bytes.len()).ok_or(io::ErrorKind::StorageFull)?;
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Failing {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        Err(io::ErrorKind::TimedOut.into())
    }
}

#[test]
fn failing_files_are_reported() {
    let (index, bytes) = small();
    for room in 0..bytes.len() {
        assert!(save(&index, &meta(), cursor, &mut Failing(room)).is_err());
        let mut broken = bytes[..room].chain(Failing(0));
        match load(&RadixIndex::default(), &mut broken, None) {
            Err(error) => assert!(matches!(error, LoadError::Io(_))),
            Ok(result) => {
                let cause = Cause::Unreadable(io::ErrorKind::TimedOut);
                assert!(result.lost.last().is_some_and(|lost| lost.cause == cause));
                assert_eq!(result.lost.len() + result.workers.len(), 3);
            }
        }
    }
    let long = Meta { key: vec![0; 65_537], ..meta() };
    assert!(save(&index, &long, cursor, &mut Vec::new()).is_err());
}

#[test]
fn a_file_is_replaced_as_a_whole() {
    let folder = std::env::temp_dir().join(format!("kvflash-snapshot-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("index.snapshot");
    let (index, bytes) = small();
    std::fs::write(&path, b"old").unwrap();
    let long = Meta { key: vec![0; 65_537], ..meta() };
    assert!(save_to_path(&index, &long, cursor, &path).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
    let saved = save_to_path(&index, &meta(), cursor, &path).unwrap();
    assert_eq!((std::fs::read(&path).unwrap(), saved.bytes), (bytes.clone(), bytes.len() as u64));
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "nothing is left beside it");
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(save_to_path(&index, &meta(), cursor, &path).is_err());
}

/// A worker that only ever stores prompts from their start and evicts from their end: whatever moment a
/// snapshot shows, no prompt has a hole.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn saved_beside_a_writer() {
    let index = RadixIndex::default();
    let stop = AtomicBool::new(false);
    let workers = [0, 1, 2].map(|id| Worker::new(id, 0));
    let name = |prompt: u64, at: u64| prompt << 16 | at;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut rng = SmallRng::seed_from_u64(3);
            let mut depths: BTreeMap<(Worker, u64), u64> = BTreeMap::new();
            while !stop.load(Ordering::Relaxed) {
                let worker = workers[rng.random_range(0..3)];
                let prompt = rng.random_range(1..40_u64);
                let depth = depths.entry((worker, prompt)).or_default();
                let to = rng.random_range(0..80);
                if to > *depth {
                    let local = |at: u64| if at < 20 { at } else { name(prompt, at) };
                    let block = |at| Block {
                        engine_hash: name(prompt, at) ^ 5 << 40,
                        local_hash: local(at),
                    };
                    let blocks: Vec<Block> = (*depth..to).map(block).collect();
                    let parent = depth.checked_sub(1).map(|at| block(at).engine_hash);
                    let outcome = index.store(worker, Tier::Device, parent, 1337, &blocks);
                    assert_eq!(outcome.rejected, None);
                } else {
                    let names: Vec<u64> =
                        (to..*depth).rev().map(|at| name(prompt, at) ^ 5 << 40).collect();
                    index.remove(worker, Tier::Device, &names);
                }
                *depth = to;
            }
        });
        // Also when an assertion fails: the scope waits for the writer.
        let _stop = Stop(&stop);
        let (mut blocks, mut saves) = (0, 0);
        let deadline = Instant::now() + Duration::from_secs(60);
        // From then on no new worker appears between a save and a count.
        while index.workers().len() < workers.len() && Instant::now() < deadline {
            std::thread::yield_now();
        }
        while (blocks < 100_000 || saves < 100) && Instant::now() < deadline {
            saves += 1;
            let bytes = saved(&index);
            let copy = RadixIndex::default();
            assert!(loaded(&copy, &bytes).unwrap().lost.is_empty());
            copy.audit();
            for worker in copy.workers() {
                let held = copy.memberships(worker);
                blocks += held.len();
                let names: Vec<u64> = held.iter().map(|m| m.engine_hash ^ 5 << 40).collect();
                let has = |name: &u64| names.contains(name);
                assert!(names.iter().all(|name| name & 0xffff == 0 || has(&(name - 1))));
            }
        }
        assert!(blocks >= 100_000, "{blocks} in {saves}");
    });
}

/// Kind, tier, whether there is a parent; nearly always valid.
fn step_kind() -> impl Strategy<Value = [u8; 3]> {
    let valid = (0..2_u8, 0..4_u8, 0..2_u8).prop_map(|(kind, tier, parent)| [kind, tier, parent]);
    prop_oneof![15 => valid, 1 => [0..4_u8, 0..6, 0..4]]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..Default::default() })]

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(loaded(&RadixIndex::default(), &bytes).is_err());
    }

    /// Behind a good head, with good checksums, anything.
    #[test]
    fn no_section_panics(
        steps in prop::collection::vec((step_kind(), 0..5_u32, 0..6_u64, 0..3_u64), 0..8),
        words in prop::collection::vec(0..6_u64, 0..40),
        (names, labels) in (0..24_u64, 0..24_u64),
        (number, rank, flags) in (0..4_u64, 0..2_u64, 0..4_u64),
        (is_long, fits) in (prop::bool::weighted(0.1), prop::bool::weighted(0.8)),
    ) {
        let (_, good) = small();
        let first = good.windows(7).position(|window| window == b"kvfpart").unwrap();
        let mut body = Vec::new();
        for ([kind, tier, has_parent], len, parent, seed) in &steps {
            body.extend([*kind, *tier, *has_parent, 0]);
            body.extend(len.to_le_bytes());
            // Most of what a valid step must not have is not there.
            let parent = if *has_parent == 0 && *parent < 5 { 0 } else { *parent };
            let seed = if *kind == 0 && *seed < 2 { 0 } else { *seed };
            body.extend(parent.to_le_bytes());
            body.extend(seed.to_le_bytes());
        }
        let stored = steps.iter().map(|([kind, ..], len, ..)| (u64::from(*len), *kind == 1));
        let sum = stored.fold((0, 0), |(names, labels), (len, is_stored)| {
            (names + len, labels + if is_stored { len } else { 0 })
        });
        let (names, labels) = if fits { sum } else { (names, labels) };
        let len = if fits { (names + labels) as usize } else { words.len() };
        let words = words.iter().chain(&[9, 8, 7, 6]).cycle().take(len);
        body.extend(words.flat_map(|word| word.to_le_bytes()));
        let long = if is_long { u64::MAX / 8 } else { 0 };
        let mut bytes = good[..first + 8].to_vec();
        let fields = [
            number | rank << 32, 1, flags, 0, 0,
            steps.len() as u64, names | long, labels, xxh3_64(&body),
        ];
        bytes.extend(fields.iter().flat_map(|field| field.to_le_bytes()));
        let checksum = xxh3_64(&bytes[first..]);
        bytes.extend(checksum.to_le_bytes());
        bytes.extend(&body);
        bytes.extend(&good[first..]);
        let index = RadixIndex::default();
        let result = loaded(&index, &bytes).unwrap();
        prop_assert_eq!(result.lost.len() + result.workers.len(), 3);
        index.audit();
    }
}
