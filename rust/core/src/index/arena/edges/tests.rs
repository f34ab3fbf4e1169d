//! The table against a plain map, and under readers.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::thread;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::super::epoch::pin;
use super::*;

type Key = (u32, u32, u64);

/// A table of one bucket, with its directory and what the writer knows of it.
const EMPTY_BYTES: usize = 64 + 8 + 8;

/// Collects until nothing waits for readers; other tests' readers come and go.
fn settle(edges: &Edges, writing: &mut Writing) {
    while !edges.turn(writing).books.retired.is_empty() {
        edges.collect(writing);
        thread::yield_now();
    }
}

/// Bytes that the arrays and the books have, added up from what is there.
fn counted_bytes(edges: &Edges, writing: &mut Writing) -> usize {
    let turn = edges.turn(writing);
    let arrays = turn.everything().into_iter().map(|garbage| match garbage {
        Garbage::Segment(array) => array.bytes(),
        Garbage::Directory(array) => array.bytes(),
    });
    arrays.sum()
}

#[test]
fn an_empty_table_is_small_and_finds_nothing() {
    let (edges, mut writing) = Edges::new(0);
    assert_eq!(edges.find(&pin(), 0, 0, 0, |_| true), None);
    assert!(!edges.remove(&mut writing, 0, 0, 0, 1));
    assert_eq!((edges.len(&writing), edges.bytes(&writing)), (0, EMPTY_BYTES));
}

#[test]
fn asks_the_child_and_tells_keys_apart() {
    let (edges, mut writing) = Edges::new(7);
    edges.insert(&mut writing, 1, 2, 3, 11);
    let pin = pin();
    assert_eq!(edges.find(&pin, 1, 2, 3, |child| child == 11), Some(11));
    assert_eq!(edges.find(&pin, 1, 2, 3, |_| false), None);
    for (parent, offset, local) in [(2, 1, 3), (1, 3, 2), (1, 2, 4), (0, 2, 3)] {
        assert_eq!(edges.find(&pin, parent, offset, local, |_| true), None);
    }
    assert!(!edges.remove(&mut writing, 1, 2, 3, 12));
    assert!(edges.remove(&mut writing, 1, 2, 3, 11));
    assert_eq!(edges.find(&pin, 1, 2, 3, |_| true), None);
}

#[test]
#[should_panic(expected = "another table")]
fn refuses_the_right_to_another_table() {
    let (edges, _writing) = Edges::new(0);
    let (_other, mut writing) = Edges::new(0);
    edges.insert(&mut writing, 1, 1, 1, 1);
}

#[test]
fn agrees_with_a_map_while_it_grows_and_shrinks() {
    const ENTRIES: usize = 100_000;
    let mut random = SmallRng::seed_from_u64(1);
    let (edges, mut writing) = Edges::new(random.random());
    let (mut map, mut keys): (HashMap<Key, u32>, Vec<Key>) = (HashMap::new(), Vec::new());
    let (mut children, mut bytes_max) = (Vec::<Key>::from([(0, 0, 0)]), 0);
    for (goal, chance) in [(ENTRIES, 0.8), (ENTRIES / 2, 0.3), (ENTRIES * 4 / 5, 0.7), (0, 0.1)] {
        while (keys.len() < goal) == (chance > 0.5) && keys.len() != goal {
            if random.random_bool(chance) {
                let key =
                    (random.random_range(0..5000), random.random_range(0..64), random.random());
                let child = children.len() as u32;
                children.push(key);
                edges.insert(&mut writing, key.0, key.1, key.2, child);
                assert_eq!(map.insert(key, child), None);
                keys.push(key);
            } else if !keys.is_empty() {
                let key = keys.swap_remove(random.random_range(0..keys.len()));
                let child = map.remove(&key).expect("keys are those of the map");
                assert!(edges.remove(&mut writing, key.0, key.1, key.2, child));
                assert!(!edges.remove(&mut writing, key.0, key.1, key.2, child));
                let pin = pin();
                let is_child = |child: u32| children[child as usize] == key;
                assert_eq!(edges.find(&pin, key.0, key.1, key.2, is_child), None);
            }
            if random.random_bool(0.01) {
                edges.collect(&mut writing);
                assert_eq!(edges.len(&writing), map.len());
                bytes_max = bytes_max.max(edges.bytes(&writing));
            }
        }
        settle(&edges, &mut writing);
        let allocated = edges.turn(&mut writing).books.allocated;
        assert_eq!(allocated, counted_bytes(&edges, &mut writing));
        let pin = pin();
        for (key, &child) in &map {
            let is_child = |child: u32| children[child as usize] == *key;
            assert_eq!(edges.find(&pin, key.0, key.1, key.2, is_child), Some(child));
        }
        let bytes = edges.bytes(&writing);
        assert!(bytes <= EMPTY_BYTES + 1024 + 40 * map.len(), "{bytes} for {}", map.len());
    }
    assert!(bytes_max >= ENTRIES * 8, "{bytes_max}");
    assert_eq!(edges.len(&writing), 0);
    assert!(edges.bytes(&writing) <= EMPTY_BYTES + 1100, "{}", edges.bytes(&writing));
    assert_eq!(counted_bytes(&edges, &mut writing), 64 + 8);
}

/// Entries with tags chosen by the test: no hash function would collide like this.
fn check_tags(tags: impl Fn(u32) -> u32, count: u32, bytes_max: usize) {
    let (edges, mut writing) = Edges::new(0);
    for child in 1..=count {
        edges.turn(&mut writing).insert(tags(child), child);
    }
    settle(&edges, &mut writing);
    assert!(edges.bytes(&writing) <= bytes_max, "{}", edges.bytes(&writing));
    let pin = pin();
    for child in 1..=count {
        let found = segment::find(edges.segment(&pin, tags(child)), tags(child), |it| it == child);
        assert_eq!(found, Some(child));
    }
    for child in (1..=count).rev() {
        assert!(edges.turn(&mut writing).remove(tags(child), child));
    }
    drop(pin);
    settle(&edges, &mut writing);
    assert_eq!(counted_bytes(&edges, &mut writing), 64 + 8);
}

#[test]
fn equal_tags_make_a_larger_segment() {
    for tag in [0, 1, u32::MAX] {
        check_tags(|_| tag, 3000, 80_000);
    }
}

#[test]
fn tags_that_differ_at_one_end_only_work() {
    check_tags(|child| child, 3000, 160_000);
    check_tags(|child| child.reverse_bits(), 3000, 160_000);
    check_tags(|child| child % 3, 3000, 80_000);
    check_tags(|child| if child % 10 == 0 { child << 20 } else { 5 }, 3000, 160_000);
}

#[test]
fn readers_always_find_what_stays() {
    const STAYING: u32 = 300;
    let (edges, mut writing) = Edges::new(3);
    let (over, looks) = (AtomicBool::new(false), AtomicUsize::new(0));
    let key = |child: u32| (child % 7, child, u64::from(child) * 0x1_0001);
    let insert = |writing: &mut Writing, child| {
        let (parent, offset, local) = key(child);
        edges.insert(writing, parent, offset, local, child);
    };
    (1..=STAYING).for_each(|child| insert(&mut writing, child));
    thread::scope(|scope| {
        for thread in 0..2_u64 {
            let (edges, over, looks) = (&edges, &over, &looks);
            scope.spawn(move || {
                let mut random = SmallRng::seed_from_u64(thread);
                while !over.load(Relaxed) {
                    let pin = pin();
                    for _ in 0..8 {
                        let child = random.random_range(1..=STAYING);
                        let (parent, offset, local) = key(child);
                        let found = edges.find(&pin, parent, offset, local, |it| it == child);
                        assert_eq!(found, Some(child));
                    }
                    looks.fetch_add(8, Relaxed);
                }
            });
        }
        let mut random = SmallRng::seed_from_u64(9);
        let mut round = 0;
        while round < 20 || (round < 2_000 && looks.load(Relaxed) < 10_000) {
            round += 1;
            let last = STAYING + random.random_range(100..20_000);
            (STAYING + 1..=last).for_each(|child| {
                insert(&mut writing, child);
                if child % 16 == 0 {
                    edges.collect(&mut writing);
                }
            });
            (STAYING + 1..=last).for_each(|child| {
                let (parent, offset, local) = key(child);
                assert!(edges.remove(&mut writing, parent, offset, local, child));
                edges.collect(&mut writing);
            });
            assert_eq!(edges.len(&writing), STAYING as usize, "round {round}");
        }
        over.store(true, Relaxed);
    });
    assert!(looks.load(Relaxed) > 0);
    settle(&edges, &mut writing);
    assert!(edges.bytes(&writing) < 20_000, "{}", edges.bytes(&writing));
}
