//! Runs Python's queries: with per-thread buffers, and without the GIL when that pays off.

use std::cell::RefCell;

use kvflash_core::hash;
use kvflash_core::hash::engine::MediaItem;
use kvflash_core::index::{ManyMatches, Match, Matches, RadixIndex};
use pyo3::prelude::*;

use super::overlap::OverlapScores;

/// Tokens that are hashed in a microsecond or two. For less, releasing the GIL costs more than it
/// gains, and other threads may keep it for milliseconds.
pub(super) const SHORT_TOKENS: usize = 8_192;
/// Blocks that are walked in about that time.
pub(super) const SHORT_BLOCKS: usize = 256;

/// Blocks of many prompts that are hashed before the first lookup.
const BLOCKS_AT_ONCE: usize = 65_536;

thread_local! {
    // Grows to the thread's largest query and is reused.
    static LOCALS: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    static MATCHES: RefCell<Matches> = RefCell::default();
    static MANY: RefCell<ManyMatches> = RefCell::default();
}

/// Runs `work`, without the GIL when it `is_long`.
pub(super) fn detached<T: Send>(
    py: Python<'_>,
    is_long: bool,
    work: impl FnOnce() -> T + Send,
) -> T {
    if is_long { py.detach(work) } else { work() }
}

/// The result of `read` for the matches of `locals`.
pub(super) fn matches<T: Send>(
    py: Python<'_>,
    index: &RadixIndex,
    locals: &[u64],
    early_exit: bool,
    read: impl FnOnce(&mut Matches) -> T + Send,
) -> T {
    detached(py, locals.len() > SHORT_BLOCKS, || {
        MATCHES.with_borrow_mut(|matches| {
            if early_exit {
                index.find_matches_early_exit(locals, matches);
            } else {
                index.find_matches(locals, matches);
            }
            read(matches)
        })
    })
}

/// The overlaps of `locals`; `counted` selects what counts.
pub(super) fn overlaps(
    py: Python<'_>,
    index: &RadixIndex,
    locals: &[u64],
    early_exit: bool,
    counted: fn(&Match) -> Match,
) -> OverlapScores {
    matches(py, index, locals, early_exit, |found| OverlapScores::of(found.as_slice(), counted))
}

/// Identity and block size of a prompt.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub block_size: u32,
    pub seed: u64,
}

impl Shape {
    pub fn new(block_size: u32, lora_name: Option<&str>, cache_salt: Option<&str>) -> Self {
        Self { block_size, seed: hash::identity_seed(lora_name, cache_salt) }
    }

    /// Hashes `tokens` into the thread's buffer for `work`.
    pub fn hashed<T>(self, tokens: &[u32], work: impl FnOnce(&[u64]) -> T) -> T {
        LOCALS.with_borrow_mut(|locals| {
            locals.clear();
            hash::local_hashes_into(tokens, self.block_size, self.seed, locals);
            work(locals)
        })
    }

    /// The overlaps of a prompt, with its multimodal items and embeddings; runs without Python.
    pub fn overlaps(
        self,
        index: &RadixIndex,
        tokens: &[u32],
        (media, embeds): (&[MediaItem], &[Vec<u8>]),
        counted: fn(&Match) -> Match,
    ) -> OverlapScores {
        let find = |locals: &[u64]| {
            MATCHES.with_borrow_mut(|matches| {
                index.find_matches(locals, matches);
                OverlapScores::of(matches.as_slice(), counted)
            })
        };
        if media.is_empty() && embeds.is_empty() {
            return self.hashed(tokens, find);
        }
        find(&hash::content_hashes(tokens, self.block_size, self.seed, media, embeds))
    }

    /// The overlaps of many prompts; runs without Python.
    pub fn overlaps_of_many(
        self,
        index: &RadixIndex,
        prompts: &[impl AsRef<[u32]>],
        counted: fn(&Match) -> Match,
    ) -> Vec<OverlapScores> {
        let mut all = Vec::with_capacity(prompts.len());
        let mut ends: Vec<usize> = Vec::new();
        while all.len() < prompts.len() {
            LOCALS.with_borrow_mut(|locals| {
                locals.clear();
                ends.clear();
                for tokens in &prompts[all.len()..] {
                    hash::local_hashes_into(tokens.as_ref(), self.block_size, self.seed, locals);
                    ends.push(locals.len());
                    if locals.len() >= BLOCKS_AT_ONCE {
                        break;
                    }
                }
                let starts = std::iter::once(0).chain(ends.iter().copied());
                let hashed: Vec<&[u64]> =
                    starts.zip(&ends).map(|(start, end)| &locals[start..*end]).collect();
                MANY.with_borrow_mut(|many| {
                    index.find_many(&hashed, many);
                    all.extend(many.iter().map(|found| OverlapScores::of(found, counted)));
                });
            });
        }
        all
    }
}
