#![allow(clippy::unwrap_used)]

use super::TrustState::{Degraded, Exact, Stale};
use super::*;
use crate::catalog::registration::ListenerStatus::{Active, Failed, Paused, Pending};

/// A connected engine with a replay endpoint, of which everything came.
fn healthy() -> Evidence {
    Evidence {
        status: Active,
        was_connected: true,
        is_unverified: false,
        has_replay: true,
        is_recovered_without_watermark: false,
        is_recovered_inexact: false,
        is_known_empty: false,
        last_sequence: Some(9),
        missing_batches: 0,
        is_replaying: false,
        missed_first_batches: 0,
        batches_before: 0,
        since: EventCounts { batches: 10, stored: 10, stored_blocks: 40, ..EventCounts::default() },
        block_size: Some(16),
        evicted_blocks: 0,
        device_blocks: 40,
        capacity_blocks: Some(40),
        shares_socket_with: None,
    }
}

fn changed(change: impl FnOnce(&mut Evidence)) -> Evidence {
    let mut evidence = healthy();
    change(&mut evidence);
    evidence
}

type Row = (&'static str, fn(&mut Evidence), TrustState, &'static [&'static str]);

const TABLE: &[Row] = &[
    ("healthy", |_| {}, Exact, &[]),
    ("full to the last block", |e| e.device_blocks = 40, Exact, &[]),
    ("of unknown capacity", |e| (e.device_blocks, e.capacity_blocks) = (1 << 40, None), Exact, &[]),
    ("restarted before", |e| e.since.restarts = 3, Exact, &[]),
    ("repaired", |e| (e.since.gap_batches, e.since.repaired_batches) = (5, 5), Exact, &[]),
    ("asked for replays in vain", |e| e.since.failed_replays = 1, Exact, &[]),
    ("of other cache groups too", |e| e.since.other_group = 7, Exact, &[]),
    ("removing what is not known", |e| e.since.unknown_removed = 7, Exact, &[]),
    ("not heard, and known to be empty", silent_and_empty, Exact, &[]),
    ("failed", |e| e.status = Failed, Stale, &["failed"]),
    ("not connected yet", never_connected, Stale, &["never_connected"]),
    ("disconnected", |e| e.status = Pending, Stale, &["disconnected"]),
    ("paused", |e| e.status = Paused, Stale, &["paused"]),
    ("of another block size", other_block_size, Stale, &["block_size_mismatch"]),
    ("of two block sizes", |e| e.since.block_size_mismatch = 1, Degraded, &["mixed_block_sizes"]),
    ("never understood", garbled, Stale, &["nothing_decodable"]),
    ("not always understood", |e| e.since.undecodable = 1, Degraded, &["undecodable"]),
    ("not heard", |e| *e = silent(), Degraded, &["no_events_yet"]),
    ("catching up", |e| e.missing_batches = 4, Degraded, &["catching_up"]),
    ("asked for all", |e| e.is_replaying = true, Degraded, &["catching_up"]),
    (
        "asked for its last batch",
        |e| (e.is_replaying, e.is_unverified) = (true, true),
        Degraded,
        &["unverified_reconnect"],
    ),
    ("catching up from the start", start_missing, Degraded, &["catching_up"]),
    ("begun late", begun_late, Degraded, &["missed_first_batches"]),
    ("registered again", |e| e.batches_before = 3, Degraded, &["missed_first_batches"]),
    ("with losses", |e| e.since.lost_batches = 1, Degraded, &["lost_batches"]),
    (
        "begun late, with losses",
        late_with_losses,
        Degraded,
        &["missed_first_batches", "lost_batches"],
    ),
    ("connected again", |e| e.is_unverified = true, Degraded, &["unverified_reconnect"]),
    (
        "recovered",
        |e| e.is_recovered_without_watermark = true,
        Degraded,
        &["recovered_without_watermark"],
    ),
    ("recovered from doubt", |e| e.is_recovered_inexact = true, Degraded, &["recovered_inexact"]),
    ("recovered and not heard", recovered_silent, Degraded, &["recovered_without_watermark"]),
    ("malformed", |e| e.since.malformed = 1, Degraded, &["malformed_events"]),
    ("of a newer kind", |e| e.since.unknown_type = 1, Degraded, &["unknown_events"]),
    ("on a new medium", |e| e.since.unknown_medium = 1, Degraded, &["unknown_medium"]),
    ("with orphans", |e| e.since.orphaned = 1, Degraded, &["orphaned_stores"]),
    ("with circles", |e| e.since.self_parent = 1, Degraded, &["self_parent"]),
    ("of two salts", |e| e.since.identity_conflict = 1, Degraded, &["identity_conflict"]),
    ("with names that move", |e| e.since.moved_blocks = 1, Degraded, &["hash_reused"]),
    ("without room", |e| e.since.refused_blocks = 1, Degraded, &["refused_blocks"]),
    ("squeezed", |e| e.evicted_blocks = 1, Degraded, &["evicted_by_limit"]),
    ("too full", |e| e.device_blocks = 41, Degraded, &["over_capacity"]),
    ("as two", |e| e.shares_socket_with = Some(2), Degraded, &["shared_socket"]),
    ("lost twice over", disconnected_with_losses, Stale, &["disconnected", "lost_batches"]),
];

fn silent() -> Evidence {
    changed(|e| (e.last_sequence, e.since, e.device_blocks) = (None, EventCounts::default(), 0))
}

fn silent_and_empty(evidence: &mut Evidence) {
    *evidence = Evidence { is_known_empty: true, ..silent() };
}

fn recovered_silent(evidence: &mut Evidence) {
    *evidence = Evidence { is_recovered_without_watermark: true, ..silent() };
}

fn never_connected(evidence: &mut Evidence) {
    *evidence = Evidence { status: Pending, was_connected: false, ..silent() };
}

fn start_missing(evidence: &mut Evidence) {
    *evidence = Evidence { missing_batches: 3, ..silent() };
}

fn other_block_size(evidence: &mut Evidence) {
    (evidence.since.block_size_mismatch, evidence.since.stored) = (10, 0);
}

fn garbled(evidence: &mut Evidence) {
    evidence.since = EventCounts { undecodable: 3, ..EventCounts::default() };
}

fn begun_late(evidence: &mut Evidence) {
    (evidence.missed_first_batches, evidence.since.lost_batches) = (500, 500);
}

fn late_with_losses(evidence: &mut Evidence) {
    (evidence.missed_first_batches, evidence.since.lost_batches) = (500, 501);
}

fn disconnected_with_losses(evidence: &mut Evidence) {
    (evidence.status, evidence.since.lost_batches) = (Pending, 1);
}

#[test]
fn what_is_seen_makes_state_and_reasons() {
    for (name, change, state, codes) in TABLE {
        let trust = Trust::of(&changed(change), None);
        assert_eq!(trust.state, *state, "{name}");
        assert_eq!(trust.reasons.len(), codes.len(), "{name}");
        assert_eq!(trust.codes().iter().map(Code::name).collect::<Vec<_>>(), *codes, "{name}");
    }
}

#[test]
fn every_code_is_in_the_table_and_has_words_and_a_fix() {
    for code in Code::ALL {
        let row = TABLE.iter().find(|(.., codes)| codes.contains(&code.name()));
        assert!(row.is_some(), "{} is in no row", code.name());
        for has_replay in [true, false] {
            let evidence = Evidence { has_replay, ..healthy() };
            let reason = explain(code, &evidence, Some("it hung up"));
            assert!(reason.message.len() > 30 && reason.fix.len() > 10, "{reason:?}");
            assert!(!reason.message.ends_with('.') && !reason.fix.ends_with('.'), "{reason:?}");
        }
        assert_eq!(Codes::EMPTY.with(code).state(), code.state());
    }
    assert!(Code::ALL.len() <= 32, "a set of codes has 32 bits");
}

#[test]
fn messages_say_how_much() {
    let evidence = changed(|e| {
        (e.missed_first_batches, e.since.lost_batches) = (500, 512);
        (e.device_blocks, e.capacity_blocks) = (1234, Some(1000));
    });
    let trust = Trust::of(&evidence, None);
    let all: Vec<_> = trust.reasons.iter().map(|reason| reason.message.as_str()).collect();
    assert!(all[0].starts_with("500 batches"), "{all:?}");
    assert!(all[1].starts_with("12 batches"), "{all:?}");
    assert!(all[2].contains("1234 blocks") && all[2].contains("1000"), "{all:?}");
    let lost = changed(|e| e.status = Failed);
    assert!(Trust::of(&lost, Some("no route")).reasons[0].message.contains("no route"));
}

#[test]
fn one_is_not_said_as_several() {
    let one = || {
        changed(|e| {
            e.since = EventCounts {
                lost_batches: 1,
                undecodable: 1,
                malformed: 1,
                unknown_type: 1,
                unknown_medium: 1,
                block_size_mismatch: 1,
                orphaned: 1,
                self_parent: 1,
                identity_conflict: 1,
                moved_blocks: 1,
                refused_blocks: 1,
                ..e.since
            };
            (e.missing_batches, e.batches_before, e.evicted_blocks) = (1, 1, 1);
        })
    };
    let deaf = |e: &mut Evidence| {
        (e.since.stored, e.since.batches) = (0, 0);
    };
    let mut alone = one();
    deaf(&mut alone);
    let said = |evidence: &Evidence| {
        let reasons = Trust::of(evidence, None).reasons.into_iter();
        reasons.map(|reason| reason.message).collect::<Vec<_>>()
    };
    let all = [said(&one()), said(&alone)].concat();
    assert!(all.len() > 20, "{all:?}");
    for several in ["1 batches", "1 messages", "1 events", "1 blocks", "1 missing batches", "them"]
    {
        assert!(!all.iter().any(|message| message.contains(several)), "{several}: {all:#?}");
    }
    assert!(!all.iter().any(|message| message.contains("1 stored events")), "{all:#?}");
}

#[test]
fn a_worker_just_registered_is_not_connected_yet() {
    let pending = Evidence { status: Pending, was_connected: false, ..silent() };
    let said = |error| Trust::of(&pending, error).reasons[0].message.clone();
    assert!(said(None).starts_with("not connected to its event socket yet"), "{}", said(None));
    assert!(said(Some("no route")).ends_with(": no route"), "{}", said(Some("no route")));
}

#[test]
fn the_fix_for_losses_depends_on_the_replay_endpoint() {
    let fix = |has_replay| {
        let evidence = changed(|e| (e.since.lost_batches, e.has_replay) = (1, has_replay));
        Trust::of(&evidence, None).reasons[0].fix
    };
    assert!(
        fix(false).starts_with("if its events come over ZMQ, register it with its replay_endpoint")
    );
    assert!(fix(true).contains("buffer_steps"));
}

#[test]
fn the_worst_reason_makes_the_state() {
    assert!(Exact < Degraded && Degraded < Stale);
    assert_eq!(Codes::EMPTY.state(), Exact);
    let codes = Codes::EMPTY.with(Code::LostBatches).with(Code::Failed);
    assert_eq!(codes.state(), Stale);
    assert_eq!(codes.without(Codes::EMPTY.with(Code::Failed)).state(), Degraded);
}
