//! Workers that nobody publishes for here, and what is still known of them.

use std::sync::Arc;

use super::model::ModelIndex;
use super::registration::Place;
use crate::ids::{InstanceId, Worker};

/// What is known of a worker that nobody publishes for here: one that was unregistered, so that its next
/// registration goes on from there, or one whose blocks came from another replica.
#[derive(Clone)]
pub(super) struct Past {
    pub model: Arc<ModelIndex>,
    pub place: Place,
    pub kind: PastKind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PastKind {
    /// Unregistered; its blocks are gone.
    Left { endpoint: String },
    /// Recovered from a peer and never registered; its blocks count.
    Recovered,
}

impl Past {
    /// Takes its blocks out of the index.
    pub fn drop_blocks(&self, instance_id: InstanceId) {
        for dp_rank in &self.place.ranks {
            self.model.remove_worker(Worker::new(instance_id, *dp_rank));
        }
    }
}
