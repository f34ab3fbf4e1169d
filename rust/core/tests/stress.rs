//! Writers and readers at once: what readers saw must have been there, and the end must be exact.

#![allow(unsafe_code, reason = "an allocator that counts, in front of the system's")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use kvflash_core::ids::{Tier, Worker};
use kvflash_core::index::{
    Block, CountMode, Limits, ManyMatches, Match, Matches, Membership, Options, RadixIndex,
    frequencies,
};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

mod oracle;
use oracle::{BlockIndex, OracleIndex, replay};

/// Counts each thread's allocations.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// Safety: everything is passed on to the system's allocator; the counter is a plain thread-local
// that neither allocates nor has a destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // Safety: the caller's promise about `layout` is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // Safety: `at` came from `alloc` above, hence from `System`, with this layout.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const WRITERS: usize = 3;
const READERS: usize = 2;
/// Blocks of the prompt all writers work on.
const PROMPT: u64 = 24;

/// How long a test lets its threads run; CI sets more.
fn span() -> Duration {
    let seconds = std::env::var("KVFLASH_STRESS_SECONDS").ok().and_then(|s| s.parse().ok());
    Duration::from_secs_f64(seconds.unwrap_or(1.0))
}

/// Waits for threads by their handles. The end of a scope waits for them, too, but in a way that the
/// thread sanitizer cannot see: what follows would look like a race with them.
fn join(threads: Vec<thread::ScopedJoinHandle<'_, ()>>) {
    threads.into_iter().for_each(|thread| thread.join().expect("no thread panics"));
}

/// Blocks of a prompt so long that dropping it takes a while, for others to come between.
const LONG: u64 = 300;

fn prompt(blocks: u64) -> Vec<u64> {
    (1..=blocks).collect()
}

/// Blocks `from..to` of the prompt, named alike by everybody.
fn slice(from: u64, to: u64) -> Vec<Block> {
    (from..to).map(|at| Block { engine_hash: 1_000 + at, local_hash: at + 1 }).collect()
}

fn store(index: &dyn BlockIndex, worker: Worker, tier: Tier, from: u64, to: u64) {
    let parent = (from > 0).then(|| 1_000 + from - 1);
    let outcome = index.store(worker, tier, parent, 1337, &slice(from, to));
    assert_eq!(outcome.rejected, None);
}

fn remove(index: &dyn BlockIndex, worker: Worker, tier: Tier, from: u64, to: u64) {
    let names: Vec<u64> = (from..to).rev().map(|at| 1_000 + at).collect();
    assert_eq!(index.remove(worker, tier, &names).unknown, 0);
}

/// The changes of one writer to its worker: (call began, call ended, depth before, depth after).
type Log = Vec<(u64, u64, u32, u32)>;

/// The least and the most a worker could have held at some moment of `[from, to]`.
fn bounds(log: &Log, from: u64, to: u64) -> (u32, u32) {
    // Depth is constant between calls; within a call it may be anything between both ends.
    let (mut least, mut most) = (u32::MAX, 0);
    let first = log.partition_point(|call| call.1 < from);
    let mut at = first.checked_sub(1).map_or(0, |before| log[before].3);
    for call in &log[first..] {
        (least, most) = (least.min(at), most.max(at));
        if call.0 > to {
            break;
        }
        least = least.min(call.2).min(call.3);
        most = most.max(call.2).max(call.3);
        at = call.3;
    }
    (least.min(at), most.max(at))
}

/// Parents are stored first and children evicted first, so a depth is a moment's truth: a reader
/// may report nothing that the worker did not hold during the query, and must report what it held
/// all the while.
#[test]
fn readers_see_depths_that_were_there() {
    for options in
        [Options::default(), Options { count_mode: CountMode::Copies, ..Options::default() }]
    {
        let index = RadixIndex::new(options);
        let (clock, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        // The last writer predicts instead of storing.
        let start = Barrier::new(WRITERS + 1 + READERS);
        let tick = || clock.fetch_add(1, SeqCst);
        let (logs, reads) = thread::scope(|scope| {
            let writer = |n: usize| {
                let (index, stop, start, tick) = (&index, &stop, &start, &tick);
                move || {
                    let worker = Worker::new(n as u64, 0);
                    let mut rng = SmallRng::seed_from_u64(n as u64);
                    let (mut log, mut depth) = (Log::new(), 0);
                    start.wait();
                    while !stop.load(SeqCst) {
                        let to = rng.random_range(0..=PROMPT);
                        let mut began = tick();
                        if n == WRITERS {
                            // Predictions only end all at once: a shorter one needs a clear first.
                            if to < depth {
                                index.clear(worker);
                                let cleared = tick();
                                log.push((began, cleared, depth as u32, 0));
                                (began, depth) = (cleared, 0);
                            }
                            index.predict(worker, 1337, &prompt(to));
                        } else if to == 0 && rng.random() {
                            index.clear(worker);
                        } else if to < depth {
                            remove(index, worker, Tier::Device, to, depth);
                        } else {
                            store(index, worker, Tier::Device, depth, to);
                        }
                        // A clear goes through the blocks in no order: any depth in between.
                        log.push((began, tick(), depth as u32, to as u32));
                        depth = to;
                    }
                    log
                }
            };
            // Every other one asks for several prompts at a time.
            let reader = |n: usize| {
                let (index, stop, start, tick) = (&index, &stop, &start, &tick);
                move || {
                    let (mut out, mut reads) = (Matches::new(), Vec::new());
                    let mut many = ManyMatches::default();
                    let query = prompt(PROMPT);
                    start.wait();
                    while !stop.load(SeqCst) {
                        let began = tick();
                        if n.is_multiple_of(2) {
                            index.find_matches(&query, &mut out);
                            reads.push((began, tick(), out.as_slice().to_vec()));
                        } else {
                            index.find_many(&[&query, &query[..0], &query], &mut many);
                            let ended = tick();
                            let found: Vec<_> = many.iter().map(<[Match]>::to_vec).collect();
                            let [one, none, other]: [Vec<Match>; 3] =
                                found.try_into().expect("three answers");
                            assert!(none.is_empty());
                            reads.extend([one, other].map(|found| (began, ended, found)));
                        }
                    }
                    reads
                }
            };
            let writers: Vec<_> = (0..=WRITERS).map(|n| scope.spawn(writer(n))).collect();
            let readers: Vec<_> = (0..READERS).map(|n| scope.spawn(reader(n))).collect();
            thread::sleep(span());
            stop.store(true, SeqCst);
            let join = |handle: thread::ScopedJoinHandle<'_, Log>| handle.join().expect("a writer");
            let logs: Vec<Log> = writers.into_iter().map(join).collect();
            let reads: Vec<_> =
                readers.into_iter().flat_map(|r| r.join().expect("a reader")).collect();
            (logs, reads)
        });

        let mut beside_writes = 0;
        for (began, ended, found) in &reads {
            for (n, log) in logs.iter().enumerate() {
                let mine = found.iter().find(|m| m.worker == Worker::new(n as u64, 0));
                let depth = mine.map_or(0, |m| if n == WRITERS { m.predicted } else { m.device });
                let (least, most) = bounds(log, *began, *ended);
                beside_writes += usize::from(least < most);
                assert!(least <= depth && depth <= most, "{least} <= {depth} <= {most}");
            }
        }
        assert!(reads.len() > 1_000 && beside_writes > 100, "{} {beside_writes}", reads.len());
        let mut out = Matches::new();
        index.find_matches(&prompt(PROMPT), &mut out);
        out.sort();
        let at_rest: BTreeMap<Worker, u32> =
            out.as_slice().iter().map(|m| (m.worker, m.device.max(m.predicted))).collect();
        for (n, log) in logs.iter().enumerate() {
            let last = log.last().map_or(0, |call| call.3);
            assert_eq!(at_rest.get(&Worker::new(n as u64, 0)).copied().unwrap_or(0), last);
        }
    }
}

/// Random events of several workers on shared blocks, tiers and all; played again one by one, each
/// worker's events give the same state, for workers never see each other.
#[test]
fn at_rest_the_index_equals_its_twin() {
    let options = Options { count_mode: CountMode::Copies, hash_seed: 5, ..Options::default() };
    let (index, twin) = (RadixIndex::new(options), OracleIndex::new(options));
    let script = |index: &dyn BlockIndex, n: usize, events: usize| {
        let mut rng = SmallRng::seed_from_u64(100 + n as u64);
        let worker = Worker::new(n as u64, 1);
        for _ in 0..events {
            let tier = Tier::ALL[rng.random_range(0..4)];
            let name = |rng: &mut SmallRng| rng.random_range(0..20_u64);
            match rng.random_range(0..200) {
                0 => _ = index.clear(worker),
                1 => _ = index.remove_worker(worker),
                2..8 => {
                    let len = rng.random_range(1..7);
                    let locals: Vec<u64> = (0..len).map(|_| rng.random_range(1..3)).collect();
                    index.predict(worker, 1337, &locals);
                }
                8..16 => _ = index.copy(worker, tier, &[name(&mut rng), name(&mut rng)]),
                16..90 => {
                    let names: Vec<u64> = (0..3).map(|_| name(&mut rng)).collect();
                    index.remove(worker, tier, &names);
                }
                _ => {
                    let parent = rng.random_bool(0.6).then(|| name(&mut rng));
                    let blocks: Vec<Block> = (0..rng.random_range(1..4))
                        .map(|_| Block {
                            engine_hash: name(&mut rng),
                            local_hash: rng.random_range(1..3),
                        })
                        .collect();
                    index.store(worker, tier, parent, 1337, &blocks);
                }
            }
        }
    };
    let events = (span().as_millis() * 20) as usize;
    let stop = AtomicBool::new(false);
    let read = thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (mut out, mut read) = (Matches::new(), 0);
            while !stop.load(SeqCst) {
                index.find_matches(&[1, 1, 2, 1, 2], &mut out);
                assert!(out.as_slice().iter().all(|m| m.device <= m.host && m.external <= 5));
                // Whatever the moment, a dump makes sense by itself.
                let copy = OracleIndex::new(options);
                for event in index.dump_worker(Worker::new(0, 1)) {
                    let outcome = replay(&copy, Worker::new(0, 1), &event);
                    assert_eq!((outcome.rejected, outcome.moved), (None, 0), "{event:?}");
                }
                index.memberships(Worker::new(1, 1));
                index.stats();
                read += 1;
            }
            read
        });
        let writers: Vec<_> = (0..4)
            .map(|n| {
                let (index, script) = (&index, &script);
                scope.spawn(move || script(index, n, events))
            })
            .collect();
        writers.into_iter().for_each(|writer| writer.join().expect("a writer"));
        stop.store(true, SeqCst);
        reader.join().expect("the reader")
    });
    assert!(read > 10);
    (0..4).for_each(|n| script(&twin, n, events));
    index.audit();
    assert_eq!(index.workers(), twin.workers());
    let all = |index: &dyn BlockIndex| -> Vec<Membership> {
        index.workers().iter().flat_map(|worker| index.memberships(*worker)).collect()
    };
    assert_eq!(all(&index), all(&twin));
    assert!(all(&index).len() > 20);
    let (mut mine, mut theirs) = (Matches::new(), Matches::new());
    for query in 0..64_u64 {
        let locals: Vec<u64> = (0..6).map(|bit| 1 + (query >> bit & 1)).collect();
        index.find_matches(&locals, &mut mine);
        twin.find_matches(&locals, &mut theirs);
        mine.sort();
        theirs.sort();
        assert_eq!(mine.as_slice(), theirs.as_slice());
    }
    let (stats, expected) = (index.stats(), twin.stats());
    assert_eq!(kvflash_core::index::IndexStats { bytes: 0, ..stats }, expected);
}

/// Few slots, many workers that come and go: worker `n` only ever holds `n % LONG + 1` blocks, so
/// credit for what another one held in the same slot shows.
#[test]
fn a_recycled_slot_never_credits_another_worker() {
    let limits = Limits { max_workers: 4, ..Limits::default() };
    let index = RadixIndex::new(Options { limits, ..Options::default() });
    let (next, seen, stop) = (AtomicU64::new(0), AtomicUsize::new(0), AtomicBool::new(false));
    // Each writer has one worker at a time: those numbered below all of these are gone.
    let current: [AtomicU64; WRITERS] = Default::default();
    let held = |worker: Worker| worker.instance_id % LONG + 1;
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for mine in &current {
            let (index, next, stop) = (&index, &next, &stop);
            threads.push(scope.spawn(move || {
                let (query, mut out) = (prompt(LONG), Matches::new());
                while !stop.load(SeqCst) {
                    let worker = Worker::new(next.fetch_add(1, SeqCst), 0);
                    mine.store(worker.instance_id, SeqCst);
                    let tier = Tier::ALL[worker.instance_id as usize / 7 % 2];
                    store(index, worker, tier, 0, held(worker));
                    if worker.instance_id.is_multiple_of(3) {
                        remove(index, worker, tier, 0, held(worker));
                        store(index, worker, tier, 0, held(worker));
                    }
                    // Predict last: an eviction also ends the block's prediction.
                    index.predict(worker, 1337, &prompt(held(worker)));
                    // Leftovers of a slot's last owner, or its late removals, show here.
                    index.find_matches(&query, &mut out);
                    let own = out.as_slice().iter().find(|found| found.worker == worker);
                    let own = own.map(|m| (u64::from(m.external), u64::from(m.predicted)));
                    assert_eq!(own, Some((held(worker), held(worker))));
                    assert!(index.remove_worker(worker));
                }
            }));
        }
        for _ in 0..READERS {
            threads.push(scope.spawn(|| {
                let (query, mut out) = (prompt(LONG), Matches::new());
                while !stop.load(SeqCst) {
                    let oldest = current.iter().map(|id| id.load(SeqCst)).min().unwrap_or(0);
                    index.find_matches(&query, &mut out);
                    let newest = next.load(SeqCst);
                    for found in out.as_slice() {
                        let id = found.worker.instance_id;
                        let most = u64::from(found.external.max(found.predicted));
                        assert!(most <= held(found.worker), "{found:?}");
                        assert!(oldest <= id && id < newest, "{oldest} <= {id} < {newest}");
                        seen.fetch_add(1, SeqCst);
                    }
                    let mut ids: Vec<Worker> = out.as_slice().iter().map(|m| m.worker).collect();
                    ids.sort_unstable();
                    assert!(ids.windows(2).all(|pair| pair[0] != pair[1]), "twice: {ids:?}");
                }
            }));
        }
        thread::sleep(span());
        stop.store(true, SeqCst);
        join(threads);
    });
    assert!(seen.load(SeqCst) > 200, "{}", seen.load(SeqCst));
    assert!(next.load(SeqCst) > 200, "slots were reused too seldom to prove anything");
    let stats = index.stats();
    assert_eq!((stats.workers, stats.unique_blocks, stats.memberships), (0, 0, 0));
    assert_eq!((stats.slots_exhausted_total, stats.predicted), (0, 0));
    index.audit();
}

/// One worker that is removed and comes back, fed by two threads: never credited twice, and nothing
/// stays when it is gone.
#[test]
fn a_worker_that_comes_back_has_one_seat() {
    let index = RadixIndex::default();
    let (worker, stop) = (Worker::new(1, 0), AtomicBool::new(false));
    let reads = AtomicUsize::new(0);
    thread::scope(|scope| {
        let mut threads = Vec::new();
        // Two, so that one waits for the other's lock while the worker is removed.
        for _ in 0..2 {
            threads.push(scope.spawn(|| {
                while !stop.load(SeqCst) {
                    store(&index, worker, Tier::Device, 0, LONG);
                }
            }));
        }
        threads.push(scope.spawn(|| {
            while !stop.load(SeqCst) {
                index.remove_instance(1);
            }
        }));
        threads.push(scope.spawn(|| {
            let (query, mut out) = (prompt(PROMPT), Matches::new());
            while !stop.load(SeqCst) {
                index.find_matches(&query, &mut out);
                assert!(out.len() <= 1, "{:?}", out.as_slice());
                reads.fetch_add(out.len(), SeqCst);
            }
        }));
        thread::sleep(span());
        stop.store(true, SeqCst);
        join(threads);
    });
    assert!(reads.load(SeqCst) > 100);
    index.audit();
    index.remove_worker(worker);
    let stats = index.stats();
    assert_eq!((stats.unique_blocks, stats.memberships), (0, 0));
}

/// Predictions come, are renewed and run out while others read: none is seen beyond what was
/// predicted, and every one ends.
#[test]
fn predictions_run_out_beside_readers() {
    const TTL_MS: u64 = 5;
    let limits = Limits { predicted_ttl_ms: TTL_MS, ..Limits::default() };
    let index = RadixIndex::new(Options { limits, ..Options::default() });
    let (now_ms, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let (predicted, seen, unseen) = (AtomicU64::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    // Worker n's prompts are never longer than this.
    let longest = |n: u64| n * 7 + 3;
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for thread in 0..WRITERS as u64 {
            let (index, stop, predicted) = (&index, &stop, &predicted);
            threads.push(scope.spawn(move || {
                let mut rng = SmallRng::seed_from_u64(thread);
                while !stop.load(SeqCst) {
                    let n = rng.random_range(0..8);
                    let len = rng.random_range(1..=longest(n));
                    let fresh = index.predict(Worker::new(n, 0), 1337, &prompt(len));
                    predicted.fetch_add(fresh as u64, SeqCst);
                }
            }));
        }
        threads.push(scope.spawn(|| {
            while !stop.load(SeqCst) {
                index.advance_to(now_ms.fetch_add(1, SeqCst) + 1);
                // Some time between two ticks, for others to come in.
                (0..200).for_each(|_| std::hint::spin_loop());
            }
        }));
        for _ in 0..READERS {
            threads.push(scope.spawn(|| {
                let (query, mut out) = (prompt(LONG), Matches::new());
                while !stop.load(SeqCst) {
                    index.find_matches(&query, &mut out);
                    for found in out.as_slice() {
                        assert_eq!(found.external, 0, "a prediction is no fact");
                        let most = longest(found.worker.instance_id);
                        assert!(0 < found.predicted && u64::from(found.predicted) <= most);
                    }
                    seen.fetch_add(out.len(), SeqCst);
                    unseen.fetch_add(8 - out.len(), SeqCst);
                }
            }));
        }
        thread::sleep(span());
        // On a busy machine the ticks that let predictions go come seldom.
        let deadline = Instant::now() + Duration::from_secs(60);
        while seen.load(SeqCst).min(unseen.load(SeqCst)) <= 100 && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10));
        }
        stop.store(true, SeqCst);
        join(threads);
    });
    assert!(seen.load(SeqCst) > 100 && unseen.load(SeqCst) > 100, "{seen:?} {unseen:?}");
    index.audit();
    index.advance_to(now_ms.load(SeqCst) + TTL_MS);
    let stats = index.stats();
    assert_eq!((stats.predicted, stats.unique_blocks), (0, 0));
    assert_eq!(stats.expired_blocks_total, predicted.load(SeqCst), "each ends once");
    index.audit();
}

/// However many workers store at once, the limit holds.
#[test]
fn the_limit_holds_under_concurrent_stores() {
    let limits = Limits { max_blocks: 100, ..Limits::default() };
    let index = RadixIndex::new(Options { limits, ..Options::default() });
    let deadline = Instant::now() + span() / 2;
    thread::scope(|scope| {
        let spawn = |n| {
            let index = &index;
            scope.spawn(move || {
                let worker = Worker::new(n, 0);
                while Instant::now() < deadline {
                    store(index, worker, Tier::Device, 0, PROMPT);
                    store(index, worker, Tier::Host, 0, PROMPT);
                    assert!((0..4).map(|n| index.blocks(Worker::new(n, 0))).sum::<usize>() <= 192);
                    index.clear(worker);
                }
                store(index, worker, Tier::Device, 0, PROMPT);
                store(index, worker, Tier::Host, 0, PROMPT);
            })
        };
        join((0..4).map(spawn).collect());
    });
    // An event sets room aside before it knows its duplicates, so the last few may be refused.
    let stats = index.stats();
    assert!((76..=100).contains(&stats.memberships), "{stats:?}");
    assert!(stats.refused_blocks_total >= 92, "{stats:?}");
    index.audit();
}

/// All workers store, then all drop the same blocks, at the same moment: no bit is lost, no block
/// stays without a holder.
#[test]
fn workers_meet_on_the_same_blocks() {
    let index = RadixIndex::default();
    let (barrier, stop) = (Barrier::new(WRITERS), AtomicBool::new(false));
    let rounds = AtomicUsize::new(0);
    // Counted, not asserted on the spot: a thread that panics would leave the others waiting.
    let (lost, left) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        let spawn = |n| {
            let (index, barrier, stop, rounds) = (&index, &barrier, &stop, &rounds);
            let (lost, left) = (&lost, &left);
            scope.spawn(move || {
                let worker = Worker::new(n as u64, 0);
                let (query, mut out) = (prompt(LONG), Matches::new());
                let began = Instant::now();
                while !stop.load(SeqCst) {
                    let tier = Tier::ALL[rounds.load(SeqCst) % 3];
                    barrier.wait();
                    store(index, worker, tier, 0, LONG);
                    barrier.wait();
                    index.find_matches(&query, &mut out);
                    let full = |found: &Match| u64::from(found.external) == LONG;
                    if out.len() != WRITERS || !out.as_slice().iter().all(full) {
                        lost.fetch_add(1, SeqCst);
                    }
                    barrier.wait();
                    remove(index, worker, tier, 0, LONG);
                    barrier.wait();
                    left.fetch_add(index.stats().unique_blocks, SeqCst);
                    if n == 0 {
                        let done = rounds.fetch_add(1, SeqCst) + 1;
                        // On a busy machine a round takes long.
                        let time = if done > 50 { span() } else { Duration::from_secs(60) };
                        stop.store(began.elapsed() > time, SeqCst);
                    }
                    // Everybody leaves after the same round.
                    barrier.wait();
                }
            })
        };
        join((0..WRITERS).map(spawn).collect());
    });
    assert_eq!((lost.into_inner(), left.into_inner()), (0, 0), "of {rounds:?} rounds");
    assert!(rounds.load(SeqCst) > 50, "{rounds:?}");
    index.audit();
}

/// A caller that keeps its [`Matches`] pays for memory once, in every form of holder set and tier.
#[test]
fn warm_queries_allocate_nothing() {
    let index = RadixIndex::default();
    for n in 0..300 {
        store(&index, Worker::new(n, 0), Tier::ALL[n as usize % 3], 0, n % LONG + 1);
        index.predict(Worker::new(n / 2, 0), 1337, &prompt(n + 1));
    }
    let (query, mut out, mut counts) = (prompt(LONG), Matches::new(), Vec::new());
    let mut ask = |index: &RadixIndex| {
        index.find_matches(&query, &mut out);
        out.sort();
        frequencies(out.as_slice(), &mut counts);
        index.find_matches_early_exit(&query, &mut out);
    };
    ask(&index);
    let before = ALLOCATIONS.get();
    (0..100).for_each(|_| ask(&index));
    assert_eq!(ALLOCATIONS.get() - before, 0);
    assert!(before > 300, "the counter counts");
}
