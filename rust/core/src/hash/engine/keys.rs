//! Extra keys, which distinguish prompts with equal tokens, block by block.

use smallvec::SmallVec;

use super::{NameAlgorithm, pickle};

/// A multimodal item of a prompt, which covers the tokens `offset..offset + length`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Deserialize)]
pub struct MediaItem {
    /// The engine's identifier; under a LoRA adapter it may begin with the adapter's name.
    pub identifier: String,
    /// Its first token in the prompt; items are sorted by it.
    pub offset: u32,
    /// Number of tokens.
    pub length: u32,
}

/// Content of a prompt besides its tokens.
#[derive(Debug, Clone, Copy, Default)]
pub struct NameKeys<'a> {
    /// Name and path of the adapter. An empty name means no adapter, an empty path an unknown one.
    pub lora: Option<(&'a str, &'a str)>,
    /// The request's `cache_salt`; an empty one means none.
    pub cache_salt: Option<&'a str>,
    /// Multimodal items, ascending by offset.
    pub media: &'a [MediaItem],
    /// Digest of each block's prompt embeddings, for blocks of `unit` tokens; may be empty.
    pub embeds: &'a [Vec<u8>],
}

/// An extra key of one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key<'a> {
    /// The adapter's name and path.
    Lora(&'a str, &'a str),
    /// An item's identifier, and its first token relative to the block's; negative before it.
    Media(&'a str, i64),
    /// The cache salt.
    Salt(&'a str),
    /// Digest of the block's prompt embeddings.
    Embeds(&'a [u8]),
}

impl Key<'_> {
    /// vLLM's tag of the key.
    pub(super) fn tag(&self) -> &'static str {
        match self {
            Self::Lora(..) => "lora",
            Self::Media(..) => "mm",
            Self::Salt(_) => "cache_salt",
            Self::Embeds(_) => "prompt_embeds",
        }
    }

    /// Number of elements of its tuple, including the tag.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Lora(..) | Self::Media(..) => 3,
            Self::Salt(_) | Self::Embeds(_) => 2,
        }
    }
}

/// The extra keys of a prompt's blocks, from the first one on.
#[derive(Debug, Clone)]
pub(super) struct KeysOfBlocks<'a> {
    lora: Option<Key<'a>>,
    salt: Option<Key<'a>>,
    /// The items that do not end before the block.
    media: &'a [MediaItem],
    embeds: &'a [Vec<u8>],
    unit: u32,
    block: usize,
    is_pickle: bool,
}

impl<'a> KeysOfBlocks<'a> {
    /// The keys of blocks of `unit` tokens; `None` if no block's keys can be computed.
    pub(super) fn new(algorithm: NameAlgorithm, unit: u32, keys: &NameKeys<'a>) -> Option<Self> {
        let lora = keys.lora.filter(|(name, _)| !name.is_empty());
        if unit == 0 || lora.is_some_and(|(_, path)| path.is_empty()) {
            return None;
        }
        Some(Self {
            lora: lora.map(|(name, path)| Key::Lora(name, path)),
            salt: keys.cache_salt.filter(|salt| !salt.is_empty()).map(Key::Salt),
            media: keys.media,
            embeds: keys.embeds,
            unit,
            block: 0,
            is_pickle: algorithm.is_pickle(),
        })
    }

    /// Tokens in a block.
    pub(super) fn unit(&self) -> usize {
        self.unit as usize
    }

    /// Keys of the prompt as a whole: its adapter and its salt.
    pub(super) fn of_prompt(&self) -> impl Iterator<Item = Key<'a>> {
        self.lora.into_iter().chain(self.salt)
    }

    /// Whether keys depend on the block's position, not only on the prompt.
    pub(super) fn depend_on_place(&self) -> bool {
        !self.media.is_empty() || !self.embeds.is_empty()
    }

    /// Skips blocks.
    pub(super) fn skip(&mut self, blocks: usize) {
        self.block += blocks;
    }

    /// Keys of the next block, in vLLM's order; `None` if they can't be computed.
    pub(super) fn next(&mut self) -> Option<impl Iterator<Item = Key<'a>> + use<'a>> {
        let (block, start) = (self.block, self.block as u64 * u64::from(self.unit));
        self.block += 1;
        let media = MediaOfBlock::new(&mut self.media, start, start + u64::from(self.unit));
        if self.is_pickle && media.clone().has_twins() {
            return None;
        }
        let embeds = match self.embeds.get(block) {
            None if !self.embeds.is_empty() => return None,
            digest => digest.map(|digest| Key::Embeds(digest)),
        };
        let salt = self.salt.filter(|_| block == 0);
        Some(self.lora.into_iter().chain(media).chain(salt).chain(embeds))
    }
}

/// The keys of the items that vLLM counts towards the block of the tokens `start..end`, in its
/// order.
#[derive(Clone)]
pub(in crate::hash) struct MediaOfBlock<'a> {
    items: std::slice::Iter<'a, MediaItem>,
    start: u64,
    end: u64,
}

impl<'a> MediaOfBlock<'a> {
    /// Drops the leading items that end before the block from `media`.
    pub(in crate::hash) fn new(media: &mut &'a [MediaItem], start: u64, end: u64) -> Self {
        while let [first, rest @ ..] = *media
            && first.end() <= start
        {
            *media = rest;
        }
        // vLLM checks only the last item, though an earlier one may reach further.
        let is_past = media.last().is_none_or(|last| last.end() <= start);
        Self { items: if is_past { [].iter() } else { media.iter() }, start, end }
    }

    /// Whether two items have equal identifiers, which may or may not be one object.
    fn has_twins(self) -> bool {
        if self.items.len() < 2 {
            return false;
        }
        let mut identifiers: SmallVec<[&str; 8]> = self
            .filter_map(|key| match key {
                Key::Media(identifier, _) if !pickle::is_singleton(identifier) => Some(identifier),
                _ => None,
            })
            .collect();
        identifiers.sort_unstable();
        identifiers.windows(2).any(|pair| pair[0] == pair[1])
    }
}

impl<'a> Iterator for MediaOfBlock<'a> {
    type Item = Key<'a>;

    fn next(&mut self) -> Option<Key<'a>> {
        let item = self.items.find(|item| item.end() > self.start)?;
        let offset = u64::from(item.offset);
        // An item that reaches into the next block, or begins there, is the last one examined.
        if offset >= self.end || item.end() > self.end {
            self.items = [].iter();
        }
        let offset_in_block = offset.cast_signed() - self.start.cast_signed();
        (offset < self.end).then_some(Key::Media(&item.identifier, offset_in_block))
    }
}

impl MediaItem {
    /// One more than the item's last token.
    fn end(&self) -> u64 {
        u64::from(self.offset) + u64::from(self.length)
    }
}
