//! Shared code of the classes over an index.

use kvflash_core::catalog::apply_router_event;
use kvflash_core::codec::router::{KvEvent, RouterEvent};
use kvflash_core::error::{Error, Result};
use kvflash_core::ids::{InstanceId, Tier, Worker};
use kvflash_core::index::{IndexStats, RadixIndex};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::error::{Raised, invalid};

/// Applies an engine's event as JSON, on the device.
pub(super) fn apply_event(index: &RadixIndex, worker_id: u64, json: &[u8]) -> Result<()> {
    let event: KvEvent = serde_json::from_slice(json)
        .map_err(|error| Error::decode(error.column(), error.to_string()))?;
    let event = RouterEvent { worker_id, event, storage_tier: Tier::Device };
    apply_router_event(index, &event).map(drop)
}

/// Clears an instance, or one rank of it.
pub(super) fn clear(index: &RadixIndex, id: InstanceId, dp_rank: Option<u32>) -> usize {
    match dp_rank {
        Some(rank) => index.clear(Worker::new(id, rank)),
        None => index
            .workers()
            .into_iter()
            .filter(|worker| worker.instance_id == id)
            .map(|worker| index.clear(worker))
            .sum(),
    }
}

pub(super) fn workers(index: &RadixIndex) -> Vec<(u64, u32)> {
    index.workers().into_iter().map(|worker| (worker.instance_id, worker.dp_rank)).collect()
}

pub(super) fn stats<'py>(py: Python<'py>, index: &RadixIndex) -> Raised<Bound<'py, PyDict>> {
    // All fields by name, so that a new field of the index does not compile until it is added here.
    macro_rules! dict {
        ($stats:expr; $($field:ident),* $(,)?) => {{
            let IndexStats { $($field),* } = $stats;
            let dict = PyDict::new(py);
            $(dict.set_item(stringify!($field), $field)?;)*
            Ok(dict)
        }};
    }
    dict!(py.detach(|| index.stats());
        workers, holders, unique_blocks, memberships, predicted, orphans_total, self_references_total,
        slots_exhausted_total, refused_blocks_total, unknown_removals_total, duplicate_blocks_total,
        moved_blocks_total, evicted_blocks_total, expired_blocks_total, bytes,
    )
}

/// A tier by its name in routers, or by an engine's medium.
pub(super) fn tier(name: &str) -> Raised<Tier> {
    Tier::from_name(name).or_else(|| Tier::from_medium(name)).ok_or_else(|| {
        invalid(format!(
            "tier must be device, host_pinned, disk, external or an engine's medium, got {name:?}"
        ))
    })
}
