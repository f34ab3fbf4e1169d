//! Scenarios: an input, and after `->` the expected effects.

use std::cell::RefCell;

use super::*;
use crate::stream::{END_OF_REPLAY, Step, Stream};

/// An index by first principles: the numbers that it accepted, and the calls that it received.
#[derive(Default)]
struct Log(RefCell<Taken>);

#[derive(Default)]
struct Taken {
    stream: Stream,
    applied: Vec<u64>,
    lost: Vec<u64>,
    malformed: usize,
    failed: usize,
    empty: usize,
}

impl Log {
    fn take(
        &self,
        sequence: u64,
        payload: &[u8],
        call: fn(&mut Stream, u64) -> Step,
    ) -> FrameOutcome {
        let taken = &mut *self.0.borrow_mut();
        let mut step = call(&mut taken.stream, sequence);
        if step == Step::Restarted {
            taken.applied.clear();
            step = call(&mut taken.stream, sequence);
        }
        match step {
            Step::Apply => {
                taken.stream.applied(payload[0].into());
                taken.applied.push(sequence);
                FrameOutcome::Applied
            }
            Step::Gap { from, to } => FrameOutcome::Gap { from, to },
            Step::Duplicate | Step::Restarted | Step::Invalid => FrameOutcome::Applied,
        }
    }
}

impl Feed for Log {
    fn live(&self, sequence: u64, payload: &[u8]) -> FrameOutcome {
        self.take(sequence, payload, Stream::live)
    }

    fn replayed(&self, sequence: u64, payload: &[u8]) -> FrameOutcome {
        self.take(sequence, payload, Stream::replayed)
    }

    fn verify(&self, first: Option<(u64, &[u8])>) -> bool {
        let taken = &mut *self.0.borrow_mut();
        let is_same = first
            .is_some_and(|(sequence, payload)| taken.stream.verify(sequence, payload[0].into()));
        if !is_same {
            taken.stream.reset();
            taken.applied.clear();
        }
        is_same
    }

    fn give_up(&self, sequence: u64) {
        let taken = &mut *self.0.borrow_mut();
        taken.lost.extend(taken.stream.next()..sequence.min(taken.stream.next() + 100));
        taken.stream.skip_to(sequence);
    }

    fn position(&self) -> (u64, Option<u64>) {
        let stream = &self.0.borrow().stream;
        (stream.next(), stream.last())
    }

    fn malformed(&self) {
        self.0.borrow_mut().malformed += 1;
    }

    fn replay_started(&self) {}

    fn replay_ended(&self, failure: Option<&str>, is_empty: bool) {
        let taken = &mut *self.0.borrow_mut();
        taken.failed += usize::from(failure.is_some());
        taken.empty += usize::from(is_empty);
    }
}

/// Frames of numbers; `x` is a malformed message, `'` after a number marks another epoch of the
/// engine.
fn frames(words: &[&str]) -> Vec<Option<Frame>> {
    let frame = |word: &&str| {
        let payload = vec![u8::from(word.ends_with('\''))];
        let number = word.trim_end_matches('\'');
        let sequence = if number == "far" { END_OF_REPLAY } else { number.parse().ok()? };
        Some(Frame { sequence, payload })
    };
    words.iter().map(frame).collect()
}

#[test]
fn a_reply_ends_with_its_marker_or_an_empty_message() {
    let batch = |sequence| Some(Frame { sequence, payload: vec![1] });
    for (parts, sequence, payload, has_ended) in [
        (3, Some(END_OF_REPLAY), &b""[..], true),
        (2, Some(END_OF_REPLAY), b"x", true),
        (3, Some(3), b"", false),
        (2, None, b"", false),
        (1, None, b"x", false),
        (0, None, b"", false),
    ] {
        let mut answer = Answer::default();
        answer.add(3, Some(1), &[1]);
        answer.add(3, None, b"not a batch");
        assert!(!answer.is_over, "before {parts} parts, {sequence:?}");
        answer.add(parts, sequence, payload);
        answer.add(3, Some(2), &[1]);
        let wanted = Answer { frames: vec![batch(1), None], is_over: true, has_ended };
        assert_eq!(answer, wanted, "{parts} parts, {sequence:?}, {payload:?}");
    }
}

/// Plays one line a step. `answer 1 2 ...` is a part of an answer, `answer 1 end` the last one, and
/// `answer 1 cut` one that ends without its mark. Time stands still but for `silent`.
#[track_caller]
fn play(has_endpoint: bool, scenario: &str) -> (Repair, Taken) {
    let (mut repair, feed) = (Repair::new(has_endpoint, 500, false), Log::default());
    let mut now_ms = 0;
    let lines: Vec<_> = scenario.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    assert!(!lines.is_empty(), "a scenario of no steps proves nothing");
    for line in lines {
        let (call, expected) = line.split_once("->").unwrap_or((line, ""));
        let words: Vec<_> = call.split_whitespace().collect();
        let (verb, rest) = words.split_first().expect("a verb");
        let effects = match *verb {
            "connected" => repair.connected(&feed, now_ms),
            "live" => repair.live(&feed, frames(rest), now_ms),
            "answer" => {
                let (last, before) = rest.split_last().map_or(("", &[][..]), |(l, b)| (*l, b));
                let (has_ended, is_over) = (last == "end", last == "end" || last == "cut");
                let frames = frames(if is_over { before } else { rest });
                repair.answered(&feed, Answer { frames, is_over, has_ended }, now_ms)
            }
            "silent" => {
                now_ms = repair.deadline_ms().expect("a replay under way");
                repair.silent(&feed, rest == ["more"], now_ms)
            }
            "unreachable" => repair.unreachable(&feed, "it is".to_owned(), now_ms),
            "hold" => {
                repair.hold();
                Vec::new()
            }
            "release" => repair.release(&feed, true, now_ms),
            _ => panic!("unknown verb in: {line}"),
        };
        let said: Vec<_> = effects
            .into_iter()
            .map(|effect| match effect {
                Effect::Ask(first) => format!("ask {first}"),
                Effect::Dismiss => "dismiss".to_owned(),
                Effect::Peek => "peek".to_owned(),
                Effect::Lost(from, to, _) => format!("lost {from}..{to}"),
                Effect::Failed(first, _) => format!("failed {first}"),
            })
            .collect();
        assert_eq!(said.join(", "), expected.trim(), "at: {line}");
    }
    (repair, feed.0.into_inner())
}

fn count(to: u64) -> Vec<u64> {
    (0..=to).collect()
}

#[test]
fn what_was_dropped_is_replayed() {
    let (repair, taken) = play(
        true,
        "connected      -> ask 0
         answer end     -> dismiss
         live 0 1 5 6   -> ask 2
         answer 2 3
         answer 4 5 6 end -> dismiss
         live 7",
    );
    assert_eq!((taken.applied, taken.lost), (count(7), vec![]));
    assert_eq!((repair.wants_live(), repair.deadline_ms(), taken.empty), (true, None, 1));
}

#[test]
fn live_frames_wait_for_the_end_of_a_replay_and_are_applied_once() {
    let (repair, _) = play(true, "live 0 3 -> ask 1");
    assert!(!repair.wants_live());
    let (_, taken) = play(true, "live 0 3 4 5 -> ask 1\n answer 1 2 3 4 end -> dismiss\n live 6");
    assert_eq!(taken.applied, count(6));
}

#[test]
fn without_a_replay_endpoint_what_is_lost_is_told() {
    let (_, taken) = play(false, "connected\n live 0 3 -> lost 1..2\n live 4");
    assert_eq!((taken.applied, taken.lost), (vec![0, 3, 4], vec![1, 2]));
}

#[test]
fn what_came_before_the_subscription_is_caught_up_without_a_live_frame() {
    let (_, taken) = play(true, "connected -> ask 0\n answer 0 1 2 end -> dismiss");
    assert_eq!((taken.applied, taken.empty), (count(2), 0));
}

#[test]
fn a_ring_that_begins_later_gives_what_it_has() {
    let (_, taken) = play(true, "live 0 9 -> ask 1\n answer 6 7 8 9 end -> dismiss\n live 10");
    assert_eq!((taken.applied, taken.lost), (vec![0, 6, 7, 8, 9, 10], count(5)[1..].to_vec()));
    // Without a live frame that waits: those in the socket are looked at first.
    let (_, taken) = play(
        true,
        "connected  -> ask 0
         answer 3 4 -> peek
         live
         answer end -> dismiss
         live 5",
    );
    assert_eq!((taken.applied, taken.lost), (vec![3, 4, 5], vec![0, 1, 2]));
}

#[test]
fn a_ring_that_begins_later_does_not_cost_frames_that_came_live() {
    let (_, taken) = play(true, "live 0 2 3 -> ask 1\n answer 8 9 end -> dismiss\n live 4");
    assert_eq!((taken.applied, taken.lost), (vec![0, 2, 3, 4], vec![1]));
}

#[test]
fn live_frames_in_the_socket_count_as_well() {
    let (_, taken) = play(
        true,
        "connected      -> ask 0
         answer 8 9 end -> peek
         live x 2 3 4   -> dismiss
         live 5",
    );
    assert_eq!((taken.applied, taken.lost, taken.malformed), (vec![2, 3, 4, 5], vec![0, 1], 1));
}

#[test]
fn a_replay_of_a_far_number_does_not_deafen() {
    let far = 1_u64 << 40;
    let scenario = format!("live 0 2 -> ask 1\n answer {far} end -> dismiss\n live 3");
    let (_, taken) = play(true, &scenario);
    assert_eq!((taken.applied, taken.lost), (vec![0, 2, 3], vec![1]));
}

#[test]
fn a_replay_without_an_answer_ends_and_the_next_gap_tries_again() {
    let (_, taken) = play(
        true,
        "live 0 2   -> ask 1
         silent     -> dismiss, failed 1
         live 4     -> ask 3
         answer 3 4 end -> dismiss",
    );
    assert_eq!((taken.applied, taken.lost, taken.failed), (vec![0, 2, 3, 4], vec![1], 1));
}

#[test]
fn an_answer_that_waits_for_its_turn_is_not_late() {
    let (repair, _) = play(true, "live 0 2 -> ask 1\n silent more");
    assert_eq!(repair.deadline_ms(), Some(1_000));
    let (_, taken) = play(true, "live 0 2 -> ask 1\n silent more\n answer 1 2 end -> dismiss");
    assert_eq!(taken.applied, count(2));
}

#[test]
fn a_replay_that_stalls_midway_keeps_what_came() {
    let (_, taken) = play(
        true,
        "live 0 5   -> ask 1
         answer 1 2
         silent     -> ask 3
         silent     -> dismiss, failed 3
         live 6",
    );
    assert_eq!((taken.applied, taken.lost), (vec![0, 1, 2, 5, 6], vec![3, 4]));
}

#[test]
fn the_rest_of_a_replay_that_stops_midway_is_requested_soon() {
    let asked = "live 0 5 -> ask 1";
    for (answers, deadline_ms) in [("", 500), ("answer 1 2", 50), ("answer 1 2\n answer 3", 50)] {
        let (repair, _) = play(true, &format!("{asked}\n {answers}"));
        assert_eq!(repair.deadline_ms(), Some(deadline_ms), "{answers}");
    }
    // The known batch that proves the stream is the same says nothing about the rest.
    let (repair, _) = play(true, "live 0 1 2\n connected -> ask 2\n answer 2");
    assert_eq!(repair.deadline_ms(), Some(500));
    // The engine may still be busy with the first reply, so the second one gets the whole time.
    let (repair, _) = play(true, &format!("{asked}\n answer 1 2\n silent -> ask 3"));
    assert_eq!(repair.deadline_ms(), Some(550));
    // So does one that is requested for a hole, or for a gap behind the replay.
    for answer in ["answer 1 2 4 -> ask 3", "answer 1 2 3 4 end -> dismiss, ask 6"] {
        let (repair, _) = play(true, &format!("live 0 5 7 -> ask 1\n {answer}"));
        assert_eq!(repair.deadline_ms(), Some(500), "{answer}");
    }
}

#[test]
fn a_replay_that_only_repeats_itself_ends() {
    let (_, taken) = play(
        true,
        "live 0 5    -> ask 1
         answer 1
         answer 1 1
         silent more -> ask 2
         answer 1
         answer 1
         silent more -> dismiss, failed 2
         live 6",
    );
    assert_eq!((taken.applied, taken.lost), (vec![0, 1, 5, 6], vec![2, 3, 4]));
    // While new batches come it goes on.
    let (repair, _) = play(true, "live 0 9 -> ask 1\n answer 1\n silent more\n answer 2 3");
    assert_eq!(repair.deadline_ms(), Some(100));
}

#[test]
fn an_endless_replay_ends() {
    let (mut repair, feed) = play(true, "live 0 5 -> ask 1");
    let feed = Log(feed.into());
    let endless = Answer { frames: frames(&["1"; 1 << 12]), is_over: false, has_ended: false };
    let effects = (0..=1 << 8).flat_map(|_| repair.answered(&feed, endless.clone(), 0));
    let effects: Vec<_> = effects.collect();
    let [Effect::Dismiss, Effect::Failed(1, why), Effect::Ask(2)] = &effects[..] else {
        panic!("{effects:?}");
    };
    assert!(why.contains("1048576"), "{why}");
}

#[test]
fn lines_about_losses_are_held_back() {
    let (mut repair, feed) = (Repair::new(false, 500, false), Log::default());
    let mut lines = |now_ms: u64, sequence: u64| {
        let frame = Frame { sequence, payload: vec![0] };
        repair.live(&feed, vec![Some(frame)], now_ms)
    };
    let told: usize = (0..100).map(|at| lines(at, 2 * at).len()).sum();
    assert_eq!(told, 5);
    assert_eq!(lines(60_100, 300), [Effect::Lost(199, 299, 94)]);
}

#[test]
fn a_replay_with_holes_is_asked_for_again() {
    let (_, taken) = play(
        true,
        "live 0 8       -> ask 1
         answer 1 2 5 6 -> ask 3
         answer 3 4 7 8 -> ask 5
         answer 5 6 7 8 end -> dismiss",
    );
    assert_eq!((taken.applied, taken.lost), (count(8), vec![]));
}

#[test]
fn nobody_at_the_replay_endpoint() {
    let (_, taken) = play(true, "live 0 2 -> ask 1\n unreachable -> dismiss, failed 1\n live 3");
    assert_eq!((taken.applied, taken.lost), (vec![0, 2, 3], vec![1]));
}

#[test]
fn a_replay_of_garbage_ends_and_the_stream_goes_on() {
    for garbage in ["cut", "x cut", "x x", "0 end", "far end", "end"] {
        let end = if garbage == "x x" { "silent -> dismiss, failed 1" } else { "" };
        let after = if end.is_empty() { "-> dismiss" } else { "" };
        let (_, taken) = play(
            true,
            &format!(
                "live 0 2 -> ask 1
                 answer {garbage} {after}
                 {end}
                 live 4 -> ask 3
                 answer 3 4 end -> dismiss"
            ),
        );
        assert_eq!((taken.applied, taken.lost), (vec![0, 2, 3, 4], vec![1]), "{garbage}");
    }
}

#[test]
fn the_end_mark_and_what_is_no_frame_are_passed_over_live() {
    let (_, taken) = play(true, "live 0 far x 1");
    assert_eq!((taken.applied, taken.malformed), (vec![0, 1], 1));
}

#[test]
fn a_new_connection_is_verified() {
    let (_, taken) = play(
        true,
        "live 0 1 2
         connected  -> ask 2
         answer 2 3 end -> dismiss
         live 4",
    );
    assert_eq!(taken.applied, count(4));
    let (_, taken) = play(true, "live 0 1\n connected -> ask 1\n answer x -> dismiss, failed 1");
    assert_eq!((taken.applied, taken.failed), (vec![0, 1], 1));
}

#[test]
fn a_restart_while_disconnected_is_found_without_a_live_frame() {
    for (answer, whole, applied) in [
        // Nothing yet, fewer than before, and past the old one's last batch.
        ("end", "end", vec![]),
        ("end", "0' end", vec![0]),
        ("2' 3' end", "0' 1' 2' 3' end", count(3)),
    ] {
        let (_, taken) = play(
            true,
            &format!(
                "live 0 1 2
                 connected -> ask 2
                 answer {answer} -> ask 0
                 answer {whole} -> dismiss"
            ),
        );
        assert_eq!(taken.applied, applied);
    }
}

#[test]
fn a_verification_without_an_answer_leaves_the_restart_to_the_live_frames() {
    let (_, taken) = play(
        true,
        "live 0 1 2
         connected  -> ask 2
         silent     -> dismiss, failed 2
         live 2'    -> ask 0
         answer 0' 1' 2' end -> dismiss",
    );
    assert_eq!(taken.applied, count(2));
}

#[test]
fn what_follows_a_verification_without_an_answer_is_verified_with_the_next_gap() {
    let (_, taken) = play(
        true,
        "live 0 1
         connected  -> ask 1
         silent     -> dismiss, failed 1
         live 3'    -> ask 1
         answer 1'  -> ask 0
         answer 0' 1' 2' 3' end -> dismiss
         live 5'    -> ask 4
         answer 4' 5' end -> dismiss",
    );
    assert_eq!(taken.applied, count(5));
    let (_, taken) = play(
        true,
        "live 0 1
         connected  -> ask 1
         silent     -> dismiss, failed 1
         live 3     -> ask 1
         silent     -> dismiss, failed 2
         live 5     -> ask 3
         answer 3 4 5 end -> dismiss
         live 7     -> ask 6
         answer 6 end -> dismiss",
    );
    assert_eq!((taken.applied, taken.lost), (vec![0, 1, 3, 4, 5, 6, 7], vec![2]));
}

#[test]
fn a_connection_during_a_replay_is_verified_after_it() {
    let (_, taken) = play(
        true,
        "live 0 2   -> ask 1
         connected
         connected
         answer 1 2 end -> dismiss, ask 2
         answer 2 end   -> dismiss",
    );
    assert_eq!(taken.applied, count(2));
}

#[test]
fn what_is_held_asks_for_nothing_until_it_is_released() {
    let (repair, _) = play(true, "live 0\n hold\n connected");
    assert!(!repair.wants_live());
    let (repair, taken) = play(
        true,
        "live 0 2   -> ask 1
         hold
         release
         hold
         answer 1 2 end -> dismiss
         release    -> ask 2
         answer 2 3 end -> dismiss",
    );
    assert_eq!((taken.applied, repair.wants_live()), (count(3), true));
}

#[test]
fn what_comes_for_a_replay_that_is_over_is_dropped() {
    let (_, taken) = play(true, "live 0\n answer 1 end\n unreachable");
    assert_eq!(taken.applied, vec![0]);
}
