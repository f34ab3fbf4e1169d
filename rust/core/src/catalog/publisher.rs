//! One engine socket: its position in the event stream, and the effect of its frames on the index.

use std::sync::Arc;

use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64;

mod place;

use super::cache_groups::{CacheGroups, EngineFacts};
use super::code::{Code, Codes};
use super::counters::{EventCounters, EventCounts, add};
use super::ingest::Ingest;
use super::model::ModelIndex;
use super::registration::{ListenerStatus, Place, PublisherId, Registration, Source};
use super::standing::Standing;
use super::trust::{self, Evidence};
use super::unheard::Unheard;
use crate::clock::Clock;
use crate::codec::{Limits, decode_batch};
use crate::ids::Worker;
use crate::log_limit::LogLimit;
use crate::repair::{Feed, FrameOutcome};
use crate::stream::{Step, Stream};

/// Maximum ranks per socket; batches of further ones count as malformed.
const MAX_RANKS: usize = 1_024;

struct State {
    stream: Stream,
    groups: CacheGroups,
    /// Every rank that this socket has published for, the registered one first.
    ranks: Vec<u32>,
    status: ListenerStatus,
    last_error: Option<String>,
    /// It is of a replay, and the next one that succeeds clears it.
    is_replays_error: bool,
    last_event_ms: Option<u64>,
    /// Batches up to the stream position that was taken over, whose blocks are still to be
    /// requested; 0: none.
    bare_batches: u64,
    /// The blocks came from a replica that could not name their stream position.
    is_unplaced: bool,
    standing: Standing,
    /// The completeness last reported to the index for the ranks.
    unheard: Option<Unheard>,
    /// Limits log lines about restarts, and about invalid frames.
    restart_lines: LogLimit,
    frame_lines: LogLimit,
    closed: bool,
}

/// One engine socket.
///
/// # Consistency
/// Frames of one publisher are applied one at a time; different publishers run concurrently.
pub struct Publisher {
    /// Number within this process.
    pub id: PublisherId,
    /// The worker whose blocks it reports, unless a batch names another rank of the same instance.
    pub worker: Worker,
    /// The index that it feeds.
    pub model: Arc<ModelIndex>,
    /// Address of the PUB socket.
    pub endpoint: String,
    /// Address of the replay socket.
    pub replay_endpoint: Option<String>,
    /// Blocks of a rank's device, if known.
    pub capacity_blocks: Option<u64>,
    /// Properties of the engine that no event contains.
    pub facts: EngineFacts,
    /// How it became known.
    pub source: Source,
    counters: EventCounters,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
}

/// A snapshot of a publisher for reports.
#[derive(Debug, Clone)]
pub struct PublisherView {
    /// The registered worker.
    pub worker: Worker,
    /// Ranks named by its batches, including the registered one.
    pub ranks: Vec<u32>,
    /// How it became known.
    pub source: Source,
    /// Address of the PUB socket.
    pub endpoint: String,
    /// Address of the replay socket.
    pub replay_endpoint: Option<String>,
    /// Blocks of a rank's device, if known.
    pub capacity_blocks: Option<u64>,
    /// State of the socket.
    pub status: ListenerStatus,
    /// Last error of the socket.
    pub last_error: Option<String>,
    /// Last sequence number applied.
    pub last_sequence: Option<u64>,
    /// Milliseconds since the last batch.
    pub last_event_age_ms: Option<u64>,
    /// Counters.
    pub counts: EventCounts,
    /// The inputs of its trust, without [`Code::OF_INDEX`].
    pub evidence: Evidence,
}

impl Publisher {
    /// From a registration, for the index of its key.
    pub(super) fn new(
        id: PublisherId,
        registration: Registration,
        model: Arc<ModelIndex>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let Registration {
            worker, endpoint, replay_endpoint, capacity_blocks, facts, source, ..
        } = registration;
        let standing = Standing::new(model.index.evicted_blocks_total(), clock.now_ms());
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
            source,
            counters: EventCounters::default(),
            clock,
            state: Mutex::new(State {
                stream: Stream::default(),
                groups: CacheGroups::default(),
                ranks: vec![worker.dp_rank],
                status: ListenerStatus::Pending,
                last_error: None,
                is_replays_error: false,
                last_event_ms: None,
                bare_batches: 0,
                is_unplaced: false,
                standing,
                unheard,
                restart_lines: LogLimit::default(),
                frame_lines: LogLimit::default(),
                closed: false,
            }),
        }
    }

    /// The engine's process is known from another source to have restarted.
    ///
    /// # Consistency
    /// Already received batches of the new process are dropped too: without a replay they can't be
    /// told from old ones, and less credit is the safer error.
    pub fn restarted(&self) {
        let mut state = self.state.lock();
        self.forget_restarted(&mut state, "it is a new process");
        state.stream.reset();
        self.tell(&mut state);
    }

    /// Counts messages without a sequence number and payload, which are dropped, as undecodable
    /// frames.
    pub fn count_malformed_messages(&self, count: u64) {
        add(&self.counters.undecodable, count);
    }

    /// Sets the state of its socket, as reported by the transport.
    pub fn set_status(&self, status: ListenerStatus, error: Option<String>) {
        let mut state = self.state.lock();
        let (before, has_position) = (state.status, state.stream.last().is_some());
        if status == ListenerStatus::Active && before != status && state.standing.seen.was_connected
        {
            state.stream.reconnected();
        }
        state.standing.socket(before, status, has_position);
        state.status = status;
        if error.is_some() || status == ListenerStatus::Active {
            state.last_error = error;
            state.is_replays_error = false;
        }
        self.tell(&mut state);
    }

    /// Whether its socket was ever connected.
    pub(super) fn has_connected(&self) -> bool {
        self.state.lock().standing.seen.was_connected
    }

    /// Whether what it published before the registration has been replayed, or can't be: it has no
    /// replay endpoint, or the first replay failed.
    pub(super) fn is_caught_up(&self) -> bool {
        let evidence = self.evidence(&self.state.lock());
        let codes = trust::findings(&evidence);
        let can_replay = evidence.has_replay && self.counters.read().failed_replays == 0;
        let awaits_replay = codes.has(Code::NoEventsYet) && can_replay;
        !(codes.has(Code::NeverConnected) || codes.has(Code::CatchingUp) || awaits_replay)
    }

    /// Reads the counters.
    pub fn counts(&self) -> EventCounts {
        self.counters.read()
    }

    /// Reads everything for a report.
    pub fn view(&self) -> PublisherView {
        let state = self.state.lock();
        let now_ms = self.clock.now_ms();
        PublisherView {
            worker: self.worker,
            ranks: state.ranks.clone(),
            source: self.source,
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

    /// Completes a view's evidence with data of the index: total evictions, and blocks per rank on
    /// the device. Logs new problems.
    pub(super) fn complete(&self, view: &mut PublisherView, evicted: u64, device_blocks: usize) {
        let mut state = self.state.lock();
        view.evidence.evicted_blocks = state.standing.evicted_since(evicted);
        view.evidence.device_blocks = device_blocks;
        let mut looked_at = Code::OF_INDEX;
        if state.status == view.status {
            // It may have become worth a line by now.
            looked_at = looked_at.with(Code::NeverConnected);
        }
        let error = view.last_error.as_deref();
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

    /// Logs new problems, except for those that need data of the index, and reports to the index
    /// whether it is complete.
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

    /// Ends its frames, and drops the blocks of every rank that this socket published for. Returns
    /// its position; `None` if it was already closed. Waits for readers of its blocks.
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

    /// Drops the blocks of a rank known only from events; a later event for it restores it. Returns
    /// whether it existed.
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
        // If another publisher also serves it, the blocks belong to that one.
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
                return FrameOutcome::Applied;
            }
            Step::Gap { from, to } => {
                state.standing.seen.missing_batches = to - from + 1;
                return FrameOutcome::Gap { from, to };
            }
            // Not a sequence number at all, or a second restart, which the state machine can't see
            // right after a reset.
            Step::Invalid | Step::Restarted => {
                add(&self.counters.undecodable, 1);
                return FrameOutcome::Applied;
            }
        }
        state.stream.applied(xxh3_64(payload));
        state.standing.went_on();
        if self.replay_endpoint.is_none() {
            state.bare_batches = 0;
        }
        // A frame may arrive before the check of its connection requests the others.
        state.standing.seen.missing_batches = state.bare_batches;
        state.last_event_ms = Some(self.clock.now_ms());
        if is_replay {
            add(&self.counters.repaired_batches, 1);
        }
        match decode_batch(payload, &Limits::default()) {
            Ok(batch) => {
                if let Some(reason) = batch.malformed_reason {
                    tracing::debug!(
                        worker = %self.worker, endpoint = self.endpoint, sequence, reason,
                        count = batch.malformed, "dropped events that contradict themselves"
                    );
                }
                let dp_rank = batch.dp_rank.unwrap_or(self.worker.dp_rank);
                if !state.ranks.contains(&dp_rank) {
                    if state.ranks.len() == MAX_RANKS {
                        add(&self.counters.malformed, batch.events.len() as u64);
                        self.tell(state);
                        return FrameOutcome::Applied;
                    }
                    self.add_rank(state, dp_rank);
                    state.groups.touch();
                }
                add(&self.counters.batches, 1);
                Ingest {
                    model: &self.model,
                    counters: &self.counters,
                    worker: Worker::new(self.worker.instance_id, dp_rank),
                    ranks: &state.ranks,
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

    /// A further rank that it publishes for.
    fn add_rank(&self, state: &mut State, dp_rank: u32) {
        let rank = Worker::new(self.worker.instance_id, dp_rank);
        state.ranks.push(dp_rank);
        self.model.roster.add(rank);
        self.model.unheard.set(rank, state.unheard);
    }

    /// Shares the engine's cache groups with queries, as shown by its events. Another publisher of a
    /// rank may have shown groups that this one has not.
    fn share_layout(&self, state: &mut State) {
        let Some(layout) = state.groups.changed(self.facts) else { return };
        let ranks = state.ranks.iter().map(|rank| Worker::new(self.worker.instance_id, *rank));
        ranks
            .filter(|worker| !layout.is_plain() || self.is_own(*worker))
            .for_each(|worker| self.model.set_layout(worker, Some(Arc::clone(&layout))));
    }

    /// Whether no other publisher is responsible for this rank of the instance.
    fn is_own(&self, rank: Worker) -> bool {
        rank == self.worker || !self.model.roster.is_shared(rank)
    }

    /// Its ranks, except for those that also have another publisher.
    fn own_ranks(&self, state: &State) -> impl Iterator<Item = Worker> {
        let ranks = state.ranks.iter().map(|rank| Worker::new(self.worker.instance_id, *rank));
        ranks.filter(|rank| self.is_own(*rank))
    }

    /// Drops the blocks of its own ranks; the ranks stay known.
    fn clear_ranks(&self, state: &State) {
        self.own_ranks(state).for_each(|worker| self.model.clear_worker(worker));
    }

    /// The engine has restarted: drops its blocks, and logs that.
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
        state.groups.lost_before = self.counters.read().lost_batches;
        self.own_ranks(state).for_each(|worker| self.model.drop_layout(worker));
        state.bare_batches = 0;
        state.is_unplaced = false;
        let evicted = self.model.index.evicted_blocks_total();
        state.standing.forgotten(self.counters.read(), evicted);
    }
}

impl Feed for Publisher {
    /// Applies a frame of the subscription, in order of arrival.
    ///
    /// # Cost
    /// A lock of this publisher, the decoding, and the index's cost per block.
    fn live(&self, sequence: u64, payload: &[u8]) -> FrameOutcome {
        let mut state = self.state.lock();
        if state.closed {
            return FrameOutcome::Closed;
        }
        self.settle_unplaced(&mut state, sequence, payload);
        let gaps = state.stream.gaps;
        let mut step = state.stream.live(sequence);
        if step == Step::Duplicate && state.stream.contradicts(sequence, xxh3_64(payload)) {
            step = Step::Restarted;
        }
        if step == Step::Restarted {
            self.forget_restarted(&mut state, "its sequence numbers went back");
            step = state.stream.live(sequence);
        }
        if let Step::Gap { from, to } = step
            && state.stream.gaps > gaps
        {
            // A frame that is offered again after a failed repair shows the same gap.
            add(&self.counters.gap_batches, to - from + 1);
        }
        self.take(&mut state, step, sequence, payload, false)
    }

    /// Applies a frame of a replay.
    fn replayed(&self, sequence: u64, payload: &[u8]) -> FrameOutcome {
        let mut state = self.state.lock();
        if state.closed {
            return FrameOutcome::Closed;
        }
        self.settle_unplaced(&mut state, sequence, payload);
        let step = state.stream.replayed(sequence);
        self.take(&mut state, step, sequence, payload, true)
    }

    /// After a reconnect: checks that this is still the stream that was applied so far.
    ///
    /// `first` is the first frame of a replay from the last applied sequence number, `None` if the
    /// engine had nothing to replay. A different stream means that the engine restarted: its blocks
    /// are dropped and the stream starts over.
    fn verify(&self, first: Option<(u64, &[u8])>) -> bool {
        let mut state = self.state.lock();
        if state.stream.last().is_none() {
            return true;
        }
        // A ring that has moved beyond our position proves nothing: then the blocks are dropped,
        // too, and restored from what the ring still holds.
        let same = match first {
            Some((sequence, payload)) => state.stream.verify(sequence, xxh3_64(payload)),
            None => false,
        };
        if !same {
            self.forget_restarted(&mut state, "while it was disconnected");
            state.stream.reset();
        } else if state.bare_batches > 0 {
            // The same engine as at the last registration, whose blocks were dropped: everything
            // that the engine still has is needed, and would count twice with what came meanwhile.
            self.forget(&mut state);
            state.stream.reset();
            return false;
        } else {
            state.standing.went_on();
        }
        self.tell(&mut state);
        same
    }

    /// Gives up on missing batches: the stream continues at `sequence`.
    fn give_up(&self, sequence: u64) {
        let mut state = self.state.lock();
        let before = state.stream.lost;
        let is_first = state.stream.last().is_none();
        state.stream.skip_to(sequence);
        let lost = state.stream.lost - before;
        add(&self.counters.lost_batches, lost);
        state.standing.gave_up(lost, is_first);
        self.tell(&mut state);
    }

    /// The sequence number from which a replay would continue the stream, and the last applied one.
    fn position(&self) -> (u64, Option<u64>) {
        let state = self.state.lock();
        (state.stream.next(), state.stream.last())
    }

    fn malformed(&self) {
        self.count_malformed_messages(1);
    }

    fn replay_started(&self) {
        add(&self.counters.replays, 1);
        let mut state = self.state.lock();
        state.standing.seen.is_replaying = true;
        self.tell(&mut state);
    }

    fn replay_ended(&self, failure: Option<&str>, is_empty: bool) {
        add(&self.counters.failed_replays, u64::from(failure.is_some()));
        let mut state = self.state.lock();
        state.standing.seen.is_replaying = false;
        if failure.is_some() && state.bare_batches > 0 {
            let batches = std::mem::take(&mut state.bare_batches);
            state.standing.returned(batches, false);
        }
        if failure.is_some() || state.is_replays_error {
            state.last_error = failure.map(|why| format!("replay failed: {why}"));
            state.is_replays_error = failure.is_some();
        }
        if is_empty {
            // Everything was requested: the engine has published nothing yet.
            state.standing.seen.is_known_empty = true;
        }
        self.tell(&mut state);
    }
}
