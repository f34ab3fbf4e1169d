//! Reports about all publishers: view and trust.

use std::collections::HashMap;
use std::sync::Arc;

use super::legal::is_brokered;
use super::model::ModelIndex;
use super::publisher::{Publisher, PublisherView};
use super::registration::{ListenerStatus, PublisherId};
use super::registry::Catalog;
use super::trust::Trust;
use crate::ids::{InstanceId, Tier, Worker};

/// A publisher as operators see it.
pub struct Report {
    /// Its properties and counters.
    pub view: PublisherView,
    /// The index that it feeds.
    pub model: Arc<ModelIndex>,
    /// Trust in the index's data about it.
    pub trust: Trust,
}

impl Catalog {
    /// The publishers of all models selected by `wants`, by model, in order of registration. While
    /// they are held, connected ones are pending: they do not read yet.
    ///
    /// # Cost
    /// The statistics of each index once, and O(1) per publisher and rank.
    pub fn reports(&self, wants: impl Fn(&ModelIndex) -> bool) -> Vec<Report> {
        self.reports_where(|publisher| wants(&publisher.model))
    }

    /// The publishers of one instance.
    pub fn reports_of(&self, id: InstanceId) -> Vec<Report> {
        self.reports_where(|publisher| publisher.worker.instance_id == id)
    }

    fn reports_where(&self, wants: impl Fn(&Publisher) -> bool) -> Vec<Report> {
        let publishers = self.publishers();
        let sharers = sharers(&publishers);
        // By address: all publishers of a model share it.
        let mut evicted: HashMap<*const ModelIndex, u64> = HashMap::new();
        let is_held = self.tables.read().is_held;
        publishers
            .iter()
            .filter(|publisher| wants(publisher))
            .map(|publisher| {
                let model = Arc::clone(&publisher.model);
                let evicted = *evicted
                    .entry(Arc::as_ptr(&model))
                    .or_insert_with(|| model.index.evicted_blocks_total());
                let mut view = publisher.view();
                let fullest = view.ranks.iter().map(|rank| {
                    let worker = Worker::new(view.worker.instance_id, *rank);
                    model.index.blocks_in(worker, Tier::Device)
                });
                let device_blocks = fullest.max().unwrap_or(0);
                view.evidence.shares_socket_with = sharers.get(&publisher.id).copied();
                publisher.complete(&mut view, evicted, device_blocks);
                let trust = Trust::of(&view.evidence, view.last_error.as_deref());
                if is_held && view.status == ListenerStatus::Active {
                    view.status = ListenerStatus::Pending;
                }
                Report { view, model, trust }
            })
            .collect()
    }
}

/// Publishers whose event socket another instance of their index has, too, with that instance. Some
/// are legitimate: an engine that restarts may be registered under a new id before the old one goes.
fn sharers(publishers: &[Arc<Publisher>]) -> HashMap<PublisherId, InstanceId> {
    let mut at_socket: HashMap<_, Vec<&Publisher>> = HashMap::new();
    for publisher in publishers.iter().filter(|publisher| !is_brokered(&publisher.endpoint)) {
        let socket = (Arc::as_ptr(&publisher.model), publisher.endpoint.as_str());
        at_socket.entry(socket).or_default().push(publisher);
    }
    let together = at_socket.into_values().filter(|sharing| sharing.len() > 1);
    let other = |sharing: Vec<&Publisher>| {
        let instances: Vec<_> = sharing.iter().map(|one| one.worker.instance_id).collect();
        let of_one = |one: &Publisher| {
            let other = instances.iter().find(|other| **other != one.worker.instance_id);
            Some((one.id, *other?))
        };
        sharing.into_iter().filter_map(of_one).collect::<Vec<_>>()
    };
    together.flat_map(other).collect()
}
