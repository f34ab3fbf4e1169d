//! The queue against a list that is searched from end to end.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::super::*;
use super::config;

#[derive(Debug, Clone)]
enum Step {
    Push { client: usize, input: u64, cached: u64, priority: i32, wait_ms: u64 },
    Pop { largest: u32 },
    Tokens { nth: usize, tokens: u64 },
    Finish { nth: usize, output: Option<u64> },
    Cancel { nth: usize },
    Wait { ms: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..5_usize, 0..50_u64, 0..60_u64, -1..2_i32, 1..40_u64).prop_map(
            |(client, input, cached, priority, wait_ms)| Step::Push {
                client, input, cached, priority, wait_ms
            }
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

#[derive(Default)]
struct Twin {
    counters: BTreeMap<usize, f64>,
    waiting: Vec<Waiting>,
    running: Vec<Running>,
    last_waiting: Option<usize>,
}

impl Twin {
    fn lift(&mut self, client: usize, lifts: bool) {
        let own = *self.counters.entry(client).or_insert(0.0);
        if !lifts || self.waiting.iter().any(|one| one.client == client) {
            return;
        }
        let others = self.waiting.iter().map(|one| self.counters[&one.client]);
        let lowest = others.min_by(f64::total_cmp);
        let level = lowest.or(self.last_waiting.map(|last| self.counters[&last]));
        self.counters.insert(client, own.max(level.unwrap_or(0.0)));
    }

    /// Of the client with the lowest counter, then the earliest first request: its first request.
    fn next(&self) -> Option<usize> {
        let first = |client: usize| {
            let own = (0..self.waiting.len()).filter(|&at| self.waiting[at].client == client);
            own.min_by_key(|&at| (-self.waiting[at].priority, self.waiting[at].ticket))
        };
        let firsts = self.counters.keys().filter_map(|&client| first(client));
        firsts.min_by(|&a, &b| {
            let key =
                |at: usize| (self.counters[&self.waiting[at].client], self.waiting[at].ticket);
            key(a).partial_cmp(&key(b)).unwrap()
        })
    }

    fn remove(&mut self, at: usize) -> Waiting {
        let gone = self.waiting.remove(at);
        if self.waiting.is_empty() {
            self.last_waiting = Some(gone.client);
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
    }
}

proptest! {
    #[test]
    fn the_queue_does_as_its_twin(
        discipline in prop::sample::select(vec![Discipline::VtcFair, Discipline::Lcf]),
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let mut queue: FairQueue<u32> = FairQueue::new(config(discipline)).unwrap();
        let mut twin = Twin::default();
        let (mut now_ms, mut item) = (0, 0);
        let price = Price::default();
        for step in steps {
            match step {
                Step::Push { client, input, cached, priority, wait_ms } => {
                    item += 1;
                    twin.lift(client, discipline == Discipline::VtcFair);
                    let deadline_ms = now_ms + wait_ms;
                    let score = f64::from(priority);
                    let standing = Standing { strict_priority: 0, score };
                    let options = Options { standing, deadline_ms: Some(deadline_ms) };
                    let cost =
                        Cost { input_tokens: input, cached_tokens: cached, output_tokens: None };
                    let ticket =
                        queue.push(&client.to_string(), item, cost, options, now_ms).unwrap();
                    let input = input.saturating_sub(cached) as f64;
                    twin.waiting.push(Waiting {
                        ticket, client, item, input, priority, deadline_ms,
                    });
                }
                Step::Pop { largest } => {
                    let granted = queue.pop(now_ms, |&item| item <= largest);
                    let late = twin.expire(now_ms);
                    let dropped: Vec<u32> =
                        queue.expire(now_ms).into_iter().map(|one| one.item).collect();
                    prop_assert_eq!(dropped, late);
                    let next = twin.next().filter(|&at| twin.waiting[at].item <= largest);
                    prop_assert_eq!(
                        granted.as_ref().map(|granted| granted.item),
                        next.map(|at| twin.waiting[at].item)
                    );
                    if let Some((granted, at)) = granted.zip(next) {
                        let Waiting { client, input, .. } = twin.remove(at);
                        let (paid, grant) = (price.total(input, 0.0), granted.grant);
                        twin.charge(client, paid);
                        twin.running.push(Running { grant, client, input, output: 0.0, paid });
                    }
                }
                Step::Tokens { nth, tokens } if nth < twin.running.len() => {
                    let running = &mut twin.running[nth];
                    queue.tokens(running.grant, tokens);
                    running.output += tokens as f64;
                    let due = price.total(running.input, running.output);
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
                    twin.charge(running.client, price.total(running.input, output) - running.paid);
                }
                Step::Cancel { nth } if nth < twin.waiting.len() => {
                    let gone = twin.remove(nth);
                    prop_assert_eq!(queue.cancel(gone.ticket), Some(gone.item));
                }
                Step::Wait { ms } => now_ms += ms,
                _ => {}
            }
            for (client, &counter) in &twin.counters {
                prop_assert_eq!(queue.counter(&client.to_string()), Some(counter));
            }
            let stats = queue.stats();
            prop_assert_eq!(stats.running, twin.running.len());
            prop_assert_eq!(stats.queued, twin.waiting.len());
            prop_assert_eq!(stats.clients, twin.counters.len());
        }
    }
}
