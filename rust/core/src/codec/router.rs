//! The JSON form of events, for dumps, replays and exchange between routers.
//!
//! ```json
//! {"worker_id": 1, "event": {"event_id": 7, "data": {"stored": {"parent_hash": null, "blocks":
//!   [{"block_hash": 100, "tokens_hash": 11, "mm_extra_info": null}]}}, "dp_rank": 0}}
//! ```
//!
//! Unlike engines' events these contain local hashes instead of tokens. Unknown keys are ignored,
//! and hashes may be signed: only the bits matter.

use serde::de::Deserializer;
use serde::{Deserialize, Serialize};
use serde_json::Number;

use crate::error::Error;
use crate::hash::SEED;
use crate::ids::{InstanceId, Tier, Worker};

/// A change of a worker's blocks, as exchanged between routers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RouterEvent {
    /// The engine instance.
    pub worker_id: InstanceId,
    /// The event.
    pub event: KvEvent,
    /// Location of the blocks; omitted for device memory.
    #[serde(default = "tier::device", skip_serializing_if = "tier::is_device", with = "tier")]
    pub storage_tier: Tier,
}

/// An event with its number in the order of its worker's events.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KvEvent {
    /// Consecutive within a worker; synthetic in dumps.
    pub event_id: u64,
    /// The change.
    pub data: EventData,
    /// Data-parallel rank within the instance.
    #[serde(default)]
    pub dp_rank: u32,
}

/// The change.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventData {
    /// Blocks became reusable.
    Stored(StoredBlocks),
    /// Blocks were evicted.
    Removed(RemovedBlocks),
    /// Everything was dropped.
    Cleared,
}

/// A contiguous chain of blocks that became reusable.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StoredBlocks {
    /// The engine's name of the block before the first one; `None` at the start of a prompt.
    #[serde(default, deserialize_with = "optional_hash")]
    pub parent_hash: Option<u64>,
    /// The blocks in chain order.
    pub blocks: Vec<StoredBlock>,
    /// Identity seed of the local hashes, so that a chain continued after a load keeps its salt.
    /// Omitted for prompts without adapter and salt; other routers ignore it.
    #[serde(
        default = "no_identity",
        skip_serializing_if = "is_no_identity",
        deserialize_with = "seed"
    )]
    pub seed: u64,
}

/// One block that became reusable.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct StoredBlock {
    /// The engine's name of the block.
    #[serde(deserialize_with = "hash")]
    pub block_hash: u64,
    /// Local hash of the block's tokens.
    #[serde(deserialize_with = "hash")]
    pub tokens_hash: u64,
    /// Multimodal items in the block, as the sender describes them; passed on, not read.
    pub mm_extra_info: Option<serde_json::Value>,
}

/// Blocks that were evicted.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct RemovedBlocks {
    /// The engine's names of the blocks, in eviction order.
    #[serde(deserialize_with = "hashes")]
    pub block_hashes: Vec<u64>,
}

impl RouterEvent {
    /// Parses one event.
    ///
    /// # Errors
    /// [`Error::Decode`] for invalid JSON or another kind of object, with the offset.
    pub fn from_json(json: &[u8]) -> Result<Self, Error> {
        serde_json::from_slice(json).map_err(|error| decode_error(json, &error))
    }

    /// Writes the event on one line.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("numbers and text-keyed maps only, nothing can fail")
    }

    /// The same event with another number.
    pub fn numbered(mut self, event_id: u64) -> Self {
        self.event.event_id = event_id;
        self
    }

    /// The worker that holds the blocks.
    pub fn worker(&self) -> Worker {
        Worker::new(self.worker_id, self.event.dp_rank)
    }
}

fn decode_error(json: &[u8], error: &serde_json::Error) -> Error {
    // Lines count from 1. An error without a line is about the whole input.
    let lines = json.split_inclusive(|&byte| byte == b'\n');
    let before: usize = lines.take(error.line().saturating_sub(1)).map(<[u8]>::len).sum();
    Error::decode(before + error.column(), error.to_string())
}

/// A hash is a JSON number: written unsigned, read unsigned or signed.
fn bits<E: serde::de::Error>(number: Number) -> Result<u64, E> {
    let signed = || Some(number.as_i64()?.cast_unsigned());
    number
        .as_u64()
        .or_else(signed)
        .ok_or_else(|| E::custom(format!("a hash must be an integer of 64 bits, not {number}")))
}

fn hash<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    bits(Number::deserialize(deserializer)?)
}

fn optional_hash<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    Option::<Number>::deserialize(deserializer)?.map(bits).transpose()
}

fn hashes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u64>, D::Error> {
    Vec::<Number>::deserialize(deserializer)?.into_iter().map(bits).collect()
}

/// Identity seeds: absent and null mean no identity.
fn seed<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    Ok(optional_hash(deserializer)?.unwrap_or(SEED))
}

fn no_identity() -> u64 {
    SEED
}

fn is_no_identity(seed: &u64) -> bool {
    *seed == SEED
}

/// Tiers by the names that routers exchange.
mod tier {
    use super::{Deserialize, Deserializer, Tier};

    pub(super) fn device() -> Tier {
        Tier::Device
    }

    pub(super) fn is_device(tier: &Tier) -> bool {
        *tier == Tier::Device
    }

    pub(super) fn serialize<S: serde::Serializer>(tier: &Tier, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(tier.name())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Tier, D::Error> {
        let name = std::borrow::Cow::<'de, str>::deserialize(from)?;
        Tier::from_name(&name).ok_or_else(|| {
            serde::de::Error::custom(format!(
                "storage_tier must be device, host_pinned, disk or external, not {name:?}"
            ))
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STORED: &str = r#"{"worker_id":1,"event":{"event_id":7,"data":{"stored":{"parent_hash":null,"blocks":[{"block_hash":100,"tokens_hash":11,"mm_extra_info":null}]}},"dp_rank":0}}"#;

    #[test]
    fn the_known_form_is_read_and_written_alike() {
        let event = RouterEvent::from_json(STORED.as_bytes()).unwrap();
        assert_eq!(event.worker(), Worker::new(1, 0));
        assert_eq!(event.event.event_id, 7);
        assert_eq!(event.storage_tier, Tier::Device);
        let EventData::Stored(stored) = &event.event.data else { panic!("{event:?}") };
        assert_eq!((stored.parent_hash, stored.seed), (None, crate::hash::SEED));
        let block = StoredBlock { block_hash: 100, tokens_hash: 11, mm_extra_info: None };
        assert_eq!(stored.blocks, [block]);
        assert_eq!(event.to_json(), STORED);
    }

    #[test]
    fn removed_and_cleared_have_their_own_shapes() {
        let removed = r#"{"worker_id":2,"event":{"event_id":8,"data":{"removed":{"block_hashes":[100,18446744073709551615]}},"dp_rank":3}}"#;
        let cleared = r#"{"worker_id":2,"event":{"event_id":9,"data":"cleared","dp_rank":3}}"#;
        let events = [removed, cleared].map(|one| RouterEvent::from_json(one.as_bytes()).unwrap());
        let removed_blocks = RemovedBlocks { block_hashes: vec![100, u64::MAX] };
        assert_eq!(events[0].event.data, EventData::Removed(removed_blocks));
        assert_eq!(events[1].event.data, EventData::Cleared);
        assert_eq!([events[0].to_json(), events[1].to_json()], [removed, cleared]);
    }

    #[test]
    fn signed_hashes_keep_their_bits() {
        let json = STORED
            .replace("\"parent_hash\":null", "\"parent_hash\":-1")
            .replace("\"block_hash\":100", "\"block_hash\":-9223372036854775808")
            .replace("\"tokens_hash\":11", "\"tokens_hash\":-2");
        let event = RouterEvent::from_json(json.as_bytes()).unwrap();
        let EventData::Stored(stored) = event.event.data else { panic!() };
        assert_eq!(stored.parent_hash, Some(u64::MAX));
        assert_eq!(stored.blocks[0].block_hash, 1 << 63);
        assert_eq!(stored.blocks[0].tokens_hash, u64::MAX - 1);
        let removed =
            br#"{"worker_id":2,"event":{"event_id":8,"data":{"removed":{"block_hashes":[-1]}}}}"#;
        let event = RouterEvent::from_json(removed).unwrap();
        let removed_blocks = RemovedBlocks { block_hashes: vec![u64::MAX] };
        assert_eq!(event.event.data, EventData::Removed(removed_blocks));
    }

    #[test]
    fn what_is_absent_has_a_default_and_what_is_unknown_is_ignored() {
        let json = br#"{"worker_id":1,"residency_domain":"x","storage_tier":"host_pinned","event":{
            "event_id":7,"data":{"stored":{"start_position":3,"blocks":[]}}}}"#;
        let event = RouterEvent::from_json(json).unwrap();
        assert_eq!((event.storage_tier, event.event.dp_rank), (Tier::Host, 0));
    }

    #[test]
    fn an_identity_is_said_only_where_there_is_one() {
        let seed = crate::hash::identity_seed(None, Some("tenant"));
        let salted = STORED.replace("}]}}", &format!("}}],\"seed\":{seed}}}}}"));
        assert_ne!(salted, STORED);
        let event = RouterEvent::from_json(salted.as_bytes()).unwrap();
        let EventData::Stored(stored) = &event.event.data else { panic!("{event:?}") };
        assert_eq!(stored.seed, seed);
        assert_eq!(event.to_json(), salted);
        // Null, as other systems write unknown values, and a signed one.
        for (written, meant) in [("null", crate::hash::SEED), ("-1", u64::MAX)] {
            let json = salted.replace(&seed.to_string(), written);
            let event = RouterEvent::from_json(json.as_bytes()).unwrap();
            let EventData::Stored(stored) = event.event.data else { panic!() };
            assert_eq!(stored.seed, meant);
        }
    }

    #[test]
    fn errors_name_the_place() {
        let json = b"\n{\"worker_id\": true}";
        let Err(Error::Decode { offset, reason }) = RouterEvent::from_json(json) else { panic!() };
        assert!(reason.contains("boolean"), "{reason}");
        assert!((2..json.len()).contains(&offset), "{offset}");
        for bad in [
            STORED.replace("100", "1e3"),
            STORED.replace("100", "18446744073709551616"),
            STORED.replace("100", "\"100\""),
            STORED.replace("\"stored\"", "\"moved\""),
            STORED.replace("\"dp_rank\":0}}", "\"dp_rank\":0},\"storage_tier\":\"tape\"}"),
            String::new(),
        ] {
            assert_ne!(bad, STORED);
            let result = RouterEvent::from_json(bad.as_bytes());
            assert!(matches!(result, Err(Error::Decode { .. })), "{bad}: {result:?}");
        }
    }

    fn data() -> impl Strategy<Value = EventData> {
        let block = (any::<u64>(), any::<u64>(), prop::option::of("[a-z]{0,4}")).prop_map(
            |(block_hash, tokens_hash, item)| StoredBlock {
                block_hash,
                tokens_hash,
                mm_extra_info: item.map(|item| serde_json::json!({"mm_objects": [item, 1]})),
            },
        );
        let blocks = prop::collection::vec(block, 0..5);
        prop_oneof![
            (any::<Option<u64>>(), prop_oneof![Just(crate::hash::SEED), any::<u64>()], blocks)
                .prop_map(|(parent_hash, seed, blocks)| EventData::Stored(StoredBlocks {
                    parent_hash,
                    blocks,
                    seed
                })),
            any::<Vec<u64>>()
                .prop_map(|block_hashes| EventData::Removed(RemovedBlocks { block_hashes })),
            Just(EventData::Cleared),
        ]
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(
            worker_id: u64,
            event_id: u64,
            dp_rank: u32,
            tier in 0..4_usize,
            data in data(),
        ) {
            let event = RouterEvent {
                worker_id,
                event: KvEvent { event_id, data, dp_rank },
                storage_tier: Tier::ALL[tier],
            };
            prop_assert_eq!(RouterEvent::from_json(event.to_json().as_bytes()), Ok(event));
        }
    }
}
