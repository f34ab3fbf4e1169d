//! Frames in, steps out; and a dumb twin.

use super::Step::{Apply, Duplicate, Gap, Invalid, Restarted};
use super::*;
use proptest::prelude::*;

/// Plays one line a step: `live 3`, `replayed 3`, `skip_to 3`, `reset`, with what must come
/// out after `->`.
#[track_caller]
fn play(scenario: &str) -> Stream {
    let mut stream = Stream::default();
    let lines: Vec<_> = scenario.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    assert!(!lines.is_empty(), "a scenario of no steps proves nothing");
    for line in lines {
        let (call, expected) = line.split_once("->").unwrap_or((line, ""));
        let (verb, seq) = call.trim().split_once(' ').unwrap_or((call.trim(), "0"));
        let seq = if seq == "end" { END_OF_REPLAY } else { seq.parse().unwrap() };
        let step = match verb {
            "live" => stream.live(seq),
            "replayed" => stream.replayed(seq),
            "skip_to" => {
                stream.skip_to(seq);
                continue;
            }
            "reset" => {
                stream.reset();
                continue;
            }
            _ => panic!("unknown verb in: {line}"),
        };
        let said = match step {
            Apply => "apply".to_owned(),
            Gap { from, to } => format!("gap {from}..{to}"),
            Duplicate => "duplicate".to_owned(),
            Restarted => "restarted".to_owned(),
            Invalid => "invalid".to_owned(),
        };
        assert_eq!(said, expected.trim(), "at: {line}");
    }
    stream
}

#[test]
fn frames_in_order_are_applied() {
    let stream = play("live 0 -> apply\n live 1 -> apply\n live 2 -> apply");
    assert_eq!((stream.next(), stream.last()), (3, Some(2)));
    assert_eq!((stream.gaps, stream.lost), (0, 0));
}

#[test]
fn a_late_subscriber_asks_for_the_beginning() {
    let stream = play(
        "live 2     -> gap 0..1
         replayed 0 -> apply
         replayed 1 -> apply
         live 2     -> apply",
    );
    assert_eq!((stream.gaps, stream.lost), (1, 0));
}

#[test]
fn a_gap_is_repaired_and_counted_once() {
    let stream = play(
        "live 0     -> apply
         live 3     -> gap 1..2
         live 4     -> gap 1..3
         replayed 1 -> apply
         replayed 2 -> apply
         live 3     -> apply
         live 4     -> apply",
    );
    assert_eq!(stream.gaps, 1);
}

#[test]
fn a_gap_begins_after_the_last_one_applied() {
    play(
        "live 5 -> gap 0..4
         skip_to 5
         live 5 -> apply
         live 9 -> gap 6..8",
    );
}

#[test]
fn a_replay_may_run_past_the_gap() {
    play(
        "live 0     -> apply
         live 2     -> gap 1..1
         replayed 0 -> duplicate
         replayed 1 -> apply
         replayed 2 -> apply
         replayed 3 -> apply
         live 2     -> duplicate
         live 3     -> duplicate
         live 4     -> apply",
    );
}

#[test]
fn a_gap_that_cannot_be_repaired_is_given_up() {
    let stream = play(
        "live 0     -> apply
         live 9     -> gap 1..8
         replayed 6 -> gap 1..5
         skip_to 6
         replayed 6 -> apply
         replayed 7 -> apply
         live 9     -> gap 8..8
         skip_to 9
         live 9     -> apply
         skip_to 3
         live 10    -> apply",
    );
    assert_eq!((stream.lost, stream.gaps), (6, 2));
}

#[test]
fn a_live_number_that_repeats_is_a_restart() {
    play(
        "live 0 -> apply
         live 1 -> apply
         live 0 -> restarted
         live 0 -> apply
         live 1 -> apply
         live 1 -> restarted
         live 1 -> gap 0..0",
    );
}

#[test]
fn a_restart_of_which_the_first_frames_were_missed_starts_from_zero() {
    play(
        "live 0     -> apply
         live 1     -> apply
         live 2     -> apply
         live 3     -> apply
         live 2     -> restarted
         live 2     -> gap 0..1
         replayed 0 -> apply
         replayed 1 -> apply
         live 2     -> apply",
    );
}

#[test]
fn the_end_of_a_replay_is_not_a_batch() {
    let stream = play(
        "live end     -> invalid
         replayed end -> invalid
         live 0       -> apply
         live end     -> invalid
         skip_to end
         live 1       -> apply",
    );
    assert_eq!(stream.lost, 0);
}

#[test]
fn the_last_number_of_all_does_not_overflow() {
    let last = END_OF_REPLAY - 1;
    let mut stream = Stream::default();
    assert_eq!(stream.live(last), Gap { from: 0, to: last - 1 });
    stream.skip_to(last);
    assert_eq!(stream.live(last), Apply);
    assert_eq!(stream.next(), END_OF_REPLAY);
    assert_eq!(stream.replayed(0), Duplicate);
    assert_eq!(stream.live(0), Restarted);
}

#[test]
fn a_reset_keeps_the_counters() {
    let stream = play("live 4 -> gap 0..3\n skip_to 4\n live 4 -> apply\n reset\n live 0 -> apply");
    assert_eq!((stream.gaps, stream.lost), (1, 4));
}

#[test]
fn the_last_payload_proves_the_stream() {
    let mut stream = Stream::default();
    assert!(stream.verify(0, 1), "nothing contradicts while nothing was applied");
    assert_eq!(stream.live(0), Apply);
    assert_eq!(stream.last_payload_hash(), None);
    stream.applied(77);
    assert_eq!(stream.last_payload_hash(), Some(77));
    assert!(stream.verify(0, 77));
    assert_eq!(stream.next(), 1);
    assert_eq!(stream.live(1), Apply);
    assert_eq!(stream.last_payload_hash(), None, "the hash belongs to the batch before");
    stream.applied(78);
    assert!(!stream.verify(1, 79));
    assert_eq!((stream.next(), stream.last()), (0, None));
}

#[test]
fn a_frame_other_than_the_last_proves_nothing() {
    let mut stream = play("live 0 -> apply\n live 1 -> apply");
    stream.applied(78);
    assert!(!stream.verify(2, 78));
    assert_eq!((stream.next(), stream.last()), (0, None));
}

/// The machine by first principles: a list of what happened, nothing derived kept.
#[derive(Default)]
struct Twin {
    /// Numbers applied or given up.
    done: std::collections::BTreeSet<u64>,
    /// Live numbers taken.
    live: Vec<u64>,
}

impl Twin {
    fn next(&self) -> u64 {
        (0..).find(|seq| !self.done.contains(seq)).unwrap()
    }

    fn replayed(&mut self, seq: u64) -> Step {
        match seq {
            _ if self.done.contains(&seq) => Duplicate,
            _ if seq == self.next() => {
                self.done.insert(seq);
                Apply
            }
            _ => Gap { from: self.next(), to: seq - 1 },
        }
    }

    fn live(&mut self, seq: u64) -> Step {
        if self.live.iter().any(|&earlier| earlier >= seq) {
            *self = Self::default();
            return Restarted;
        }
        let step = self.replayed(seq);
        if !matches!(step, Gap { .. }) {
            self.live.push(seq);
        }
        step
    }

    fn skip_to(&mut self, seq: u64) {
        self.done.extend(0..seq);
    }
}

#[derive(Debug, Clone)]
enum Call {
    Live(u64),
    Replayed(u64),
    SkipTo(u64),
    Reset,
}

fn call() -> impl Strategy<Value = Call> {
    prop_oneof![
        8 => (0_u64..12).prop_map(Call::Live),
        8 => (0_u64..12).prop_map(Call::Replayed),
        2 => (0_u64..12).prop_map(Call::SkipTo),
        1 => Just(Call::Reset),
    ]
}

/// An engine that publishes, loses frames, restarts; payloads differ from life to life.
#[derive(Debug, Clone)]
enum Happening {
    Publish { is_lost: bool },
    Restart,
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        12 => any::<bool>().prop_map(|is_lost| Happening::Publish { is_lost }),
        1 => Just(Happening::Restart),
    ]
}

/// A consumer as the module's documentation tells it to be, with a replay that keeps all.
#[derive(Default)]
struct Consumer {
    stream: Stream,
    /// Payload hashes applied since the last restart that was noticed.
    applied: Vec<u64>,
}

impl Consumer {
    fn receive(&mut self, seq: u64, published: &[u64]) {
        loop {
            match self.stream.live(seq) {
                Apply => return self.apply(published[seq as usize]),
                Duplicate => return,
                Restarted => self.applied.clear(),
                Gap { from, .. } => self.repair(from, published),
                Invalid => unreachable!(),
            }
        }
    }

    fn repair(&mut self, from: u64, published: &[u64]) {
        let mut start = self.stream.last().unwrap_or(from) as usize;
        if let Some(&first) = published.get(start) {
            if !self.stream.verify(start as u64, first) {
                self.applied.clear();
                start = 0;
            }
        } else {
            self.stream.reset();
            self.applied.clear();
            start = 0;
        }
        for (seq, &payload) in published.iter().enumerate().skip(start) {
            if self.stream.replayed(seq as u64) == Apply {
                self.apply(payload);
            }
        }
    }

    fn apply(&mut self, payload: u64) {
        self.applied.push(payload);
        self.stream.applied(payload);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn it_equals_its_twin(calls in prop::collection::vec(call(), 1..60)) {
        let mut stream = Stream::default();
        let mut twin = Twin::default();
        for call in calls {
            match call {
                Call::Live(seq) => prop_assert_eq!(stream.live(seq), twin.live(seq)),
                Call::Replayed(seq) => {
                    prop_assert_eq!(stream.replayed(seq), twin.replayed(seq));
                }
                Call::SkipTo(seq) => {
                    stream.skip_to(seq);
                    twin.skip_to(seq);
                }
                Call::Reset => {
                    stream.reset();
                    twin = Twin::default();
                }
            }
            prop_assert_eq!(stream.next(), twin.next());
        }
    }

    #[test]
    fn no_number_panics(calls in prop::collection::vec((any::<u64>(), 0..4_u8), 1..60)) {
        let mut stream = Stream::default();
        for (seq, verb) in calls {
            // Half of the numbers from the upper end, where an overflow would be.
            let seq = if seq % 2 == 0 { u64::MAX - seq % 5 } else { seq };
            match verb {
                0 => drop(stream.live(seq)),
                1 => drop(stream.replayed(seq)),
                2 => stream.skip_to(seq),
                _ => drop(stream.verify(seq, seq)),
            }
        }
    }

    #[test]
    fn a_consumer_applies_one_life_of_the_engine_in_order(
        happenings in prop::collection::vec(happening(), 1..80),
    ) {
        let mut consumer = Consumer::default();
        let (mut life, mut published): (u64, Vec<u64>) = (0, Vec::new());
        for happening in happenings {
            match happening {
                Happening::Restart => {
                    life += 1;
                    published.clear();
                }
                Happening::Publish { is_lost } => {
                    let seq = published.len() as u64;
                    published.push(life << 32 | seq);
                    // The only loss that cannot be seen: a new epoch loses all frames up to the old
                    // one's next number.
                    let hides = consumer.stream.last_live.is_some_and(|last| seq > last)
                        && seq <= consumer.stream.next()
                        && consumer.applied.last().is_some_and(|last| last >> 32 != life);
                    if !is_lost && !hides {
                        consumer.receive(seq, &published);
                        prop_assert_eq!(&consumer.applied, &published);
                    }
                }
            }
        }
    }
}

#[test]
fn a_stream_goes_on_where_another_replica_stood() {
    let mut stream = Stream::default();
    stream.resume(41, Some(7), false);
    assert_eq!((stream.next(), stream.last()), (42, Some(41)));
    assert_eq!(stream.live(40), Duplicate);
    assert_eq!(stream.live(41), Duplicate);
    assert!(!stream.contradicts(41, 7));
    assert_eq!(stream.live(42), Apply);
    assert_eq!(stream.live(3), Restarted);
}

#[test]
fn a_duplicate_with_another_payload_is_a_restart() {
    let mut stream = Stream::default();
    stream.resume(41, Some(7), false);
    assert_eq!(stream.live(41), Duplicate);
    assert!(stream.contradicts(41, 8));
    assert_eq!((stream.next(), stream.last()), (0, None));
    stream.resume(41, None, false);
    assert!(!stream.contradicts(41, 8), "nothing is known of the payload");
    assert!(!stream.contradicts(40, 8), "nothing is known of earlier batches");
}

#[test]
fn what_was_heard_before_does_not_come_live_again() {
    let mut stream = Stream::default();
    stream.resume(41, Some(7), true);
    assert_eq!(stream.live(41), Restarted);
    stream.resume(41, Some(7), true);
    assert_eq!(stream.live(44), Gap { from: 42, to: 43 });
    stream.resume(END_OF_REPLAY, None, true);
    assert_eq!((stream.next(), stream.last()), (0, None));
}
