//! What GET /workers answers, in the shape of the published document.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::catalog::{Catalog, EventCounts, ListenerStatus, PublisherView};
use crate::ids::{InstanceId, Worker};

#[derive(Debug, Serialize)]
struct Listener {
    endpoint: String,
    status: ListenerStatus,
    #[serde(skip_serializing_if = "Option::is_none")]
    replay_endpoint: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_error: Option<String>,
    last_sequence: Option<u64>,
    last_event_age_ms: Option<u64>,
    events: EventCounts,
}

/// One entry of GET /workers.
#[derive(Debug, Serialize)]
pub(super) struct WorkerEntry {
    instance_id: InstanceId,
    source: &'static str,
    status: ListenerStatus,
    model_name: String,
    tenant_id: String,
    block_size: Option<u32>,
    /// Blocks held, all ranks and tiers.
    blocks: usize,
    endpoints: BTreeMap<u32, String>,
    listeners: BTreeMap<u32, Listener>,
    /// Ranks that only events have named.
    dynamic_dp_ranks: Vec<u32>,
}

/// The status of an instance from those of its listeners: failed > pending > active > paused.
fn aggregate(statuses: impl Iterator<Item = ListenerStatus>) -> ListenerStatus {
    use ListenerStatus::{Active, Failed, Paused, Pending};
    let priority = |status: &ListenerStatus| match status {
        Failed => 3,
        Pending => 2,
        Active => 1,
        Paused => 0,
    };
    statuses.max_by_key(priority).unwrap_or(Active)
}

/// All instances, optionally of one model, by id.
pub(super) fn worker_entries(catalog: &Catalog, model_name: Option<&str>) -> Vec<WorkerEntry> {
    let mut instances: BTreeMap<InstanceId, Vec<(PublisherView, _)>> = BTreeMap::new();
    for publisher in catalog.publishers() {
        if model_name.is_none_or(|name| publisher.model.key.model_name == name) {
            let view = publisher.view();
            let model = std::sync::Arc::clone(&publisher.model);
            instances.entry(view.worker.instance_id).or_default().push((view, model));
        }
    }
    instances
        .into_iter()
        .map(|(instance_id, publishers)| {
            // A registration belongs to one model and tenant, and an instance to one of them.
            let model = &publishers[0].1;
            let mut ranks: Vec<u32> =
                publishers.iter().flat_map(|(view, _)| view.ranks.clone()).collect();
            ranks.sort_unstable();
            ranks.dedup();
            let registered: Vec<u32> = publishers.iter().map(|(v, _)| v.worker.dp_rank).collect();
            WorkerEntry {
                instance_id,
                source: "zmq",
                status: aggregate(publishers.iter().map(|(view, _)| view.status)),
                model_name: model.key.model_name.clone(),
                tenant_id: model.key.tenant_id.clone(),
                block_size: model.block_size(),
                blocks: ranks
                    .iter()
                    .map(|rank| model.index.blocks(Worker::new(instance_id, *rank)))
                    .sum(),
                endpoints: publishers
                    .iter()
                    .map(|(view, _)| (view.worker.dp_rank, view.endpoint.clone()))
                    .collect(),
                dynamic_dp_ranks: ranks
                    .into_iter()
                    .filter(|rank| !registered.contains(rank))
                    .collect(),
                listeners: publishers
                    .into_iter()
                    .map(|(view, _)| {
                        let rank = view.worker.dp_rank;
                        let listener = Listener {
                            endpoint: view.endpoint,
                            status: view.status,
                            replay_endpoint: view.replay_endpoint,
                            last_error: view.last_error,
                            last_sequence: view.last_sequence,
                            last_event_age_ms: view.last_event_age_ms,
                            events: view.counts,
                        };
                        (rank, listener)
                    })
                    .collect(),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::ListenerStatus::{Active, Failed, Paused, Pending};
    use super::*;

    #[test]
    fn status_priority_is_failed_pending_active_paused() {
        for (statuses, wanted) in [
            (vec![Failed, Active], Failed),
            (vec![Pending, Active], Pending),
            (vec![Active, Paused], Active),
            (vec![Paused], Paused),
        ] {
            assert_eq!(aggregate(statuses.into_iter()), wanted);
        }
    }
}
