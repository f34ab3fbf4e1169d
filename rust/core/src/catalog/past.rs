//! Workers without a publisher here, and what is still known of them.

use std::sync::Arc;

use super::model::ModelIndex;
use super::registration::Place;
use crate::ids::{InstanceId, Worker};

/// Data about a worker without a publisher here: it was unregistered, and its next registration
/// will continue from here, or its blocks came from another replica.
#[derive(Clone)]
pub(super) struct Past {
    pub model: Arc<ModelIndex>,
    pub place: Place,
    pub kind: PastKind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PastKind {
    /// Unregistered; its blocks are dropped.
    Left { endpoint: String },
    /// Recovered from a peer and never registered; its blocks count.
    Recovered,
}

impl Past {
    /// Removes its blocks from the index.
    pub fn drop_blocks(&self, instance_id: InstanceId) {
        for dp_rank in &self.place.ranks {
            self.model.remove_worker(Worker::new(instance_id, *dp_rank));
        }
    }
}
