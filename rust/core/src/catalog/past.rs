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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::cache_groups::EngineFacts;
    use super::super::identity::Identity;
    use super::super::model::ModelKey;
    use super::super::registration::{Registration, Source};
    use super::super::registry::Catalog;
    use super::super::transfer::adopt;
    use super::*;
    use crate::ids::Tier;
    use crate::index::{Block, DEFAULT_SEED};

    #[test]
    fn what_is_restored_for_a_publisher_that_closes_is_dropped() {
        for is_over in [false, true] {
            let catalog = Catalog::default();
            let key = ModelKey { model_name: "m".into(), tenant_id: "t".into() };
            let model = catalog.model_or_create(&key, Some(4)).unwrap();
            let ranks = [0, 1].map(|rank| Worker::new(1, rank));
            let restored = adopt(&catalog, &model, ranks[0], || {
                for worker in ranks {
                    let block = Block { engine_hash: 7, local_hash: 7 };
                    model.index.store(worker, Tier::Device, None, DEFAULT_SEED, &[block]);
                }
                // It registers while the blocks are loaded, and is being unregistered.
                let registration = Registration {
                    worker: ranks[0],
                    key: key.clone(),
                    block_size: Some(4),
                    endpoint: "tcp://a:1".into(),
                    replay_endpoint: None,
                    capacity_blocks: None,
                    identity: Identity::default(),
                    facts: EngineFacts::default(),
                    source: Source::Zmq,
                };
                let publisher = catalog.register(registration).unwrap();
                if is_over {
                    assert_eq!(catalog.unregister(1, "m", None, None), Ok(1));
                } else {
                    assert!(publisher.close().is_some());
                }
                Place { ranks: vec![0, 1], ..Place::default() }
            });
            assert_eq!(restored, Ok(()));
            // If it is over, the worker may register again, or is dropped after a while.
            assert_eq!(catalog.drop_recovered(), usize::from(is_over));
            assert_eq!(ranks.map(|worker| model.index.blocks(worker)), [0, 0]);
            assert!(model.workers().is_empty());
        }
    }
}
