//! Masks block hashes in dumps, so that they reveal nothing about prompts.
//!
//! Local hashes are computed from a block's tokens by a public function, and so are the block names
//! of many engines. An attacker who reads them and knows a prompt except for a few digits finds
//! these by trial. With a secret, each hash is replaced by its HMAC.

use std::path::Path;

use kvflash_core::codec::router::{EventData, RouterEvent};
use kvflash_core::error::Result;
use kvflash_core::hash::SEED;

use crate::secret_file::Secret;

pub(super) const FLAG: &str = "--hash-secret-file";

/// Masks hashes. Processes with the same secret give equal masks for equal hashes.
#[derive(Debug, Clone)]
pub(crate) struct HashMask(Secret);

impl HashMask {
    /// With the secret in a file.
    ///
    /// # Errors
    /// `Config`, naming the flag, the file and the limit.
    pub fn open(path: &Path) -> Result<Self> {
        Secret::read(FLAG, path).map(Self)
    }

    /// The mask of a word; `kind` separates words of different meanings.
    pub fn word(&self, kind: &str, word: u64) -> u64 {
        let bytes = self.0.hmac(&[kind.as_bytes(), &word.to_le_bytes()]);
        bytes.iter().take(8).fold(0, |word, byte| word << 8 | u64::from(*byte))
    }

    /// Masks all hashes of an event. The public seed is kept.
    pub fn event(&self, event: &mut RouterEvent) {
        let name = |word: &mut u64| *word = self.word("name", *word);
        match &mut event.event.data {
            EventData::Stored(stored) => {
                stored.parent_hash.iter_mut().for_each(name);
                if stored.seed != SEED {
                    stored.seed = self.word("seed", stored.seed);
                }
                for block in &mut stored.blocks {
                    name(&mut block.block_hash);
                    block.tokens_hash = self.word("tokens", block.tokens_hash);
                }
            }
            EventData::Removed(removed) => removed.block_hashes.iter_mut().for_each(name),
            EventData::Cleared => {}
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kvflash_core::codec::router::{KvEvent, StoredBlock, StoredBlocks};
    use kvflash_core::hash::local_hashes;
    use kvflash_core::ids::Tier;

    use super::*;

    fn stored(parent: Option<u64>, seed: u64, tokens: &[u32]) -> RouterEvent {
        let block = |(at, local): (usize, u64)| StoredBlock {
            block_hash: 100 + at as u64,
            tokens_hash: local,
            mm_extra_info: None,
        };
        let blocks = local_hashes(tokens, 4, seed).into_iter().enumerate().map(block).collect();
        let data = EventData::Stored(StoredBlocks { parent_hash: parent, blocks, seed });
        let event = KvEvent { event_id: 0, data, dp_rank: 0 };
        RouterEvent { worker_id: 1, event, storage_tier: Tier::Device }
    }

    /// A four-digit PIN within a known prompt: with the plain hashes an attacker finds it by trial.
    #[test]
    fn what_is_masked_is_found_by_no_trial() {
        let prompt = |pin: u32| [7, 7, 7, pin];
        let guess =
            |seen: u64| (0..10_000).find(|pin| local_hashes(&prompt(*pin), 4, SEED)[0] == seen);
        let mut event = stored(None, SEED, &prompt(4_711));
        let tokens_hash = |event: &RouterEvent| match &event.event.data {
            EventData::Stored(stored) => stored.blocks[0].tokens_hash,
            _ => unreachable!(),
        };
        assert_eq!(guess(tokens_hash(&event)), Some(4_711));
        HashMask(Secret::of(b"0123456789abcdef")).event(&mut event);
        assert_eq!(guess(tokens_hash(&event)), None);
    }

    #[test]
    fn masks_are_the_same_where_the_hashes_are() {
        let mask = HashMask(Secret::of(b"0123456789abcdef"));
        let mut events = [stored(None, SEED, &[1; 8]), stored(Some(101), 9, &[1; 4])];
        events.iter_mut().for_each(|event| mask.event(event));
        let [first, second] = events.map(|event| match event.event.data {
            EventData::Stored(stored) => stored,
            _ => unreachable!(),
        });
        assert_eq!(second.parent_hash, Some(first.blocks[1].block_hash), "chains can be followed");
        assert_eq!((first.seed, second.seed), (SEED, mask.word("seed", 9)));
        assert_eq!(first.blocks[0].tokens_hash, first.blocks[1].tokens_hash);
        assert_ne!(mask.word("name", 5), mask.word("tokens", 5));
        let other = HashMask(Secret::of(b"fedcba9876543210"));
        assert_ne!(mask.word("name", 5), other.word("name", 5));
        assert_eq!(format!("{mask:?}"), "HashMask(..)");
    }
}
