//! SMG's chain index, applied inline: a lock and a map per worker, as its lanes have them, no queue.

use std::sync::Mutex;

use kv_index::{ChainBlockMap, ChainIndex, ContentHash, SequenceHash, StoredBlock};
use kvflash_replay::backend::{Backend, fold};
use kvflash_replay::corpus::EventView;

/// `ChainIndex` with what it leaves to its caller.
pub struct Chain {
    index: ChainIndex,
    /// Its numbers are handed out in order, so that the harness' are the same.
    lanes: Vec<Mutex<ChainBlockMap>>,
}

/// An owned event.
pub enum Event {
    Stored { worker: u32, parent: Option<SequenceHash>, blocks: Vec<StoredBlock> },
    Removed { worker: u32, names: Vec<SequenceHash> },
    Cleared { worker: u32 },
}

impl Backend for Chain {
    type Event = Event;
    type Prompt = Vec<ContentHash>;
    type Out = ();
    const QUEUED: bool = false;

    fn new(workers: u32) -> Self {
        let index = ChainIndex::with_max_workers(workers as usize);
        for worker in 0..workers {
            let number = index.intern_worker(&worker.to_string()).expect("there is room");
            assert_eq!(number, worker, "numbers are handed out in order");
        }
        Self { index, lanes: (0..workers).map(|_| Mutex::new(ChainBlockMap::new())).collect() }
    }

    fn event(&self, view: EventView<'_>) -> Event {
        match view {
            EventView::Stored { worker, parent, blocks } => Event::Stored {
                worker,
                parent: parent.map(SequenceHash),
                blocks: blocks
                    .iter()
                    .map(|block| StoredBlock {
                        seq_hash: SequenceHash(block.name),
                        content_hash: ContentHash(block.local),
                    })
                    .collect(),
            },
            EventView::Removed { worker, names } => {
                Event::Removed { worker, names: names.iter().copied().map(SequenceHash).collect() }
            }
            EventView::Cleared { worker } => Event::Cleared { worker },
        }
    }

    fn prompt(&self, locals: &[u64]) -> Self::Prompt {
        locals.iter().copied().map(ContentHash).collect()
    }

    fn apply(&self, event: Event) {
        let lane = |worker: u32| self.lanes[worker as usize].lock().expect("nobody panics");
        match event {
            Event::Stored { worker, parent, blocks } => {
                // A refused event shows in the check of answers.
                let _ = self.index.apply_stored(worker, &blocks, parent, &mut lane(worker));
            }
            Event::Removed { worker, names } => {
                self.index.apply_removed(worker, &names, &mut lane(worker));
            }
            Event::Cleared { worker } => self.index.apply_cleared(worker, &mut lane(worker)),
        }
    }

    fn drain(&self) {}

    fn ask(&self, prompt: &Self::Prompt, (): &mut ()) -> u64 {
        let mut sum = 0_u64;
        let part = |worker: u32, depth| sum = sum.wrapping_add(fold(u64::from(worker), depth));
        self.index.score_into(prompt, |content| content.0, false, part);
        sum
    }

    fn ask_map(&self, prompt: &Self::Prompt, (): &mut ()) -> u64 {
        let scores = self.index.find_matches(prompt, false).scores;
        let parts = scores.iter().map(|(&worker, &depth)| fold(u64::from(worker), depth));
        parts.fold(0, u64::wrapping_add)
    }

    fn answer(&self, prompt: &Self::Prompt) -> Vec<(u32, u32)> {
        let scores = self.index.find_matches(prompt, false).scores;
        let mut answer: Vec<_> = scores.into_iter().collect();
        answer.sort_unstable();
        answer
    }
}
