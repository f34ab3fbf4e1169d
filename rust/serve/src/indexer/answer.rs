//! Response of GET /workers, in the published format.

use std::collections::BTreeMap;

use kvflash_core::catalog::{Catalog, ListenerStatus, ModelIndex, ModelKey, Report};
use kvflash_core::ids::{InstanceId, Worker};
use serde_json::{Value, json};

fn listener(Report { view, trust, .. }: &Report) -> Value {
    let mut listener = json!({
        "endpoint": view.endpoint,
        "status": view.status,
        "trust": trust,
        "replay_endpoint": view.replay_endpoint,
        // Blocks of a rank's device, as registered.
        "capacity_blocks": view.capacity_blocks,
        // Blocks held on the device of its fullest rank.
        "device_blocks": view.evidence.device_blocks,
        "last_error": view.last_error,
        "last_sequence": view.last_sequence,
        "last_event_age_ms": view.last_event_age_ms,
        "events": view.counts,
    });
    let is_optional =
        |name: &String| ["replay_endpoint", "capacity_blocks", "last_error"].contains(&&**name);
    if let Value::Object(fields) = &mut listener {
        fields.retain(|name, value| !value.is_null() || !is_optional(name));
    }
    listener
}

/// The lowest trust among an instance's listeners, with all reasons and their listeners.
fn trust(reports: &[Report]) -> Value {
    let mut reasons = Vec::new();
    for Report { view, trust, .. } in reports {
        for reason in &trust.reasons {
            let mut reason = json!(reason);
            reason["dp_rank"] = json!(view.worker.dp_rank);
            reasons.push(reason);
        }
    }
    let state = reports.iter().map(|report| report.trust.state).max().unwrap_or_default();
    json!({ "state": state, "reasons": reasons })
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

/// All instances, optionally of one model, by id; an instance in several models or tenants has an
/// entry in each.
pub(super) fn worker_entries(catalog: &Catalog, model_name: Option<&str>) -> Vec<Value> {
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
            let (index, rank_of) = (&model.index, |report: &Report| report.view.worker.dp_rank);
            let held = ranks.iter().map(|rank| index.blocks(Worker::new(instance_id, *rank)));
            let endpoint = |report: &Report| (rank_of(report), report.view.endpoint.clone());
            json!({
                "instance_id": instance_id,
                // An instance whose ranks became known differently has the first one's.
                "source": reports[0].view.source,
                "status": aggregate(reports.iter().map(|report| report.view.status)),
                "trust": trust(&reports),
                "model_name": key.model_name,
                "tenant_id": key.tenant_id,
                "block_size": model.block_size(),
                // Blocks held, all ranks and tiers.
                "blocks": held.sum::<usize>(),
                "endpoints": reports.iter().map(endpoint).collect::<BTreeMap<_, _>>(),
                "listeners": reports
                    .iter()
                    .map(|report| (rank_of(report), listener(report)))
                    .collect::<BTreeMap<_, _>>(),
                // Ranks known only from events.
                "dynamic_dp_ranks":
                    ranks.iter().filter(|rank| !registered.contains(rank)).collect::<Vec<_>>(),
            })
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
