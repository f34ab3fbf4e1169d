//! Dynamo's indexes, as its router runs them: events go to a pool of threads, prompts are answered on
//! the caller's thread.

use dynamo_kv_router::indexer::{SyncIndexer, ThreadPoolIndexer};
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent,
};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, PositionalIndexer};
use kvflash_replay::backend::{Backend, fold};
use kvflash_replay::corpus::EventView;

/// A structure that the pool can hold.
pub trait Structure: SyncIndexer {
    /// An empty one.
    fn new() -> Self;
}

impl Structure for ConcurrentRadixTreeCompressed {
    fn new() -> Self {
        Self::new()
    }
}

impl Structure for PositionalIndexer {
    fn new() -> Self {
        // The jump of its own benchmarks.
        Self::new(8)
    }
}

/// `ThreadPoolIndexer` over a structure with a number of threads.
pub struct Pool<T: SyncIndexer, const THREADS: usize>(ThreadPoolIndexer<T>);

/// What its router uses by default.
pub type Compressed<const THREADS: usize> = Pool<ConcurrentRadixTreeCompressed, THREADS>;

/// What its blog calls the flash indexer.
pub type Positional<const THREADS: usize> = Pool<PositionalIndexer, THREADS>;

fn sum(scores: &OverlapScores) -> u64 {
    let parts = scores.scores.iter().map(|(worker, &depth)| fold(worker.worker_id, depth));
    parts.fold(0, u64::wrapping_add)
}

impl<T: Structure, const THREADS: usize> Backend for Pool<T, THREADS> {
    type Event = RouterEvent;
    type Prompt = Vec<LocalBlockHash>;
    type Out = ();
    const QUEUED: bool = true;
    const SWEEPS: bool = true;

    fn new(_: u32) -> Self {
        Self(ThreadPoolIndexer::new(T::new(), THREADS, 128))
    }

    fn event(&self, view: EventView<'_>) -> Self::Event {
        let name = |name: u64| ExternalSequenceBlockHash(name);
        let (worker, data) = match view {
            EventView::Stored { worker, parent, blocks } => {
                let block = |block: &kvflash_replay::corpus::NamedBlock| KvCacheStoredBlockData {
                    block_hash: name(block.name),
                    tokens_hash: LocalBlockHash(block.local),
                    mm_extra_info: None,
                };
                let blocks = blocks.iter().map(block).collect();
                let parent_hash = parent.map(name);
                let data = KvCacheStoreData { parent_hash, start_position: None, blocks };
                (worker, KvCacheEventData::Stored(data))
            }
            EventView::Removed { worker, names } => {
                let block_hashes = names.iter().copied().map(name).collect();
                (worker, KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }))
            }
            EventView::Cleared { worker } => (worker, KvCacheEventData::Cleared),
        };
        let event = KvCacheEvent { event_id: 0, data, dp_rank: 0 };
        RouterEvent::new(u64::from(worker) + 1_000, event)
    }

    fn prompt(&self, locals: &[u64]) -> Self::Prompt {
        locals.iter().copied().map(LocalBlockHash).collect()
    }

    fn apply(&self, event: Self::Event) {
        self.0.enqueue_event(event).expect("its threads live");
    }

    fn drain(&self) {
        pollster::block_on(self.0.flush_and_wait()).expect("its threads live");
    }

    fn sweep(&self) {
        self.0.backend().run_cleanup_task();
    }

    fn ask(&self, prompt: &Self::Prompt, (): &mut ()) -> u64 {
        sum(&self.0.backend().find_matches(prompt, false))
    }

    fn ask_map(&self, prompt: &Self::Prompt, (): &mut ()) -> u64 {
        // A map is all it has.
        sum(&self.0.backend().find_matches(prompt, false))
    }

    fn answer(&self, prompt: &Self::Prompt) -> Vec<(u32, u32)> {
        let scores = self.0.backend().find_matches(prompt, false).scores;
        let number = |id: u64| (id - 1_000) as u32;
        let mut answer: Vec<_> =
            scores.iter().map(|(worker, &depth)| (number(worker.worker_id), depth)).collect();
        answer.sort_unstable();
        answer
    }
}
