//! Where streams come from: chaos, slices of prompts, engines that behave.

use std::collections::VecDeque;
use std::ops::Range;

use kvflash_core::ids::{Tier, Worker};
use kvflash_core::index::Block;
use rand::Rng;
use rand::rngs::SmallRng;
use rand::seq::{IndexedRandom, SliceRandom};

use super::pair::{Op, chains};

/// Parameters of a chaotic stream.
#[derive(Clone, Copy)]
pub struct Space {
    pub instances: u64,
    pub ranks: u32,
    pub names: u64,
    pub locals: u64,
    pub tiers: usize,
}

impl Space {
    fn worker(&self, rng: &mut SmallRng) -> Worker {
        Worker::new(rng.random_range(0..self.instances), rng.random_range(0..self.ranks))
    }
}

fn locals(rng: &mut SmallRng, alphabet: u64, len: usize) -> Vec<u64> {
    (0..len).map(|_| rng.random_range(1..=alphabet)).collect()
}

/// A prediction. Every other instance has a history, now of one length and now of another.
pub fn predict(worker: Worker, locals: Vec<u64>) -> Op {
    let has_history = worker.instance_id % 2 == 1;
    let history_blocks = has_history.then(|| 2 + locals.len() * 3 % 40);
    Op::Predict { worker, locals, history_blocks }
}

/// An event with no regard for what is valid: tiny alphabets, so that names move, repeat and twin.
pub fn chaos(rng: &mut SmallRng, space: Space) -> Op {
    let worker = space.worker(rng);
    let tier = Tier::ALL[rng.random_range(0..space.tiers)];
    let name = |rng: &mut SmallRng| rng.random_range(0..space.names);
    let names = |rng: &mut SmallRng| (0..rng.random_range(1..4)).map(|_| name(rng)).collect();
    match rng.random_range(0..100) {
        0..58 => {
            let parent = rng.random_bool(0.6).then(|| name(rng));
            let block = |rng: &mut SmallRng| Block {
                engine_hash: name(rng),
                local_hash: rng.random_range(1..=space.locals),
            };
            let blocks = (0..rng.random_range(0..5)).map(|_| block(rng)).collect();
            Op::Store { worker, tier, parent, blocks }
        }
        58..62 => Op::Copy { worker, tier, names: names(rng) },
        62..90 => Op::Remove { worker, tier, names: names(rng) },
        90..94 => {
            let len = rng.random_range(0..6);
            predict(worker, locals(rng, space.locals, len))
        }
        94..97 => Op::Advance(rng.random_range(-20..40)),
        97 if rng.random() => Op::ClearTier(worker, tier),
        97 => Op::Clear(worker),
        98 => Op::RemoveWorker(worker),
        _ => Op::RemoveInstance(worker.instance_id),
    }
}

pub fn chaotic_queries(rng: &mut SmallRng, alphabet: u64) -> Vec<Vec<u64>> {
    (0..6).map(|_| locals(rng, alphabet, 7)).collect()
}

/// A tree of prompts: each begins like another one and then goes its own way.
pub struct Prompts {
    pub all: Vec<Vec<u64>>,
    pub chains: Vec<Vec<u64>>,
    alphabet: u64,
}

impl Prompts {
    /// Some end where another one goes on, some repeat one block many times in a row.
    pub fn grow(rng: &mut SmallRng, count: usize, len: Range<usize>, alphabet: u64) -> Self {
        let mut all: Vec<Vec<u64>> = Vec::new();
        for _ in 0..count {
            let mut prompt = match all.choose(rng) {
                Some(other) => other[..rng.random_range(0..=other.len())].to_vec(),
                None => Vec::new(),
            };
            let len = rng.random_range(len.clone());
            prompt.truncate(len);
            while prompt.len() < len {
                let again = *prompt.last().filter(|_| rng.random_bool(0.3)).unwrap_or(&0);
                let fresh = rng.random_range(1..=alphabet);
                prompt.push(if again > 0 { again } else { fresh });
            }
            all.push(prompt);
        }
        Self { alphabet, ..Self::of(all) }
    }

    /// These.
    pub fn of(all: Vec<Vec<u64>>) -> Self {
        let chains = all.iter().map(|prompt| chains(prompt)).collect();
        Self { all, chains, alphabet: 2 }
    }

    /// Prompts as they are, gone astray in the middle, gone on beyond their end, begun in the middle.
    pub fn queries(&self, rng: &mut SmallRng) -> Vec<Vec<u64>> {
        let mut pick = || self.all[rng.random_range(0..self.all.len())].clone();
        let (plain, mut astray, mut beyond, middle) = (pick(), pick(), pick(), pick());
        let at = rng.random_range(0..astray.len());
        astray[at] = rng.random_range(1..=self.alphabet + 1);
        beyond.extend(locals(rng, self.alphabet, 3));
        let middle = middle[rng.random_range(0..middle.len())..].to_vec();
        vec![plain, astray, beyond, middle]
    }

    /// The beginning of one of them, often with an end of its own.
    pub fn prompt(&self, rng: &mut SmallRng) -> Vec<u64> {
        let whole = &self.all[rng.random_range(0..self.all.len())];
        let mut prompt = whole[..rng.random_range(1..=whole.len())].to_vec();
        if rng.random() {
            let own = rng.random_range(1..4);
            prompt.extend(locals(rng, self.alphabet, own));
        }
        prompt
    }
}

/// How the blocks of [`Prompts`] are named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Naming {
    /// By chain hash: all agree.
    Shared,
    /// Each worker permutes the chain hash in a way of its own.
    Permuted,
    /// By prompt and position: what two prompts share has two names, and is held until both go.
    Placed,
    /// By block ids of a small cache: names move to other content all the time.
    Numbered,
}

impl Naming {
    pub fn name(self, worker: Worker, prompts: &Prompts, prompt: usize, at: usize) -> u64 {
        let chain = prompts.chains[prompt][at];
        match self {
            Self::Shared => chain,
            Self::Permuted => permute(worker, chain),
            Self::Placed => (prompt * 10_000 + at) as u64,
            Self::Numbered => (prompt * 31 + at * 7) as u64 % 97,
        }
    }
}

/// A bijection of the worker's own.
fn permute(worker: Worker, chain: u64) -> u64 {
    chain.wrapping_mul(2 * worker.instance_id + 1).rotate_left(worker.dp_rank)
}

/// An operation on blocks `at` of a prompt: long runs, holes, healing, divergence at any offset.
pub fn slice_op(
    worker: Worker,
    tier: Tier,
    prompts: &Prompts,
    (prompt, at): (usize, Range<usize>),
    naming: Naming,
    what: u32,
) -> Op {
    let locals = &prompts.all[prompt];
    let name = |at| naming.name(worker, prompts, prompt, at);
    let names = || at.clone().map(name).collect();
    match what {
        0..48 => {
            let parent = at.start.checked_sub(1).map(name);
            let block = |at| Block { engine_hash: name(at), local_hash: locals[at] };
            Op::Store { worker, tier, parent, blocks: at.clone().map(block).collect() }
        }
        48..53 => Op::Copy { worker, tier, names: names() },
        53..86 => Op::Remove { worker, tier, names: names() },
        86..92 => predict(worker, locals[..at.end].to_vec()),
        92..97 => Op::Advance(5 * at.len() as i64),
        97 => Op::ClearTier(worker, Tier::Device),
        98 => Op::Clear(worker),
        _ => Op::RemoveWorker(worker),
    }
}

/// A random [`slice_op`]; removals in any order.
pub fn slice(rng: &mut SmallRng, space: Space, prompts: &Prompts, naming: Naming) -> Op {
    let worker = space.worker(rng);
    let tier = match rng.random_bool(0.8) {
        true => Tier::Device,
        false => Tier::ALL[rng.random_range(0..space.tiers)],
    };
    let prompt = rng.random_range(0..prompts.all.len());
    let len = prompts.all[prompt].len();
    let from = if rng.random() { 0 } else { rng.random_range(0..len) };
    // One block, a few, or the rest.
    let most = *[1, 4, 16, len].choose(rng).unwrap_or(&1);
    let to = (from + rng.random_range(1..=most)).min(len);
    let what = rng.random_range(0..100);
    let mut op = slice_op(worker, tier, prompts, (prompt, from..to), naming, what);
    if let Op::Remove { names, .. } = &mut op {
        match rng.random_range(0..3) {
            0 => names.reverse(),
            1 => names.shuffle(rng),
            _ => {}
        }
    }
    op
}

/// In which order an engine evicts.
#[derive(Debug, Clone, Copy)]
pub enum Eviction {
    TailFirst,
    HeadFirst,
    Random,
}

/// An engine's names of its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Calls {
    /// By a permuted chain hash.
    Permuted,
    /// By the smallest number that is free: small integers, used again for other content.
    Numbered,
    /// By a new name each time: content stored again has two.
    Fresh,
}

struct Cached {
    chain: u64,
    name: u64,
    tiers: [bool; 4],
}

/// An engine that behaves: stores what it lacks under what it holds, evicts what it holds.
pub struct Engine {
    worker: Worker,
    eviction: Eviction,
    calls: Calls,
    /// Blocks on the device.
    capacity: usize,
    /// Evicted blocks go to lower tiers as often as away.
    is_offloading: bool,
    /// Some of its removals get lost on the way.
    is_lossy: bool,
    /// Parents first.
    cache: Vec<Cached>,
    due: VecDeque<Op>,
    next: u64,
}

impl Engine {
    pub fn new(worker: Worker, eviction: Eviction, calls: Calls, capacity: usize) -> Self {
        let (is_offloading, is_lossy) = (false, false);
        let (cache, due, next) = Default::default();
        Self { worker, eviction, calls, capacity, is_offloading, is_lossy, cache, due, next }
    }

    pub fn offloading(self, is_offloading: bool) -> Self {
        Self { is_offloading, ..self }
    }

    pub fn losing_removals(self) -> Self {
        Self { is_lossy: true, ..self }
    }

    fn on_device(&self, chain: u64) -> Option<&Cached> {
        self.cache.iter().find(|block| block.chain == chain && block.tiers[0])
    }

    /// The name for a block that is not on the device.
    fn call(&mut self, chain: u64) -> u64 {
        let known = self.cache.iter().find(|block| block.chain == chain);
        self.next += 1;
        match (self.calls, known) {
            (Calls::Fresh, _) => permute(self.worker, self.next),
            (_, Some(known)) => known.name,
            (Calls::Permuted, None) => permute(self.worker, chain),
            (Calls::Numbered, None) => {
                let is_free = |id: &u64| self.cache.iter().all(|block| block.name != *id);
                (0..).find(is_free).expect("a cache is finite")
            }
        }
    }

    /// Serves `prompt`, or makes room first.
    pub fn step(&mut self, rng: &mut SmallRng, prompt: &[u64]) -> Op {
        if let Some(op) = self.due.pop_front() {
            return op;
        }
        if self.cache.iter().filter(|block| block.tiers[0]).count() >= self.capacity {
            return self.evict(rng);
        }
        let chains = chains(prompt);
        let lacks = |chain: &u64| self.on_device(*chain).is_none();
        let Some(first) = chains.iter().position(lacks) else { return self.evict(rng) };
        // Either just the hole, or what lies behind it is stored again with it.
        let hole = chains[first..].iter().take_while(|chain| lacks(chain)).count();
        let end = if rng.random() { first + hole } else { chains.len() };
        let mut parent = first
            .checked_sub(1)
            .and_then(|above| self.on_device(chains[above]))
            .map(|block| block.name);
        let mut blocks: Vec<Block> = Vec::new();
        for (&chain, &local_hash) in chains[first..end].iter().zip(&prompt[first..]) {
            let engine_hash = self.call(chain);
            let at = self.cache.iter().position(|block| block.name == engine_hash);
            let mut tiers = at.map_or([false; 4], |at| self.cache.remove(at).tiers);
            tiers[0] = true;
            self.cache.push(Cached { chain, name: engine_hash, tiers });
            blocks.push(Block { engine_hash, local_hash });
        }
        // In one event, or block by block as they are decoded, or in between.
        let few = if blocks.len() < 16 { 1 } else { 32 };
        let most = *[few, 7, blocks.len()].choose(rng).unwrap_or(&1);
        for event in blocks.chunks(most.max(1)) {
            let (worker, tier) = (self.worker, Tier::Device);
            self.due.push_back(Op::Store { worker, tier, parent, blocks: event.to_vec() });
            parent = event.last().map(|block| block.engine_hash);
        }
        self.due.pop_front().expect("something was missing")
    }

    fn evict(&mut self, rng: &mut SmallRng) -> Op {
        let is_lower = self.is_offloading && rng.random_bool(0.3);
        let tier = if is_lower { Tier::ALL[rng.random_range(1..3)] } else { Tier::Device };
        let to = Tier::ALL[rng.random_range(1..3)];
        let is_moving = self.is_offloading && !is_lower && rng.random();
        let mut names = Vec::new();
        for _ in 0..rng.random_range(1..=12) {
            let held =
                self.cache.iter().enumerate().filter(|(_, block)| block.tiers[tier as usize]);
            let held: Vec<usize> = held.map(|(at, _)| at).collect();
            let victim = match self.eviction {
                Eviction::TailFirst => held.last(),
                Eviction::HeadFirst => held.first(),
                Eviction::Random => held.choose(rng),
            };
            let Some(block) = victim.map(|at| &mut self.cache[*at]) else { break };
            block.tiers[tier as usize] = false;
            block.tiers[to as usize] |= is_moving;
            names.push(block.name);
        }
        self.cache.retain(|block| block.tiers.contains(&true));
        let worker = self.worker;
        if self.is_lossy && rng.random_bool(0.2) {
            return Op::Advance(1);
        }
        let removal = Op::Remove { worker, tier, names: names.clone() };
        if is_moving {
            self.due.push_back(removal);
            return Op::Copy { worker, tier: to, names };
        }
        removal
    }
}

/// Very many workers that hold one prompt to different depths, with holes here and there. They name
/// blocks alike, or each in a way of its own.
pub fn crowded(rng: &mut SmallRng, workers: u64, prompt: &[u64], do_agree: bool) -> Op {
    let worker = Worker::new(rng.random_range(0..workers), 0);
    // Depths are drawn to have both many equal ones and many different ones.
    let depth = match rng.random() {
        true => prompt.len(),
        false => rng.random_range(1..=prompt.len()),
    };
    let dialect = if do_agree { 0 } else { worker.instance_id * 1_000 };
    let name = |at: usize| 5_000 + dialect + at as u64;
    let (tier, from) = (Tier::Device, rng.random_range(0..depth));
    match rng.random_range(0..20) {
        0..10 => {
            let block = |at| Block { engine_hash: name(at), local_hash: prompt[at] };
            Op::Store { worker, tier, parent: None, blocks: (0..depth).map(block).collect() }
        }
        10..12 => {
            let names = (from..prompt.len()).rev().map(name).collect();
            Op::Remove { worker, tier, names }
        }
        12..14 => Op::Remove { worker, tier, names: vec![name(from)] },
        14 => {
            // Goes on in host memory, from somewhere on the device.
            let block = |at| Block { engine_hash: name(at), local_hash: prompt[at] };
            let parent = from.checked_sub(1).map(name);
            let blocks = (from..prompt.len()).map(block).collect();
            Op::Store { worker, tier: Tier::Host, parent, blocks }
        }
        15 | 16 => Op::Copy { worker, tier: Tier::Host, names: (from..depth).map(name).collect() },
        17 => predict(worker, prompt[..depth].to_vec()),
        18 => Op::Advance(1),
        _ => match rng.random() {
            true => Op::Clear(worker),
            false => Op::RemoveWorker(worker),
        },
    }
}
