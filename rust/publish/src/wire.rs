//! Events as bytes, in both forms that vLLM has published. A batch is the msgpack array
//! `[seconds since the epoch, [events], data parallel rank]`.

use rmp::encode::{self, RmpWrite};

/// Tokens of one event; receivers take four times as many.
pub const TOKENS_MAX: usize = 1 << 20;
/// Blocks of one event that receivers take.
pub const BLOCKS_MAX: usize = 65_536;
/// Length of a name that receivers take.
pub const NAME_BYTES_MAX: usize = 64 << 10;

/// The form of an event.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Era {
    /// A map with its kind under `type` (vLLM since about 0.27); keys without a value may be absent.
    #[default]
    Tagged,
    /// An array that begins with its kind (vLLM up to about 0.22). It has no `cache_salt`.
    Positional,
}

/// What else tells a block from others with the same tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Key {
    /// A salt, or another name.
    Name(String),
    /// Identifier of a multimodal item, and its first token, counted from the block's.
    Item(String, i64),
}

/// The keys of each block.
pub type Keys = [Option<Vec<Key>>];

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
    /// Keys, one entry a block.
    pub extra_keys: Option<&'a Keys>,
}

/// Writing into a vector can't fail.
type Bytes = rmp::encode::ByteBuf;

/// Encodes a stored event.
pub fn stored(era: Era, event: &Stored<'_>) -> Vec<u8> {
    let room = 128 + 9 * event.block_hashes.len() + 5 * event.token_ids.len();
    let (salt, keys) = (event.cache_salt, event.extra_keys);
    let count = match era {
        Era::Positional => 8,
        // Engines leave these two out rather than write nil.
        Era::Tagged => 7 + u32::from(salt.is_some()) + u32::from(keys.is_some()),
    };
    let mut out = Fields::new(era, "BlockStored", count, room);
    out.names(event.block_hashes);
    out.number("parent_block_hash", event.parent_hash);
    out.key("token_ids");
    out.list(event.token_ids, |out, &token| uint(out, u64::from(token)));
    out.number("block_size", Some(u64::from(event.block_size)));
    out.number("lora_id", event.lora_id);
    out.text("medium", event.medium);
    out.text("lora_name", event.lora_name);
    if salt.is_some() && era == Era::Tagged {
        out.text("cache_salt", salt);
    }
    if keys.is_some() || era == Era::Positional {
        out.key("extra_keys");
        match keys {
            None => nil(&mut out.bytes),
            Some(keys) => out.list(keys, block_keys),
        }
    }
    out.bytes.into_vec()
}

/// Encodes a removed event.
pub fn removed(era: Era, block_hashes: &[u64], medium: Option<&str>) -> Vec<u8> {
    let mut out = Fields::new(era, "BlockRemoved", 2, 64 + 9 * block_hashes.len());
    out.names(block_hashes);
    out.text("medium", medium);
    out.bytes.into_vec()
}

/// Encodes a cleared event.
pub fn cleared(era: Era) -> Vec<u8> {
    Fields::new(era, "AllBlocksCleared", 0, 32).bytes.into_vec()
}

/// Joins encoded events to the payload of one message.
pub fn batch(events: &[Vec<u8>], timestamp_s: f64, dp_rank: Option<u32>) -> Vec<u8> {
    let mut out = Bytes::with_capacity(32 + events.iter().map(Vec::len).sum::<usize>());
    let _ = encode::write_array_len(&mut out, 3);
    let _ = encode::write_f64(&mut out, timestamp_s);
    let _ = encode::write_array_len(&mut out, events.len() as u32);
    for event in events {
        let _ = out.write_bytes(event);
    }
    match dp_rank {
        Some(rank) => uint(&mut out, u64::from(rank)),
        None => nil(&mut out),
    }
    out.into_vec()
}

/// The fields of one event, in their order; their names only where the era has them.
struct Fields {
    era: Era,
    bytes: Bytes,
}

impl Fields {
    fn new(era: Era, kind: &str, count: u32, room: usize) -> Self {
        let mut out = Self { era, bytes: Bytes::with_capacity(room) };
        match era {
            Era::Tagged => drop(encode::write_map_len(&mut out.bytes, count + 1)),
            Era::Positional => drop(encode::write_array_len(&mut out.bytes, count + 1)),
        }
        out.text("type", Some(kind));
        out
    }

    fn key(&mut self, name: &str) {
        if self.era == Era::Tagged {
            let _ = encode::write_str(&mut self.bytes, name);
        }
    }

    fn list<T>(&mut self, items: &[T], write: impl Fn(&mut Bytes, &T)) {
        let _ = encode::write_array_len(&mut self.bytes, items.len() as u32);
        for item in items {
            write(&mut self.bytes, item);
        }
    }

    fn names(&mut self, block_hashes: &[u64]) {
        self.key("block_hashes");
        self.list(block_hashes, |out, &hash| uint(out, hash));
    }

    fn number(&mut self, name: &str, value: Option<u64>) {
        self.key(name);
        match value {
            Some(value) => uint(&mut self.bytes, value),
            None => nil(&mut self.bytes),
        }
    }

    fn text(&mut self, name: &str, value: Option<&str>) {
        self.key(name);
        match value {
            Some(value) => drop(encode::write_str(&mut self.bytes, value)),
            None => nil(&mut self.bytes),
        }
    }
}

fn uint(out: &mut Bytes, value: u64) {
    let _ = encode::write_uint(out, value);
}

fn nil(out: &mut Bytes) {
    let _ = encode::write_nil(out);
}

fn block_keys(out: &mut Bytes, keys: &Option<Vec<Key>>) {
    let Some(keys) = keys else { return nil(out) };
    let _ = encode::write_array_len(out, keys.len() as u32);
    for key in keys {
        match key {
            Key::Name(name) => drop(encode::write_str(out, name)),
            Key::Item(identifier, begin) => {
                let _ = encode::write_array_len(out, 2);
                let _ = encode::write_str(out, identifier);
                let _ = encode::write_sint(out, *begin);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kvflash_core::codec::{Limits, decode_batch};
    use kvflash_core::event::Event;

    use super::*;
    use crate::blocks::{self, Blocks};

    fn decoded(events: &[Vec<u8>]) -> Vec<Event> {
        let payload = batch(events, 1.5, Some(3));
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
            extra_keys: None,
        };
        let mut events = call.encode(2, usize::MAX).expect("legal").events;
        events.extend(blocks::removed(&[7], None, usize::MAX).expect("legal"));
        events.push(cleared(Era::Tagged));
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
            extra_keys: None,
        };
        let encoded = call.encode(16, usize::MAX).expect("legal");
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
            extra_keys: None,
        };
        assert_eq!(call.encode(2, usize::MAX).map(|encoded| encoded.blocks), Ok(2));
        let wrong = Blocks { token_ids: &[1, 2, 3], ..call };
        let text = wrong.encode(2, usize::MAX).expect_err("sizes of seven tokens").to_string();
        assert_eq!(text, "num_block_tokens adds up to 7 tokens, token_ids has 3");
        let long = "x".repeat(NAME_BYTES_MAX + 1);
        assert!(Blocks { medium: Some(&long), ..call }.encode(2, usize::MAX).is_err());
    }
}
