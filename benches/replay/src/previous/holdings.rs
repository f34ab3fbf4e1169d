//! What one worker holds and what it calls it. Used under that worker's lock only.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use super::ghosts::Ghosts;
use super::nodes::{Mix, Nodes, Pinned};
use super::types::{CountMode, DEFAULT_SEED, DumpBlock};
use kvflash_core::ids::{Tier, Worker};

/// What is not the common case of a name: another seed, other tiers, more than one copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Mark {
    seed: u64,
    copies: [u32; 4],
}

impl Mark {
    /// One copy on the device, default seed: what a name without a mark means.
    const PLAIN: Self = Self { seed: DEFAULT_SEED, copies: [1, 0, 0, 0] };

    fn tiers(self) -> impl Iterator<Item = Tier> {
        Tier::ALL.into_iter().filter(move |tier| self.copies[*tier as usize] > 0)
    }
}

/// What became of one stored block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Put {
    Added,
    Duplicate,
    Moved,
    Refused,
}

/// What became of one removed name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Take {
    Removed,
    Kept,
    Unknown,
}

/// A block to store, placed in its chain.
#[derive(Debug, Clone, Copy)]
pub(super) struct Placed {
    pub name: u64,
    pub chain: u64,
    pub parent: Option<u64>,
    pub local: u64,
    pub seed: u64,
}

/// The table of nodes, pinned, and the slot this worker has in it.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub nodes: &'a Nodes,
    pub pin: &'a Pinned<'a>,
    pub slot: u16,
}

/// One worker's names. Invariant: the worker's bit in a node and tier is set exactly when at least
/// one of its names stands for that block in that tier.
pub(super) struct Holdings {
    /// Name -> chain hash: 16 bytes a name, all there is for the common case.
    names: HashMap<u64, u64, Mix>,
    marks: HashMap<u64, Mark, Mix>,
    /// How many names stand for one block in one tier; only where there are two or more.
    twins: HashMap<(u64, u8), u32, Mix>,
    ghosts: Ghosts,
    /// Memberships, per tier.
    held: [usize; 4],
    mix: Mix,
}

impl Holdings {
    pub fn new(mix: Mix) -> Self {
        Self {
            names: HashMap::with_hasher(mix),
            marks: HashMap::with_hasher(mix),
            twins: HashMap::with_hasher(mix),
            ghosts: Ghosts::new(mix),
            held: [0; 4],
            mix,
        }
    }

    /// Memberships, per tier.
    pub fn held(&self) -> [usize; 4] {
        self.held
    }

    /// Chain hash and seed of a name that is held or was lately.
    pub fn locate(&self, name: u64) -> Option<(u64, u64)> {
        match self.names.get(&name) {
            Some(&chain) => Some((chain, self.mark(name).seed)),
            None => self.ghosts.find(name),
        }
    }

    /// Chain hash and seed of a name that is held.
    pub fn find_held(&self, name: u64) -> Option<(u64, u64)> {
        self.names.get(&name).map(|chain| (*chain, self.mark(name).seed))
    }

    /// Holds a block. `room` is how many memberships may still be added; it is kept up to date.
    pub fn put(
        &mut self,
        place: Place<'_>,
        tier: Tier,
        mode: CountMode,
        block: Placed,
        room: &mut usize,
    ) -> Put {
        let mark = self.mark(block.name);
        let fresh = {
            let mut copies = [0; 4];
            copies[tier as usize] = 1;
            Mark { seed: block.seed, copies }
        };
        match self.names.entry(block.name) {
            Entry::Occupied(entry) if *entry.get() == block.chain => {
                let mut next = Mark { seed: block.seed, ..mark };
                let copies = &mut next.copies[tier as usize];
                if *copies > 0 {
                    if mode == CountMode::Copies {
                        *copies = copies.saturating_add(1);
                    }
                    self.set_mark(block.name, next);
                    return Put::Duplicate;
                }
                if *room == 0 {
                    return Put::Refused;
                }
                *copies = 1;
                self.set_mark(block.name, next);
                *room -= 1;
                self.hold(place, tier, block);
                Put::Added
            }
            Entry::Occupied(mut entry) => {
                // A name stands for one content: what it stood for goes first, in all tiers. That
                // frees at least the one membership which the new meaning takes.
                let old = entry.insert(block.chain);
                for tier in mark.tiers() {
                    self.release(place, tier, old);
                    *room += 1;
                }
                self.set_mark(block.name, fresh);
                *room -= 1;
                self.hold(place, tier, block);
                Put::Moved
            }
            Entry::Vacant(entry) => {
                if *room == 0 {
                    return Put::Refused;
                }
                entry.insert(block.chain);
                self.ghosts.forget(block.name);
                self.set_mark(block.name, fresh);
                *room -= 1;
                self.hold(place, tier, block);
                Put::Added
            }
        }
    }

    /// Lets go of one copy of a name.
    pub fn take(&mut self, place: Place<'_>, tier: Tier, name: u64, min_ghosts: usize) -> Take {
        let Some(&chain) = self.names.get(&name) else { return Take::Unknown };
        let mut mark = self.mark(name);
        let copies = &mut mark.copies[tier as usize];
        match *copies {
            0 => return Take::Unknown,
            1 => *copies = 0,
            _ => {
                *copies -= 1;
                self.set_mark(name, mark);
                return Take::Kept;
            }
        }
        self.release(place, tier, chain);
        if mark.copies == [0; 4] {
            self.names.remove(&name);
            self.marks.remove(&name);
            let cap = min_ghosts.max(self.names.len() / 8);
            self.ghosts.push(name, chain, mark.seed, cap);
        } else {
            self.set_mark(name, mark);
        }
        Take::Removed
    }

    /// Lets go of everything. Returns the memberships there were.
    pub fn purge(&mut self, nodes: &Nodes, slot: u16) -> usize {
        for (&name, &chain) in &self.names {
            // A pin of its own for each: one for all would keep every dead node until the end.
            let pin = nodes.pin();
            for tier in self.mark(name).tiers() {
                nodes.release(&pin, chain, tier, slot);
            }
        }
        let dropped = self.held.iter().sum();
        *self = Self::new(self.mix);
        dropped
    }

    /// Every membership, in no order, without the parents' names.
    pub fn dump(&self, pin: &Pinned<'_>, worker: Worker) -> Vec<DumpBlock> {
        let mut blocks = Vec::with_capacity(self.held.iter().sum());
        for (&name, &chain) in &self.names {
            let (parent_chain, local_hash) =
                Nodes::content(pin, chain).expect("a block that is held has a node");
            let mark = self.mark(name);
            blocks.extend(mark.tiers().map(|tier| DumpBlock {
                worker,
                tier,
                parent_engine: None,
                parent_chain,
                engine_hash: name,
                local_hash,
                seed: mark.seed,
                copies: mark.copies[tier as usize],
            }));
        }
        blocks
    }

    /// Bytes on the heap.
    pub fn heap_bytes(&self) -> usize {
        self.names.allocation_size()
            + self.marks.allocation_size()
            + self.twins.allocation_size()
            + self.ghosts.heap_bytes()
    }

    fn mark(&self, name: u64) -> Mark {
        // Most workers have no marks at all: the check spares them a probe per name.
        if self.marks.is_empty() {
            return Mark::PLAIN;
        }
        self.marks.get(&name).copied().unwrap_or(Mark::PLAIN)
    }

    fn set_mark(&mut self, name: u64, mark: Mark) {
        if mark != Mark::PLAIN {
            self.marks.insert(name, mark);
        } else if !self.marks.is_empty() {
            self.marks.remove(&name);
        }
    }

    fn hold(&mut self, place: Place<'_>, tier: Tier, block: Placed) {
        self.held[tier as usize] += 1;
        let content = (block.parent, block.local);
        if !place.nodes.hold(place.pin, block.chain, content, tier, place.slot) {
            // Only this worker sets its bit, under its lock: it is set, so another name holds it.
            *self.twins.entry((block.chain, tier as u8)).or_insert(1) += 1;
        }
    }

    fn release(&mut self, place: Place<'_>, tier: Tier, chain: u64) {
        self.held[tier as usize] -= 1;
        let key = (chain, tier as u8);
        if !self.twins.is_empty()
            && let Some(names) = self.twins.get_mut(&key)
        {
            *names -= 1;
            if *names == 1 {
                self.twins.remove(&key);
            }
            return;
        }
        place.nodes.release(place.pin, chain, tier, place.slot);
    }
}
