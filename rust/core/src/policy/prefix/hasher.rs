//! A prompt's blocks, and their chained hashes.

use xxhash_rust::xxh64::Xxh64;

use super::super::contract::Context;
use super::super::settings::{PrefixSettings, TokenizerKind};

/// Bytes of a prompt that are tokenized; the rest is not hashed, as a longer prompt would occupy a
/// thread for too long.
pub const MAX_TIKTOKEN_BYTES: usize = 1 << 18;

/// Cuts prompts into blocks and hashes them.
#[derive(Debug)]
pub struct BlockHasher {
    tokenizer: TokenizerKind,
    is_compat: bool,
    /// Bytes of a block; characters of one with [`TokenizerKind::Character`] in `document`.
    block_len: usize,
    seed: u64,
    id: u64,
}

impl BlockHasher {
    /// Cuts blocks as configured, with hashes that start at `seed`.
    ///
    /// In `document` a block is a number of tokens or characters. In `aibrix-compat` it is a number
    /// of bytes of the tokenizer's output, 4 per token id; characters are bytes of UTF-8.
    pub fn new(settings: &PrefixSettings, seed: u64) -> Self {
        if settings.tokenizer == TokenizerKind::Tiktoken {
            // The vocabulary is compiled in, and unpacked now rather than for the first request.
            tiktoken_rs::cl100k_base_singleton();
        }
        let is_single = settings.is_compat || settings.tokenizer == TokenizerKind::Character;
        let token_len = if is_single { 1 } else { size_of::<u32>() };
        let block_len = (settings.block_size as usize).max(1) * token_len;
        let mut id = Xxh64::new(seed);
        id.update(&(block_len as u64).to_le_bytes());
        id.update(&[settings.tokenizer as u8, u8::from(settings.is_compat)]);
        let PrefixSettings { tokenizer, is_compat, .. } = *settings;
        Self { tokenizer, is_compat, block_len, seed, id: id.digest() }
    }

    /// Equal for hashers that compute equal hashes.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Hashes of the full blocks of a request, in order; none for a prompt shorter than a block.
    ///
    /// # Cost
    /// One pass over the prompt; with tiktoken also tokenization, some microseconds per kilobyte.
    pub fn hashes(&self, context: &Context<'_>) -> Vec<u64> {
        match self.tokenizer {
            TokenizerKind::Character if self.is_compat => self.chain(context.prompt),
            TokenizerKind::Character => self.chain_blocks(self.characters(context.prompt)),
            TokenizerKind::Tiktoken => {
                let tokenizer = tiktoken_rs::cl100k_base_singleton();
                let text = &context.prompt[..context.prompt.len().min(MAX_TIKTOKEN_BYTES)];
                self.tokens(&tokenizer.encode_ordinary(&String::from_utf8_lossy(text)))
            }
            TokenizerKind::Model => self.tokens(context.token_ids),
        }
    }

    fn tokens(&self, ids: &[u32]) -> Vec<u64> {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_be_bytes()).collect();
        self.chain(&bytes)
    }

    /// `hash[i] = XXH64(seed; hash[i - 1] in little-endian, block[i])`, the seed before the first.
    pub fn chain(&self, bytes: &[u8]) -> Vec<u64> {
        self.chain_blocks(bytes.chunks_exact(self.block_len))
    }

    /// The full blocks of a text, each a number of its characters.
    fn characters<'a>(&self, text: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
        // UTF-8: every character has one byte that does not continue another.
        let begins = |at: &usize| text[*at] & 0b1100_0000 != 0b1000_0000;
        let ends = (1..text.len()).filter(begins).chain((!text.is_empty()).then_some(text.len()));
        let mut from = 0;
        ends.skip(self.block_len - 1)
            .step_by(self.block_len)
            .map(move |to| &text[std::mem::replace(&mut from, to)..to])
    }

    fn chain_blocks<'a>(&self, blocks: impl Iterator<Item = &'a [u8]>) -> Vec<u64> {
        let mut parent = self.seed;
        blocks
            .map(|block| {
                let mut hash = Xxh64::new(self.seed);
                hash.update(&parent.to_le_bytes());
                hash.update(block);
                parent = hash.digest();
                parent
            })
            .collect()
    }
}
