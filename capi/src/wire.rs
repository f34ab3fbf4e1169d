//! Events as bytes: the tagged maps that vLLM publishes since about 0.27, plus `cache_salt`.

use rmp::encode::{self, RmpWrite};

/// Tokens of one event; receivers take four times as many.
pub const TOKENS_MAX: usize = 1 << 20;
/// Blocks of one event that receivers take.
pub const BLOCKS_MAX: usize = 65_536;
/// Length of a name that receivers take.
pub const NAME_BYTES_MAX: usize = 64 << 10;

/// Blocks that were stored, each the continuation of the one before.
#[derive(Debug, Clone, Copy)]
pub struct Stored<'a> {
    pub block_hashes: &'a [u64],
    pub parent_hash: Option<u64>,
    pub token_ids: &'a [u32],
    pub block_size: u32,
    pub lora_id: Option<u64>,
    pub medium: Option<&'a str>,
    pub lora_name: Option<&'a str>,
    pub cache_salt: Option<&'a str>,
}

/// Writing into a vector can't fail.
type Bytes = rmp::encode::ByteBuf;

/// Encodes a stored event.
pub fn stored(event: &Stored<'_>) -> Vec<u8> {
    let mut out =
        Bytes::with_capacity(128 + 9 * event.block_hashes.len() + 5 * event.token_ids.len());
    let fields = 8 + u32::from(event.cache_salt.is_some());
    let _ = encode::write_map_len(&mut out, fields);
    text(&mut out, "type", Some("BlockStored"));
    names(&mut out, event.block_hashes);
    key(&mut out, "parent_block_hash");
    number(&mut out, event.parent_hash);
    key(&mut out, "token_ids");
    let _ = encode::write_array_len(&mut out, event.token_ids.len() as u32);
    for &token in event.token_ids {
        let _ = encode::write_uint(&mut out, u64::from(token));
    }
    key(&mut out, "block_size");
    let _ = encode::write_uint(&mut out, u64::from(event.block_size));
    key(&mut out, "lora_id");
    number(&mut out, event.lora_id);
    text(&mut out, "medium", event.medium);
    text(&mut out, "lora_name", event.lora_name);
    if event.cache_salt.is_some() {
        text(&mut out, "cache_salt", event.cache_salt);
    }
    out.into_vec()
}

/// Encodes a removed event.
pub fn removed(block_hashes: &[u64], medium: Option<&str>) -> Vec<u8> {
    let mut out = Bytes::with_capacity(64 + 9 * block_hashes.len());
    let _ = encode::write_map_len(&mut out, 3);
    text(&mut out, "type", Some("BlockRemoved"));
    names(&mut out, block_hashes);
    text(&mut out, "medium", medium);
    out.into_vec()
}

/// Encodes a cleared event.
pub fn cleared() -> Vec<u8> {
    let mut out = Bytes::with_capacity(32);
    let _ = encode::write_map_len(&mut out, 1);
    text(&mut out, "type", Some("AllBlocksCleared"));
    out.into_vec()
}

/// Joins encoded events to the payload of one message.
pub fn batch(events: &[Vec<u8>], timestamp_s: f64, dp_rank: u32) -> Vec<u8> {
    let mut out = Bytes::with_capacity(32 + events.iter().map(Vec::len).sum::<usize>());
    let _ = encode::write_array_len(&mut out, 3);
    let _ = encode::write_f64(&mut out, timestamp_s);
    let _ = encode::write_array_len(&mut out, events.len() as u32);
    for event in events {
        let _ = out.write_bytes(event);
    }
    let _ = encode::write_uint(&mut out, u64::from(dp_rank));
    out.into_vec()
}

fn key(out: &mut Bytes, name: &str) {
    let _ = encode::write_str(out, name);
}

fn names(out: &mut Bytes, block_hashes: &[u64]) {
    key(out, "block_hashes");
    let _ = encode::write_array_len(out, block_hashes.len() as u32);
    for &hash in block_hashes {
        let _ = encode::write_uint(out, hash);
    }
}

fn number(out: &mut Bytes, value: Option<u64>) {
    match value {
        Some(value) => drop(encode::write_uint(out, value)),
        None => drop(encode::write_nil(out)),
    }
}

fn text(out: &mut Bytes, name: &str, value: Option<&str>) {
    key(out, name);
    match value {
        Some(value) => drop(encode::write_str(out, value)),
        None => drop(encode::write_nil(out)),
    }
}
