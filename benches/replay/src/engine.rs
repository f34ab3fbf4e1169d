//! What engines make of requests: which blocks become reusable, which are evicted, in which order.
//!
//! A model of a paged engine with prefix caching: some requests run at a time; a prompt's missing blocks
//! are allocated at once and become visible as one span when its prefill is done; while it decodes, each
//! full block becomes visible by itself. Allocation takes the least recently used block nobody uses;
//! a finished request gives its blocks back tail first, so children go before their parents.

use std::collections::{BTreeMap, HashMap, VecDeque};

/// A block as an engine knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Labeled {
    /// Sequence hash: the block with everything before it.
    pub chain: u64,
    /// Local hash.
    pub local: u64,
}

/// A request on its way through an engine.
#[derive(Debug, Clone, Default)]
pub struct Job {
    /// Which query of the corpus it begins with.
    pub query: usize,
    /// Blocks of the prompt, then those it will have decoded.
    pub blocks: Vec<Labeled>,
    /// How many of them are the prompt's.
    pub prompt: usize,
}

/// What an engine does, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Act {
    /// A request arrives: the moment at which a router asks.
    Ask { query: usize },
    /// Blocks became reusable, after `parent` (a chain hash).
    Store { parent: Option<u64>, blocks: Vec<Labeled> },
    /// Blocks (chain hashes) were evicted.
    Evict { chains: Vec<u64> },
}

struct Slot {
    users: u32,
    /// Turn at which it was given back; 0 while somebody uses it.
    idle_since: u64,
}

struct Running {
    job: Job,
    at: usize,
}

/// One engine.
pub struct Engine {
    capacity_blocks: usize,
    batch: usize,
    waiting: VecDeque<Job>,
    running: Vec<Running>,
    slots: HashMap<u64, Slot>,
    idle: BTreeMap<u64, u64>,
    turn: u64,
}

impl Engine {
    /// An empty engine that runs up to `batch` of `jobs` at a time.
    pub fn new(capacity_blocks: usize, batch: usize, jobs: VecDeque<Job>) -> Self {
        Self {
            capacity_blocks,
            batch,
            waiting: jobs,
            running: Vec::new(),
            slots: HashMap::new(),
            idle: BTreeMap::new(),
            turn: 0,
        }
    }

    /// One scheduler step: admits a request if one fits, and decodes a block of each that runs.
    /// False when everything is done.
    pub fn step(&mut self, mut act: impl FnMut(Act)) -> bool {
        self.admit(&mut act);
        let mut at = 0;
        while at < self.running.len() {
            if self.running[at].at < self.running[at].job.blocks.len() && self.decode(at, &mut act)
            {
                at += 1;
            } else {
                self.finish(at);
            }
        }
        !(self.running.is_empty() && self.waiting.is_empty())
    }

    fn admit(&mut self, act: &mut impl FnMut(Act)) {
        if self.running.len() >= self.batch {
            return;
        }
        let Some(mut job) = self.waiting.pop_front() else { return };
        if self.running.is_empty() {
            // It must fit an empty engine; what does not is cut off.
            job.blocks.truncate(self.capacity_blocks);
            job.prompt = job.prompt.min(job.blocks.len());
        }
        let prompt = &job.blocks[..job.prompt];
        let hit = prompt.iter().take_while(|block| self.slots.contains_key(&block.chain)).count();
        let reused = prompt[..hit].iter().filter(|b| self.slots[&b.chain].users == 0).count();
        let room = self.capacity_blocks - self.slots.len() + self.idle.len() - reused;
        if room < job.prompt - hit {
            self.waiting.push_front(job);
            return;
        }
        act(Act::Ask { query: job.query });
        for at in 0..hit {
            self.hold(job.blocks[at].chain);
        }
        self.make_room(job.prompt - hit, act);
        for at in hit..job.prompt {
            self.hold(job.blocks[at].chain);
        }
        if hit < job.prompt {
            let parent = hit.checked_sub(1).map(|at| job.blocks[at].chain);
            act(Act::Store { parent, blocks: job.blocks[hit..job.prompt].to_vec() });
        }
        let at = job.prompt;
        self.running.push(Running { job, at });
    }

    /// False when there is no room: the request ends there.
    fn decode(&mut self, running: usize, act: &mut impl FnMut(Act)) -> bool {
        if self.slots.len() >= self.capacity_blocks && self.idle.is_empty() {
            return false;
        }
        self.make_room(1, act);
        let Running { job, at } = &mut self.running[running];
        let block = job.blocks[*at];
        let parent = at.checked_sub(1).map(|at| job.blocks[at].chain);
        *at += 1;
        self.hold(block.chain);
        act(Act::Store { parent, blocks: vec![block] });
        true
    }

    fn finish(&mut self, running: usize) {
        let Running { job, at } = self.running.swap_remove(running);
        for block in job.blocks[..at].iter().rev() {
            let slot = self.slots.get_mut(&block.chain).expect("a running request's block is held");
            slot.users -= 1;
            if slot.users == 0 {
                self.turn += 1;
                slot.idle_since = self.turn;
                self.idle.insert(self.turn, block.chain);
            }
        }
    }

    fn hold(&mut self, chain: u64) {
        let slot = self.slots.entry(chain).or_insert(Slot { users: 0, idle_since: 0 });
        if slot.users == 0 && slot.idle_since != 0 {
            self.idle.remove(&slot.idle_since);
            slot.idle_since = 0;
        }
        slot.users += 1;
    }

    fn make_room(&mut self, blocks: usize, act: &mut impl FnMut(Act)) {
        let mut chains = Vec::new();
        while self.slots.len() + blocks > self.capacity_blocks {
            let (_, chain) = self.idle.pop_first().expect("the caller checked that there is room");
            self.slots.remove(&chain);
            chains.push(chain);
        }
        if !chains.is_empty() {
            act(Act::Evict { chains });
        }
    }
}
