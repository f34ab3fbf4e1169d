//! Sessions stay with the worker of their last request until it can't take one.

use super::*;
use crate::load::ActiveLoad;
use crate::policy::{Affinity, Candidate, Sample, Seat, Session, Settings, registry};
use crate::select::{BusyTable, Report, Thresholds};

const TTL_SECS: u64 = 60;

struct Bench {
    router: Arc<Router>,
    affinity: Arc<Affinity>,
    clock: Arc<ManualClock>,
}

/// A router of three workers with the policy `name`.
fn bench(name: &str) -> Bench {
    let affinity = Arc::new(Affinity::new(TTL_SECS).unwrap());
    let mut rng = SmallRng::seed_from_u64(1);
    let active = registry::build(name, &Settings::default(), &mut rng).unwrap();
    let policies =
        Policies { active, affinity: Some(Arc::clone(&affinity)), ..Policies::default() };
    let clock = Arc::new(ManualClock::default());
    let router = Router::with_policies(sized(4), policies, Arc::clone(&clock) as _).unwrap();
    let router = Arc::new(router);
    router.set_workers(&workers([1, 2, 3])).unwrap();
    Bench { router, affinity, clock }
}

fn candidate(id: u64) -> Candidate {
    Candidate::new(Worker::new(id, 0), ActiveLoad::default())
}

fn of_session(key: &str) -> Ask<'_> {
    let session = Session { worker: None, key: Some(key) };
    Ask { session, ..request(8, &[1, 2]) }
}

impl Bench {
    /// Where `request` goes, and why; it ends at once.
    fn route(&self, request: &Ask<'_>) -> (Worker, Reason) {
        let mut considered = Considered::default();
        let before = self.router.preview(request, &mut considered).map(|one| one.choice);
        let (_booking, decision) = self.router.route(request, &mut considered).unwrap();
        if decision.choice.reason == Reason::SessionAffinity {
            assert_eq!(before.unwrap(), decision.choice, "a preview says the same");
        }
        (decision.worker, decision.choice.reason)
    }

    fn sample(&self, name: &str, label: &str) -> f64 {
        let mut found = f64::NAN;
        self.affinity.samples(&mut |sample: Sample<'_>| {
            if (sample.name, sample.label.1) == (name, label) {
                found = sample.value;
            }
        });
        found
    }

    fn requests(&self) -> [f64; 3] {
        ["begun", "kept", "moved"].map(|end| self.sample("session_affinity_requests_total", end))
    }
}

#[test]
fn under_every_policy_a_session_stays_where_its_last_request_went() {
    let names = ["kv", "round-robin", "random", "least-loaded", "power-of-two"];
    let others = ["least-request", "prefix-cache", "prefix-cache:2,least-request:1"];
    for name in names.into_iter().chain(others) {
        let bench = bench(name);
        let (home, first) = bench.route(&of_session("a"));
        assert_ne!(first, Reason::SessionAffinity, "{name}");
        // Work there makes no difference, as long as it takes requests.
        let only = |worker: Worker| worker == home;
        let mut considered = Considered::default();
        let fill = Ask { allowed: Some(&only), ..request(4_000, &[]) };
        let _load = bench.router.route(&fill, &mut considered).unwrap();
        for _ in 0..20 {
            assert_eq!(bench.route(&of_session("a")), (home, Reason::SessionAffinity), "{name}");
        }
        assert_eq!(bench.requests(), [1.0, 20.0, 0.0], "{name}");
    }
}

#[test]
fn a_worker_that_can_take_no_request_loses_its_sessions() {
    let bench = bench("kv");
    let (home, _) = bench.route(&of_session("a"));
    // Busy: another one takes it, and keeps it when the first one is free again.
    let limit = Thresholds { active_prefill_tokens: Some(0), ..Thresholds::default() };
    let table = BusyTable::new(limit).unwrap();
    table.set_workers(&workers([1, 2, 3]));
    table.report(home, &Report { active_prefill_tokens: Some(1), ..Report::default() });
    let known = Known { busy: Some(&table), ..Known::default() };
    let (second, reason) = bench.route(&Ask { known, ..of_session("a") });
    assert_ne!((second, reason), (home, Reason::SessionAffinity));
    assert_eq!(bench.route(&of_session("a")), (second, Reason::SessionAffinity));
    // Not allowed, as after a failed attempt.
    let not_there = |worker: Worker| worker != second;
    let barred = Ask { allowed: Some(&not_there), ..of_session("a") };
    let (third, _) = bench.route(&barred);
    assert_ne!(third, second);
    // Gone.
    let left: Vec<Worker> =
        workers([1, 2, 3]).into_iter().filter(|worker| *worker != third).collect();
    bench.router.set_workers(&left).unwrap();
    let (fourth, reason) = bench.route(&of_session("a"));
    assert_ne!((fourth, reason), (third, Reason::SessionAffinity));
    bench.router.set_workers(&workers([1, 2, 3])).unwrap();
    assert_eq!(bench.route(&of_session("a")), (fourth, Reason::SessionAffinity));
    assert_eq!(bench.requests(), [1.0, 2.0, 3.0]);
}

#[test]
fn a_session_is_forgotten_so_long_after_its_last_request() {
    let bench = bench("round-robin");
    let (home, _) = bench.route(&of_session("a"));
    for _ in 0..3 {
        bench.clock.advance(TTL_SECS * 1_000 - 1);
        bench.router.expire();
        assert_eq!(bench.route(&of_session("a")), (home, Reason::SessionAffinity));
    }
    bench.clock.advance(TTL_SECS * 1_000);
    // Even without a cleanup.
    let mut considered = Considered::default();
    let preview = bench.router.preview(&of_session("a"), &mut considered).unwrap();
    assert_eq!(preview.choice.reason, Reason::Turn);
    assert_eq!(bench.sample("session_affinity_sessions", ""), 1.0);
    bench.router.expire();
    assert_eq!(bench.sample("session_affinity_sessions", ""), 0.0);
    assert_eq!(bench.sample("session_affinity_forgotten_total", "expired"), 1.0);
    assert_eq!(bench.route(&of_session("a")).1, Reason::Turn);
}

#[test]
fn previews_and_requests_without_a_key_begin_no_session() {
    let bench = bench("kv");
    let mut considered = Considered::default();
    bench.router.preview(&of_session("a"), &mut considered).unwrap();
    for request in [request(8, &[1, 2]), of_session("")] {
        bench.route(&request);
        assert_ne!(bench.route(&request).1, Reason::SessionAffinity);
    }
    let told = Session { worker: Some(Worker::new(2, 0)), key: None };
    let named = Ask { session: told, ..request(8, &[1, 2]) };
    bench.route(&named);
    assert_eq!(bench.sample("session_affinity_sessions", ""), 0.0);
    let key = "k".repeat(257);
    let error = bench.router.route(&of_session(&key), &mut considered).err().unwrap().to_string();
    assert_eq!(error, "session_key may have at most 256 bytes, got 257");
}

#[test]
fn the_margin_says_what_staying_costs() {
    let bench = bench("kv");
    let (home, _) = bench.route(&of_session("a"));
    let mut considered = Considered::default();
    let only = |worker: Worker| worker == home;
    let fill = Ask { allowed: Some(&only), ..request(40, &[]) };
    let _load = bench.router.route(&fill, &mut considered).unwrap();
    let decision = bench.router.preview(&of_session("a"), &mut considered).unwrap();
    // Ten blocks wait there, and nowhere else.
    assert_eq!((decision.worker, decision.choice.margin), (home, Some(-10.0)));
    assert_eq!(decision.choice.reason.name(), "session_affinity");
}

#[test]
fn two_routers_of_one_table_have_sessions_of_their_own() {
    let affinity = Arc::new(Affinity::new(1).unwrap());
    let (one, other) = (affinity.seat(), affinity.seat());
    let session = Session { worker: None, key: Some("a") };
    one.routed(session, Worker::new(1, 0), 0);
    other.routed(session, Worker::new(2, 0), 0);
    let found = [candidate(1), candidate(2)];
    let at = |seat: &Seat| seat.kept(session, &found, 0).map(|choice| choice.index);
    assert_eq!((at(&one), at(&other)), (Some(0), Some(1)));
}

#[test]
fn the_table_is_bounded_and_its_time_in_range() {
    let affinity = Arc::new(Affinity::with_room(10, 3).unwrap());
    let (seat, worker) = (affinity.seat(), Worker::new(1, 0));
    let found = [candidate(1)];
    let session = |key| Session { worker: None, key: Some(key) };
    let is_known = |key| seat.kept(session(key), &found, 0).is_some();
    for key in ["a", "b", "c", "a", "d"] {
        seat.routed(session(key), worker, 0);
    }
    assert_eq!(["a", "b", "c", "d"].map(is_known), [true, false, true, true]);
    let mut evicted = 0.0;
    affinity.samples(&mut |sample| {
        evicted += if sample.label == ("cause", "evicted") { sample.value } else { 0.0 };
    });
    assert_eq!(evicted, 1.0);
    for wrong in [0, 31_536_001] {
        let error = Affinity::new(wrong).err().unwrap().to_string();
        let text =
            format!("--router-session-affinity-ttl-secs must be in 1..=31536000, got {wrong}");
        assert_eq!(error, text);
    }
    assert!(Affinity::new(1).is_ok() && Affinity::new(31_536_000).is_ok());
}
