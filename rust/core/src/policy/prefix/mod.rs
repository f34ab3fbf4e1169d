//! `prefix-cache`: the worker that holds the most of the prompt, unless it is too busy.
//!
//! It reads holders from engines' events, or else from a table of what was sent where.

mod hasher;
mod holders;
mod matching;
mod table;

use parking_lot::Mutex;
use rand::RngCore;

pub(super) use hasher::BlockHasher;
pub(super) use matching::{BUCKETS, is_imbalanced, match_percent_bucket, select_matched};
pub(super) use table::PrefixTable;

use super::by_metric::choose_lowest;
use super::contract::{Candidates, Context, Polarity, RoutePolicy, Sample};
use super::cost::CandidateCost;
use super::decision::{Choice, Reason};
use super::settings::{PrefixSettings, PrefixSource, TokenizerKind};
use crate::error::Result;
use crate::ids::Worker;

/// The policy and its table.
#[derive(Debug)]
pub struct PrefixCache {
    settings: PrefixSettings,
    hasher: BlockHasher,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    table: PrefixTable,
    scratch: Scratch,
    counters: Counters,
}

/// Memory reused between decisions.
#[derive(Debug, Default)]
struct Scratch {
    counts: Vec<i64>,
    allowed: Vec<bool>,
    /// By candidate; `None` if it holds nothing.
    percents: Vec<Option<u32>>,
    values: Vec<Option<f64>>,
}

/// Decisions by reason, and the held share of the prompt.
#[derive(Debug, Default)]
struct Counters {
    selections: [u64; 3],
    buckets: [u64; 5],
    imbalanced: u64,
}

const SELECTIONS: [Reason; 3] =
    [Reason::PrefixMatch, Reason::PrefixMatchSkipped, Reason::LeastRequestFallback];

impl PrefixCache {
    /// The policy with an empty table; hashes start at `seed`.
    pub fn new(settings: &PrefixSettings, seed: u64) -> Self {
        let state = State {
            table: PrefixTable::new(settings),
            scratch: Scratch::default(),
            counters: Counters::default(),
        };
        let hasher = BlockHasher::new(settings, seed);
        Self { settings: settings.clone(), hasher, state: Mutex::new(state) }
    }

    fn hashes<'a>(&self, context: &'a Context<'_>) -> std::borrow::Cow<'a, [u64]> {
        context.memo.hashes(self.hasher.id(), || self.hasher.hashes(context))
    }

    fn uses_index(&self, context: &Context<'_>) -> bool {
        match self.settings.source {
            PrefixSource::Auto => context.is_indexed,
            PrefixSource::Table => false,
            PrefixSource::Index => true,
        }
    }

    /// Fills `scratch.percents` for the eligible candidates.
    fn percents(&self, state: &mut State, context: &Context<'_>, candidates: &Candidates<'_>) {
        let State { table, scratch, .. } = state;
        let Scratch { allowed, percents, .. } = scratch;
        percents.clear();
        percents.resize(candidates.len(), None);
        if self.uses_index(context) {
            let size = u64::from(context.request.block_size);
            let full = context.request.isl_tokens.checked_div(size).unwrap_or(0);
            for (index, candidate) in candidates.list.iter().enumerate() {
                if full > 0 && candidate.overlap_blocks > 0 && allowed[index] {
                    let held = u64::from(candidate.overlap_blocks).min(full);
                    percents[index] = Some((held * 100 / full) as u32);
                }
            }
            return;
        }
        let hashes = self.hashes(context);
        let workers = candidates.list.iter().map(|candidate| candidate.worker);
        table.matches(context.model, &hashes, workers, allowed, context.now_ms, percents);
    }
}

impl RoutePolicy for PrefixCache {
    fn name(&self) -> &str {
        "prefix-cache"
    }

    fn needs_tokens(&self) -> bool {
        self.settings.source != PrefixSource::Table
            || self.settings.tokenizer == TokenizerKind::Model
    }

    fn prepare(&self, context: &Context<'_>) -> Result<()> {
        if !self.uses_index(context) {
            let _hashes_are_kept = self.hashes(context);
        }
        Ok(())
    }

    fn choose(
        &self,
        context: &Context<'_>,
        candidates: &Candidates<'_>,
        costs: &mut Vec<CandidateCost>,
        rng: &mut dyn RngCore,
    ) -> Option<Choice> {
        candidates.fill(costs, |index| f64::from(candidates.requests(index)));
        let mut state = self.state.lock();
        let Scratch { counts, allowed, .. } = &mut state.scratch;
        counts.clear();
        counts.extend((0..candidates.len()).map(|index| i64::from(candidates.requests(index))));
        let lowest = counts.iter().copied().min()?;
        allowed.clear();
        let is_imbalanced = is_imbalanced(counts, self.settings.imbalance_abs_count);
        if is_imbalanced {
            allowed.extend(counts.iter().map(|&count| count == lowest));
        } else {
            allowed.resize(counts.len(), true);
        }
        if is_imbalanced && !self.settings.is_compat {
            // The document ignores matches then, even of the least used workers.
            state.scratch.percents.clear();
            state.scratch.percents.resize(candidates.len(), None);
        } else {
            self.percents(&mut state, context, candidates);
        }
        let Scratch { counts, percents, values, .. } = &mut state.scratch;
        let factor = self.settings.standard_deviation_factor;
        if let Some((index, ties)) = select_matched(counts, percents, factor, rng) {
            let score = percents[index].map(f64::from);
            let reason = Reason::PrefixMatch;
            return Some(Choice { index, ties, margin: None, reason, score });
        }
        let is_matched = percents.iter().any(Option::is_some);
        values.clear();
        values.extend(counts.iter().map(|&count| Some(count as f64)));
        let fewest = choose_lowest(values, rng)?;
        let reason =
            if is_matched { Reason::PrefixMatchSkipped } else { Reason::LeastRequestFallback };
        let score = Some(f64::from(percents[fewest.index].unwrap_or(0)));
        Some(Choice { reason, score, ..fewest })
    }

    fn is_scorer(&self) -> bool {
        true
    }

    fn scores(
        &self,
        context: &Context<'_>,
        candidates: &Candidates<'_>,
        scores: &mut Vec<Option<f64>>,
        _rng: &mut dyn RngCore,
    ) -> Option<Polarity> {
        let mut state = self.state.lock();
        state.scratch.allowed.clear();
        state.scratch.allowed.resize(candidates.len(), true);
        self.percents(&mut state, context, candidates);
        scores.clear();
        let percents = state.scratch.percents.iter();
        scores.extend(percents.map(|percent| Some(f64::from(percent.unwrap_or(0)))));
        Some(Polarity::Most)
    }

    fn routed(&self, context: &Context<'_>, candidates: &Candidates<'_>, choice: &Choice) {
        let mut state = self.state.lock();
        let State { table, scratch, counters } = &mut *state;
        if let Some(at) = SELECTIONS.iter().position(|&reason| reason == choice.reason) {
            counters.selections[at] += 1;
            let percent = choice.score.unwrap_or(0.0) as u32;
            counters.buckets[match_percent_bucket(percent)] += 1;
            scratch.counts.clear();
            scratch.counts.extend((0..candidates.len()).map(|i| i64::from(candidates.requests(i))));
            let limit = self.settings.imbalance_abs_count;
            counters.imbalanced += u64::from(is_imbalanced(&scratch.counts, limit));
        }
        if !self.uses_index(context) {
            let worker = candidates.list[choice.index].worker;
            table.record(context.model, &self.hashes(context), worker, context.now_ms);
        }
    }

    fn removed(&self, worker: Worker) {
        self.state.lock().table.forget(worker);
    }

    fn samples(&self, _now_ms: u64, visit: &mut dyn FnMut(Sample<'_>)) {
        let state = self.state.lock();
        let State { table, counters, .. } = &*state;
        for (reason, &count) in SELECTIONS.iter().zip(&counters.selections) {
            let label = ("selection", reason.name());
            let (name, help) =
                ("prefix_cache_selection_total", "Decisions by the rule that settled them");
            visit(Sample { name, help, label, value: count as f64 });
        }
        for ((_, bucket), &count) in BUCKETS.iter().zip(&counters.buckets) {
            let label = ("match_percent_bucket", *bucket);
            let name = "prefix_cache_decisions_total";
            let help =
                "Decisions by the share of the prompt that the chosen worker is believed to hold";
            visit(Sample { name, help, label, value: count as f64 });
        }
        let stats = table.stats();
        for (name, help, value) in [
            (
                "prefix_cache_load_imbalance_total",
                "Decisions by load alone, because the workers' loads differed too much",
                counters.imbalanced,
            ),
            ("prefix_cache_blocks", "Blocks in the policy's table", stats.blocks),
            ("prefix_cache_bytes", "Memory of the policy's table", stats.bytes),
            (
                "prefix_cache_evicted_blocks_total",
                "Blocks that left the policy's table at its limit",
                stats.evicted,
            ),
            (
                "prefix_cache_expired_blocks_total",
                "Blocks that left the policy's table because of their age",
                stats.expired,
            ),
        ] {
            visit(Sample::plain(name, help, value as f64));
        }
    }
}
