//! Decisions as they are reported: the selected worker, a record of all inputs and the outcome, and a
//! ring of the latest records by request id, limited in bytes.
//!
//! A record keeps the raw inputs: every request makes one, and few are ever read. What people read
//! is computed on demand.

use std::collections::VecDeque;
use std::sync::Arc;

use hashbrown::HashMap;
use parking_lot::Mutex;

use super::ask::TokenSource;
use super::draining::Diverted;
use crate::ids::Worker;
use crate::index::Match;
use crate::policy::{Candidate, CandidateCost, Choice, Reason, RequestTerms, Terms};

named! {
    /// Outcome of a request.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Outcome {
        /// It has not ended.
        Running = "running",
        /// Its answer is complete.
        Complete = "complete",
        /// It ended before its first token, or with the engine's error.
        Failed = "failed",
        /// Its answer was interrupted.
        Broken = "broken",
        /// The client disconnected.
        ClientGone = "client_gone",
        /// Its caller freed the load.
        Freed = "freed",
        /// It had no activity for too long.
        Expired = "expired",
    }
}

/// The selected worker, with a summary of the reasons.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Selection {
    /// The worker.
    pub worker: Worker,
    /// Leading blocks of the prompt that it holds on its device; without events, those predicted.
    pub overlap_blocks: u32,
    /// Further leading blocks that it was credited with because the prompt was sent there recently.
    pub predicted_blocks: u32,
    /// Blocks saved by host memory and disks besides these, rounded down.
    pub lower_blocks: u32,
    /// Leading blocks on its device according to its events, whatever their credit.
    pub held_blocks: u32,
    /// Leading blocks that it holds contiguously across all tiers.
    pub reached_blocks: u32,
    /// Leading blocks that the best of all workers holds, even if it could not take the request.
    pub best_blocks: u32,
    /// Time of the selection, by the selector's clock.
    pub at_ms: u64,
    /// The reason.
    pub reason: Reason,
    /// How many were equally good.
    pub ties: usize,
    /// Cost difference to the next one.
    pub margin: Option<f64>,
    /// The seed of the random draw; see [`RouteOverride::seed`](super::RouteOverride::seed).
    pub seed: u64,
}

impl Selection {
    /// Leading blocks of the prompt that it will find on the device: those it holds, and those
    /// predicted beyond them.
    pub fn expected_blocks(&self) -> u32 {
        self.overlap_blocks + self.predicted_blocks
    }
}

/// One worker that could have taken the request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CandidateRecord {
    /// The request's cost there.
    pub terms: Terms,
    /// Leading blocks reported as its overlap: those held on the device; without events, those
    /// predicted.
    pub overlap_blocks: u32,
    /// Leading blocks held on the device.
    pub device_blocks: u32,
    /// Blocks reached when host memory continues where the device ends.
    pub host_blocks: u32,
    /// Blocks reached when disks, local or shared, continue where host memory ends.
    pub disk_blocks: u32,
    /// Leading blocks that it was predicted to hold.
    pub predicted_blocks: u32,
    /// Weight of its blocks, 0 to 1, if below 1.
    pub credit: Option<f64>,
    /// Skipped because it was busy.
    pub is_busy: bool,
    /// Skipped because it was draining.
    pub is_draining: bool,
}

/// Candidates that a past decision keeps: the cheapest, and as many of those that were skipped. With
/// all of 2,000 workers, a decision would take 200 KiB and a journal would hold few.
pub(super) const CANDIDATES_KEPT: usize = 64;

/// What a decision read of the workers.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Seen {
    /// Candidates that were neither busy nor draining, in worker order.
    pub open: Box<[Candidate]>,
    /// The cost of each of these.
    pub costs: Box<[CandidateCost]>,
    /// The others, and whether they were draining.
    pub passed_over: Box<[(Terms, bool)]>,
    /// What the index found.
    pub found: Box<[Match]>,
    /// Weights of blocks below 1.
    pub credits: Box<[(Worker, f64)]>,
    /// There are no events: an overlap is a prediction.
    pub is_predicted: bool,
    /// Candidates that are in neither list.
    pub left_out: usize,
}

/// The candidates to keep of `count`, at most `most`, in their order: those that are `wanted`, the one
/// that has the most of the prompt, and the cheapest of the others.
pub(super) fn kept(
    count: usize,
    cost: impl Fn(usize) -> f64,
    overlap: impl Fn(usize) -> u32,
    wanted: impl Fn(usize) -> bool,
    most: usize,
) -> Vec<usize> {
    let mut kept: Vec<usize> = (0..count).collect();
    if count > most {
        let best = (0..count).max_by_key(|&at| overlap(at));
        let is_first = |at: usize| wanted(at) || Some(at) == best;
        let rank = |at: usize| if is_first(at) { f64::NEG_INFINITY } else { cost(at) };
        kept.select_nth_unstable_by(most - 1, |&a, &b| rank(a).total_cmp(&rank(b)));
        kept.truncate(most);
        kept.sort_unstable();
    }
    kept
}

impl Seen {
    fn bytes(&self) -> usize {
        size_of_val(&*self.open)
            + size_of_val(&*self.costs)
            + size_of_val(&*self.passed_over)
            + size_of_val(&*self.found)
            + size_of_val(&*self.credits)
    }
}

/// Held blocks, and predicted blocks beyond them, as they are reported; without events all are
/// predicted.
pub(super) fn told(terms: &Terms, is_predicted: bool) -> (u32, u32) {
    match is_predicted {
        true => (terms.overlap_blocks, 0),
        false => (terms.overlap_blocks - terms.predicted_blocks, terms.predicted_blocks),
    }
}

/// One decision.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// The request's name.
    pub request_id: Arc<str>,
    /// The model.
    pub model: Arc<str>,
    /// The client's name for it, if it is an alias.
    pub alias: Option<Arc<str>>,
    /// When it was decided, milliseconds of the selector's clock.
    pub decided_at_ms: u64,
    /// The policy that chose.
    pub policy: Arc<str>,
    /// The policy outside the core that should have chosen, if it gave no valid choice in time.
    pub instead_of: Option<Arc<str>>,
    /// The chosen worker.
    pub worker: Worker,
    /// The choice among the candidates that were neither busy nor draining, which come first.
    pub choice: Choice,
    /// The seed of the random draw.
    pub seed: u64,
    /// The request as the policy saw it.
    pub request: RequestTerms,
    /// How far the prompt's tokens were known.
    pub prompt_source: TokenSource,
    /// Full blocks of the prompt, as far as its tokens were known.
    pub request_blocks: u32,
    /// Leading blocks of the chosen worker reported as its overlap; see [`CandidateRecord`].
    pub overlap_blocks: u32,
    /// The draining worker that it should have used.
    pub diverted: Option<Diverted>,
    pub(super) seen: Seen,
    /// Milliseconds from the decision to the first token.
    pub first_token_ms: Option<u64>,
    /// Milliseconds from the decision to the end.
    pub ended_ms: Option<u64>,
    /// Tokens that the engine reports as reused.
    pub cached_tokens: Option<u64>,
    /// The outcome.
    pub outcome: Outcome,
}

impl Record {
    /// The candidates that it keeps, skipped ones last.
    ///
    /// # Cost
    /// O(candidates), and sorting what the index found.
    pub fn candidates(&self) -> Vec<CandidateRecord> {
        let Seen { open, costs, passed_over, found, credits, is_predicted, .. } = &self.seen;
        let mut found: Vec<&Match> = found.iter().collect();
        found.sort_unstable_by_key(|found| found.worker);
        let credits: HashMap<Worker, f64> = credits.iter().copied().collect();
        let candidate = |terms: Terms, is_busy, is_draining| {
            let place = found.binary_search_by_key(&terms.worker, |found| found.worker);
            let blocks = |tier: fn(&Match) -> u32| place.map_or(0, |place| tier(found[place]));
            CandidateRecord {
                terms,
                overlap_blocks: told(&terms, *is_predicted).0,
                device_blocks: blocks(|held| held.device),
                host_blocks: blocks(|held| held.host),
                disk_blocks: blocks(|held| held.external),
                predicted_blocks: blocks(|held| held.predicted),
                credit: credits.get(&terms.worker).copied(),
                is_busy,
                is_draining,
            }
        };
        let open = open.iter().zip(costs).map(|(one, cost)| self.request.terms_at(one, cost));
        let passed_over = passed_over.iter();
        open.map(|terms| candidate(terms, false, false))
            .chain(passed_over.map(|&(terms, draining)| candidate(terms, !draining, draining)))
            .collect()
    }

    pub(super) fn bytes(&self) -> usize {
        size_of::<Self>()
            + self.request_id.len()
            + self.alias.as_deref().map_or(0, str::len)
            + self.seen.bytes()
    }
}

/// Maximum decisions returned for one name, because clients choose the names.
const MAX_FOUND: usize = 16;

#[derive(Debug, Default)]
struct State {
    /// Oldest first; the first one has the number `first`.
    ring: VecDeque<Record>,
    first: u64,
    bytes: usize,
    dropped_total: u64,
}

/// Sizes and counters of a [`Journal`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct JournalStats {
    /// Decisions kept.
    pub records: usize,
    /// Bytes they occupy.
    pub bytes: usize,
    /// Decisions dropped for later ones, or larger than the limit.
    pub dropped_total: u64,
}

/// The latest decisions, as many as its limit allows; the oldest are dropped.
///
/// # Cost
/// A lock and O(1) besides the record itself; [`find`](Self::find) looks at every record.
#[derive(Debug)]
pub struct Journal {
    limit_bytes: usize,
    state: Mutex<State>,
}

impl Journal {
    /// An empty journal of at most `limit_bytes`; 0 keeps nothing.
    pub fn new(limit_bytes: usize) -> Self {
        Self { limit_bytes, state: Mutex::default() }
    }

    /// Whether it keeps records.
    pub fn is_on(&self) -> bool {
        self.limit_bytes > 0
    }

    /// Keeps `record`; returns its number for [`update`](Self::update).
    pub fn push(&self, record: Record) -> u64 {
        let bytes = record.bytes();
        let mut state = self.state.lock();
        let state = &mut *state;
        if bytes > self.limit_bytes {
            state.dropped_total += 1;
            // A number that no record has.
            return u64::MAX;
        }
        while state.bytes + bytes > self.limit_bytes {
            state.drop_oldest();
        }
        let number = state.first + state.ring.len() as u64;
        state.ring.push_back(record);
        state.bytes += bytes;
        number
    }

    /// Changes a record, if it still exists.
    pub fn update(&self, number: u64, change: impl FnOnce(&mut Record)) {
        let mut state = self.state.lock();
        let place = number.checked_sub(state.first).map(|place| place as usize);
        if let Some(record) = place.and_then(|place| state.ring.get_mut(place)) {
            change(record);
        }
    }

    /// The latest decisions for `request_id`, 16 at most, oldest first: several if several workers
    /// were tried.
    pub fn find(&self, request_id: &str) -> Vec<Record> {
        let state = self.state.lock();
        let of_name = state.ring.iter().rev().filter(|record| &*record.request_id == request_id);
        let mut found: Vec<Record> = of_name.take(MAX_FOUND).cloned().collect();
        found.reverse();
        found
    }

    /// Sizes and counters.
    pub fn stats(&self) -> JournalStats {
        let state = self.state.lock();
        JournalStats {
            records: state.ring.len(),
            bytes: state.bytes,
            dropped_total: state.dropped_total,
        }
    }
}

impl State {
    fn drop_oldest(&mut self) {
        let Some(record) = self.ring.pop_front() else { return };
        self.first += 1;
        self.bytes -= record.bytes();
        self.dropped_total += 1;
    }
}
