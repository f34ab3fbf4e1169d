//! The index as it is.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use kvflash_core::ids::{Tier, Worker};
use kvflash_core::index::{
    Block, CountMode, DEFAULT_SEED, Depth, Depths, Limits, Matches, Options, RadixIndex,
};
use rustc_hash::FxHashMap;

use super::{Owned, number};
use crate::backend::{Backend, fold};
use crate::corpus::EventView;

/// How an index counts; a type, so that each way is a backend of its own.
pub trait Mode: Send + Sync + 'static {
    /// The way.
    const MODE: CountMode;
    /// How long blocks stand, and how far the clock goes with each event; 0 for no such limit.
    const TTL_MS: u64 = 0;
    /// See above.
    const EVENT_MS: u64 = 0;
}

/// A second store means nothing, and blocks run out: later than the corpus ends, so that it costs what
/// keeping ages costs.
pub struct Aging;

impl Mode for Aging {
    const MODE: CountMode = CountMode::Set;
    const TTL_MS: u64 = 1_000_000;
    const EVENT_MS: u64 = 10;
}

/// A second store means nothing.
pub struct Set;

/// A second store is a second copy.
pub struct Copies;

impl Mode for Set {
    const MODE: CountMode = CountMode::Set;
}

impl Mode for Copies {
    const MODE: CountMode = CountMode::Copies;
}

/// `kvflash_core::index::RadixIndex`.
pub struct Current<M> {
    index: RadixIndex,
    applied: AtomicU64,
    mode: PhantomData<M>,
}

/// As the router uses it.
pub type Kvflash = Current<Set>;

impl<M: Mode> Backend for Current<M> {
    type Event = Owned<Block>;
    type Prompt = Vec<u64>;
    type Out = Depths;
    const QUEUED: bool = false;

    fn new(_: u32) -> Self {
        let limits = Limits { ttl_ms: M::TTL_MS, ..Limits::default() };
        let options = Options { count_mode: M::MODE, limits, hash_seed: 0x5EED_CAFE };
        Self { index: RadixIndex::new(options), applied: AtomicU64::new(0), mode: PhantomData }
    }

    fn event(&self, view: EventView<'_>) -> Self::Event {
        Owned::of(view, |engine_hash, local_hash| Block { engine_hash, local_hash })
    }

    fn prompt(&self, locals: &[u64]) -> Self::Prompt {
        locals.to_vec()
    }

    fn apply(&self, event: Self::Event) {
        if M::TTL_MS > 0 {
            let applied = self.applied.fetch_add(1, Relaxed);
            // As a service's clock would: now and then.
            if applied.is_multiple_of(64) {
                self.index.advance_to(applied * M::EVENT_MS);
            }
        }
        match event {
            Owned::Stored { worker, parent, blocks } => {
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

    fn ask(&self, prompt: &Self::Prompt, out: &mut Depths) -> u64 {
        self.index.find_depths(prompt, out);
        let parts = out.as_slice().iter().map(|at| fold(at.instance_id, at.blocks));
        parts.fold(0, u64::wrapping_add)
    }

    fn ask_map(&self, prompt: &Self::Prompt, out: &mut Depths) -> u64 {
        self.index.find_depths(prompt, out);
        let worker = |at: &Depth| Worker::new(at.instance_id, at.dp_rank);
        let map: FxHashMap<Worker, u32> =
            out.as_slice().iter().map(|at| (worker(at), at.blocks)).collect();
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
