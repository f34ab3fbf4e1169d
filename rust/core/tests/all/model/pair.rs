//! The index and its twin side by side: what is played on both, and what is compared.

use std::collections::BTreeMap;

use kvflash_core::ids::{Tier, Worker};
use kvflash_core::index::{
    Block, DumpEvent, IndexStats, Limits, ManyMatches, Match, Matches, Options, RadixIndex,
    frequencies,
};
use rand::SeedableRng;
use rand::rngs::SmallRng;

use crate::oracle::{BlockIndex, OracleIndex, replay};

/// One event of a stream.
#[derive(Debug, Clone)]
pub enum Op {
    Store {
        worker: Worker,
        tier: Tier,
        parent: Option<u64>,
        blocks: Vec<Block>,
    },
    Copy {
        worker: Worker,
        tier: Tier,
        names: Vec<u64>,
    },
    Remove {
        worker: Worker,
        tier: Tier,
        names: Vec<u64>,
    },
    Predict {
        worker: Worker,
        locals: Vec<u64>,
        history_blocks: Option<usize>,
    },
    /// Advance the time; a step back is passed to the index and must change nothing.
    Advance(i64),
    Clear(Worker),
    ClearTier(Worker, Tier),
    RemoveWorker(Worker),
    RemoveInstance(u64),
}

impl Op {
    fn worker(&self) -> Option<Worker> {
        match self {
            Self::Store { worker, .. }
            | Self::Copy { worker, .. }
            | Self::Remove { worker, .. }
            | Self::Predict { worker, .. }
            | Self::ClearTier(worker, _)
            | Self::Clear(worker) => Some(*worker),
            Self::RemoveWorker(_) | Self::RemoveInstance(_) | Self::Advance(_) => None,
        }
    }
}

/// The identity of all prompts that begin with `local`: a seed belongs to content.
pub fn seed_of(local: u64) -> u64 {
    1337 + local % 2
}

/// The chain hash, worked out here so that the index's own is checked too.
pub fn chain(parent: Option<u64>, local: u64) -> u64 {
    let Some(parent) = parent else { return local };
    let bytes = [parent.to_le_bytes(), local.to_le_bytes()].concat();
    xxhash_rust::xxh3::xxh3_64_with_seed(&bytes, 1337)
}

pub fn chains(locals: &[u64]) -> Vec<u64> {
    let mut all: Vec<u64> = Vec::new();
    locals.iter().for_each(|local| all.push(chain(all.last().copied(), *local)));
    all
}

/// Situations of a run; a test asserts that its own has occurred.
#[derive(Debug, Default)]
pub struct Seen {
    pub events: usize,
    pub compared: usize,
    /// Workers' answers in all that was compared; those without a match do not count.
    pub scores: usize,
    pub matched: usize,
    pub deepest: u32,
    pub most_matches: usize,
    /// Answers in which a lower tier went on where the nearer one ended.
    pub lower: usize,
    /// Answers with predictions.
    pub foretold: usize,
    pub rejected: BTreeMap<String, usize>,
    pub added: u32,
    pub duplicates: u32,
    pub moved: u32,
    pub refused: u32,
    pub copied: u32,
    pub kept: u32,
    pub expired: usize,
    /// Predictions that ran out of a history.
    pub outgrown: u64,
    pub dump_events: usize,
    /// Dumps that had to store blocks only to let them go again.
    pub filled: usize,
}

impl Seen {
    /// Whether some event was rejected for this cause.
    pub fn met(&self, cause: &str) -> bool {
        self.rejected.contains_key(cause)
    }
}

pub struct Pair {
    options: Options,
    pub index: RadixIndex,
    pub twin: OracleIndex,
    now_ms: u64,
    out: Matches,
    many: ManyMatches,
    pub seen: Seen,
}

impl Pair {
    pub fn new(options: Options) -> Self {
        Self {
            options,
            index: RadixIndex::new(options),
            twin: OracleIndex::new(options),
            now_ms: 0,
            out: Matches::new(),
            many: ManyMatches::default(),
            seen: Seen::default(),
        }
    }

    /// Plays one event on both and compares what they return.
    pub fn play(&mut self, op: &Op) {
        let Self { index, twin, seen, .. } = self;
        seen.events += 1;
        match op {
            Op::Store { worker, tier, parent, blocks } => {
                // As feeders do: children have their parent's identity.
                let inherited = parent.and_then(|parent| twin.parent_seed(*worker, parent));
                let first = blocks.first().map_or(0, |block| block.local_hash);
                let seed = inherited.unwrap_or(seed_of(first));
                let outcome = index.store(*worker, *tier, *parent, seed, blocks);
                assert_eq!(outcome, twin.store(*worker, *tier, *parent, seed, blocks));
                if let Some(cause) = outcome.rejected {
                    *seen.rejected.entry(format!("{cause:?}")).or_default() += 1;
                }
                seen.added += outcome.added;
                seen.duplicates += outcome.duplicates;
                seen.moved += outcome.moved;
                seen.refused += outcome.refused;
            }
            Op::Copy { worker, tier, names } => {
                let outcome = index.copy(*worker, *tier, names);
                assert_eq!(outcome, twin.copy(*worker, *tier, names));
                seen.copied += outcome.added;
                seen.refused += outcome.refused;
            }
            Op::Remove { worker, tier, names } => {
                let outcome = index.remove(*worker, *tier, names);
                assert_eq!(outcome, twin.remove(*worker, *tier, names));
                seen.kept += outcome.kept;
            }
            Op::Predict { worker, locals, history_blocks } => {
                let seed = seed_of(locals.first().copied().unwrap_or(0));
                let before = twin.stats().expired_blocks_total;
                let predict = |one: &dyn BlockIndex| match history_blocks {
                    None => one.predict(*worker, seed, locals),
                    Some(most) => one.predict_within(*worker, seed, locals, *most),
                };
                assert_eq!(predict(index), predict(twin));
                seen.outgrown += twin.stats().expired_blocks_total - before;
            }
            Op::Advance(by_ms) => {
                let told_ms = self.now_ms.saturating_add_signed(*by_ms);
                self.now_ms = self.now_ms.max(told_ms);
                let expired = index.advance_to(told_ms);
                assert_eq!(expired, twin.advance_to(told_ms));
                // Never too late, and never at a time that has been told.
                assert!(index.predictions_due_ms() <= twin.predictions_due_ms());
                assert!(index.predictions_due_ms() > told_ms);
                seen.expired += expired;
            }
            Op::Clear(worker) => assert_eq!(index.clear(*worker), twin.clear(*worker)),
            Op::ClearTier(worker, tier) => {
                assert_eq!(index.clear_tier(*worker, *tier), twin.clear_tier(*worker, *tier));
            }
            Op::RemoveWorker(worker) => {
                assert_eq!(index.remove_worker(*worker), twin.remove_worker(*worker));
            }
            Op::RemoveInstance(id) => {
                assert_eq!(index.remove_instance(*id), twin.remove_instance(*id));
            }
        }
    }

    /// Compares everything that can be asked.
    pub fn compare(&mut self, queries: &[Vec<u64>]) {
        self.index.audit();
        let workers = self.twin.workers();
        assert_eq!(self.index.workers(), workers);
        assert_eq!(IndexStats { bytes: 0, ..self.index.stats() }, self.twin.stats());
        workers.iter().for_each(|worker| self.compare_worker(*worker, 0..8));
        queries.iter().for_each(|query| self.compare_query(query, 1));
        self.compare_many(queries);
    }

    /// Compares what can have changed most easily: the event's worker, and the answers.
    pub fn compare_after(&mut self, op: &Op, queries: &[Vec<u64>]) {
        if let Some(worker) = op.worker() {
            self.compare_worker(worker, 0..8);
            if let Op::Copy { names, .. } | Op::Remove { names, .. } = op {
                self.compare_worker(worker, names.iter().copied());
            }
        }
        queries.iter().for_each(|query| self.compare_query(query, 1));
    }

    fn compare_worker(&self, worker: Worker, names: impl IntoIterator<Item = u64>) {
        let (index, twin) = (&self.index, &self.twin);
        assert_eq!(index.blocks(worker), twin.blocks(worker), "{worker}");
        let held = index.memberships(worker);
        assert_eq!(held, twin.memberships(worker), "{worker}");
        for tier in Tier::ALL {
            let in_tier = held.iter().filter(|one| one.tier == tier).count();
            assert_eq!(index.blocks_in(worker, tier), in_tier, "{worker}, {tier:?}");
            assert_eq!(twin.blocks_in(worker, tier), in_tier, "{worker}, {tier:?}");
        }
        for name in names {
            assert_eq!(index.parent_seed(worker, name), twin.parent_seed(worker, name), "{name}");
            for tier in Tier::ALL {
                let holds = |one: &dyn BlockIndex| one.holds_all(worker, tier, &[name]);
                assert_eq!(holds(index), holds(twin), "{worker}, {tier:?}: {name}");
            }
        }
    }

    /// Compares the answers to all the prompts and their halves, asked for in one call; more than are
    /// answered under one pin.
    fn compare_many(&mut self, queries: &[Vec<u64>]) {
        let halves = queries.iter().map(|query| &query[..query.len() / 2]);
        let some: Vec<&[u64]> = queries.iter().map(Vec::as_slice).chain(halves).collect();
        let prompts: Vec<&[u64]> = some.iter().copied().cycle().take(some.len().max(40)).collect();
        let sorted = |found: &[Match]| {
            let mut found = found.to_vec();
            found.sort_unstable();
            found
        };
        self.index.find_many(&prompts, &mut self.many);
        let mut out = Matches::new();
        let mut ask_twin = |prompt: &&[u64]| {
            self.twin.find_matches(prompt, &mut out);
            sorted(out.as_slice())
        };
        let expected: Vec<Vec<Match>> = some.iter().map(&mut ask_twin).collect();
        assert_eq!(self.many.iter().len(), prompts.len());
        for (at, found) in self.many.iter().enumerate() {
            assert_eq!(sorted(found), expected[at % some.len()], "{:?}", prompts[at]);
        }
    }

    /// Compares the answers to the prompt and to every `stride`th of its prefixes.
    ///
    /// The twin is asked for the whole prompt only: from its definition, the answer to a prefix is the
    /// same, cut.
    pub fn compare_query(&mut self, locals: &[u64], stride: usize) {
        let Self { index, twin, seen, out, .. } = self;
        let ask_twin = |is_early: bool| {
            let mut out = Matches::new();
            match is_early {
                true => twin.find_matches_early_exit(locals, &mut out),
                false => twin.find_matches(locals, &mut out),
            }
            out.sort();
            out.as_slice().to_vec()
        };
        let (full, early) = (ask_twin(false), ask_twin(true));
        for len in (0..=locals.len()).rev().step_by(stride) {
            index.find_matches(&locals[..len], out);
            out.sort();
            assert_eq!(out.as_slice(), cut(&full, len), "{len} of {locals:?}");
            index.find_matches_early_exit(&locals[..len], out);
            out.sort();
            assert_eq!(out.as_slice(), cut(&early, len), "early exit, {len} of {locals:?}");
            seen.scores += cut(&full, len).len();
        }
        index.find_matches(locals, out);
        let mut counts = Vec::new();
        frequencies(out.as_slice(), &mut counts);
        let mut deeper = full.len();
        let mut ends = vec![0; counts.len() + 1];
        full.iter().for_each(|m| ends[(m.device as usize).min(counts.len())] += 1);
        for (count, ended) in counts.iter().zip(&ends) {
            deeper -= ended;
            assert_eq!(*count as usize, deeper, "{locals:?}");
        }
        let (mut names, mut wanted) = (Vec::new(), Vec::new());
        for worker in twin.workers() {
            index.names_along(worker, locals, &mut names);
            twin.names_along(worker, locals, &mut wanted);
            // The twin remembers contents that no worker holds any more.
            names.resize(names.len().max(wanted.len()), None);
            wanted.resize(names.len(), None);
            for (name, wanted) in names.iter().zip(&wanted) {
                // Most are the same name, of which there is nothing more to compare.
                if name == wanted {
                    continue;
                }
                assert_eq!(name.is_some(), wanted.is_some(), "{worker}: {locals:?}");
                let seed = |name: &Option<u64>| name.map(|name| twin.parent_seed(worker, name));
                assert_eq!(seed(name), seed(wanted), "{worker}: {locals:?}");
            }
        }
        seen.compared += 1;
        seen.matched += usize::from(!full.is_empty());
        seen.most_matches = seen.most_matches.max(full.len());
        seen.lower += usize::from(full.iter().any(|m| m.device > 0 && m.external > m.device));
        seen.foretold += usize::from(full.iter().any(|m| m.predicted > 0));
        seen.deepest = seen.deepest.max(full.iter().map(|m| m.external).max().unwrap_or(0));
    }

    /// Plays the dumps of both into empty ones of both kinds: each must come to hold and answer the
    /// same.
    pub fn compare_replayed(&mut self, queries: &[Vec<u64>]) {
        let limits = Limits { max_workers: self.options.limits.max_workers, ..Limits::default() };
        let options = Options { limits, ..self.options };
        let (index, twin) = (RadixIndex::new(options), OracleIndex::new(options));
        let crossed = RadixIndex::new(options);
        let play = |into: &dyn BlockIndex, worker, events: &[DumpEvent]| {
            for event in events {
                let outcome = replay(into, worker, event);
                assert!(outcome.rejected.is_none() && outcome.refused == 0, "{event:?}");
                assert_eq!(outcome.moved, 0, "{event:?}");
            }
        };
        for worker in self.twin.workers() {
            let expected = self.twin.memberships(worker);
            let dump = self.index.dump_worker(worker);
            play(&index, worker, &dump);
            play(&twin, worker, &dump);
            play(&crossed, worker, &self.twin.dump_worker(worker));
            for (kind, copy) in [("index", &index as &dyn BlockIndex), ("twin", &twin)] {
                assert_eq!(
                    copy.memberships(worker),
                    expected,
                    "{worker} into the {kind}: {dump:?}"
                );
            }
            assert_eq!(crossed.memberships(worker), expected, "{worker} from the twin");
            self.seen.dump_events += dump.len();
            let is_filler = |event: &DumpEvent| matches!(event, DumpEvent::Removed { .. });
            self.seen.filled += usize::from(dump.iter().any(is_filler));
        }
        index.audit();
        crossed.audit();
        let mut out = Matches::new();
        for query in queries {
            self.twin.find_matches(query, &mut out);
            let facts = out.as_slice().iter().map(|found| Match { predicted: 0, ..*found });
            let mut facts: Vec<Match> = facts.filter(|found| found.external > 0).collect();
            facts.sort_unstable();
            for copy in [&index as &dyn BlockIndex, &twin, &crossed] {
                copy.find_matches(query, &mut out);
                out.sort();
                assert_eq!(out.as_slice(), facts, "{query:?}");
            }
        }
    }
}

/// The answer to the first `len` blocks of the prompt that has the answer `full`.
fn cut(full: &[Match], len: usize) -> Vec<Match> {
    let cut = |blocks: u32| blocks.min(len as u32);
    let cut_all = |found: &Match| Match {
        device: cut(found.device),
        host: cut(found.host),
        disk: cut(found.disk),
        external: cut(found.external),
        predicted: cut(found.predicted),
        ..*found
    };
    full.iter().map(cut_all).filter(|m| m.external > 0 || m.predicted > 0).collect()
}

fn number(variable: &str) -> Option<usize> {
    std::env::var(variable).ok().and_then(|n| n.parse().ok())
}

/// How many events a stream of cheap ones plays.
pub fn events() -> usize {
    number("KVFLASH_MODEL_EVENTS").unwrap_or(3_000)
}

/// Whether more seeds are played than those that every run plays.
pub fn are_many() -> bool {
    number("KVFLASH_MODEL_SEEDS").is_some() || number("KVFLASH_MODEL_SKIP").is_some()
}

/// Distinct seeds for the stream that a test calls `first`.
pub fn seeds(first: u64) -> impl Iterator<Item = u64> {
    let count = number("KVFLASH_MODEL_SEEDS").unwrap_or(1) as u64;
    let skipped = number("KVFLASH_MODEL_SKIP").unwrap_or(0) as u64;
    (skipped..skipped + count).map(move |round| first + round * 10_000)
}

/// How long a stream is and how often everything is compared, not just what an event is about.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    pub seed: u64,
    pub options: Options,
    pub events: usize,
    pub compare_every: usize,
}

/// Plays a stream; on a failure the plan and the event are in the output.
pub fn run(
    plan: Plan,
    mut next: impl FnMut(&mut SmallRng) -> Op,
    mut ask: impl FnMut(&mut SmallRng) -> Vec<Vec<u64>>,
) -> Seen {
    let mut rng = SmallRng::seed_from_u64(plan.seed);
    let mut pair = Pair::new(plan.options);
    let mut asked = ask(&mut rng);
    for event in 1..=plan.events {
        if event % 8 == 0 {
            asked = ask(&mut rng);
        }
        let op = next(&mut rng);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pair.play(&op);
            match event % plan.compare_every {
                0 => pair.compare(&asked),
                _ => pair.compare_after(&op, &asked),
            }
            if event % (64 * plan.compare_every.min(8)) == 0 || event == plan.events {
                pair.compare_replayed(&asked);
            }
        }));
        if let Err(cause) = result {
            eprintln!("{plan:?}\nevent {event}: {op:?}");
            std::panic::resume_unwind(cause);
        }
    }
    println!("seed {}: {} events, {} scores compared", plan.seed, plan.events, pair.seen.scores);
    pair.seen
}
