//! The index before the run trie.

use kvflash_core::ids::{Tier, Worker};
use rustc_hash::FxHashMap;

use super::{Owned, number};
use crate::backend::{Backend, fold};
use crate::corpus::EventView;
use crate::previous::{Block, BlockIndex, DEFAULT_SEED, Matches, Options, Parent, RadixIndex};

/// [`crate::previous::RadixIndex`], as the router used it.
pub struct Previous {
    index: RadixIndex,
}

impl Backend for Previous {
    type Event = Owned<Block>;
    type Prompt = Vec<u64>;
    type Out = Matches;
    const QUEUED: bool = false;

    fn new(_: u32) -> Self {
        Self { index: RadixIndex::new(Options { hash_seed: 0x5EED_CAFE, ..Options::default() }) }
    }

    fn event(&self, view: EventView<'_>) -> Self::Event {
        Owned::of(view, |engine_hash, local_hash| Block { engine_hash, local_hash })
    }

    fn prompt(&self, locals: &[u64]) -> Self::Prompt {
        locals.to_vec()
    }

    fn apply(&self, event: Self::Event) {
        match event {
            Owned::Stored { worker, parent, blocks } => {
                let parent = parent.map(Parent::Engine);
                self.index.store(worker, Tier::Device, parent, DEFAULT_SEED, &blocks);
            }
            Owned::Removed { worker, names } => {
                self.index.remove(worker, Tier::Device, &names);
            }
            Owned::Cleared { worker } => {
                self.index.clear(worker);
            }
        }
    }

    fn drain(&self) {}

    fn ask(&self, prompt: &Self::Prompt, out: &mut Matches) -> u64 {
        self.index.find_matches(prompt, out);
        let parts = out.as_slice().iter().map(|at| fold(at.worker.instance_id, at.device));
        parts.fold(0, u64::wrapping_add)
    }

    fn ask_map(&self, prompt: &Self::Prompt, out: &mut Matches) -> u64 {
        self.index.find_matches(prompt, out);
        let map: FxHashMap<Worker, u32> =
            out.as_slice().iter().map(|at| (at.worker, at.device)).collect();
        let parts = map.iter().map(|(worker, &depth)| fold(worker.instance_id, depth));
        parts.fold(0, u64::wrapping_add)
    }

    fn answer(&self, prompt: &Self::Prompt) -> Vec<(u32, u32)> {
        let mut out = Matches::new();
        self.index.find_matches(prompt, &mut out);
        out.sort();
        out.as_slice().iter().map(|at| (number(at.worker), at.device)).collect()
    }
}
