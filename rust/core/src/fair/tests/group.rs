//! Clients that have the turns of one client together.

use super::super::*;
use super::{config, cost, pop};

const GROUP: &str = "10.0.0.9";

fn of_group(client: &str) -> ClientName<'_> {
    ClientName { group: Some(GROUP), client }
}

/// Of the first `turns` requests, those of a client that has as many waiting, beside one that has a fresh name for
/// each of its own; `group` is that of the fresh names.
fn turns_beside_fresh_names(
    discipline: Discipline,
    group: Option<&str>,
    turns: usize,
    answer: u64,
) -> usize {
    let mut queue: FairQueue<bool> = FairQueue::new(config(discipline)).unwrap();
    let mut number = 0;
    let mut push_fresh = |queue: &mut FairQueue<bool>| {
        number += 1;
        let client = ClientName { group, client: &format!("fresh-{number}") };
        queue.push(client, false, cost(10), Standing::default(), 0).unwrap();
    };
    for _ in 0..2 * turns {
        push_fresh(&mut queue);
    }
    for _ in 0..turns {
        queue.push("honest", true, cost(10), Standing::default(), 0).unwrap();
    }
    let (mut honest, mut running) = (0, None);
    for _ in 0..turns {
        let Granted { grant, item, .. } = queue.pop(0, |_| true).unwrap();
        queue.tokens(grant, answer);
        // Something runs always: else `vtc-max-fair` forgives.
        if let Some(before) = running.replace(grant) {
            assert!(queue.finish(before, Used::default()));
        }
        honest += usize::from(item);
        push_fresh(&mut queue);
    }
    honest
}

#[test]
fn a_fresh_name_for_each_request_gains_nothing_within_a_group() {
    for discipline in [Discipline::VtcFair, Discipline::VtcMaxFair, Discipline::VtcPred] {
        for answer in [0, 40] {
            let honest = turns_beside_fresh_names(discipline, Some(GROUP), 100, answer);
            assert!((48..=52).contains(&honest), "{discipline}: {honest} of 100");
            // The names alone would have had nearly all.
            let honest = turns_beside_fresh_names(discipline, None, 100, answer);
            assert!(honest <= 2, "{discipline}: {honest} of 100 without a group");
        }
    }
}

#[test]
fn clients_of_a_group_take_turns_for_its_turns() {
    let mut queue: FairQueue<u32> = FairQueue::new(config(Discipline::VtcFair)).unwrap();
    for (client, item) in [("heavy", 1), ("heavy", 2), ("heavy", 3), ("light", 4), ("light", 5)] {
        queue.push(of_group(client), item, cost(10), Standing::default(), 0).unwrap();
    }
    for item in [11, 12, 13, 14, 15] {
        queue.push("other", item, cost(10), Standing::default(), 0).unwrap();
    }
    let order: Vec<u32> = std::iter::from_fn(|| pop(&mut queue)).map(|(_, item)| item).collect();
    assert_eq!(order, [1, 11, 4, 12, 2, 13, 5, 14, 3, 15]);
    assert_eq!(queue.counter(of_group("heavy")), Some(30.0));
    assert_eq!(queue.counter(of_group("light")), Some(20.0));
    // The same name beside the group is another client.
    assert_eq!((queue.counter("light"), queue.counter("other")), (None, Some(50.0)));
}

#[test]
fn the_weight_of_a_name_counts_within_its_group_alone() {
    let mut queue: FairQueue<u32> = FairQueue::new(config(Discipline::VtcFair)).unwrap();
    queue.set_weight("heavy", 4.0).unwrap();
    for item in 1..=4 {
        queue.push(of_group("heavy"), item, cost(10), Standing::default(), 0).unwrap();
        queue.push(of_group("light"), item + 4, cost(10), Standing::default(), 0).unwrap();
        queue.push("other", item + 10, cost(10), Standing::default(), 0).unwrap();
    }
    let order: Vec<u32> = (0..8).map(|_| pop(&mut queue).unwrap().1).collect();
    assert_eq!(order, [1, 11, 5, 12, 2, 13, 3, 14]);
}

#[test]
fn a_group_that_was_idle_has_no_credit() {
    let mut queue: FairQueue<u32> = FairQueue::new(config(Discipline::VtcFair)).unwrap();
    queue.push(of_group("a"), 1, cost(10), Standing::default(), 0).unwrap();
    let (grant, _) = pop(&mut queue).unwrap();
    queue.finish(grant, Used::default());
    for _ in 0..10 {
        queue.push("busy", 2, cost(100), Standing::default(), 0).unwrap();
    }
    for _ in 0..5 {
        pop(&mut queue).unwrap();
    }
    // It comes back under another name, too.
    for (client, item) in [("a", 1), ("b", 3), ("c", 4), ("d", 5)] {
        queue.push(of_group(client), item, cost(100), Standing::default(), 0).unwrap();
    }
    let order: Vec<u32> = (0..4).map(|_| pop(&mut queue).unwrap().1).collect();
    assert_eq!(order.iter().filter(|&&item| item == 2).count(), 2, "{order:?}");
}

#[test]
fn a_group_leaves_room_in_the_queue() {
    let limits = FairConfig { max_queued: 8, ..config(Discipline::VtcFair) };
    let mut queue: FairQueue<u32> = FairQueue::new(limits).unwrap();
    queue.max_clients = 5;
    let names = ["a", "b", "c", "d", "a", "b"];
    for name in names {
        queue.push(of_group(name), 1, cost(1), Standing::default(), 0).unwrap();
    }
    let refused = queue.push(of_group("e"), 1, cost(1), Standing::default(), 0).unwrap_err();
    assert_eq!(refused.refusal, Refusal::ClientQueueFull);
    let text = refused.error.to_string();
    assert!(text.contains("6 requests of 10.0.0.9 wait, over all its client names"), "{text}");
    queue.push("other", 2, cost(1), Standing::default(), 0).unwrap();
    assert_eq!(queue.stats().clients, 5);
    while let Some((grant, _)) = pop(&mut queue) {
        queue.finish(grant, Used::default());
    }
    // Names that come and go take the place of idle ones, and a group goes with its last name.
    for n in 0..100 {
        queue.push(format!("{n}").as_str(), 3, cost(1), Standing::default(), 0).unwrap();
        let (grant, _) = pop(&mut queue).unwrap();
        queue.finish(grant, Used::default());
        assert_eq!(queue.stats().clients, 5);
    }
    assert!(names.iter().all(|name| queue.counter(of_group(name)).is_none()));
    assert_eq!(queue.stats().forgotten_clients_total, 100);
    queue.push(of_group("a"), 1, cost(1), Standing::default(), 0).unwrap();
    assert_eq!(pop(&mut queue).map(|(_, item)| item), Some(1));
}
