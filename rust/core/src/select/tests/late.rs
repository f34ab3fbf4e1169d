//! Routers that start beside engines which have run for a while.

use super::*;
use crate::catalog::{ListenerStatus, Publisher, Unheard};
use crate::repair::{Feed, FrameOutcome};

/// A batch without events, as engines encode it.
const EMPTY: [u8; 11] = [0x92, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x90];
/// Blocks of the prompts below.
const BLOCKS: u32 = 12;

impl Bench {
    fn publisher(&self, at: Worker) -> Arc<Publisher> {
        let all = self.catalog.publishers();
        all.into_iter().find(|publisher| publisher.worker == at).unwrap()
    }

    fn unheard(&self) -> Vec<(u64, Unheard)> {
        let all = self.selector.model().all_unheard();
        all.into_iter().map(|(worker, why)| (worker.instance_id, why)).collect()
    }

    /// An engine that published its first seven batches before any subscription.
    fn begun_late(&self, at: Worker) -> Arc<Publisher> {
        let publisher = self.publisher(at);
        publisher.set_status(ListenerStatus::Active, None);
        assert_eq!(publisher.live(7, &EMPTY), FrameOutcome::Gap { from: 0, to: 6 });
        publisher.give_up(7);
        assert_eq!(publisher.live(7, &EMPTY), FrameOutcome::Applied);
        publisher
    }

    /// The engine says that it reused all of a prompt of which no event told.
    fn reuses_what_is_not_known(&self, at: Worker, prompt: u32) -> Option<ReuseChange> {
        let tokens: Vec<u32> =
            (0..=BLOCKS * BLOCK_SIZE).map(|token| prompt * 1_000 + token).collect();
        let prompt = self.prompt(&tokens);
        let pin = Some(Pin { instance_id: at.instance_id, dp_rank: None });
        let (_held, selection) = self.selector.select(&Ask { pin, ..Ask::new(&prompt) }).unwrap();
        self.selector.compare(&prompt, &selection, Some(u64::from(BLOCKS * BLOCK_SIZE)))
    }
}

#[test]
fn the_index_says_what_it_has_not_heard_of_until_it_knows() {
    let bench = plain(3);
    bench.register(3);
    assert_eq!(bench.unheard(), [0, 1, 2].map(|id| (id, Unheard::Silent)));
    // An engine that begins now is known from its first batch on.
    let begun_now = bench.publisher(worker(0));
    begun_now.set_status(ListenerStatus::Active, None);
    begun_now.live(0, &EMPTY);
    let late = bench.begun_late(worker(1));
    assert_eq!(bench.unheard(), [(1, Unheard::Missed), (2, Unheard::Silent)]);
    late.live(8, &EMPTY);
    assert_eq!(bench.selector.model().unheard(worker(1)), Some(Unheard::Missed));
    // Its process is another one: it holds nothing, which its first batch shows.
    late.restarted();
    assert_eq!(bench.unheard(), [(1, Unheard::Silent), (2, Unheard::Silent)]);
    late.live(0, &EMPTY);
    bench.catalog.unregister(2, "m", None, None).unwrap();
    assert_eq!(bench.unheard(), []);
}

#[test]
fn a_replay_is_not_known_before_its_end() {
    let bench = plain(1);
    bench.register(1);
    let publisher = bench.publisher(worker(0));
    publisher.set_status(ListenerStatus::Active, None);
    publisher.replay_started();
    assert_eq!(bench.unheard(), [(0, Unheard::Replaying)]);
    for sequence in 0..3 {
        assert_eq!(publisher.replayed(sequence, &EMPTY), FrameOutcome::Applied);
        assert_eq!(bench.unheard(), [(0, Unheard::Replaying)]);
    }
    publisher.replay_ended(None, false);
    assert_eq!(bench.unheard(), []);
}

#[test]
fn the_first_replay_is_over_when_it_ended_or_can_not_come() {
    let bench = plain(1);
    assert!(bench.catalog.is_caught_up());
    let subscribe = |replay: Option<&str>| {
        let _gone = bench.catalog.unregister(0, "m", None, None);
        let registration = Registration {
            replay_endpoint: replay.map(str::to_owned),
            ..bench.registration(worker(0))
        };
        let publisher = bench.catalog.register(registration).unwrap();
        assert!(!bench.catalog.is_caught_up(), "it has not connected yet");
        publisher.set_status(ListenerStatus::Active, None);
        publisher
    };
    subscribe(None);
    assert!(bench.catalog.is_caught_up());
    for end in [(None, true), (Some("silent"), false)] {
        let publisher = subscribe(Some("tcp://127.0.0.1:6000"));
        assert!(!bench.catalog.is_caught_up(), "it is about to be asked");
        publisher.replay_started();
        assert!(!bench.catalog.is_caught_up());
        publisher.replay_ended(end.0, end.1);
        assert!(bench.catalog.is_caught_up(), "{end:?}");
    }
}

#[test]
fn what_an_engine_stored_before_it_was_heard_of_is_no_lie() {
    let bench = plain(2);
    bench.register(2);
    bench.begun_late(worker(1));
    for prompt in 0..40 {
        assert_eq!(bench.reuses_what_is_not_known(worker(1), prompt), None);
    }
    let view = bench.selector.reuse.views()[&worker(1)];
    assert_eq!((view.samples, view.finding, view.credit), (40, None, 1.0));
}

#[test]
fn known_blocks_that_fill_a_cache_are_all_that_is_in_it() {
    let bench = plain(2);
    bench.register(2);
    bench.begun_late(worker(1));
    let tokens: Vec<u32> = (0..BLOCKS * BLOCK_SIZE).collect();
    bench.store(worker(1), Tier::Device, &tokens);
    let told = |kv_total_blocks| {
        let report = Report { kv_total_blocks, ..Report::default() };
        bench.selector.busy.report(worker(1), &report);
        bench.selector.tick();
        bench.selector.model().unheard(worker(1))
    };
    assert_eq!(told(None), Some(Unheard::Missed));
    assert_eq!(told(Some(u64::from(BLOCKS + 1))), Some(Unheard::Missed));
    assert_eq!(told(Some(u64::from(BLOCKS))), None);
    // From now on its events are to tell of all that it reuses.
    let found: Vec<_> =
        (1..40).filter_map(|prompt| bench.reuses_what_is_not_known(worker(1), prompt)).collect();
    assert_eq!(found, [ReuseChange::Distrusted(ReuseFinding::ReuseNotInEvents)]);
}
