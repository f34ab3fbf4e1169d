//! The corpus: events of all engines in one order, the prompts asked meanwhile, and right answers.

use std::collections::{HashMap, HashSet, VecDeque};

use kvflash_core::hash::{SEED, extend, local_hashes};

use crate::engine::{Act, Engine, Job, Labeled};
use crate::trace::{Dice, ID_TOKENS, Request, mix};

/// A block of a stored event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamedBlock {
    /// The engine's name.
    pub name: u64,
    /// Local hash.
    pub local: u64,
}

/// What an item is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Blocks became reusable; `start..start + len` of [`Corpus::blocks`].
    Stored,
    /// Blocks were evicted; of [`Corpus::names`].
    Removed,
    /// A prompt is asked; `start` is its number.
    Asked,
}

/// One thing that happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Item {
    /// What.
    pub kind: Kind,
    /// To whom: engines are numbered from 0.
    pub worker: u32,
    /// The name before a stored event's first.
    pub parent: Option<u64>,
    /// Where its content begins.
    pub start: usize,
    /// How much there is.
    pub len: usize,
}

/// An event, looked at where it lies.
#[derive(Debug, Clone, Copy)]
pub enum EventView<'a> {
    /// Blocks became reusable.
    Stored { worker: u32, parent: Option<u64>, blocks: &'a [NamedBlock] },
    /// Blocks were evicted.
    Removed { worker: u32, names: &'a [u64] },
    /// All of a worker's were.
    Cleared { worker: u32 },
}

impl EventView<'_> {
    /// Whose event it is.
    pub fn worker(&self) -> u32 {
        match self {
            Self::Stored { worker, .. }
            | Self::Removed { worker, .. }
            | Self::Cleared { worker } => *worker,
        }
    }

    /// Blocks in it.
    pub fn len(&self) -> usize {
        match self {
            Self::Stored { blocks, .. } => blocks.len(),
            Self::Removed { names, .. } => names.len(),
            Self::Cleared { .. } => 0,
        }
    }

    /// Whether it names no block.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The right answer to one prompt after the first `after` items.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// Items that came before.
    pub after: usize,
    /// Which prompt.
    pub query: usize,
    /// Worker and depth, ascending by worker; depths of 0 are left out.
    pub answer: Vec<(u32, u32)>,
}

/// How engines name their blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Names {
    /// By sequence hash, all alike.
    Agree,
    /// Each engine in its own way.
    Differ,
}

/// What a corpus is made with.
#[derive(Debug, Clone, Copy)]
pub struct Recipe {
    /// Engines.
    pub workers: u32,
    /// Blocks an engine has room for.
    pub capacity_blocks: usize,
    /// Tokens of a block; divides 512.
    pub block_size: u32,
    /// Requests that run at a time in an engine.
    pub batch: usize,
    /// How engines name blocks.
    pub names: Names,
    /// Of the assignment of requests to engines.
    pub seed: u64,
    /// Points at which answers are noted.
    pub checks: usize,
}

impl Default for Recipe {
    fn default() -> Self {
        Self {
            workers: 16,
            capacity_blocks: 16_384,
            block_size: 128,
            batch: 8,
            names: Names::Agree,
            seed: 42,
            checks: 200,
        }
    }
}

/// Everything that is replayed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Corpus {
    /// Engines.
    pub workers: u32,
    /// What happens, in order.
    pub items: Vec<Item>,
    /// Content of stored events.
    pub blocks: Vec<NamedBlock>,
    /// Content of removed events.
    pub names: Vec<u64>,
    /// Per prompt: its first local hash in `locals`, and how many.
    pub queries: Vec<(usize, usize)>,
    /// Content of prompts.
    pub locals: Vec<u64>,
    /// Right answers, in order of `after`.
    pub checks: Vec<Check>,
}

impl Corpus {
    /// Lets engines work through `requests` and writes down what they do.
    pub fn build(requests: &[Request], recipe: &Recipe) -> Self {
        let mut corpus = Self { workers: recipe.workers, ..Self::default() };
        let mut engines = corpus.seat(requests, recipe);
        let mut busy = true;
        while busy {
            busy = false;
            for (worker, engine) in engines.iter_mut().enumerate() {
                busy |= engine.step(|act| corpus.note(worker as u32, act, recipe.names));
            }
        }
        corpus.work_out_answers(recipe);
        corpus
    }

    /// Hands each request to an engine at random.
    fn seat(&mut self, requests: &[Request], recipe: &Recipe) -> Vec<Engine> {
        let mut dice = Dice::new(recipe.seed);
        let mut jobs = vec![VecDeque::new(); recipe.workers as usize];
        let mut known = HashMap::new();
        for (query, request) in requests.iter().enumerate() {
            let job = self.job(query, request, recipe.block_size, &mut known);
            jobs[dice.below(recipe.workers as usize)].push_back(job);
        }
        let engine = |jobs| Engine::new(recipe.capacity_blocks, recipe.batch, jobs);
        jobs.into_iter().map(engine).collect()
    }

    fn job(
        &mut self,
        query: usize,
        request: &Request,
        block_size: u32,
        known: &mut HashMap<u64, u64>,
    ) -> Job {
        let tokens = request.input_length.min(request.hash_ids.len() as u64 * ID_TOKENS);
        let prompt = (tokens / u64::from(block_size)) as usize;
        let all = ((tokens + request.output_length) / u64::from(block_size)) as usize;
        let per_id = (ID_TOKENS / u64::from(block_size)) as usize;
        let mut blocks = Vec::with_capacity(all);
        let mut parent = None;
        for at in 0..all {
            let local = if at < prompt {
                let id = request.hash_ids[at / per_id];
                *known.entry(id).or_insert_with(|| {
                    local_hashes(&vec![id as u32; block_size as usize], block_size, SEED)[0]
                })
            } else {
                // Generated tokens are nobody else's.
                mix((query as u64) << 32 | at as u64 | 1 << 63)
            };
            let chain = extend(parent, local);
            parent = Some(chain);
            blocks.push(Labeled { chain, local });
        }
        self.queries.push((self.locals.len(), prompt));
        self.locals.extend(blocks[..prompt].iter().map(|block| block.local));
        Job { query, blocks, prompt }
    }

    fn note(&mut self, worker: u32, act: Act, names: Names) {
        let name = |chain| match names {
            Names::Agree => chain,
            Names::Differ => mix(chain ^ mix(u64::from(worker) + 1)),
        };
        let item = match act {
            Act::Ask { query } => {
                Item { kind: Kind::Asked, worker, parent: None, start: query, len: 1 }
            }
            Act::Store { parent, blocks } => {
                let (start, len) = (self.blocks.len(), blocks.len());
                let named = |b: Labeled| NamedBlock { name: name(b.chain), local: b.local };
                self.blocks.extend(blocks.into_iter().map(named));
                Item { kind: Kind::Stored, worker, parent: parent.map(name), start, len }
            }
            Act::Evict { chains } => {
                let (start, len) = (self.names.len(), chains.len());
                self.names.extend(chains.into_iter().map(name));
                Item { kind: Kind::Removed, worker, parent: None, start, len }
            }
        };
        self.items.push(item);
    }

    /// Plays the events on plain sets, and asks those.
    fn work_out_answers(&mut self, recipe: &Recipe) {
        let mut held = vec![HashSet::new(); self.workers as usize];
        let mut dice = Dice::new(recipe.seed ^ 1);
        let every = (self.items.len() / recipe.checks.max(1)).max(1);
        let mut asked = 0;
        for at in 0..self.items.len() {
            match self.event(at) {
                Some(EventView::Stored { worker, parent, blocks }) => {
                    let held = &mut held[worker as usize];
                    assert!(parent.is_none_or(|name| held.contains(&name)), "a parent is held");
                    for block in blocks {
                        assert!(held.insert(block.name), "an engine stores what it did not hold");
                    }
                }
                Some(EventView::Removed { worker, names }) => {
                    for name in names {
                        assert!(
                            held[worker as usize].remove(name),
                            "an engine evicts what it held"
                        );
                    }
                }
                Some(EventView::Cleared { worker }) => held[worker as usize].clear(),
                None => asked = self.items[at].start,
            }
            if (at + 1) % every == 0 {
                for query in [asked, dice.below(self.queries.len()), dice.below(self.queries.len())]
                {
                    let answer = self.answer(query, &held, recipe.names);
                    self.checks.push(Check { after: at + 1, query, answer });
                }
            }
        }
    }

    fn answer(&self, query: usize, held: &[HashSet<u64>], names: Names) -> Vec<(u32, u32)> {
        let mut chains = Vec::new();
        kvflash_core::hash::sequence_hashes_into(self.query(query), &mut chains);
        let depth = |worker: u32| {
            let held = &held[worker as usize];
            let name = |chain| match names {
                Names::Agree => chain,
                Names::Differ => mix(chain ^ mix(u64::from(worker) + 1)),
            };
            chains.iter().take_while(|&&chain| held.contains(&name(chain))).count() as u32
        };
        (0..self.workers).map(|worker| (worker, depth(worker))).filter(|at| at.1 > 0).collect()
    }

    /// The event at `at`; `None` for a prompt.
    pub fn event(&self, at: usize) -> Option<EventView<'_>> {
        let Item { kind, worker, parent, start, len } = self.items[at];
        match kind {
            Kind::Stored => {
                let blocks = &self.blocks[start..start + len];
                Some(EventView::Stored { worker, parent, blocks })
            }
            Kind::Removed => {
                Some(EventView::Removed { worker, names: &self.names[start..start + len] })
            }
            Kind::Asked => None,
        }
    }

    /// All events, in order.
    pub fn events(&self) -> impl Iterator<Item = EventView<'_>> {
        (0..self.items.len()).filter_map(|at| self.event(at))
    }

    /// Local hashes of a prompt.
    pub fn query(&self, query: usize) -> &[u64] {
        let (start, len) = self.queries[query];
        &self.locals[start..start + len]
    }

    /// What is held after the last event: per worker the names in the order they were stored.
    pub fn held_at_end(&self) -> Vec<Vec<u64>> {
        let mut held: Vec<HashMap<u64, usize>> = vec![HashMap::new(); self.workers as usize];
        for (turn, event) in self.events().enumerate() {
            match event {
                EventView::Stored { worker, blocks, .. } => {
                    let names = blocks.iter().enumerate();
                    held[worker as usize].extend(names.map(|(at, b)| (b.name, turn << 20 | at)));
                }
                EventView::Removed { worker, names } => {
                    for name in names {
                        held[worker as usize].remove(name);
                    }
                }
                EventView::Cleared { worker } => held[worker as usize].clear(),
            }
        }
        held.into_iter()
            .map(|names| {
                let mut names: Vec<_> = names.into_iter().collect();
                names.sort_unstable_by_key(|&(_, turn)| turn);
                names.into_iter().map(|(name, _)| name).collect()
            })
            .collect()
    }
}
