//! Trust in the index's data about a publisher: exact, degraded or stale, with reasons and fixes.
//!
//! A pure function of [`Evidence`]. Observations from before the last known good moment (a restart
//! or a cache reset of the engine, after which neither it nor the index holds anything) do not
//! count.

use serde::Serialize;

use super::code::{Code, Codes, TrustState};
use super::counters::EventCounts;
use super::registration::ListenerStatus;
use crate::ids::InstanceId;

/// The inputs of a publisher's trust.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Evidence {
    /// State of its socket.
    pub status: ListenerStatus,
    /// Whether it was ever connected since the registration.
    pub was_connected: bool,
    /// Reconnected, without a frame or replay that verifies the stream.
    pub is_unverified: bool,
    /// Whether lost batches can be requested.
    pub has_replay: bool,
    /// Blocks came from a peer without their stream position.
    pub is_recovered_without_watermark: bool,
    /// Blocks came from a peer with inexact data.
    pub is_recovered_inexact: bool,
    /// The engine's replay was empty: it has published nothing yet.
    pub is_known_empty: bool,
    /// Last batch applied since the start or a restart.
    pub last_sequence: Option<u64>,
    /// Requested batches.
    pub missing_batches: u64,
    /// A replay is in progress.
    pub is_replaying: bool,
    /// Unavailable batches before the first received one.
    pub missed_first_batches: u64,
    /// Batches of an earlier registration, whose blocks were dropped.
    pub batches_before: u64,
    /// Counters since the last known good moment.
    pub since: EventCounts,
    /// Tokens in a block of the index.
    pub block_size: Option<u32>,
    /// Blocks of any worker that the index evicted at a limit since that moment.
    pub evicted_blocks: u64,
    /// Blocks on the device of its fullest rank.
    pub device_blocks: usize,
    /// Blocks of a rank's device, if known.
    pub capacity_blocks: Option<u64>,
    /// Another instance in the index with the same event socket.
    pub shares_socket_with: Option<InstanceId>,
}

/// The problems of this publisher.
pub fn findings(evidence: &Evidence) -> Codes {
    use ListenerStatus::{Active, Failed, Paused, Pending};
    let Evidence { status, since, .. } = *evidence;
    let is_heard = evidence.last_sequence.is_some() || since.undecodable > 0;
    let lost_later = since.lost_batches.saturating_sub(evidence.missed_first_batches);
    let is_deaf = since.block_size_mismatch > 0 && since.stored == 0;
    let is_garbled = since.undecodable > 0 && since.batches == 0;
    let is_over = |capacity| evidence.device_blocks as u64 > capacity;
    let is_known = evidence.is_known_empty || evidence.is_recovered_without_watermark;
    // A replay that verifies the stream has its own code.
    let is_replaying = evidence.is_replaying && !evidence.is_unverified;
    let is_behind = evidence.missing_batches > 0 || is_replaying;
    let is_silent = status == Active && !is_heard && !is_known;
    [
        (Code::Failed, status == Failed),
        (Code::NeverConnected, status == Pending && !evidence.was_connected),
        (Code::Disconnected, status == Pending && evidence.was_connected),
        (Code::Paused, status == Paused),
        (Code::BlockSizeMismatch, is_deaf),
        (Code::NothingDecodable, is_garbled),
        (Code::NoEventsYet, is_silent && !is_behind),
        (Code::CatchingUp, is_behind),
        (Code::MissedFirstBatches, evidence.missed_first_batches + evidence.batches_before > 0),
        (Code::LostBatches, lost_later > 0),
        (Code::UnverifiedReconnect, evidence.is_unverified),
        (Code::RecoveredWithoutWatermark, evidence.is_recovered_without_watermark),
        (Code::RecoveredInexact, evidence.is_recovered_inexact),
        (Code::Undecodable, since.undecodable > 0 && !is_garbled),
        (Code::MalformedEvents, since.malformed > 0),
        (Code::UnknownEvents, since.unknown_type > 0),
        (Code::UnknownMedium, since.unknown_medium > 0),
        (Code::MixedBlockSizes, since.block_size_mismatch > 0 && !is_deaf),
        (Code::OrphanedStores, since.orphaned > 0),
        (Code::SelfParent, since.self_parent > 0),
        (Code::IdentityConflict, since.identity_conflict > 0),
        (Code::HashReused, since.moved_blocks > 0),
        (Code::RefusedBlocks, since.refused_blocks > 0),
        (Code::EvictedByLimit, evidence.evicted_blocks > 0),
        (Code::OverCapacity, evidence.capacity_blocks.is_some_and(is_over)),
        (Code::SharedSocket, evidence.shares_socket_with.is_some()),
    ]
    .into_iter()
    .filter(|(_, is_so)| *is_so)
    .fold(Codes::EMPTY, |codes, (code, _)| codes.with(code))
}

/// Why a publisher is not exact, as text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Reason {
    /// Short and stable, for machines: see [`Code`].
    pub code: &'static str,
    /// The observation and its effect on credit.
    pub message: String,
    /// The fix.
    pub fix: &'static str,
}

/// Trust in the index's data about a publisher, with reasons.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Trust {
    /// The worst state of all reasons.
    pub state: TrustState,
    /// Empty if exact; the most severe first.
    pub reasons: Vec<Reason>,
    #[serde(skip)]
    codes: Codes,
}

impl Trust {
    /// Evaluates `evidence`; `last_error` is the last error of the socket, for the message.
    pub fn of(evidence: &Evidence, last_error: Option<&str>) -> Self {
        let codes = findings(evidence);
        Self {
            state: codes.state(),
            codes,
            reasons: codes.iter().map(|code| explain(code, evidence, last_error)).collect(),
        }
    }

    /// The codes of its reasons.
    pub fn codes(&self) -> Codes {
        self.codes
    }
}

/// A finding as text.
pub(super) fn explain(code: Code, evidence: &Evidence, last_error: Option<&str>) -> Reason {
    let message = match last_error {
        // A worker that was just registered.
        None if code == Code::NeverConnected => {
            "not connected to its event socket yet, so its cache is unknown".to_owned()
        }
        error => message(code, evidence, error.unwrap_or("no error was reported")),
    };
    Reason { code: code.name(), message, fix: code.fix(evidence.has_replay) }
}

/// A count with what is said of one, or of several.
fn counted(count: u64, one: &str, several: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { several })
}

fn message(code: Code, evidence: &Evidence, last_error: &str) -> String {
    let Evidence { since, .. } = evidence;
    let size = evidence.block_size.unwrap_or(0);
    match code {
        Code::Failed => format!("its event socket failed: {last_error}"),
        Code::NeverConnected => {
            format!("never connected to its event socket, so its cache is unknown: {last_error}")
        }
        Code::Disconnected => format!(
            "the connection to its event socket is lost, so the index about it is out of date: {last_error}"
        ),
        Code::Paused => {
            "its events are not being read, so the index about it is out of date".to_owned()
        }
        Code::BlockSizeMismatch if since.block_size_mismatch == 1 => format!(
            "its only stored event has another block size than the index's {size} tokens: none of its blocks \
             can match"
        ),
        Code::BlockSizeMismatch => format!(
            "none of its {} stored events has the index's block size of {size} tokens: none of its blocks can \
             match",
            since.block_size_mismatch
        ),
        Code::NothingDecodable => counted(
            since.undecodable,
            "message arrived and is not an event batch: its cache is unknown",
            "messages arrived and none is an event batch: its cache is unknown",
        ),
        Code::NoEventsYet => {
            "connected, but no event has arrived yet: its cache is unknown".to_owned()
        }
        Code::CatchingUp if evidence.missing_batches == 0 => {
            "earlier batches are being requested; later ones wait until they have arrived".to_owned()
        }
        Code::CatchingUp => counted(
            evidence.missing_batches,
            "missing batch is being requested; later ones wait until it has arrived",
            "missing batches are being requested; later ones wait until they have arrived",
        ),
        Code::MissedFirstBatches => counted(
            evidence.missed_first_batches + evidence.batches_before,
            "batch was published before the first one received: blocks stored in it earn no credit; no block is \
             credited wrongly",
            "batches were published before the first one received: blocks stored in them earn no credit; no \
             block is credited wrongly",
        ),
        Code::LostBatches => counted(
            since.lost_batches.saturating_sub(evidence.missed_first_batches),
            "batch was lost: blocks evicted in it are still credited, blocks stored in it are not",
            "batches were lost: blocks evicted in them are still credited, blocks stored in them are not",
        ),
        Code::UnverifiedReconnect => {
            "reconnected, but it may be a new engine process: if the engine restarted, its old blocks are \
             credited wrongly"
                .to_owned()
        }
        Code::RecoveredWithoutWatermark => {
            "its blocks came from a peer that did not say up to which batch: some may be evicted, some \
             may be missing"
                .to_owned()
        }
        Code::RecoveredInexact => {
            "its blocks came from a peer with an inexact index of it: some may be evicted, some may be missing"
                .to_owned()
        }
        Code::Undecodable => counted(
            since.undecodable,
            "message was not an event batch and was dropped: blocks evicted in it are still credited",
            "messages were not event batches and were dropped: blocks evicted in them are still credited",
        ),
        Code::MalformedEvents => counted(
            since.malformed,
            "event contradicted itself and was dropped: blocks evicted by it are still credited",
            "events contradicted themselves and were dropped: blocks evicted by them are still credited",
        ),
        Code::UnknownEvents => counted(
            since.unknown_type,
            "event of a type that this version does not know was skipped: if it evicts, credit is too high",
            "events of a type that this version does not know were skipped: if they evict, credit is too high",
        ),
        Code::UnknownMedium => counted(
            since.unknown_medium,
            "event named a storage medium that this version does not know: blocks there earn no credit",
            "events named a storage medium that this version does not know: blocks there earn no credit",
        ),
        Code::MixedBlockSizes => format!(
            "{} another block size than the index's {size} tokens: these blocks earn no credit",
            counted(
                since.block_size_mismatch,
                "of its stored events has",
                "of its stored events have"
            )
        ),
        Code::OrphanedStores => counted(
            since.orphaned,
            "stored event continues unknown blocks: what it stored earns no credit",
            "stored events continue unknown blocks: what they stored earns no credit",
        ),
        Code::SelfParent => counted(
            since.self_parent,
            "stored event named a block twice or as its own ancestor and was dropped",
            "stored events named a block twice or as its own ancestor and were dropped",
        ),
        Code::IdentityConflict => counted(
            since.identity_conflict,
            "stored event continues blocks of another cache salt or adapter and was dropped",
            "stored events continue blocks of another cache salt or adapter and were dropped",
        ),
        Code::HashReused => counted(
            since.moved_blocks,
            "block was stored under a name that stood for other content: a removal was missed, or the engine's \
             hashes do not tell its prompts apart",
            "blocks were stored under a name that stood for other content: a removal was missed, or the \
             engine's hashes do not tell its prompts apart",
        ),
        Code::RefusedBlocks => counted(
            since.refused_blocks,
            "block found no room in the index: it earns no credit",
            "blocks found no room in the index: they earn no credit",
        ),
        Code::EvictedByLimit if evidence.evicted_blocks == 1 => {
            "the index dropped 1 block at its memory limit: if it is this worker's, it earns no credit".to_owned()
        }
        Code::EvictedByLimit => format!(
            "the index dropped {} blocks at its memory limit: some may be this worker's and earn no credit",
            evidence.evicted_blocks
        ),
        Code::OverCapacity => format!(
            "{} blocks are credited on its device, which has {}: removals were missed",
            evidence.device_blocks,
            evidence.capacity_blocks.unwrap_or(0)
        ),
        Code::SharedSocket => format!(
            "instance {} has the same event socket: both are credited with the blocks of one engine",
            evidence.shares_socket_with.unwrap_or(0)
        ),
    }
}

#[cfg(test)]
mod tests;
