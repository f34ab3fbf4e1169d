//! The index as router events: what a dump says, and what a reader of one does with it.

use crate::codec::router::{EventData, KvEvent, RouterEvent, StoredBlock, StoredBlocks};
use crate::error::{Error, Result};
use crate::ids::Worker;
use crate::index::{Block, BlockIndex, DEFAULT_SEED, DumpBlock, Parent};

impl DumpBlock {
    fn into_event(self, event_id: u64) -> RouterEvent {
        let is_orphan = self.parent_engine.is_none() && self.parent_chain.is_some();
        let block = StoredBlock {
            block_hash: self.engine_hash,
            tokens_hash: self.local_hash,
            mm_extra_info: None,
        };
        let data = EventData::Stored(StoredBlocks {
            parent_hash: self.parent_engine,
            parent_sequence_hash: if is_orphan { self.parent_chain } else { None },
            blocks: vec![block],
        });
        RouterEvent {
            worker_id: self.worker.instance_id,
            event: KvEvent { event_id, data, dp_rank: self.worker.dp_rank },
            storage_tier: self.tier,
        }
    }
}

/// Everything `index` holds, as one-block stored events, parents before children; a block that is held
/// twice comes twice. Event ids count from 0.
///
/// # Consistency
/// Each worker at a moment of its own.
pub fn dump_events(index: &dyn BlockIndex) -> impl Iterator<Item = RouterEvent> + '_ {
    index
        .workers()
        .into_iter()
        .flat_map(|worker| index.dump_worker(worker))
        .flat_map(|block| std::iter::repeat_n(block, block.copies.max(1) as usize))
        .enumerate()
        .map(|(event_id, block)| block.into_event(event_id as u64))
}

/// Apply one router event.
///
/// # Errors
/// `InvalidArgument` for a stored event whose parent is not known, or that names a block twice;
/// nothing of it is kept.
pub fn apply_router_event(index: &dyn BlockIndex, event: &RouterEvent) -> Result<()> {
    let worker: Worker = event.worker();
    match &event.event.data {
        EventData::Stored(stored) => {
            let blocks: Vec<Block> = stored
                .blocks
                .iter()
                .map(|block| Block { engine_hash: block.block_hash, local_hash: block.tokens_hash })
                .collect();
            let parent = match (stored.parent_hash, stored.parent_sequence_hash) {
                (Some(parent), _) => Some(Parent::Engine(parent)),
                (None, Some(chain)) => Some(Parent::Chain(chain)),
                (None, None) => None,
            };
            let outcome = index.store(worker, event.storage_tier, parent, DEFAULT_SEED, &blocks);
            match outcome.rejected {
                None => Ok(()),
                Some(cause) => Err(Error::invalid(format!(
                    "stored event {} of worker {worker} rejected: {cause:?}",
                    event.event.event_id
                ))),
            }
        }
        EventData::Removed(removed) => {
            index.remove(worker, event.storage_tier, &removed.block_hashes);
            Ok(())
        }
        EventData::Cleared => {
            index.clear(worker);
            Ok(())
        }
    }
}
