//! The position of a publisher's stream: passed to another replica, and taken over from one.

use std::collections::HashSet;

use super::super::cache_groups::CacheGroups;
use super::super::code::{Code, TrustState};
use super::super::registration::Place;
use super::super::trust;
use super::{MAX_RANKS, Publisher, State};
use crate::codec::{Limits, decode_batch};
use crate::event::Event;
use crate::ids::{Tier, Worker};
use crate::index::snapshot::Cursor;
use crate::stream::END_OF_REPLAY;

impl Publisher {
    /// Continues where an earlier registration of the same engine ended. Its blocks are gone.
    pub(in crate::catalog) fn return_to(&self, cursor: Cursor) {
        let mut state = self.state.lock();
        state.stream.resume(cursor.sequence, cursor.fingerprint, true);
        let batches = state.stream.next();
        state.standing.returned(batches, self.replay_endpoint.is_some());
        state.bare_batches = batches;
    }

    /// Takes over another replica's state: the blocks that `load` adds to the index, and the
    /// position that it returns.
    ///
    /// # Errors
    /// The reason; then `load` was not called.
    ///
    /// # Consistency
    /// Its own frames wait meanwhile.
    pub(in crate::catalog) fn take_over(
        &self,
        load: impl FnOnce() -> Place,
    ) -> Result<(), &'static str> {
        let mut state = self.state.lock();
        if state.closed {
            return Err("it was unregistered meanwhile");
        }
        let is_bare = state.bare_batches > 0 && self.counters.read().batches == 0;
        if state.stream.last().is_some() && !is_bare {
            return Err("its own events have already arrived");
        }
        let place = load();
        self.go_on(&mut state, &place);
        Ok(())
    }

    /// Drops blocks and position, as before the first batch: both will come from elsewhere.
    pub(in crate::catalog) fn start_over(&self) {
        let mut state = self.state.lock();
        self.forget(&mut state);
        state.stream.reset();
    }

    /// As [`Publisher::take_over`], with blocks that are already in the index. False, and without
    /// effect, if it was unregistered meanwhile.
    pub(in crate::catalog) fn go_on_from(&self, place: &Place) -> bool {
        let mut state = self.state.lock();
        let is_open = !state.closed;
        if is_open {
            self.go_on(&mut state, place);
        }
        is_open
    }

    fn go_on(&self, state: &mut State, place: &Place) {
        for dp_rank in &place.ranks {
            if !state.ranks.contains(dp_rank) && state.ranks.len() < MAX_RANKS {
                self.add_rank(state, *dp_rank);
            }
        }
        state.groups = match &place.cache {
            Some(known) => CacheGroups::knowing(known, self.worker.instance_id),
            None => CacheGroups::crediting(place.group),
        };
        self.share_layout(state);
        state.bare_batches = 0;
        let instance_id = self.worker.instance_id;
        let blocks = |rank: &u32| self.model.index.blocks(Worker::new(instance_id, *rank));
        // Without blocks no position is needed: the stream begins here, and earlier batches are
        // requested.
        state.is_unplaced =
            place.cursor.is_none() && state.ranks.iter().any(|rank| blocks(rank) > 0);
        state.standing.recovered(!state.is_unplaced, !place.is_inexact);
        if let Some(cursor) = place.cursor {
            state.stream.resume(cursor.sequence, cursor.fingerprint, false);
        }
        self.tell(state);
    }

    /// Handles blocks without a stream position. A stream that begins here, at 0, is complete, and
    /// its engine held nothing before: the blocks are those of an earlier process, or would count
    /// twice, so they are dropped. They are kept, and the stream continues, if its first batch
    /// has another number, or continues one of them: a process that has just started could not.
    pub(super) fn settle_unplaced(&self, state: &mut State, sequence: u64, payload: &[u8]) {
        // The end marker is not a batch number, and says nothing about the stream position.
        if sequence == END_OF_REPLAY || !std::mem::take(&mut state.is_unplaced) {
            return;
        }
        if let Some(before) = sequence.checked_sub(1) {
            state.stream.resume(before, None, false);
        } else if !self.continues_blocks(payload) {
            self.clear_ranks(state);
            state.standing.recovered(true, true);
        }
    }

    /// Whether the batch stores blocks on the device behind one that the worker holds there and
    /// that the batch itself did not store.
    fn continues_blocks(&self, payload: &[u8]) -> bool {
        let Ok(batch) = decode_batch(payload, &Limits::default()) else { return false };
        let dp_rank = batch.dp_rank.unwrap_or(self.worker.dp_rank);
        let worker = Worker::new(self.worker.instance_id, dp_rank);
        let stored = batch.events.iter().filter_map(|event| match event {
            Event::Stored(stored) if stored.tier() == Some(Tier::Device) => Some(stored),
            _ => None,
        });
        let mut own: HashSet<u64> = HashSet::new();
        for event in stored {
            if let Some(parent) = event.parent.filter(|parent| !own.contains(parent))
                && self.model.index.holds_all(worker, Tier::Device, &[parent])
            {
                return true;
            }
            own.extend(&event.block_hashes);
        }
        false
    }

    /// Reads position and blocks of one moment: no frame is applied while `read` runs.
    pub(in crate::catalog) fn hold_still<T>(&self, read: impl FnOnce(Place) -> T) -> T {
        let state = self.state.lock();
        let mut place = self.place(&state);
        if state.bare_batches > 0 {
            // A replica that took this position would never request the blocks.
            place.cursor = None;
        }
        read(place)
    }

    pub(super) fn place(&self, state: &State) -> Place {
        let cursor = state
            .stream
            .last()
            .map(|sequence| Cursor { sequence, fingerprint: state.stream.last_payload_hash() });
        let findings = trust::findings(&self.evidence(state));
        // The state of this replica's socket does not affect the blocks.
        let is_doubt = |code: Code| {
            let is_unread = matches!(code, Code::BlockSizeMismatch | Code::NothingDecodable);
            is_unread || code.state() == TrustState::Degraded && !code.is_passing()
        };
        Place {
            cursor,
            ranks: state.ranks.clone(),
            group: state.groups.shown.main,
            cache: state.groups.knowledge(),
            // Dumps hold the names of workers, not those of the stores that they share.
            is_inexact: findings.iter().any(is_doubt) || !state.groups.shown.stores.is_empty(),
        }
    }
}
