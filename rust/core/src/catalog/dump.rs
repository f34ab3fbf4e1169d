//! The index as router events: creating and applying dumps.

use crate::codec::router::{
    EventData, KvEvent, RemovedBlocks, RouterEvent, StoredBlock, StoredBlocks,
};
use crate::error::{Error, Result};
use crate::ids::{Tier, Worker};
use crate::index::{Block, DumpEvent, RadixIndex, StoreOutcome};

/// The whole content of `index` as events, which recreate it in an empty index when applied in
/// order. Event ids count from 0.
///
/// # Consistency
/// Each worker is dumped as of its own moment.
///
/// # Cost
/// Holds one worker's blocks in memory at a time.
pub fn dump_events(index: &RadixIndex) -> impl Iterator<Item = RouterEvent> + '_ {
    index
        .workers()
        .into_iter()
        .flat_map(|worker| dump_worker(index, worker))
        .zip(0..)
        .map(|(event, event_id)| event.numbered(event_id))
}

/// The content of `worker`, as in [`dump_events`]; every event has the id 0.
pub fn dump_worker(
    index: &RadixIndex,
    worker: Worker,
) -> impl ExactSizeIterator<Item = RouterEvent> + use<> {
    index.dump_worker(worker).into_iter().map(move |event| router_event(worker, event))
}

fn router_event(worker: Worker, event: DumpEvent) -> RouterEvent {
    let (storage_tier, data) = match event {
        DumpEvent::Stored { tier, parent, seed, blocks } => {
            let blocks = blocks
                .into_iter()
                .map(|block| StoredBlock {
                    block_hash: block.engine_hash,
                    tokens_hash: block.local_hash,
                    mm_extra_info: None,
                })
                .collect();
            (tier, EventData::Stored(StoredBlocks { parent_hash: parent, blocks, seed }))
        }
        DumpEvent::Removed { tier, names } => {
            (tier, EventData::Removed(RemovedBlocks { block_hashes: names }))
        }
    };
    RouterEvent {
        worker_id: worker.instance_id,
        event: KvEvent { event_id: 0, data, dp_rank: worker.dp_rank },
        storage_tier,
    }
}

/// Applies one router event. Returns the outcome of a stored one.
///
/// # Errors
/// `InvalidArgument` for a stored event with an unknown parent, with a repeated block, or of a
/// worker beyond the limit; nothing of it is stored.
pub fn apply_router_event(index: &RadixIndex, event: &RouterEvent) -> Result<StoreOutcome> {
    let worker: Worker = event.worker();
    match &event.event.data {
        EventData::Stored(stored) => {
            let blocks: Vec<Block> = stored
                .blocks
                .iter()
                .map(|block| Block { engine_hash: block.block_hash, local_hash: block.tokens_hash })
                .collect();
            store_blocks(
                index,
                worker,
                event.storage_tier,
                stored.parent_hash,
                stored.seed,
                &blocks,
            )
            .map_err(|error| Error::invalid(format!("event {}: {error}", event.event.event_id)))
        }
        EventData::Removed(removed) => {
            index.remove(worker, event.storage_tier, &removed.block_hashes);
            Ok(StoreOutcome::default())
        }
        EventData::Cleared => {
            index.clear(worker);
            Ok(StoreOutcome::default())
        }
    }
}

/// Stores a chain, and reports a rejection as an error.
///
/// # Errors
/// As [`apply_router_event`].
pub fn store_blocks(
    index: &RadixIndex,
    worker: Worker,
    tier: Tier,
    parent: Option<u64>,
    seed: u64,
    blocks: &[Block],
) -> Result<StoreOutcome> {
    let outcome = index.store(worker, tier, parent, seed, blocks);
    match outcome.rejected {
        None => Ok(outcome),
        Some(cause) => Err(Error::invalid(format!(
            "{} blocks of worker {worker} after {} rejected: {cause:?}",
            blocks.len(),
            parent.map_or_else(|| "nothing".to_owned(), |name| format!("block {name}")),
        ))),
    }
}
