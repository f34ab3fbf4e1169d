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
    /// The engine's names of the blocks.
    pub block_hashes: &'a [u64],
    /// The block before the first one; `None` when the first one starts the prompt.
    pub parent_hash: Option<u64>,
    /// Tokens of all the blocks; shape `[blocks * block_size]`.
    pub token_ids: &'a [u32],
    /// Tokens in a block.
    pub block_size: u32,
    /// The engine's number of the LoRA adapter.
    pub lora_id: Option<u64>,
    /// Storage medium; `None` means device.
    pub medium: Option<&'a str>,
    /// The adapter's name.
    pub lora_name: Option<&'a str>,
    /// The cache salt of the request.
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

#[cfg(test)]
mod tests {
    use kvflash_core::codec::{Limits, decode_batch};
    use kvflash_core::event::Event;

    use super::*;
    use crate::blocks::{self, Blocks};

    fn decoded(events: &[Vec<u8>]) -> Vec<Event> {
        let payload = batch(events, 1.5, 3);
        let batch = decode_batch(&payload, &Limits::default()).expect("a batch");
        assert_eq!((batch.dp_rank, batch.events.len()), (Some(3), events.len()));
        batch.events
    }

    #[test]
    fn the_core_reads_what_is_written() {
        let call = Blocks {
            token_ids: &[1, 2, 3, 4],
            sizes: Some(&[2, 2]),
            block_hashes: &[u64::MAX, 7],
            parent_hash: Some(5),
            lora_id: 2,
            lora_name: Some("adapter"),
            cache_salt: Some("salt"),
            medium: Some("CPU"),
        };
        let mut events = call.encode(2).expect("legal").events;
        events.extend(blocks::removed(&[7], None).expect("legal"));
        events.push(cleared());
        let events = decoded(&events);
        let Event::Stored(stored) = &events[0] else { panic!("{:?}", events[0]) };
        assert_eq!(stored.block_hashes, [u64::MAX, 7]);
        assert_eq!((stored.parent, stored.block_size), (Some(5), 2));
        assert_eq!(stored.token_ids, [1, 2, 3, 4]);
        assert_eq!((stored.lora_id, stored.lora_name.as_deref()), (Some(2), Some("adapter")));
        assert_eq!(stored.cache_salt.as_deref(), Some("salt"));
        assert_eq!(stored.medium.as_deref(), Some("CPU"));
        let Event::Removed(removed) = &events[1] else { panic!("{:?}", events[1]) };
        assert_eq!(removed.block_hashes, [7]);
        assert!(matches!(events[2], Event::Cleared), "{:?}", events[2]);
    }

    #[test]
    fn long_calls_are_cut_into_events_that_receivers_take() {
        let token_ids = vec![9; 3 << 20];
        let block_hashes: Vec<u64> = (1..=3 << 16).collect();
        let call = Blocks {
            token_ids: &token_ids,
            sizes: None,
            block_hashes: &block_hashes,
            parent_hash: None,
            lora_id: 0,
            lora_name: None,
            cache_salt: None,
            medium: None,
        };
        let encoded = call.encode(16).expect("legal");
        assert_eq!((encoded.events.len(), encoded.blocks), (3, 3 << 16));
        let mut parent = None;
        for event in decoded(&encoded.events) {
            let Event::Stored(stored) = event else { panic!("{event:?}") };
            assert_eq!((stored.parent, stored.block_hashes.len()), (parent, BLOCKS_MAX));
            parent = stored.block_hashes.last().copied();
        }
    }

    #[test]
    fn blocks_behind_one_of_another_size_are_left_out() {
        let call = Blocks {
            token_ids: &[1, 2, 3, 4, 5, 6, 7],
            sizes: Some(&[2, 2, 1, 2]),
            block_hashes: &[1, 2, 3, 4],
            parent_hash: None,
            lora_id: 0,
            lora_name: None,
            cache_salt: None,
            medium: None,
        };
        assert_eq!(call.encode(2).map(|encoded| encoded.blocks), Ok(2));
        let wrong = Blocks { token_ids: &[1, 2, 3], ..call };
        let text = wrong.encode(2).expect_err("sizes of seven tokens").to_string();
        assert_eq!(text, "num_block_tokens adds up to 7 tokens, token_count is 3");
        let long = "x".repeat(NAME_BYTES_MAX + 1);
        assert!(Blocks { medium: Some(&long), ..call }.encode(2).is_err());
    }
}
