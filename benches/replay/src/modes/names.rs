//! Names of a long prompt's blocks, as an engine computes them: of a new one, and of one that is known.

use std::hint::black_box;

use kvflash_core::hash::engine::{NameCache, NameKeys, NameScheme, names_into};

use super::Trial;
use crate::figures::{Figures, median, thread_ns};

const ROUNDS: usize = 51;
const TOKENS: u32 = 100_000;
const UNIT: u32 = 16;

/// With vLLM's default scheme, without adapter, salt and items.
pub fn names(_: &Trial) -> Figures {
    // Spread over a usual vocabulary, so that tokens of all widths alternate.
    let tokens: Vec<u32> = (0..TOKENS).map(|at| at.wrapping_mul(2_654_435_761) % 128_256).collect();
    let (scheme, keys, cache) = (NameScheme::default(), NameKeys::default(), NameCache::default());
    let mut out = Vec::new();
    let mut time = |run: &dyn Fn(&mut Vec<u64>) -> bool| {
        let rounds = (0..ROUNDS).map(|_| {
            out.clear();
            let started = thread_ns();
            assert!(run(black_box(&mut out)));
            let spent = thread_ns() - started;
            assert_eq!(out.len(), (TOKENS / UNIT) as usize);
            spent
        });
        median(rounds.collect())
    };
    let new = time(&|out| names_into(&scheme, &tokens, UNIT, &keys, out));
    let known = time(&|out| cache.names(&scheme, &tokens, UNIT, &keys, out));
    let mut figures = Figures::default();
    figures.note("new_prompt_ms", new / 1e6);
    figures.note("known_prompt_ms", known / 1e6);
    figures
}
