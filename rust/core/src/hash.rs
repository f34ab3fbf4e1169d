//! Token ids to local block hashes, local block hashes to sequence hashes.
//!
//! A *local* hash identifies the tokens of one block and everything else that the engine separates
//! by (LoRA adapter, cache salt, multimodal items). A *sequence* hash identifies a block together
//! with everything before it. Only complete blocks have hashes: the tail of a prompt is never
//! reused.
//!
//! All hashes are XXH3 with 64 bits, over little-endian bytes, so that hashes of different
//! machines, and of other routers with the same scheme, are equal bit for bit.

mod content;
pub mod engine;
pub mod prompt_keys;

pub use content::{content_hashes, embeds_key, media_key};

use std::borrow::Cow;

use xxhash_rust::const_xxh3::const_custom_default_secret;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_secret, xxh3_64_with_seed};

use crate::error::{Error, Result};

/// XXH3 uses the seed itself up to this length, and above it a secret derived from the seed.
const SEEDED_BYTES: usize = 240;

/// Seed of every hash of a prompt without LoRA adapter and cache salt, and of every chain step.
pub const SEED: u64 = 1337;

/// The seed for hashing a LoRA adapter's or a tenant's blocks.
///
/// Different identities get different local hashes for the same tokens, so that no match ever
/// crosses them. An empty name means none.
pub fn identity_seed(lora_name: Option<&str>, cache_salt: Option<&str>) -> u64 {
    let lora = lora_name.filter(|name| !name.is_empty());
    let salt = cache_salt.filter(|salt| !salt.is_empty());
    // The two names are hashed under different seeds: an adapter "a" differs from a salt "a".
    let lora = lora.map_or(0, |name| xxh3_64(name.as_bytes()));
    let salt = salt.map_or(0, |salt| xxh3_64_with_seed(salt.as_bytes(), 1));
    SEED.wrapping_add(lora).wrapping_add(salt)
}

/// Checks a block size from outside.
///
/// # Errors
/// [`Error::InvalidArgument`] for 0.
pub fn check_block_size(block_size: u32) -> Result<u32> {
    match block_size {
        0 => Err(Error::invalid("block_size must be at least 1 token, got 0")),
        _ => Ok(block_size),
    }
}

/// Local hashes of the complete blocks of `tokens`; shape `[tokens / block_size]`.
///
/// `block_size` must not be 0 (see [`check_block_size`]); in release builds 0 gives no hashes.
pub fn local_hashes(tokens: &[u32], block_size: u32, seed: u64) -> Vec<u64> {
    let mut hashes = Vec::new();
    local_hashes_into(tokens, block_size, seed, &mut hashes);
    hashes
}

/// Appends the result of [`local_hashes`] to `hashes`.
///
/// # Cost
/// One growth of `hashes` at most, nothing allocated per block.
pub fn local_hashes_into(tokens: &[u32], block_size: u32, seed: u64, hashes: &mut Vec<u64>) {
    let held = hashes.len();
    hashes.resize(held + block_count(tokens.len(), block_size, false), 0);
    write_local_hashes(tokens, block_size, false, seed, &mut hashes[held..]);
}

/// Number of blocks of a prompt with a hash: complete ones, and under EAGLE those with a token
/// after them.
pub fn block_count(tokens: usize, block_size: u32, is_eagle: bool) -> usize {
    debug_assert!(block_size > 0, "callers check the block size");
    let lookahead = usize::from(is_eagle);
    tokens.saturating_sub(lookahead).checked_div(block_size as usize).unwrap_or(0)
}

/// Writes the result of [`local_hashes`] or [`local_hashes_eagle`] to the beginning of `out`.
///
/// # Panics
/// If `out` is shorter than [`block_count`].
///
/// # Cost
/// Allocates nothing, for callers with their own memory.
pub fn write_local_hashes(
    tokens: &[u32],
    block_size: u32,
    is_eagle: bool,
    seed: u64,
    out: &mut [u64],
) {
    let blocks = block_count(tokens.len(), block_size, is_eagle);
    let stride = block_size as usize * 4;
    let window = stride + usize::from(is_eagle) * 4;
    let bytes = little_endian(&tokens[..tokens.len().min(blocks * block_size as usize + 1)]);
    let starts = (0..blocks).map(|block| block * stride);
    let out = out[..blocks].iter_mut().zip(starts);
    if window > SEEDED_BYTES {
        // Long inputs are hashed under a secret derived from the seed: computed once, not per
        // block.
        let secret = const_custom_default_secret(seed);
        out.for_each(|(hash, start)| {
            *hash = xxh3_64_with_secret(&bytes[start..start + window], &secret);
        });
    } else {
        out.for_each(|(hash, start)| {
            *hash = xxh3_64_with_seed(&bytes[start..start + window], seed);
        });
    }
}

/// Local hashes of a prompt under EAGLE speculation, where a block's hash also covers the token
/// after it; shape `[(tokens - 1) / block_size]`.
///
/// `block_size` must not be 0 (see [`check_block_size`]); in release builds 0 gives no hashes.
pub fn local_hashes_eagle(tokens: &[u32], block_size: u32, seed: u64) -> Vec<u64> {
    let mut hashes = vec![0; block_count(tokens.len(), block_size, true)];
    write_local_hashes(tokens, block_size, true, seed, &mut hashes);
    hashes
}

/// Local hash of one block that contains placeholders of multimodal items.
///
/// The items' hashes follow the tokens in ascending order; the tokens already determine the
/// positions of the placeholders. Without items it equals the plain local hash.
pub fn local_hash_with_items(tokens_of_block: &[u32], mm_hashes: &[u64], seed: u64) -> u64 {
    let tokens = little_endian(tokens_of_block);
    if mm_hashes.is_empty() {
        return xxh3_64_with_seed(&tokens, seed);
    }
    let mut sorted = mm_hashes.to_vec();
    sorted.sort_unstable();
    let mut bytes = Vec::with_capacity(tokens.len() + sorted.len() * 8);
    bytes.extend_from_slice(&tokens);
    bytes.extend(sorted.iter().flat_map(|hash| hash.to_le_bytes()));
    xxh3_64_with_seed(&bytes, seed)
}

/// Hash of a multimodal item by its identifier.
///
/// Identifiers that are already digests (64 hex digits) keep their first 8 bytes; any other is
/// hashed.
pub fn item_hash(identifier: &str) -> u64 {
    let is_digest = identifier.len() == 64 && identifier.bytes().all(|b| b.is_ascii_hexdigit());
    match is_digest.then(|| u64::from_str_radix(&identifier[..16], 16)) {
        Some(Ok(hash)) => hash,
        _ => xxh3_64(identifier.as_bytes()),
    }
}

/// Sequence hash of the block with the local hash `local` after the block `parent`.
///
/// The first block's sequence hash is its local hash. Adapter and salt are only part of the local
/// hashes.
pub fn extend(parent: Option<u64>, local: u64) -> u64 {
    let Some(parent) = parent else { return local };
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&parent.to_le_bytes());
    bytes[8..].copy_from_slice(&local.to_le_bytes());
    xxh3_64_with_seed(&bytes, SEED)
}

/// Appends the sequence hashes of a prompt's blocks to `out`; shape `[locals]`.
pub fn sequence_hashes_into(locals: &[u64], out: &mut Vec<u64>) {
    out.reserve(locals.len());
    let mut parent = None;
    out.extend(locals.iter().map(|&local| {
        let sequence_hash = extend(parent, local);
        parent = Some(sequence_hash);
        sequence_hash
    }));
}

/// The little-endian bytes of `tokens`: a view on little-endian machines, otherwise a copy.
fn little_endian(tokens: &[u32]) -> Cow<'_, [u8]> {
    if cfg!(target_endian = "little") {
        Cow::Borrowed(bytemuck::cast_slice(tokens))
    } else {
        Cow::Owned(tokens.iter().flat_map(|token| token.to_le_bytes()).collect())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sequence_hashes(locals: &[u64]) -> Vec<u64> {
        let mut out = Vec::new();
        sequence_hashes_into(locals, &mut out);
        out
    }

    #[test]
    fn an_empty_name_is_no_name() {
        assert_eq!(identity_seed(None, None), SEED);
        assert_eq!(identity_seed(Some(""), Some("")), SEED);
        assert_eq!(identity_seed(Some("a"), Some("")), identity_seed(Some("a"), None));
        assert_eq!(identity_seed(Some(""), Some("a")), identity_seed(None, Some("a")));
    }

    #[test]
    fn an_adapter_and_a_salt_of_one_name_stay_apart() {
        assert_ne!(identity_seed(Some("a"), None), identity_seed(None, Some("a")));
    }

    #[test]
    fn a_block_size_of_zero_is_refused() {
        assert!(matches!(check_block_size(0), Err(Error::InvalidArgument(_))));
        assert!(matches!(check_block_size(0), Err(Error::InvalidArgument(_))));
        assert_eq!(check_block_size(1).unwrap(), 1);
    }

    #[test]
    fn a_tail_has_no_hash() {
        for (tokens, block_size, blocks) in
            [(0, 4, 0), (3, 4, 0), (4, 4, 1), (7, 4, 1), (8, 4, 2), (5, 1, 5)]
        {
            let tokens = vec![9; tokens];
            assert_eq!(local_hashes(&tokens, block_size, SEED).len(), blocks);
            let eagle = tokens.len().saturating_sub(1) / block_size as usize;
            assert_eq!(local_hashes_eagle(&tokens, block_size, SEED).len(), eagle);
        }
    }

    #[test]
    fn hashes_are_appended() {
        let mut hashes = vec![7];
        local_hashes_into(&[1, 2, 3, 4], 4, SEED, &mut hashes);
        assert_eq!(hashes, [7, 14643705804678351452]);
        sequence_hashes_into(&[14643705804678351452], &mut hashes);
        assert_eq!(hashes, [7, 14643705804678351452, 14643705804678351452]);
    }

    #[test]
    fn the_order_of_items_does_not_matter() {
        let hash = local_hash_with_items(&[1, 2, 3, 4], &[42, 7], SEED);
        assert_eq!(hash, local_hash_with_items(&[1, 2, 3, 4], &[7, 42], SEED));
        assert_eq!(
            local_hash_with_items(&[1, 2, 3, 4], &[], SEED),
            local_hashes(&[1, 2, 3, 4], 4, SEED)[0]
        );
    }

    #[test]
    fn only_64_hex_digits_are_a_digest() {
        let digest = "00000000000000FFaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
        assert_eq!(item_hash(digest), 255);
        let signed = format!("+{}", &digest[1..]);
        assert_eq!(item_hash(&signed), xxh3_64(signed.as_bytes()));
        // 64 bytes, but the 16th lies within a character.
        let text = format!("{}é{}", "a".repeat(15), "a".repeat(47));
        assert_eq!(text.len(), 64);
        assert_eq!(item_hash(&text), xxh3_64(text.as_bytes()));
    }

    proptest! {
        #[test]
        fn windows_equal_one_hash_a_block(
            tokens in prop::collection::vec(any::<u32>(), 0..400),
            block_size in 1_u32..140,
            seed: u64,
        ) {
            let bytes = |block: &[u32]| -> Vec<u8> {
                block.iter().flat_map(|token| token.to_le_bytes()).collect()
            };
            let size = block_size as usize;
            let plain: Vec<u64> = tokens
                .chunks_exact(size)
                .map(|block| xxh3_64_with_seed(&bytes(block), seed))
                .collect();
            prop_assert_eq!(local_hashes(&tokens, block_size, seed), plain);
            let eagle: Vec<u64> = tokens
                .windows(size + 1)
                .step_by(size)
                .map(|block| xxh3_64_with_seed(&bytes(block), seed))
                .collect();
            prop_assert_eq!(local_hashes_eagle(&tokens, block_size, seed), eagle);
        }

        #[test]
        fn a_sequence_hash_extends_its_parent(locals: Vec<u64>) {
            let sequence = sequence_hashes(&locals);
            for (i, &hash) in sequence.iter().enumerate() {
                let parent = i.checked_sub(1).map(|i| sequence[i]);
                prop_assert_eq!(hash, extend(parent, locals[i]));
            }
        }
    }
}
