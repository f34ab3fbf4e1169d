//! The queue against a list that is searched from end to end.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::super::*;
use super::config;

#[derive(Debug, Clone)]
enum Step {
    Push { client: usize, input: u64, cached: u64, priority: i32 },
    Pop { largest: u32 },
    Tokens { nth: usize, tokens: u64 },
    Finish { nth: usize, output: Option<u64> },
    Cancel { nth: usize },
    Wait { ms: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..5_usize, 0..50_u64, 0..60_u64, -1..2_i32).prop_map(
            |(client, input, cached, priority)| Step::Push { client, input, cached, priority }
        ),
        3 => (0..1_000_u32).prop_map(|largest| Step::Pop { largest }),
        3 => (0..9_usize, 0..9_u64).prop_map(|(nth, tokens)| Step::Tokens { nth, tokens }),
        2 => (0..9_usize, prop::option::of(0..30_u64))
            .prop_map(|(nth, output)| Step::Finish { nth, output }),
        1 => (0..9_usize).prop_map(|nth| Step::Cancel { nth }),
        1 => (0..9_u64).prop_map(|ms| Step::Wait { ms }),
    ]
}

#[derive(Debug, Clone, Copy)]
struct Waiting {
    ticket: Ticket,
    client: usize,
    item: u32,
    input: f64,
    priority: i32,
    deadline_ms: u64,
}

#[derive(Debug)]
struct Running {
    grant: Grant,
    client: usize,
    input: f64,
    output: f64,
    paid: f64,
}

/// Who takes turns with the others: the only group, or a client beside it.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Taker {
    Group,
    Client(usize),
}

#[derive(Default)]
struct Twin {
    /// The first so many clients are of the group.
    grouped: usize,
    counters: BTreeMap<usize, f64>,
    of_group: f64,
    waiting: Vec<Waiting>,
    running: Vec<Running>,
    last_waiting: Option<Taker>,
    last_of_group: Option<usize>,
}

impl Twin {
    fn taker(&self, client: usize) -> Taker {
        if client < self.grouped { Taker::Group } else { Taker::Client(client) }
    }

    fn counter(&mut self, taker: Taker) -> &mut f64 {
        match taker {
            Taker::Group => &mut self.of_group,
            Taker::Client(client) => self.counters.entry(client).or_insert(0.0),
        }
    }

    fn lift(&mut self, client: usize) {
        self.counters.entry(client).or_insert(0.0);
        let waiting: Vec<usize> = self.waiting.iter().map(|one| one.client).collect();
        if waiting.contains(&client) {
            return;
        }
        let taker = self.taker(client);
        if taker == Taker::Group {
            let others = waiting.iter().filter(|&&other| other < self.grouped);
            let lowest = others.map(|other| self.counters[other]).min_by(f64::total_cmp);
            let level = lowest.or(self.last_of_group.map(|last| self.counters[&last]));
            let own = self.counters.entry(client).or_insert(0.0);
            *own = own.max(level.unwrap_or(0.0));
        }
        if waiting.iter().any(|&other| self.taker(other) == taker) {
            return;
        }
        let others = waiting.iter().map(|&other| *self.counter(self.taker(other)));
        let lowest = others.min_by(f64::total_cmp);
        let level = lowest.or(self.last_waiting.map(|last| *self.counter(last)));
        let own = self.counter(taker);
        *own = own.max(level.unwrap_or(0.0));
    }

    /// Of the taker with the lowest counter, of it the client with the lowest one, then the earliest first request.
    fn next(&mut self) -> Option<usize> {
        let mut clients: Vec<usize> = self.waiting.iter().map(|one| one.client).collect();
        clients.sort_unstable();
        clients.dedup();
        let firsts = clients.into_iter().map(|client| {
            let own = (0..self.waiting.len()).filter(|&at| self.waiting[at].client == client);
            own.min_by_key(|&at| (-self.waiting[at].priority, self.waiting[at].ticket)).unwrap()
        });
        let mut best = BTreeMap::new();
        for at in firsts {
            let Waiting { client, ticket, .. } = self.waiting[at];
            let taker = (client >= self.grouped).then_some(client);
            let key = (self.counters[&client], ticket, at);
            let known = best.entry(taker).or_insert(key);
            if key.partial_cmp(known).unwrap().is_lt() {
                *known = key;
            }
        }
        let of_takers = best.into_values().map(|(_, ticket, at)| {
            (*self.counter(self.taker(self.waiting[at].client)), ticket, at)
        });
        let first = of_takers.min_by(|a, b| a.partial_cmp(b).unwrap());
        first.map(|(_, _, at)| at)
    }

    fn remove(&mut self, at: usize) -> Waiting {
        let gone = self.waiting.remove(at);
        if gone.client < self.grouped && !self.waiting.iter().any(|one| one.client < self.grouped) {
            self.last_of_group = Some(gone.client);
        }
        if self.waiting.is_empty() {
            self.last_waiting = Some(self.taker(gone.client));
        }
        gone
    }

    fn expire(&mut self, now_ms: u64) -> Vec<u32> {
        let mut late: Vec<(u64, Ticket)> = (self.waiting.iter())
            .filter(|one| one.deadline_ms <= now_ms)
            .map(|one| (one.deadline_ms, one.ticket))
            .collect();
        late.sort_unstable();
        late.into_iter()
            .map(|(_, ticket)| {
                let at = self.waiting.iter().position(|one| one.ticket == ticket).unwrap();
                self.remove(at).item
            })
            .collect()
    }

    fn charge(&mut self, client: usize, service: f64) {
        let counter = self.counters.get_mut(&client).unwrap();
        *counter = (*counter + service).max(0.0);
        if client < self.grouped {
            self.of_group = (self.of_group + service).max(0.0);
        }
    }
}

proptest! {
    #[test]
    fn the_queue_does_as_its_twin(
        grouped in 0..4_usize,
        max_wait_ms in 1..40_u64,
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let limits = FairConfig { max_wait_ms, ..config(Discipline::VtcFair) };
        let mut queue: FairQueue<u32> = FairQueue::new(limits).unwrap();
        let mut twin = Twin { grouped, ..Twin::default() };
        let names: Vec<String> = (0..5).map(|client| client.to_string()).collect();
        let name = |client: usize| {
            ClientName { group: (client < grouped).then_some("g"), client: &names[client] }
        };
        let (mut now_ms, mut item) = (0, 0);
        for step in steps {
            match step {
                Step::Push { client, input, cached, priority } => {
                    item += 1;
                    twin.lift(client);
                    let deadline_ms = now_ms + max_wait_ms;
                    let score = f64::from(priority);
                    let standing = Standing { strict_priority: 0, score };
                    let cost = Cost { input_tokens: input, cached_tokens: cached };
                    let ticket = queue.push(name(client), item, cost, standing, now_ms).unwrap();
                    let input = input.saturating_sub(cached) as f64;
                    twin.waiting.push(Waiting {
                        ticket, client, item, input, priority, deadline_ms,
                    });
                }
                Step::Pop { largest } => {
                    let granted = queue.pop(now_ms, |&item| item <= largest);
                    let late = twin.expire(now_ms);
                    let dropped: Vec<u32> =
                        queue.expire(now_ms);
                    prop_assert_eq!(dropped, late);
                    let next = twin.next().filter(|&at| twin.waiting[at].item <= largest);
                    prop_assert_eq!(
                        granted.as_ref().map(|granted| granted.item),
                        next.map(|at| twin.waiting[at].item)
                    );
                    if let Some((granted, at)) = granted.zip(next) {
                        let Waiting { client, input, .. } = twin.remove(at);
                        let (paid, grant) = (price(input, 0.0), granted.grant);
                        twin.charge(client, paid);
                        twin.running.push(Running { grant, client, input, output: 0.0, paid });
                    }
                }
                Step::Tokens { nth, tokens } if nth < twin.running.len() => {
                    let running = &mut twin.running[nth];
                    queue.tokens(running.grant, tokens);
                    running.output += tokens as f64;
                    let due = price(running.input, running.output);
                    let (client, more) = (running.client, due - running.paid);
                    running.paid = due;
                    twin.charge(client, more);
                }
                Step::Finish { nth, output } if nth < twin.running.len() => {
                    let running = twin.running.remove(nth);
                    let used = Used { output_tokens: output, input_tokens: None };
                    prop_assert!(queue.finish(running.grant, used));
                    prop_assert!(!queue.finish(running.grant, used), "once");
                    let output = output.map_or(running.output, |output| output as f64);
                    twin.charge(running.client, price(running.input, output) - running.paid);
                }
                Step::Cancel { nth } if nth < twin.waiting.len() => {
                    let gone = twin.remove(nth);
                    prop_assert_eq!(queue.cancel(gone.ticket), Some(gone.item));
                }
                Step::Wait { ms } => now_ms += ms,
                _ => {}
            }
            for (client, &counter) in &twin.counters {
                prop_assert_eq!(queue.counter(name(*client)), Some(counter));
            }
            let stats = queue.stats();
            prop_assert_eq!(stats.running, twin.running.len());
            prop_assert_eq!(stats.queued, twin.waiting.len());
            prop_assert_eq!(stats.clients, twin.counters.len());
        }
    }
}
