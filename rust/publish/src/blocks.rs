//! The blocks of a call: validated, then split into events that receivers accept.

use crate::error::{Result, invalid};
use crate::wire::{self, BLOCKS_MAX, Item, NAME_BYTES_MAX, Shape, TOKENS_MAX};

/// Maximum blocks of one call; more indicate an error of the caller.
pub const CALL_BLOCKS_MAX: usize = 1 << 24;
/// Maximum tokens of one call.
pub const CALL_TOKENS_MAX: usize = 1 << 28;

/// The blocks of a call.
#[derive(Debug, Clone, Copy, Default)]
pub struct Blocks<'a> {
    /// Tokens of all the blocks, in prompt order.
    pub token_ids: &'a [u32],
    /// Tokens of each block. `None`: all blocks are complete.
    pub sizes: Option<&'a [usize]>,
    /// The engine's names of the blocks; each block continues the one before.
    pub block_hashes: &'a [u64],
    /// The block before the first one; `None` if the first one starts the prompt.
    pub parent_hash: Option<u64>,
    /// The engine's number of the LoRA adapter; 0 means none, as engines count from 1.
    pub lora_id: u64,
    /// The adapter's name.
    pub lora_name: Option<&'a str>,
    /// The cache salt of the request.
    pub cache_salt: Option<&'a str>,
    /// Storage medium; `None` means device.
    pub medium: Option<&'a str>,
    /// Multimodal items, one entry per block.
    pub items: Option<&'a [Vec<Item>]>,
}

/// Encoded events, and the number of the call's blocks in them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// Each event's bytes; empty if no block fits.
    pub events: Vec<Vec<u8>>,
    /// Blocks in the events: those before the first one of another size.
    pub blocks: usize,
}

impl Blocks<'_> {
    /// Encodes the blocks up to the first one of a size other than `block_size`, which is at least
    /// 1. An event of more than `event_bytes_max` bytes contains a single block.
    ///
    /// # Errors
    /// `InvalidArgument` if the sizes do not match the tokens, for a LoRA number that receivers
    /// can't read, and for a name that is too long.
    pub fn encode(&self, shape: Shape, block_size: u32, event_bytes_max: usize) -> Result<Encoded> {
        let size = block_size as usize;
        let (count, tokens) = (self.block_hashes.len(), self.token_ids.len());
        if let Some(sizes) = self.sizes.filter(|sizes| sizes.len() != count) {
            return Err(invalid(format!(
                "num_block_tokens must have one entry for each of the {count} block_hashes, got {}",
                sizes.len()
            )));
        }
        let fitting = match self.sizes {
            None => count,
            Some(sizes) => sizes.iter().position(|&each| each != size).unwrap_or(count),
        };
        let declared = match self.sizes {
            None => count.checked_mul(size),
            Some(sizes) => sizes.iter().try_fold(0_usize, |sum, &each| sum.checked_add(each)),
        };
        if declared != Some(tokens) {
            let declared = declared.map_or("too many".to_owned(), |sum| sum.to_string());
            return Err(invalid(format!(
                "num_block_tokens adds up to {declared} tokens, token_ids has {tokens}"
            )));
        }
        if self.lora_id > i64::MAX as u64 {
            return Err(invalid(format!(
                "lora_id must be at most {}, got {}",
                i64::MAX,
                self.lora_id
            )));
        }
        let names = [
            ("lora_name", self.lora_name),
            ("cache_salt", self.cache_salt),
            ("medium", self.medium),
        ];
        for (field, name) in names {
            check_name(field, name)?;
        }
        let mut step = BLOCKS_MAX.min(TOKENS_MAX / size).max(1);
        let (mut first, mut parent_hash) = (0, self.parent_hash);
        let mut events = Vec::new();
        while first < fitting {
            let last = fitting.min(first + step);
            let block_hashes = &self.block_hashes[first..last];
            let part = Blocks {
                block_hashes,
                parent_hash,
                token_ids: &self.token_ids[first * size..last * size],
                items: self.items.map(|items| &items[first..last]),
                ..*self
            };
            let event = wire::stored(shape, block_size, &part);
            if event.len() > event_bytes_max && last - first > 1 {
                step = (last - first) / 2;
                continue;
            }
            events.push(event);
            (first, parent_hash) = (last, block_hashes.last().copied());
        }
        Ok(Encoded { events, blocks: fitting })
    }
}

/// Encodes removed blocks, in events of about `event_bytes_max` bytes.
///
/// # Errors
/// `InvalidArgument` for a name that is too long.
pub fn removed(
    shape: Shape,
    block_hashes: &[u64],
    medium: Option<&str>,
    event_bytes_max: usize,
) -> Result<Vec<Vec<u8>>> {
    check_name("medium", medium)?;
    // Nine bytes each, with room for a long medium name.
    let step = BLOCKS_MAX.min(event_bytes_max / 16).max(1);
    let encode = |hashes| wire::removed(shape, hashes, medium);
    Ok(block_hashes.chunks(step).map(encode).collect())
}

fn check_name(field: &str, name: Option<&str>) -> Result<()> {
    match name.map(str::len) {
        Some(length) if length > NAME_BYTES_MAX => {
            Err(invalid(format!("{field} may have {NAME_BYTES_MAX} bytes, got {length}")))
        }
        _ => Ok(()),
    }
}
