//! Churn: distinct prefixes come and go, and memory stays where it settled.
//!
//! `KVFLASH_CHURN_BLOCKS` says how many blocks, 10^8 for a soak.

use super::*;

fn blocks() -> u64 {
    let told = std::env::var("KVFLASH_CHURN_BLOCKS").ok().and_then(|blocks| blocks.parse().ok());
    told.unwrap_or(1_000_000)
}

/// Resident bytes of this process; 0 where that can't be read.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<usize>().ok());
    kib.map_or(0, |kib| kib * 1024)
}

/// Engines evict by themselves when `held` are held.
fn churn(limits: Limits, held: Option<usize>, name: &str) {
    const EVENT: u64 = 52;
    const WORKERS: u64 = 8;
    let total = blocks();
    let index = RadixIndex::new(limited(limits));
    let mut engines: Vec<std::collections::VecDeque<Vec<u64>>> = vec![Default::default(); 8];
    let (mut settled, mut settled_rss, mut most, mut most_rss) = (0, 0, 0, 0);
    let events = total / EVENT;
    let mut random = SmallRng::seed_from_u64(5);
    for event in 0..events {
        let who = event % WORKERS;
        // Every prefix is new, its content and its names.
        let len = random.random_range(EVENT / 2..EVENT * 3 / 2);
        let blocks: Vec<Block> = (0..len)
            .map(|at| {
                let local_hash = (event << 8 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                Block { engine_hash: local_hash ^ 0x5555, local_hash }
            })
            .collect();
        index.store(worker(who), Tier::Device, None, SEED, &blocks);
        if let Some(held) = held {
            let engine = &mut engines[who as usize];
            engine.push_back(blocks.iter().rev().map(|block| block.engine_hash).collect());
            if engine.len() * EVENT as usize > held {
                let names = engine.pop_front().expect("more than none");
                index.remove(worker(who), Tier::Device, &names);
            }
        }
        if event % 256 == 0 {
            let bytes = index.stats().bytes;
            if event < events / 4 {
                (settled, settled_rss) = (bytes.max(settled), resident().max(settled_rss));
            } else {
                most = most.max(bytes);
                most_rss = most_rss.max(if event % 65_536 == 0 { resident() } else { 0 });
            }
        }
    }
    index.audit();
    let (bytes, rss) = (index.stats().bytes, resident());
    println!(
        "{name}: {total} blocks; settled at {settled}, most since {most}, ends at {bytes}; \
         resident {settled_rss} -> {rss}; {:?}",
        index.stats()
    );
    assert!(index.stats().memberships > 0 && settled > 0);
    assert!(most <= settled + settled / 20, "{settled} -> {most}");
    assert!(bytes + bytes / 20 >= settled - settled / 20, "{settled} -> {bytes}");
    // Other tests may run beside this one, unless it is a soak.
    if std::env::var_os("KVFLASH_CHURN_BLOCKS").is_some() && rss > 0 {
        assert!(rss <= settled_rss + settled_rss / 20, "{settled_rss} -> {rss}");
    }
}

#[test]
fn churn_through_a_capacity() {
    let _alone = alone();
    churn(Limits { capacity_blocks: 8_000, ..Limits::default() }, None, "capacity");
}

#[test]
fn churn_through_a_budget() {
    let _alone = alone();
    churn(Limits { max_bytes: 3 << 20, ..Limits::default() }, None, "budget");
}

#[test]
fn churn_of_engines_that_evict() {
    let _alone = alone();
    churn(Limits::default(), Some(8_000), "engines");
}

/// Many names of the same content, as engines have that store a prompt anew under new names: what a
/// cleared worker called its blocks is nothing that the filter of names keeps.
#[test]
fn further_names_go_with_their_worker() {
    let _alone = alone();
    let index = RadixIndex::default();
    let empty = index.stats().bytes;
    let mut name = 0;
    let mut store = |who| {
        for _ in 0..64 {
            let block = |local_hash| {
                name += 1;
                Block { engine_hash: name, local_hash }
            };
            let blocks: Vec<Block> = (0..16).map(block).collect();
            index.store(who, Tier::Device, None, SEED, &blocks);
        }
    };
    store(worker(1));
    assert_eq!(index.blocks(worker(1)), 64 * 16);
    let filled = index.stats().bytes;
    for _ in 0..50 {
        index.clear(worker(1));
        store(worker(1));
    }
    let refilled = index.stats().bytes;
    assert!(refilled <= filled + filled / 4, "{filled} bytes became {refilled}");
    index.remove_worker(worker(1));
    let left = index.stats().bytes;
    assert!(left < filled / 2, "nobody holds anything: {empty} bytes, {filled}, {left}");
}
