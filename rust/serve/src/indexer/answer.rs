//! Response of GET /workers, in the published format.

use std::collections::BTreeMap;

use kvflash_core::catalog::{
    Catalog, EventCounts, ListenerStatus, ModelIndex, ModelKey, Reason, Report, Source, Trust,
    TrustState,
};
use kvflash_core::ids::{InstanceId, Worker};
use serde::Serialize;

#[derive(Debug, Serialize)]
struct Listener {
    endpoint: String,
    status: ListenerStatus,
    trust: Trust,
    #[serde(skip_serializing_if = "Option::is_none")]
    replay_endpoint: Option<String>,
    /// Blocks of a rank's device, as registered.
    #[serde(skip_serializing_if = "Option::is_none")]
    capacity_blocks: Option<u64>,
    /// Blocks held on the device of its fullest rank.
    device_blocks: usize,
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
    source: Source,
    status: ListenerStatus,
    trust: InstanceTrust,
    model_name: String,
    tenant_id: String,
    block_size: Option<u32>,
    /// Blocks held, all ranks and tiers.
    blocks: usize,
    endpoints: BTreeMap<u32, String>,
    listeners: BTreeMap<u32, Listener>,
    /// Ranks known only from events.
    dynamic_dp_ranks: Vec<u32>,
}

/// The status of an instance, from those of its listeners: failed > pending > active > paused.
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

/// The lowest trust among an instance's listeners, with all reasons and their listeners.
#[derive(Debug, Serialize)]
struct InstanceTrust {
    state: TrustState,
    reasons: Vec<RankReason>,
}

#[derive(Debug, Serialize)]
struct RankReason {
    dp_rank: u32,
    #[serde(flatten)]
    reason: Reason,
}

impl InstanceTrust {
    fn of(reports: &[Report]) -> Self {
        let rank_reason = |report: &Report, reason: &Reason| RankReason {
            dp_rank: report.view.worker.dp_rank,
            reason: reason.clone(),
        };
        Self {
            state: reports.iter().map(|report| report.trust.state).max().unwrap_or_default(),
            reasons: reports
                .iter()
                .flat_map(|report| report.trust.reasons.iter().map(|r| rank_reason(report, r)))
                .collect(),
        }
    }
}

/// All instances, optionally of one model, by id; an instance in several models or tenants has an
/// entry in each.
pub(super) fn worker_entries(catalog: &Catalog, model_name: Option<&str>) -> Vec<WorkerEntry> {
    let mut instances: BTreeMap<(InstanceId, ModelKey), Vec<Report>> = BTreeMap::new();
    let wants = |model: &ModelIndex| model_name.is_none_or(|name| model.key.model_name == name);
    for report in catalog.reports(wants) {
        let entry = (report.view.worker.instance_id, report.model.key.clone());
        instances.entry(entry).or_default().push(report);
    }
    instances
        .into_iter()
        .map(|((instance_id, key), reports)| {
            let model = &reports[0].model;
            let mut ranks: Vec<u32> =
                reports.iter().flat_map(|report| report.view.ranks.clone()).collect();
            ranks.sort_unstable();
            ranks.dedup();
            let registered: Vec<u32> = reports.iter().map(|r| r.view.worker.dp_rank).collect();
            WorkerEntry {
                instance_id,
                // An instance whose ranks became known differently has the first one's.
                source: reports[0].view.source,
                status: aggregate(reports.iter().map(|report| report.view.status)),
                trust: InstanceTrust::of(&reports),
                model_name: key.model_name,
                tenant_id: key.tenant_id,
                block_size: model.block_size(),
                blocks: ranks
                    .iter()
                    .map(|rank| model.index.blocks(Worker::new(instance_id, *rank)))
                    .sum(),
                endpoints: reports
                    .iter()
                    .map(|report| (report.view.worker.dp_rank, report.view.endpoint.clone()))
                    .collect(),
                dynamic_dp_ranks: ranks
                    .into_iter()
                    .filter(|rank| !registered.contains(rank))
                    .collect(),
                listeners: reports
                    .into_iter()
                    .map(|Report { view, trust, .. }| {
                        let rank = view.worker.dp_rank;
                        let listener = Listener {
                            endpoint: view.endpoint,
                            status: view.status,
                            trust,
                            replay_endpoint: view.replay_endpoint,
                            capacity_blocks: view.capacity_blocks,
                            device_blocks: view.evidence.device_blocks,
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
