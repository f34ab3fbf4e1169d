//! Workers without a publisher here, and what is still known of them.

use std::sync::Arc;

use super::model::ModelIndex;
use super::registration::Place;
use crate::ids::{InstanceId, Worker};
use crate::index::snapshot::Cursor;

/// An unregistered worker, whose blocks are dropped. Its next registration at this endpoint
/// continues after the batch; another address means another process.
pub(super) struct Left {
    pub endpoint: String,
    pub cursor: Cursor,
}

/// A worker that was recovered from a peer and has never registered; its blocks count.
#[derive(Clone)]
pub(super) struct Recovered {
    pub model: Arc<ModelIndex>,
    pub place: Place,
}

impl Recovered {
    /// Removes its blocks from the index, except for ranks that have a publisher of their own.
    pub fn drop_blocks(&self, instance_id: InstanceId) {
        for dp_rank in &self.place.ranks {
            let worker = Worker::new(instance_id, *dp_rank);
            if !self.model.roster.has(worker) {
                self.model.remove_worker(worker);
            }
        }
    }
}
