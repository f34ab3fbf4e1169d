//! Small made-up loads, for what a trace does not show by itself.

use crate::corpus::{EventView, NamedBlock};
use crate::trace::{Dice, mix};
use kvflash_core::hash::extend;

/// A chain of blocks as every engine names it: content `tag`, from `from` on to `to`.
pub fn chain(tag: u64, len: usize) -> Vec<NamedBlock> {
    let mut parent = None;
    (0..len as u64)
        .map(|at| {
            let local = mix(tag << 20 | at);
            let name = extend(parent, local);
            parent = Some(name);
            NamedBlock { name, local }
        })
        .collect()
}

/// Locals of `blocks`.
pub fn locals(blocks: &[NamedBlock]) -> Vec<u64> {
    blocks.iter().map(|block| block.local).collect()
}

/// An event with its content.
pub struct Step {
    /// Who.
    pub worker: u32,
    /// The name before the first.
    pub parent: Option<u64>,
    /// What became reusable.
    pub blocks: Vec<NamedBlock>,
}

impl Step {
    /// As the corpus shows events.
    pub fn view(&self) -> EventView<'_> {
        EventView::Stored { worker: self.worker, parent: self.parent, blocks: &self.blocks }
    }
}

/// Decoding: `rounds` times, each of `sequences` running sequences gets one more block. The first value
/// is what they begin with.
pub fn decoding(workers: u32, sequences: usize, rounds: usize) -> (Vec<Step>, Vec<Step>) {
    const PROMPT: usize = 32;
    let mut begin = Vec::new();
    let mut chains = Vec::new();
    for sequence in 0..sequences {
        let blocks = chain(sequence as u64 + 1, PROMPT + rounds);
        let worker = sequence as u32 % workers;
        begin.push(Step { worker, parent: None, blocks: blocks[..PROMPT].to_vec() });
        chains.push((worker, blocks));
    }
    let appends = (PROMPT..PROMPT + rounds).flat_map(|at| {
        chains.iter().map(move |(worker, blocks)| Step {
            worker: *worker,
            parent: Some(blocks[at - 1].name),
            blocks: vec![blocks[at]],
        })
    });
    (begin, appends.collect())
}

/// Blocks each worker of [`fleet`] holds.
pub const FLEET_BLOCKS: usize = 16_384;

/// Many full workers: chains of 64 blocks, a quarter of them held by four workers each; in an order in
/// which no worker's events follow each other. One event a chain.
pub fn fleet(workers: u32) -> impl Iterator<Item = Step> {
    const CHAIN: usize = 64;
    let chains = FLEET_BLOCKS / CHAIN;
    (0..chains).flat_map(move |number| {
        (0..workers).map(move |worker| {
            let group = if number % 4 == 0 { worker / 4 } else { worker };
            let kind = u64::from(number % 4 != 0);
            let tag = (u64::from(group) << 12 | number as u64) << 1 | kind;
            Step { worker, parent: None, blocks: chain(tag, CHAIN) }
        })
    })
}

/// All pairs of worker and held name, in random order, `batch` names of one worker at a time.
pub fn random_removals(held: &[Vec<u64>], batch: usize, seed: u64) -> Vec<(u32, Vec<u64>)> {
    let mut dice = Dice::new(seed);
    let mut removals = Vec::new();
    for (worker, names) in held.iter().enumerate() {
        let mut names = names.clone();
        dice.shuffle(&mut names);
        removals.extend(names.chunks(batch).map(|names| (worker as u32, names.to_vec())));
    }
    dice.shuffle(&mut removals);
    removals
}
