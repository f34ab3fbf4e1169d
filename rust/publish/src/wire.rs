//! Encodes events, in both formats that vLLM has published. A batch is the msgpack array `[seconds
//! since the epoch, [events], data parallel rank]`.

use rmp::encode::{self, RmpWrite};

use crate::blocks::Blocks;

/// Maximum tokens of one event; receivers accept four times as many.
pub const TOKENS_MAX: usize = 1 << 20;
/// Maximum blocks of one event at receivers.
pub const BLOCKS_MAX: usize = 65_536;
/// Maximum length of a name at receivers.
pub const NAME_BYTES_MAX: usize = 64 << 10;

/// The format of events.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Shape {
    /// The tagged maps of vLLM, plus `cache_salt`.
    #[default]
    Own,
    /// A map with its kind under `type` (vLLM since about 0.27); keys without a value may be
    /// absent. A block's extra keys are the adapter's name, the items, and, in the first block of a
    /// prompt, the salt.
    Tagged,
    /// An array that begins with its kind (vLLM up to about 0.22), with the same extra keys.
    Positional,
}

/// Identifier of a multimodal item, and its first token, relative to the block's.
pub type Item = (String, i64);

/// Writing to a vector can't fail.
type Bytes = rmp::encode::ByteBuf;

/// Encodes a stored event of complete blocks.
pub fn stored(shape: Shape, block_size: u32, event: &Blocks<'_>) -> Vec<u8> {
    let room = 128 + 9 * event.block_hashes.len() + 5 * event.token_ids.len();
    let (own_salt, engine_salt, adapter) = match shape {
        Shape::Own => (event.cache_salt, None, None),
        Shape::Tagged | Shape::Positional => {
            // Later blocks inherit the salt from their parent.
            let salt = event.cache_salt.filter(|_| event.parent_hash.is_none());
            (None, salt, event.lora_name)
        }
    };
    // The adapter's name alone says no more than `lora_name`.
    let has_keys = event.items.is_some() || engine_salt.is_some();
    let count = match shape {
        Shape::Positional => 8,
        // Engines omit these two rather than write nil.
        Shape::Own | Shape::Tagged => 7 + u32::from(own_salt.is_some()) + u32::from(has_keys),
    };
    let mut out = Fields::new(shape, "BlockStored", count, room);
    out.names(event.block_hashes);
    out.number("parent_block_hash", event.parent_hash);
    out.key("token_ids");
    out.list(event.token_ids, |out, _, &token| uint(out, u64::from(token)));
    out.number("block_size", Some(u64::from(block_size)));
    out.number("lora_id", Some(event.lora_id).filter(|&id| id > 0));
    out.text("medium", event.medium);
    out.text("lora_name", event.lora_name);
    if own_salt.is_some() {
        out.text("cache_salt", own_salt);
    }
    if has_keys {
        out.key("extra_keys");
        out.list(event.block_hashes, |out, at, _| {
            let items = event.items.map_or(&[][..], |items| &items[at]);
            block_keys(out, adapter, items, engine_salt.filter(|_| at == 0));
        });
    } else if shape == Shape::Positional {
        nil(&mut out.bytes);
    }
    out.bytes.into_vec()
}

/// Encodes a removed event.
pub fn removed(shape: Shape, block_hashes: &[u64], medium: Option<&str>) -> Vec<u8> {
    let mut out = Fields::new(shape, "BlockRemoved", 2, 64 + 9 * block_hashes.len());
    out.names(block_hashes);
    out.text("medium", medium);
    out.bytes.into_vec()
}

/// Encodes a cleared event.
pub fn cleared(shape: Shape) -> Vec<u8> {
    Fields::new(shape, "AllBlocksCleared", 0, 32).bytes.into_vec()
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

/// The fields of one event, in order; with names only in formats that have them.
struct Fields {
    shape: Shape,
    bytes: Bytes,
}

impl Fields {
    fn new(shape: Shape, kind: &str, count: u32, room: usize) -> Self {
        let mut out = Self { shape, bytes: Bytes::with_capacity(room) };
        match shape {
            Shape::Positional => drop(encode::write_array_len(&mut out.bytes, count + 1)),
            _ => drop(encode::write_map_len(&mut out.bytes, count + 1)),
        }
        out.text("type", Some(kind));
        out
    }

    fn key(&mut self, name: &str) {
        if self.shape != Shape::Positional {
            let _ = encode::write_str(&mut self.bytes, name);
        }
    }

    fn list<T>(&mut self, items: &[T], write: impl Fn(&mut Bytes, usize, &T)) {
        let _ = encode::write_array_len(&mut self.bytes, items.len() as u32);
        for (at, item) in items.iter().enumerate() {
            write(&mut self.bytes, at, item);
        }
    }

    fn names(&mut self, block_hashes: &[u64]) {
        self.key("block_hashes");
        self.list(block_hashes, |out, _, &hash| uint(out, hash));
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

/// Writes a block's keys in vLLM's order.
fn block_keys(out: &mut Bytes, adapter: Option<&str>, items: &[Item], salt: Option<&str>) {
    let count = items.len() + usize::from(adapter.is_some()) + usize::from(salt.is_some());
    if count == 0 {
        return nil(out);
    }
    let _ = encode::write_array_len(out, count as u32);
    if let Some(adapter) = adapter {
        let _ = encode::write_str(out, adapter);
    }
    for (identifier, begin) in items {
        let _ = encode::write_array_len(out, 2);
        let _ = encode::write_str(out, identifier);
        let _ = encode::write_sint(out, *begin);
    }
    if let Some(salt) = salt {
        let _ = encode::write_str(out, salt);
    }
}

#[cfg(test)]
mod tests {
    use kvflash_core::codec::{Limits, decode_batch};
    use kvflash_core::event::{Event, ExtraKey};

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
            items: None,
        };
        let mut events = call.encode(Shape::Own, 2, usize::MAX).expect("legal").events;
        events.extend(blocks::removed(Shape::Own, &[7], None, usize::MAX).expect("legal"));
        events.push(cleared(Shape::Own));
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
    fn a_salt_equal_to_the_adapter_s_name_stays_a_salt_in_engine_formats() {
        let text = |text: &str| ExtraKey::Text(text.to_owned());
        let call = Blocks {
            token_ids: &[1, 2, 3, 4],
            block_hashes: &[6, 7],
            lora_name: Some("a"),
            cache_salt: Some("a"),
            ..Blocks::default()
        };
        let keys = |shape, call: &Blocks<'_>, event_bytes_max| -> Vec<_> {
            let events = call.encode(shape, 2, event_bytes_max).expect("legal").events;
            let as_keys = |event| match event {
                Event::Stored(stored) => stored.extra_keys,
                other => panic!("{other:?}"),
            };
            decoded(&events).into_iter().map(as_keys).collect()
        };
        let (salted, plain) = (Some(vec![text("a"), text("a")]), Some(vec![text("a")]));
        for shape in [Shape::Tagged, Shape::Positional] {
            let both = vec![vec![salted.clone(), plain.clone()]];
            assert_eq!(keys(shape, &call, usize::MAX), both, "{shape:?}");
            let apart = vec![vec![salted.clone()], vec![]];
            assert_eq!(keys(shape, &call, 1), apart, "{shape:?}: cut into two events");
            let unsalted = Blocks { cache_salt: None, ..call };
            assert_eq!(keys(shape, &unsalted, usize::MAX), [vec![]], "{shape:?}");
        }
        assert_eq!(keys(Shape::Own, &call, usize::MAX), [vec![]]);
    }

    #[test]
    fn long_calls_are_cut_into_events_that_receivers_take() {
        let token_ids = vec![9; 3 << 20];
        let block_hashes: Vec<u64> = (1..=3 << 16).collect();
        let call = Blocks {
            token_ids: &token_ids,
            sizes: None,
            block_hashes: &block_hashes,
            ..Blocks::default()
        };
        let encoded = call.encode(Shape::Own, 16, usize::MAX).expect("legal");
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
            ..Blocks::default()
        };
        assert_eq!(call.encode(Shape::Own, 2, usize::MAX).map(|encoded| encoded.blocks), Ok(2));
        let wrong = Blocks { token_ids: &[1, 2, 3], ..call };
        let text =
            wrong.encode(Shape::Own, 2, usize::MAX).expect_err("sizes of seven tokens").to_string();
        assert_eq!(text, "num_block_tokens adds up to 7 tokens, token_ids has 3");
        let long = "x".repeat(NAME_BYTES_MAX + 1);
        assert!(Blocks { medium: Some(&long), ..call }.encode(Shape::Own, 2, usize::MAX).is_err());
    }
}
