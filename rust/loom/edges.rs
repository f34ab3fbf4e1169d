//! A reader never misses a child that stays, whatever happens to the table meanwhile.

use loom::sync::Arc;
use loom::thread;

use crate::arena::edges::{Edges, Writing};
use crate::arena::epoch::pin;
use crate::{NONE, explore};

const MISSED: &str = "missed what is there";

/// Children's numbers are their keys too. The tables of models have one slot a bucket, so a second
/// child makes a segment double, a third split.
fn insert(edges: &Edges, writing: &mut Writing, child: u32) {
    edges.insert(writing, child, child, u64::from(child), child);
}

fn remove(edges: &Edges, writing: &mut Writing, child: u32) {
    assert!(edges.remove(writing, child, child, u64::from(child), child));
}

fn is_found(edges: &Edges, child: u32) -> bool {
    let pin = pin();
    edges.find(&pin, child, child, u64::from(child), |found| found == child).is_some()
}

/// Seeds put the children into different places: beside, behind and before each other.
fn beside_a_reader(
    seeds: u64,
    before: &'static [u32],
    staying: u32,
    change: fn(&Edges, &mut Writing),
) {
    for seed in 0..seeds {
        let faults = explore(3, move |faults| {
            let (edges, mut writing) = Edges::new(seed);
            before.iter().for_each(|&child| insert(&edges, &mut writing, child));
            edges.collect(&mut writing);
            let edges = Arc::new(edges);
            let reader = {
                let edges = edges.clone();
                thread::spawn(move || faults.check(is_found(&edges, staying), MISSED))
            };
            change(&edges, &mut writing);
            edges.collect(&mut writing);
            reader.join().unwrap();
            edges.collect(&mut writing);
        });
        assert_eq!(faults, NONE, "seed {seed}");
    }
}

#[test]
fn while_a_segment_doubles() {
    beside_a_reader(4, &[1], 1, |edges, writing| insert(edges, writing, 2));
}

#[test]
fn while_a_segment_splits() {
    beside_a_reader(4, &[1, 2], 2, |edges, writing| insert(edges, writing, 3));
}

#[test]
fn while_what_it_had_to_pass_goes_and_comes_back() {
    beside_a_reader(4, &[1, 2], 2, |edges, writing| {
        remove(edges, writing, 1);
        insert(edges, writing, 1);
    });
}

#[test]
fn while_segments_shrink_and_merge() {
    beside_a_reader(4, &[1, 2, 3], 3, |edges, writing| {
        remove(edges, writing, 1);
        remove(edges, writing, 2);
    });
}

/// Who is told of a child after it was inserted finds it.
#[test]
fn what_was_inserted_before_is_found() {
    use loom::sync::atomic::AtomicBool;
    use loom::sync::atomic::Ordering::{Acquire, Release};
    let faults = explore(3, |faults| {
        let (edges, mut writing) = Edges::new(0);
        insert(&edges, &mut writing, 1);
        let shared = Arc::new((edges, AtomicBool::new(false)));
        let reader = {
            let shared = shared.clone();
            thread::spawn(move || {
                let (edges, is_there) = &*shared;
                faults.check(!is_there.load(Acquire) || is_found(edges, 2), MISSED);
            })
        };
        let (edges, is_there) = &*shared;
        insert(edges, &mut writing, 2);
        is_there.store(true, Release);
        edges.collect(&mut writing);
        reader.join().unwrap();
    });
    assert_eq!(faults, NONE);
}
