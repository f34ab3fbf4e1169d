//! The dumb twin: plain collections, one lock, every answer worked out from its definition.
//!
//! It shares types with the index and nothing else: no runs, no intervals, no
//! ladder of look-ups, no counters of names, so that a mistake must be made twice to go unseen.
//! It knows neither [`Limits::capacity_blocks`] nor [`Limits::max_bytes`]: what goes
//! there depends on how the index lies in memory.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use kvflash_core::ids::{InstanceId, Tier, Worker};
use kvflash_core::index::{
    Block, CopyOutcome, CountMode, DumpEvent, IndexStats, MAX_COPIES, MAX_WORKERS, Match, Matches,
    Membership, Options, RadixIndex, Rejection, RemoveOutcome, StoreOutcome,
};
use parking_lot::Mutex;

/// What the index and its twin both do, as [`RadixIndex`] says.
macro_rules! block_index {
    ($(fn $name:ident(&self $(, $arg:ident: $type:ty)*) $(-> $out:ty)?;)*) => {
        #[allow(dead_code)] // Not every program calls all.
        pub trait BlockIndex: Send + Sync {
            $(fn $name(&self $(, $arg: $type)*) $(-> $out)?;)*

            fn remove(&self, worker: Worker, tier: Tier, names: &[u64]) -> RemoveOutcome {
                self.evict(worker, tier, names, None)
            }
        }

        impl BlockIndex for RadixIndex {
            $(fn $name(&self $(, $arg: $type)*) $(-> $out)? {
                RadixIndex::$name(self $(, $arg)*)
            })*
        }
    };
}

type Gone<'a> = Option<&'a mut Vec<u64>>;

block_index! {
    fn store(&self, worker: Worker, tier: Tier, parent: Option<u64>, seed: u64, blocks: &[Block])
        -> StoreOutcome;
    fn copy(&self, worker: Worker, tier: Tier, names: &[u64]) -> CopyOutcome;
    fn evict(&self, worker: Worker, tier: Tier, names: &[u64], gone: Gone<'_>) -> RemoveOutcome;
    fn clear(&self, worker: Worker) -> usize;
    fn clear_tier(&self, worker: Worker, tier: Tier) -> usize;
    fn remove_worker(&self, worker: Worker) -> bool;
    fn remove_instance(&self, instance_id: InstanceId) -> usize;
    fn predict(&self, worker: Worker, seed: u64, locals: &[u64]) -> usize;
    fn predict_within(&self, worker: Worker, seed: u64, locals: &[u64], most: usize) -> usize;
    fn advance_to(&self, now_ms: u64) -> usize;
    fn predictions_due_ms(&self) -> u64;
    fn find_matches(&self, locals: &[u64], out: &mut Matches);
    fn find_matches_early_exit(&self, locals: &[u64], out: &mut Matches);
    fn parent_seed(&self, worker: Worker, name: u64) -> Option<u64>;
    fn holds_all(&self, worker: Worker, tier: Tier, names: &[u64]) -> bool;
    fn names_along(&self, worker: Worker, locals: &[u64], out: &mut Vec<Option<u64>>);
    fn workers(&self) -> Vec<Worker>;
    fn blocks(&self, worker: Worker) -> usize;
    fn blocks_in(&self, worker: Worker, tier: Tier) -> usize;
    fn memberships(&self, worker: Worker) -> Vec<Membership>;
    fn dump_worker(&self, worker: Worker) -> Vec<DumpEvent>;
    fn stats(&self) -> IndexStats;
}

/// A path of local hashes from the root, by the number it got when it was first named.
type Content = usize;

/// The path that a number stands for, one step at a time.
struct Step {
    parent: Option<Content>,
    local: u64,
    chain: u64,
}

/// All paths that were ever named. Nothing is forgotten: a parent's number is below its children's.
#[derive(Default)]
struct Paths {
    steps: Vec<Step>,
    children: BTreeMap<(Option<Content>, u64), Content>,
}

impl Paths {
    /// A content and all above it.
    fn up(&self, content: Option<Content>) -> impl Iterator<Item = Content> {
        std::iter::successors(content, |at| self.steps[*at].parent)
    }

    fn extend(&mut self, parent: Option<Content>, local: u64) -> Content {
        *self.children.entry((parent, local)).or_insert_with(|| {
            let chain = kvflash_core::hash::extend(parent.map(|at| self.steps[at].chain), local);
            self.steps.push(Step { parent, local, chain });
            self.steps.len() - 1
        })
    }

    /// The contents of a prompt's blocks, as far as anybody ever named them.
    fn follow(&self, locals: &[u64]) -> Vec<Content> {
        let mut parent = None;
        let step = |local: &u64| {
            parent = Some(*self.children.get(&(parent, *local))?);
            parent
        };
        locals.iter().map_while(step).collect()
    }
}

/// The path that a worker's name stands for, and the count of its holdings by place.
struct Name {
    content: Content,
    seed: u64,
    copies: BTreeMap<Tier, u32>,
}

/// When a prediction ends, `None` is never; and how many there were when it was made.
struct Prediction {
    end_ms: Option<u64>,
    number: u64,
}

/// The blocks of one worker, and its predictions.
#[derive(Default)]
struct Held {
    names: BTreeMap<u64, Name>,
    /// The same names by content, to find them.
    places: BTreeSet<(Content, u64)>,
    predicted: BTreeMap<Content, Prediction>,
    /// How many blocks may be predicted, where that is what ends them.
    history_blocks: Option<usize>,
    /// With which tick each content ends that was stored, and those above it, held or not.
    stored: BTreeMap<Content, u64>,
}

impl Held {
    fn memberships(&self) -> usize {
        self.names.values().map(|name| name.copies.len()).sum()
    }

    fn names_of(&self, content: Content) -> impl Iterator<Item = u64> {
        self.places.range((content, 0)..=(content, u64::MAX)).map(|place| place.1)
    }

    fn holds(&self, content: Content, tier: Tier) -> bool {
        self.names_of(content).any(|name| self.names[&name].copies.contains_key(&tier))
    }

    fn put(&mut self, hash: u64, name: Name) {
        self.places.insert((name.content, hash));
        self.names.insert(hash, name);
    }

    fn let_go(&mut self, hash: u64) {
        if let Some(name) = self.names.remove(&hash) {
            self.places.remove(&(name.content, hash));
        }
    }
}

#[derive(Default)]
struct State {
    paths: Paths,
    workers: BTreeMap<Worker, Held>,
    counters: IndexStats,
    now_ms: u64,
    /// Prompts that were predicted.
    predictions: u64,
}

impl State {
    fn memberships(&self) -> usize {
        self.workers.values().map(Held::memberships).sum()
    }

    fn is_full(&self, options: &Options) -> bool {
        let max_blocks = options.limits.max_blocks;
        max_blocks > 0 && self.memberships() >= max_blocks
    }

    /// The worker stored the content now.
    fn renew(&mut self, worker: Worker, content: Option<Content>, options: &Options) {
        if options.limits.ttl_ms == 0 {
            return;
        }
        let end = options.limits.end_tick(self.now_ms);
        let held = self.workers.entry(worker).or_default();
        held.stored.extend(self.paths.up(content).map(|content| (content, end)));
    }

    fn predict(
        &mut self,
        worker: Worker,
        locals: &[u64],
        history_blocks: Option<usize>,
        options: &Options,
    ) -> usize {
        if locals.is_empty() || !self.admit(worker, options) {
            return 0;
        }
        self.predictions += 1;
        let number = self.predictions;
        let held = self.workers.entry(worker).or_default();
        if history_blocks.is_some() && held.history_blocks.is_none() {
            held.predicted.clear();
        }
        held.history_blocks = history_blocks.or(held.history_blocks);
        let is_timed = options.limits.predicted_ttl_ms > 0 && held.history_blocks.is_none();
        let end_ms = self.now_ms.saturating_add(options.limits.predicted_ttl_ms);
        let (mut content, mut fresh) = (None, 0);
        for &local in locals {
            let own = self.paths.extend(content, local);
            let prediction = Prediction { end_ms: is_timed.then_some(end_ms), number };
            fresh += usize::from(held.predicted.insert(own, prediction).is_none());
            content = Some(own);
        }
        while held.predicted.len() > held.history_blocks.unwrap_or(usize::MAX) {
            // The oldest first, and of one prompt the deepest: it has the highest number.
            let all = held.predicted.iter();
            let oldest = all.min_by_key(|(content, made)| (made.number, Reverse(**content)));
            let Some((&oldest, _)) = oldest else { break };
            held.predicted.remove(&oldest);
            self.counters.expired_blocks_total += 1;
        }
        fresh
    }

    /// Makes `worker` known; false when there are too many already.
    fn admit(&mut self, worker: Worker, options: &Options) -> bool {
        let max_workers = options.limits.max_workers.min(MAX_WORKERS);
        if !self.workers.contains_key(&worker) && self.workers.len() >= max_workers {
            return false;
        }
        self.workers.entry(worker).or_default();
        true
    }
}

/// Plays a step of a dump for `worker`. Returns the outcome of a stored step.
#[allow(dead_code)] // Not every program plays dumps.
pub fn replay(index: &dyn BlockIndex, worker: Worker, event: &DumpEvent) -> StoreOutcome {
    match event {
        DumpEvent::Stored { tier, parent, seed, blocks } => {
            index.store(worker, *tier, *parent, *seed, blocks)
        }
        DumpEvent::Removed { tier, names } => {
            index.remove(worker, *tier, names);
            StoreOutcome::default()
        }
    }
}

fn refused(cause: Rejection) -> StoreOutcome {
    StoreOutcome { rejected: Some(cause), ..StoreOutcome::default() }
}

/// Brute force: slow, small, exact. Answers as the index must.
#[derive(Default)]
pub struct OracleIndex {
    options: Options,
    state: Mutex<State>,
}

impl OracleIndex {
    /// An empty index.
    pub fn new(options: Options) -> Self {
        Self { options, state: Mutex::default() }
    }
}

impl BlockIndex for OracleIndex {
    fn store(
        &self,
        worker: Worker,
        tier: Tier,
        parent: Option<u64>,
        seed: u64,
        blocks: &[Block],
    ) -> StoreOutcome {
        let mut state = self.state.lock();
        if blocks.is_empty() {
            return StoreOutcome::default();
        }
        let in_event: Vec<u64> = blocks.iter().map(|b| b.engine_hash).chain(parent).collect();
        if in_event.iter().collect::<BTreeSet<_>>().len() < in_event.len() {
            state.counters.self_references_total += 1;
            return refused(Rejection::SelfReference);
        }
        let named = |name| Some(state.workers.get(&worker)?.names.get(&name)?.content);
        let mut content = parent.and_then(named);
        if parent.is_some() && content.is_none() {
            state.counters.orphans_total += 1;
            return refused(Rejection::Orphan);
        }
        if !state.admit(worker, &self.options) {
            state.counters.slots_exhausted_total += 1;
            return refused(Rejection::SlotsExhausted);
        }

        state.renew(worker, content, &self.options);
        let mut outcome = StoreOutcome::default();
        for (at, block) in blocks.iter().enumerate() {
            let own = state.paths.extend(content, block.local_hash);
            content = Some(own);
            let is_full = state.is_full(&self.options);
            let held = state.workers.entry(worker).or_default();
            let fresh = Name { content: own, seed, copies: BTreeMap::from([(tier, 1)]) };
            match held.names.get_mut(&block.engine_hash) {
                Some(name) if name.content != own => {
                    held.let_go(block.engine_hash);
                    held.put(block.engine_hash, fresh);
                    outcome.moved += 1;
                }
                Some(name) if name.copies.contains_key(&tier) => {
                    if self.options.count_mode == CountMode::Copies {
                        let copies = name.copies.entry(tier).or_default();
                        *copies = MAX_COPIES.min(*copies + 1);
                    }
                    outcome.duplicates += 1;
                }
                _ if is_full => {
                    outcome.refused = (blocks.len() - at) as u32;
                    break;
                }
                Some(name) => {
                    name.copies.insert(tier, 1);
                    outcome.added += 1;
                }
                None => {
                    held.put(block.engine_hash, fresh);
                    outcome.added += 1;
                }
            }
            state.renew(worker, content, &self.options);
        }
        state.counters.duplicate_blocks_total += u64::from(outcome.duplicates);
        state.counters.moved_blocks_total += u64::from(outcome.moved);
        state.counters.refused_blocks_total += u64::from(outcome.refused);
        outcome
    }

    fn copy(&self, worker: Worker, tier: Tier, engine_hashes: &[u64]) -> CopyOutcome {
        let mut state = self.state.lock();
        let mut outcome = CopyOutcome::default();
        for hash in engine_hashes {
            let is_full = state.is_full(&self.options);
            let held = state.workers.get_mut(&worker);
            let Some(name) = held.and_then(|held| held.names.get_mut(hash)) else {
                outcome.unknown += 1;
                continue;
            };
            match name.copies.get_mut(&tier) {
                Some(copies) => {
                    if self.options.count_mode == CountMode::Copies {
                        *copies = MAX_COPIES.min(*copies + 1);
                    }
                    outcome.duplicates += 1;
                }
                None if is_full => {
                    outcome.refused += 1;
                    continue;
                }
                None => {
                    name.copies.insert(tier, 1);
                    outcome.added += 1;
                }
            }
            let content = Some(name.content);
            state.renew(worker, content, &self.options);
        }
        state.counters.duplicate_blocks_total += u64::from(outcome.duplicates);
        state.counters.refused_blocks_total += u64::from(outcome.refused);
        outcome
    }

    fn evict(
        &self,
        worker: Worker,
        tier: Tier,
        engine_hashes: &[u64],
        mut gone: Option<&mut Vec<u64>>,
    ) -> RemoveOutcome {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let mut outcome = RemoveOutcome::default();
        let mut nobody = Held::default();
        let held = state.workers.get_mut(&worker).unwrap_or(&mut nobody);
        for &hash in engine_hashes {
            let name = held.names.get_mut(&hash).filter(|name| name.copies.contains_key(&tier));
            let Some(name) = name else {
                outcome.unknown += 1;
                continue;
            };
            let copies = name.copies.entry(tier).or_default();
            *copies -= 1;
            if *copies > 0 {
                outcome.kept += 1;
                continue;
            }
            outcome.removed += 1;
            name.copies.remove(&tier);
            let content = name.content;
            if name.copies.is_empty() {
                held.let_go(hash);
            }
            if tier == Tier::Device && !held.holds(content, tier) {
                held.predicted.remove(&content);
                if let Some(gone) = &mut gone {
                    gone.push(state.paths.steps[content].local);
                }
            }
        }
        state.counters.unknown_removals_total += u64::from(outcome.unknown);
        outcome
    }

    fn clear(&self, worker: Worker) -> usize {
        let mut state = self.state.lock();
        let Some(held) = state.workers.get_mut(&worker) else { return 0 };
        let empty = Held { history_blocks: held.history_blocks, ..Held::default() };
        std::mem::replace(held, empty).memberships()
    }

    fn clear_tier(&self, worker: Worker, tier: Tier) -> usize {
        let mut state = self.state.lock();
        let Some(held) = state.workers.get_mut(&worker) else { return 0 };
        let names = held.names.iter_mut();
        let dropped: Vec<u64> =
            names.filter_map(|(hash, name)| name.copies.remove(&tier).map(|_| *hash)).collect();
        for hash in &dropped {
            if held.names[hash].copies.is_empty() {
                held.let_go(*hash);
            }
        }
        if tier == Tier::Device {
            held.predicted.clear();
        }
        dropped.len()
    }

    fn remove_worker(&self, worker: Worker) -> bool {
        self.state.lock().workers.remove(&worker).is_some()
    }

    fn remove_instance(&self, instance_id: InstanceId) -> usize {
        let mut state = self.state.lock();
        let before = state.workers.len();
        state.workers.retain(|worker, _| worker.instance_id != instance_id);
        before - state.workers.len()
    }

    fn predict(&self, worker: Worker, _seed: u64, locals: &[u64]) -> usize {
        self.state.lock().predict(worker, locals, None, &self.options)
    }

    fn predict_within(
        &self,
        worker: Worker,
        _seed: u64,
        locals: &[u64],
        history_blocks: usize,
    ) -> usize {
        self.state.lock().predict(worker, locals, Some(history_blocks), &self.options)
    }

    fn advance_to(&self, now_ms: u64) -> usize {
        let mut state = self.state.lock();
        state.now_ms = state.now_ms.max(now_ms);
        let now_ms = state.now_ms;
        let mut gone = 0;
        for held in state.workers.values_mut() {
            let before = held.predicted.len();
            held.predicted.retain(|_, made| made.end_ms.is_none_or(|end_ms| end_ms > now_ms));
            gone += before - held.predicted.len();
            let before = held.memberships();
            let tick = self.options.limits.tick_at(now_ms);
            let is_over =
                |name: &Name| held.stored.get(&name.content).is_some_and(|at| *at <= tick);
            let over = held.names.iter().filter(|(_, name)| is_over(name));
            let over: Vec<u64> = over.map(|(hash, _)| *hash).collect();
            over.into_iter().for_each(|hash| held.let_go(hash));
            gone += before - held.memberships();
        }
        state.counters.expired_blocks_total += gone as u64;
        gone
    }

    fn predictions_due_ms(&self) -> u64 {
        let state = self.state.lock();
        let ends = state.workers.values().flat_map(|held| held.predicted.values());
        ends.filter_map(|made| made.end_ms).min().unwrap_or(u64::MAX)
    }

    fn find_matches(&self, locals: &[u64], out: &mut Matches) {
        let state = self.state.lock();
        let prompt = state.paths.follow(locals);
        let mut found = Vec::new();
        for (&worker, held) in &state.workers {
            let mut reach = [0_u32; 4];
            let mut depth = 0;
            for tier in Tier::ALL {
                let on = prompt[depth..].iter().take_while(|content| held.holds(**content, tier));
                depth += on.count();
                reach[tier as usize] = depth as u32;
            }
            let [device, host, disk, external] = reach;
            let is_predicted = |content: &&Content| held.predicted.contains_key(*content);
            let predicted = prompt.iter().take_while(is_predicted).count() as u32;
            if external > 0 || predicted > 0 {
                found.push(Match { worker, device, host, disk, external, predicted });
            }
        }
        out.replace(found.into_iter());
    }

    fn find_matches_early_exit(&self, locals: &[u64], out: &mut Matches) {
        self.find_matches(locals, out);
        // The walk stops behind the first block that exactly one worker still holds.
        let all = out.as_slice().to_vec();
        let holders = |depth: u32| all.iter().filter(|m| m.device >= depth).count();
        let stop = (1..=locals.len() as u32).find(|depth| holders(*depth) <= 1);
        let cut = all.iter().map(|found| {
            Match::on_device(found.worker, found.device.min(stop.unwrap_or(u32::MAX)))
        });
        out.replace(cut.filter(|found| found.device > 0));
    }

    fn parent_seed(&self, worker: Worker, engine_hash: u64) -> Option<u64> {
        Some(self.state.lock().workers.get(&worker)?.names.get(&engine_hash)?.seed)
    }

    fn holds_all(&self, worker: Worker, tier: Tier, engine_hashes: &[u64]) -> bool {
        let state = self.state.lock();
        engine_hashes.iter().all(|hash| {
            let name = state.workers.get(&worker).and_then(|held| held.names.get(hash));
            name.is_some_and(|name| name.copies.contains_key(&tier))
        })
    }

    fn names_along(&self, worker: Worker, locals: &[u64], out: &mut Vec<Option<u64>>) {
        out.clear();
        let state = self.state.lock();
        let Some(held) = state.workers.get(&worker) else { return };
        let prompt = state.paths.follow(locals);
        out.extend(prompt.into_iter().map(|content| held.names_of(content).next()));
    }

    fn workers(&self) -> Vec<Worker> {
        self.state.lock().workers.keys().copied().collect()
    }

    fn blocks(&self, worker: Worker) -> usize {
        self.state.lock().workers.get(&worker).map_or(0, Held::memberships)
    }

    fn blocks_in(&self, worker: Worker, tier: Tier) -> usize {
        let state = self.state.lock();
        let names = state.workers.get(&worker).into_iter().flat_map(|held| held.names.values());
        names.filter(|name| name.copies.contains_key(&tier)).count()
    }

    fn memberships(&self, worker: Worker) -> Vec<Membership> {
        let state = self.state.lock();
        let names = state.workers.get(&worker).into_iter().flat_map(|held| &held.names);
        let mut memberships = Vec::new();
        for (&engine_hash, Name { content, seed, copies }) in names {
            let (chain, seed) = (state.paths.steps[*content].chain, *seed);
            memberships.extend(copies.iter().map(|(&tier, &copies)| Membership {
                chain,
                engine_hash,
                tier,
                seed,
                copies,
            }));
        }
        memberships.sort_unstable();
        memberships
    }

    fn dump_worker(&self, worker: Worker) -> Vec<DumpEvent> {
        let state = self.state.lock();
        let Some(held) = state.workers.get(&worker) else { return Vec::new() };
        let steps = &state.paths.steps;
        // Everything held, and what lies between it and the root.
        let mut wanted: BTreeMap<Content, u64> = BTreeMap::new();
        for name in held.names.values() {
            let mut above = Some(name.content);
            while let Some(content) = above.filter(|content| !wanted.contains_key(content)) {
                wanted.insert(content, name.seed);
                above = steps[content].parent;
            }
        }
        let mut events = Vec::new();
        let mut called: BTreeMap<Content, u64> = BTreeMap::new();
        let mut fillers: BTreeSet<u64> = BTreeSet::new();
        // In the order of their numbers: parents first.
        for (content, seed) in wanted {
            let Step { parent, local, chain } = steps[content];
            let parent = parent.map(|parent| called[&parent]);
            let mut emit = |tier, engine_hash| {
                let blocks = vec![Block { engine_hash, local_hash: local }];
                events.push(DumpEvent::Stored { tier, parent, seed, blocks });
            };
            for hash in held.names_of(content) {
                for (&tier, &copies) in &held.names[&hash].copies {
                    (0..copies).for_each(|_| emit(tier, hash));
                }
                called.entry(content).or_insert(hash);
            }
            called.entry(content).or_insert_with(|| {
                let mut filler = !chain;
                while held.names.contains_key(&filler) || !fillers.insert(filler) {
                    filler = filler.wrapping_add(1);
                }
                emit(Tier::Device, filler);
                filler
            });
        }
        if !fillers.is_empty() {
            let names = fillers.into_iter().collect();
            events.push(DumpEvent::Removed { tier: Tier::Device, names });
        }
        events
    }

    fn stats(&self) -> IndexStats {
        let state = self.state.lock();
        let names = || state.workers.values().flat_map(|held| held.names.values());
        let tiers = |held: &Held| {
            let tiers = held.names.values().flat_map(|name| name.copies.keys());
            tiers.collect::<BTreeSet<_>>().len()
        };
        IndexStats {
            workers: state.workers.len(),
            holders: state.workers.values().map(tiers).sum(),
            unique_blocks: names().map(|name| name.content).collect::<BTreeSet<_>>().len(),
            memberships: state.memberships(),
            predicted: state.workers.values().map(|held| held.predicted.len()).sum(),
            ..state.counters
        }
    }
}
