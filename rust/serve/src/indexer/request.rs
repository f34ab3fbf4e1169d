//! Requests of the indexer's clients. Errors name the field and its value.

use std::fmt::{self, Formatter};
use std::marker::PhantomData;
use std::num::NonZeroU32;

use kvflash_core::hash::engine::MediaItem;
use serde::de::{Deserializer, Error as _, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Serialize};

use super::super::Reject;
use crate::prompt_keys;

/// Maximum elements of a query.
pub(super) const MAX_TOKEN_IDS: usize = 4_194_304;

/// A list of integers, or of their little-endian bytes; others are refused by index and value.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Words<T>(pub Vec<T>);

pub(crate) type TokenIds = Words<u32>;

/// Engines in Python publish hashes as signed numbers; only the bits matter.
pub(crate) type BlockHashes = Words<u64>;

/// An element of such a list.
pub(crate) trait Word: Sized {
    /// The field that has the list.
    const FIELD: &'static str;
    const LEGAL: &'static str;

    /// `None` for an integer out of range. Some msgpack writers encode every number as signed.
    fn of(value: i128) -> Option<Self>;

    /// The words, and the bytes that are left over.
    fn unpack(bytes: &[u8]) -> (Vec<Self>, &[u8]);
}

impl Word for u32 {
    const FIELD: &'static str = "token_ids";
    const LEGAL: &'static str = "an integer in 0..=4294967295";

    fn of(value: i128) -> Option<Self> {
        value.try_into().ok()
    }

    fn unpack(bytes: &[u8]) -> (Vec<Self>, &[u8]) {
        let (words, rest) = bytes.as_chunks();
        (words.iter().copied().map(Self::from_le_bytes).collect(), rest)
    }
}

impl Word for u64 {
    const FIELD: &'static str = "block_hashes";
    const LEGAL: &'static str = "an integer of 64 bits";

    fn of(value: i128) -> Option<Self> {
        Some(value as Self)
    }

    fn unpack(bytes: &[u8]) -> (Vec<Self>, &[u8]) {
        let (words, rest) = bytes.as_chunks();
        (words.iter().copied().map(Self::from_le_bytes).collect(), rest)
    }
}

struct Element<T>(T);

impl<'de, T: Word> Deserialize<'de> for Element<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ElementVisitor(PhantomData)).map(Self)
    }
}

struct ElementVisitor<T>(PhantomData<T>);

impl<T: Word> Visitor<'_> for ElementVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(T::LEGAL)
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<T, E> {
        T::of(value.into()).ok_or_else(|| E::invalid_value(Unexpected::Unsigned(value), &self))
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<T, E> {
        T::of(value.into()).ok_or_else(|| E::invalid_value(Unexpected::Signed(value), &self))
    }
}

struct WordsVisitor<T>(PhantomData<T>);

impl<'de, T: Word> Visitor<'de> for WordsVisitor<T> {
    type Value = Words<T>;

    fn expecting(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str("a list of integers")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Words<T>, A::Error> {
        let mut out = Vec::with_capacity(seq.size_hint().unwrap_or(0).min(1_024));
        loop {
            match seq.next_element() {
                Ok(Some(Element(word))) => out.push(word),
                Ok(None) => return Ok(Words(out)),
                Err(error) => {
                    let what = format!("{}[{}]: {error}", T::FIELD, out.len());
                    return Err(A::Error::custom(what));
                }
            }
            check_count::<T, _>(out.len())?;
        }
    }

    fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<Words<T>, E> {
        check_count::<T, _>(bytes.len() / size_of::<T>())?;
        let (words, rest) = T::unpack(bytes);
        if rest.is_empty() {
            return Ok(Words(words));
        }
        Err(E::custom(format!(
            "{} has {} bytes, not a multiple of {} as little-endian integers are",
            T::FIELD,
            bytes.len(),
            size_of::<T>()
        )))
    }
}

fn check_count<T: Word, E: serde::de::Error>(count: usize) -> Result<(), E> {
    if count <= MAX_TOKEN_IDS {
        return Ok(());
    }
    Err(E::custom(format!("{} may have at most {MAX_TOKEN_IDS} elements", T::FIELD)))
}

impl<'de, T: Word> Deserialize<'de> for Words<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(WordsVisitor(PhantomData))
    }
}

pub(crate) fn default_tenant() -> String {
    "default".to_owned()
}

/// A tenant that may be null, which is the default one.
fn tenant<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Option::deserialize(deserializer).map(|tenant| tenant.unwrap_or_else(default_tenant))
}

/// A rank that may be null, which is rank 0.
fn rank<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// POST /register
#[derive(Debug, Clone, Deserialize, Serialize)]
pub(super) struct Register {
    pub instance_id: u64,
    pub endpoint: String,
    pub model_name: String,
    pub block_size: NonZeroU32,
    #[serde(default = "default_tenant", deserialize_with = "tenant")]
    pub tenant_id: String,
    #[serde(default, deserialize_with = "rank")]
    pub dp_rank: u32,
    pub replay_endpoint: Option<String>,
    pub capacity_blocks: Option<u64>,
    pub lora_name: Option<String>,
    #[serde(alias = "additionalsalt")]
    pub additional_salt: Option<String>,
    pub attention_chunk_size: Option<u32>,
    pub offload_chunk: Option<u32>,
}

/// POST /unregister
#[derive(Debug, Deserialize)]
pub(super) struct Unregister {
    pub instance_id: u64,
    pub model_name: String,
    pub tenant_id: Option<String>,
    pub dp_rank: Option<u32>,
}

impl Unregister {
    /// Whether it ends this registration.
    pub fn means(&self, other: &Register) -> bool {
        self.instance_id == other.instance_id
            && self.model_name == other.model_name
            && self.tenant_id.as_ref().is_none_or(|tenant| *tenant == other.tenant_id)
            && self.dp_rank.is_none_or(|rank| rank == other.dp_rank)
    }
}

/// POST /query
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
pub(super) struct Query {
    pub token_ids: TokenIds,
    pub model_name: String,
    #[serde(default = "default_tenant", deserialize_with = "tenant")]
    pub tenant_id: String,
    pub lora_name: Option<String>,
    pub lora_path: Option<String>,
    pub cache_salt: Option<String>,
    #[serde(alias = "additionalsalt")]
    pub additional_salt: Option<String>,
    #[serde(default, deserialize_with = "prompt_keys::media")]
    pub mm: Vec<MediaItem>,
    #[serde(default, deserialize_with = "prompt_keys::embeds")]
    pub embeds: Vec<Vec<u8>>,
}

impl Query {
    /// The salt, under either name.
    pub fn salt(&self) -> Result<Option<&str>, Reject> {
        match (&self.cache_salt, &self.additional_salt) {
            (Some(salt), Some(other)) if salt != other => Err(Reject::bad_request(format!(
                "cache_salt {salt:?} and additional_salt {other:?} are two names of one field"
            ))),
            (salt, other) => Ok(salt.as_deref().or(other.as_deref())),
        }
    }
}

/// POST /query_by_hash
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub(super) struct QueryByHash {
    pub block_hashes: BlockHashes,
    pub model_name: String,
    #[serde(default = "default_tenant", deserialize_with = "tenant")]
    pub tenant_id: String,
    /// Salted hashes already include their salt and the tenant's, so this field has no effect.
    #[serde(rename = "cache_salt")]
    pub _cache_salt: Option<String>,
}

/// The parameters of GET /workers, of a router, too.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WorkersFilter {
    pub model_name: Option<String>,
}

/// POST /register_peer, /deregister_peer
#[derive(Debug, Deserialize)]
pub(super) struct PeerUrl {
    pub url: String,
}

/// POST /test/pause_listener, /test/resume_listener
#[derive(Debug, Deserialize)]
pub(super) struct Listener {
    pub instance_id: u64,
    #[serde(default, deserialize_with = "rank")]
    pub dp_rank: u32,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn token_ids_outside_u32_are_refused_by_index_and_value() {
        for (json, wanted) in [
            ("[1,2,-5]", ["token_ids[2]", "-5"]),
            ("[4294967296]", ["token_ids[0]", "4294967296"]),
            ("[1,2.5]", ["token_ids[1]", "2.5"]),
            ("[1,null]", ["token_ids[1]", "null"]),
        ] {
            let error = serde_json::from_str::<TokenIds>(json).unwrap_err().to_string();
            assert!(wanted.iter().all(|part| error.contains(part)), "{json}: {error}");
        }
        assert_eq!(serde_json::from_str::<TokenIds>("[0,4294967295]").unwrap().0, [0, u32::MAX]);
    }

    #[test]
    fn null_is_an_absent_field() {
        let register = r#"{"instance_id": 1, "endpoint": "tcp://h:1", "model_name": "m",
            "block_size": 16, "tenant_id": null, "dp_rank": null}"#;
        let parsed: Register = serde_json::from_str(register).unwrap();
        assert_eq!((parsed.tenant_id.as_str(), parsed.dp_rank), ("default", 0));
        let query = r#"{"token_ids": [], "model_name": "m", "tenant_id": null, "mm": null}"#;
        let parsed: Query = serde_json::from_str(query).unwrap();
        assert_eq!(parsed.tenant_id, "default");
        let query = r#"{"block_hashes": [], "model_name": "m", "tenant_id": null}"#;
        let parsed: QueryByHash = serde_json::from_str(query).unwrap();
        assert_eq!(parsed.tenant_id, "default");
    }

    #[test]
    fn signed_hashes_keep_their_bits() {
        let hashes: BlockHashes = serde_json::from_str("[-1,18446744073709551615,0]").unwrap();
        assert_eq!(hashes.0, [u64::MAX, u64::MAX, 0]);
    }
}
