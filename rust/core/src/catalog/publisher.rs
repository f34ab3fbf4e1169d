//! One engine socket: its place in the event stream and what its frames do to the index.

use std::sync::Arc;

use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64;

mod place;

use super::cache_groups::{CacheGroups, EngineFacts};
use super::code::{Code, Codes};
use super::counters::{EventCounters, EventCounts, add};
use super::ingest::Ingest;
use super::model::ModelIndex;
use super::registration::{ListenerStatus, Place, PublisherId, Registration};
use super::standing::Standing;
use super::trust::{self, Evidence};
use super::unheard::Unheard;
use crate::clock::Clock;
use crate::codec::{Limits, decode_batch};
use crate::ids::Worker;
use crate::log_limit::LogLimit;
use crate::repair::{Feed, Frame, FrameOutcome};
use crate::stream::{Step, Stream};

/// Ranks that one socket may speak for; batches of further ones are counted as malformed.
const MAX_RANKS: usize = 1_024;

struct State {
    stream: Stream,
    groups: CacheGroups,
    /// Every rank that this socket has spoken for, the registered one first.
    ranks: Vec<u32>,
    status: ListenerStatus,
    last_error: Option<String>,
    last_event_ms: Option<u64>,
    /// The stream's place was taken over, but not the blocks that led to it.
    is_bare: bool,
    /// The blocks came from a replica that could not say up to which batch.
    is_unplaced: bool,
    standing: Standing,
    /// What the index was last told of how complete it is about the ranks.
    unheard: Option<Unheard>,
    /// Lines about restarts, and about frames that are no batch.
    restart_lines: LogLimit,
    frame_lines: LogLimit,
    closed: bool,
}

/// One engine socket.
///
/// # Consistency
/// Frames of one publisher are applied one at a time; different publishers run side by side.
pub struct Publisher {
    /// Number within this process.
    pub id: PublisherId,
    /// Whose blocks it reports, unless a batch names another rank of the same instance.
    pub worker: Worker,
    /// The index that it feeds.
    pub model: Arc<ModelIndex>,
    /// Address of the PUB socket.
    pub endpoint: String,
    /// Address of the replay socket.
    pub replay_endpoint: Option<String>,
    /// Blocks that a rank's device has, where somebody told.
    pub capacity_blocks: Option<u64>,
    /// What no event says of the engine.
    pub facts: EngineFacts,
    counters: EventCounters,
    limits: Limits,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
}

/// A reading of a publisher for reports.
#[derive(Debug, Clone)]
pub struct PublisherView {
    /// The registered worker.
    pub worker: Worker,
    /// Ranks that its batches have named, the registered one included.
    pub ranks: Vec<u32>,
    /// Address of the PUB socket.
    pub endpoint: String,
    /// Address of the replay socket.
    pub replay_endpoint: Option<String>,
    /// Blocks that a rank's device has, where somebody told.
    pub capacity_blocks: Option<u64>,
    /// State of the socket.
    pub status: ListenerStatus,
    /// Last trouble with the socket.
    pub last_error: Option<String>,
    /// Last sequence number applied.
    pub last_sequence: Option<u64>,
    /// Milliseconds since the last batch.
    pub last_event_age_ms: Option<u64>,
    /// Counters.
    pub counts: EventCounts,
    /// What its trust depends on, without [`Code::OF_INDEX`].
    pub evidence: Evidence,
}

impl Publisher {
    /// Of a registration, for the index that its key names.
    pub(super) fn new(
        id: PublisherId,
        registration: Registration,
        model: Arc<ModelIndex>,
        limits: Limits,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let Registration { worker, endpoint, replay_endpoint, capacity_blocks, facts, .. } =
            registration;
        let standing = Standing::new(model.index.evicted_blocks_total());
        model.roster.add(worker);
        let unheard = Some(Unheard::Silent);
        model.unheard.set(worker, unheard);
        Self {
            id,
            worker,
            model,
            endpoint,
            replay_endpoint,
            capacity_blocks,
            facts,
            counters: EventCounters::default(),
            limits,
            clock,
            state: Mutex::new(State {
                stream: Stream::default(),
                groups: CacheGroups::default(),
                ranks: vec![worker.dp_rank],
                status: ListenerStatus::Pending,
                last_error: None,
                last_event_ms: None,
                is_bare: false,
                is_unplaced: false,
                standing,
                unheard,
                restart_lines: LogLimit::default(),
                frame_lines: LogLimit::default(),
                closed: false,
            }),
        }
    }

    /// Take in a frame that came over the subscription, in the order it came.
    ///
    /// # Cost
    /// A lock of this publisher, the decoding, and the index's cost per block.
    pub fn live(&self, sequence: u64, payload: &[u8]) -> FrameOutcome {
        let mut state = self.state.lock();
        if state.closed {
            return FrameOutcome::Closed;
        }
        self.settle_unplaced(&mut state, sequence);
        let gaps = state.stream.gaps();
        let mut step = state.stream.live(sequence);
        if step == Step::Duplicate && state.stream.contradicts(sequence, xxh3_64(payload)) {
            step = Step::Restarted;
        }
        if step == Step::Restarted {
            self.forget_restarted(&mut state, "its sequence numbers went back");
            step = state.stream.live(sequence);
        }
        if let Step::Gap { from, to } = step
            && state.stream.gaps() > gaps
        {
            // Offered again after its repair failed, the same frame shows the same gap.
            add(&self.counters.gap_batches, to - from + 1);
        }
        self.take(&mut state, step, sequence, payload, false)
    }

    /// Take in a frame that the engine sent again on request.
    pub fn replayed(&self, sequence: u64, payload: &[u8]) -> FrameOutcome {
        let mut state = self.state.lock();
        if state.closed {
            return FrameOutcome::Closed;
        }
        self.settle_unplaced(&mut state, sequence);
        let step = state.stream.replayed(sequence);
        self.take(&mut state, step, sequence, payload, true)
    }

    /// Give up on missing batches: the stream goes on at `sequence`.
    pub fn give_up(&self, sequence: u64) {
        let mut state = self.state.lock();
        let before = state.stream.lost();
        let is_first = state.stream.last().is_none();
        state.stream.skip_to(sequence);
        let lost = state.stream.lost() - before;
        add(&self.counters.lost_batches, lost);
        state.standing.gave_up(lost, is_first);
        self.tell(&mut state);
    }

    /// After a new connection: is this still the stream that was applied so far?
    ///
    /// `first` is the first frame of a replay from the last applied sequence number, `None` when the engine
    /// had nothing to replay. A stream that is not the same one means that the engine restarted:
    /// its blocks are forgotten and the stream begins again.
    pub fn verify(&self, first: Option<(u64, &[u8])>) -> bool {
        let mut state = self.state.lock();
        if state.stream.last().is_none() {
            return true;
        }
        // A ring that has moved on past our place proves nothing: then, too, the blocks are forgotten, and
        // come back with what the ring still holds.
        let same = match first {
            Some((sequence, payload)) => state.stream.verify(sequence, xxh3_64(payload)),
            None => false,
        };
        if !same {
            self.forget_restarted(&mut state, "while it was disconnected");
            state.stream.reset();
        } else if state.is_bare {
            // The same engine as at the last registration, whose blocks went with it: all that the
            // engine still has is wanted again.
            state.stream.reset();
            state.is_bare = false;
            return false;
        } else {
            state.standing.went_on();
        }
        self.tell(&mut state);
        same
    }

    /// The engine's process is known to be another one than before, by other means than its events.
    ///
    /// # Consistency
    /// Batches of the new process that came already are forgotten too: without a replay nothing tells
    /// them from the old ones, and less credit is the safer mistake.
    pub fn restarted(&self) {
        let mut state = self.state.lock();
        self.forget_restarted(&mut state, "it is a new process");
        state.stream.reset();
        self.tell(&mut state);
    }

    /// Sequence number from which a replay would continue the stream, and the last one applied.
    pub fn position(&self) -> (u64, Option<u64>) {
        let state = self.state.lock();
        (state.stream.next(), state.stream.last())
    }

    /// Messages that have no sequence number and payload: dropped, counted as frames that can't be decoded.
    pub fn count_malformed_messages(&self, count: u64) {
        add(&self.counters.undecodable, count);
    }

    /// The door reports its socket's state.
    pub fn set_status(&self, status: ListenerStatus, error: Option<String>) {
        let mut state = self.state.lock();
        let (before, has_position) = (state.status, state.stream.last().is_some());
        state.standing.socket(before, status, has_position);
        state.status = status;
        if error.is_some() || status == ListenerStatus::Active {
            state.last_error = error;
        }
        self.tell(&mut state);
    }

    /// Whether its socket was ever connected.
    pub(super) fn has_connected(&self) -> bool {
        self.state.lock().standing.has_connected()
    }

    /// Read the counters.
    pub fn counts(&self) -> EventCounts {
        self.counters.read()
    }

    /// Read everything for a report.
    pub fn view(&self) -> PublisherView {
        let state = self.state.lock();
        let now_ms = self.clock.now_ms();
        PublisherView {
            worker: self.worker,
            ranks: state.ranks.clone(),
            endpoint: self.endpoint.clone(),
            replay_endpoint: self.replay_endpoint.clone(),
            capacity_blocks: self.capacity_blocks,
            status: state.status,
            last_error: state.last_error.clone(),
            last_sequence: state.stream.last(),
            last_event_age_ms: state.last_event_ms.map(|at| now_ms.saturating_sub(at)),
            counts: self.counters.read(),
            evidence: self.evidence(&state),
        }
    }

    /// The evidence of a view, with what the index knows: how many blocks it let go in total, and how
    /// many each rank holds on its device. Tells the log what is newly wrong.
    pub(super) fn complete(&self, view: &mut PublisherView, evicted: u64, device_blocks: usize) {
        let mut state = self.state.lock();
        view.evidence.evicted_blocks = state.standing.evicted_since(evicted);
        view.evidence.device_blocks = device_blocks;
        let (error, looked_at) = (view.last_error.as_deref(), Code::OF_INDEX);
        let clock = self.clock.as_ref();
        state.standing.tell(clock, self.worker, &self.endpoint, &view.evidence, error, looked_at);
    }

    fn evidence(&self, state: &State) -> Evidence {
        Evidence {
            has_replay: self.replay_endpoint.is_some(),
            last_sequence: state.stream.last(),
            block_size: self.model.block_size(),
            capacity_blocks: self.capacity_blocks,
            ..state.standing.evidence(state.status, &self.counters.read())
        }
    }

    /// Tells the log what is newly wrong, as far as it needs no look into the index, and the index whether it is
    /// complete.
    fn tell(&self, state: &mut State) {
        let evidence = self.evidence(state);
        let unheard = Unheard::of(trust::findings(&evidence));
        if std::mem::replace(&mut state.unheard, unheard) != unheard {
            for dp_rank in &state.ranks {
                self.model.unheard.set(Worker::new(self.worker.instance_id, *dp_rank), unheard);
            }
        }
        let (error, looked_at) =
            (state.last_error.as_deref(), Codes::all().without(Code::OF_INDEX));
        let clock = self.clock.as_ref();
        state.standing.tell(clock, self.worker, &self.endpoint, &evidence, error, looked_at);
    }

    /// No more frames: drop the blocks of every rank that this socket spoke for. Returns its place, but
    /// nothing when it was closed before. Waits for whoever reads its blocks.
    pub(super) fn close(&self) -> Option<Place> {
        let mut state = self.state.lock();
        if std::mem::replace(&mut state.closed, true) {
            return None;
        }
        let place = self.place(&state);
        for dp_rank in state.ranks.drain(..) {
            self.release(dp_rank);
        }
        Some(place)
    }

    /// Drop the blocks of a rank that only events have named; an event that names it again brings it back.
    /// Returns whether there was one.
    pub(super) fn drop_rank(&self, dp_rank: u32) -> bool {
        let mut state = self.state.lock();
        let at = state.ranks.iter().position(|rank| *rank == dp_rank);
        let Some(at) = at.filter(|_| dp_rank != self.worker.dp_rank) else { return false };
        state.ranks.remove(at);
        self.release(dp_rank);
        true
    }

    fn release(&self, dp_rank: u32) {
        let worker = Worker::new(self.worker.instance_id, dp_rank);
        // Another publisher may speak for it, too: then its blocks are that one's.
        if self.model.roster.remove(worker) {
            self.model.unheard.set(worker, None);
            self.model.remove_worker(worker);
        }
    }

    fn take(
        &self,
        state: &mut State,
        step: Step,
        sequence: u64,
        payload: &[u8],
        is_replay: bool,
    ) -> FrameOutcome {
        match step {
            Step::Apply => {}
            Step::Duplicate => {
                add(&self.counters.duplicate_batches, 1);
                return FrameOutcome::Duplicate;
            }
            Step::Gap { from, to } => {
                state.standing.missing(to - from + 1);
                return FrameOutcome::Gap { from, to };
            }
            // Not a sequence number at all; or a second restart, which a machine that has just reset itself
            // cannot see.
            Step::Invalid | Step::Restarted => {
                add(&self.counters.undecodable, 1);
                return FrameOutcome::Duplicate;
            }
        }
        state.is_bare = false;
        state.stream.applied(xxh3_64(payload));
        state.standing.went_on();
        state.last_event_ms = Some(self.clock.now_ms());
        if is_replay {
            add(&self.counters.repaired_batches, 1);
        }
        match decode_batch(payload, &self.limits) {
            Ok(batch) => {
                let dp_rank = batch.dp_rank.unwrap_or(self.worker.dp_rank);
                if !state.ranks.contains(&dp_rank) {
                    if state.ranks.len() == MAX_RANKS {
                        add(&self.counters.malformed, batch.events.len() as u64);
                        self.tell(state);
                        return FrameOutcome::Applied;
                    }
                    state.ranks.push(dp_rank);
                    state.groups.touch();
                    let rank = Worker::new(self.worker.instance_id, dp_rank);
                    self.model.roster.add(rank);
                    self.model.unheard.set(rank, state.unheard);
                }
                add(&self.counters.batches, 1);
                Ingest {
                    model: &self.model,
                    counters: &self.counters,
                    worker: Worker::new(self.worker.instance_id, dp_rank),
                    groups: &mut state.groups,
                    facts: &self.facts,
                    // A rank that clears its cache says nothing about the others.
                    standing: (state.ranks.len() == 1).then_some(&mut state.standing),
                }
                .apply(batch);
                self.share_layout(state);
            }
            Err(error) => {
                add(&self.counters.undecodable, 1);
                if let Some(held_back) = state.frame_lines.pass(self.clock.now_ms()) {
                    tracing::warn!(
                        worker = %self.worker, endpoint = self.endpoint, sequence, %error, held_back,
                        "dropped an event frame that is not an event batch"
                    );
                }
            }
        }
        self.tell(state);
        FrameOutcome::Applied
    }

    /// Tells queries what the events have shown of the engine's cache groups.
    fn share_layout(&self, state: &mut State) {
        let Some(layout) = state.groups.changed(self.facts) else { return };
        for dp_rank in &state.ranks {
            let worker = Worker::new(self.worker.instance_id, *dp_rank);
            self.model.set_layout(worker, Some(Arc::clone(&layout)));
        }
    }

    /// Drop the blocks of every rank but those that another publisher is there for; they stay known.
    fn clear_ranks(&self, state: &State) {
        for dp_rank in &state.ranks {
            let worker = Worker::new(self.worker.instance_id, *dp_rank);
            if worker == self.worker || !self.model.roster.is_shared(worker) {
                self.model.clear_worker(worker);
            }
        }
    }

    /// The engine has restarted: forget its blocks, and say so.
    fn forget_restarted(&self, state: &mut State, how: &str) {
        self.forget(state);
        add(&self.counters.restarts, 1);
        if let Some(held_back) = state.restart_lines.pass(self.clock.now_ms()) {
            tracing::warn!(
                worker = %self.worker, endpoint = self.endpoint, held_back,
                "engine restarted ({how}): its blocks are dropped"
            );
        }
    }

    fn forget(&self, state: &mut State) {
        self.clear_ranks(state);
        state.groups = CacheGroups::default();
        for dp_rank in &state.ranks {
            self.model.set_layout(Worker::new(self.worker.instance_id, *dp_rank), None);
        }
        state.is_bare = false;
        state.is_unplaced = false;
        let evicted = self.model.index.evicted_blocks_total();
        state.standing.forgotten(self.counters.read(), evicted);
    }
}

impl Feed for Publisher {
    fn live(&self, frame: &Frame) -> FrameOutcome {
        Self::live(self, frame.sequence, &frame.payload)
    }

    fn replayed(&self, frame: &Frame) -> FrameOutcome {
        Self::replayed(self, frame.sequence, &frame.payload)
    }

    fn verify(&self, first: Option<&Frame>) -> bool {
        Self::verify(self, first.map(|frame| (frame.sequence, &frame.payload[..])))
    }

    fn give_up(&self, sequence: u64) {
        Self::give_up(self, sequence);
    }

    fn position(&self) -> (u64, Option<u64>) {
        Self::position(self)
    }

    fn malformed(&self) {
        self.count_malformed_messages(1);
    }

    fn replay_started(&self) {
        add(&self.counters.replays, 1);
        let mut state = self.state.lock();
        state.standing.replaying(true);
        self.tell(&mut state);
    }

    fn replay_ended(&self, failure: Option<&str>, is_empty: bool) {
        add(&self.counters.failed_replays, u64::from(failure.is_some()));
        let mut state = self.state.lock();
        state.standing.replaying(false);
        if let Some(why) = failure {
            state.last_error = Some(format!("replay failed: {why}"));
        }
        if is_empty {
            // Everything was asked for: the engine holds nothing.
            state.standing.found_empty();
        }
        self.tell(&mut state);
    }
}
