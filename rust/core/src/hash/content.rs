//! Local hashes of prompts with content besides tokens: multimodal items, prompt embeddings.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::engine::{Key, MediaItem, MediaOfBlock};
use super::{item_hash, local_hash_with_items, local_hashes};

/// Separates digests of embeddings from identifiers.
const EMBEDS_SEED: u64 = 0x656d_6265_6473;

/// Contribution of a media item to the hash of a block. The position counts: the same image one
/// token further is another prompt.
///
/// `offset` is the item's first token, counted from the block's; negative before it.
pub fn media_key(identifier: &str, offset: i64) -> u64 {
    xxh3_64_with_seed(&offset.to_le_bytes(), item_hash(identifier))
}

/// Contribution of the digest of a block's prompt embeddings to the hash of the block.
pub fn embeds_key(digest: &[u8]) -> u64 {
    xxh3_64_with_seed(digest, EMBEDS_SEED)
}

/// Local hashes of the complete blocks of `tokens`, including other content; shape `[tokens /
/// block_size]`. Adapter and salt are in `seed`.
///
/// Empty while the block size is unknown (0). Ends before the first block without a digest of
/// embeddings: an engine with finer hashes has digests of smaller blocks.
///
/// # Cost
/// That of [`local_hashes`](super::local_hashes) without media and embeddings.
pub fn content_hashes(
    tokens: &[u32],
    block_size: u32,
    seed: u64,
    media: &[MediaItem],
    embeds: &[Vec<u8>],
) -> Vec<u64> {
    if block_size == 0 {
        return Vec::new();
    }
    if media.is_empty() && embeds.is_empty() {
        return local_hashes(tokens, block_size, seed);
    }
    let blocks = tokens.len() / block_size as usize;
    // As many digests as complete blocks, or one more for the last incomplete block.
    let is_of_these_blocks = embeds.is_empty() || embeds.len().saturating_sub(blocks) <= 1;
    let mut media = media;
    let mut items = Vec::new();
    let mut hashes = Vec::with_capacity(blocks);
    for (block, tokens) in tokens.chunks_exact(block_size as usize).enumerate() {
        let digest = embeds.get(block);
        if !embeds.is_empty() && (digest.is_none() || !is_of_these_blocks) {
            break;
        }
        items.clear();
        let start = block as u64 * u64::from(block_size);
        for key in MediaOfBlock::new(&mut media, start, start + u64::from(block_size)) {
            if let Key::Media(identifier, offset) = key {
                items.push(media_key(identifier, offset));
            }
        }
        items.extend(digest.map(|digest| embeds_key(digest)));
        hashes.push(local_hash_with_items(tokens, &items, seed));
    }
    hashes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(identifier: &str, offset: u32, length: u32) -> MediaItem {
        MediaItem { identifier: identifier.to_owned(), offset, length }
    }

    fn hashes(media: &[MediaItem], embeds: &[Vec<u8>]) -> Vec<u64> {
        content_hashes(&[7; 12], 4, 1337, media, embeds)
    }

    #[test]
    fn blocks_without_items_have_plain_hashes() {
        let plain = local_hashes(&[7; 12], 4, 1337);
        assert_eq!(hashes(&[], &[]), plain);
        let with = hashes(&[picture("a", 5, 2)], &[]);
        assert_eq!((with[0], with[2]), (plain[0], plain[2]));
        assert_ne!(with[1], plain[1]);
    }

    #[test]
    fn an_unknown_block_size_has_no_hashes() {
        assert!(content_hashes(&[7; 12], 0, 1337, &[], &[]).is_empty());
        assert!(content_hashes(&[7; 12], 0, 1337, &[picture("a", 5, 2)], &[]).is_empty());
    }

    #[test]
    fn pictures_that_change_places_are_another_prompt() {
        let one = hashes(&[picture("a", 4, 2), picture("b", 6, 2)], &[]);
        let other = hashes(&[picture("b", 4, 2), picture("a", 6, 2)], &[]);
        assert_ne!(one[1], other[1]);
        let moved = hashes(&[picture("a", 5, 1), picture("b", 6, 2)], &[]);
        assert_ne!(one[1], moved[1]);
    }

    #[test]
    fn a_picture_reaches_into_the_blocks_behind() {
        let plain = local_hashes(&[7; 12], 4, 1337);
        let long = hashes(&[picture("a", 2, 8)], &[]);
        assert!(long.iter().zip(&plain).all(|(long, plain)| long != plain));
        assert_ne!(long[1], long[2], "the place in the block differs");
    }

    #[test]
    fn embeddings_need_a_digest_for_every_block() {
        let digest = |byte: u8| vec![byte; 32];
        let three = hashes(&[], &[digest(1), digest(2), digest(3)]);
        assert_eq!(three.len(), 3);
        assert_eq!(hashes(&[], &[digest(1), digest(9), digest(3)])[0], three[0]);
        assert_ne!(hashes(&[], &[digest(1), digest(9), digest(3)])[1], three[1]);
        assert_eq!(hashes(&[], &[digest(1)]), three[..1]);
        assert!(hashes(&[], &vec![digest(1); 6]).is_empty(), "digests of finer blocks");
    }
}
