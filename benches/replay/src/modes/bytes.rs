//! What memory an index takes: bytes asked of the allocator, everything applied, nothing else counted.

use super::Trial;
use crate::backend::Backend;
use crate::corpus::EventView;
use crate::figures::{Figures, resident_bytes};
use crate::heap;
use crate::scenes;

/// Bytes per membership at 100 even points of the corpus, on average; then what is left when everything
/// was removed.
pub fn bytes<B: Backend>(trial: &Trial) -> Figures {
    let mut figures = Figures::default();
    round::<B>(trial, false, "", &mut figures);
    if B::SWEEPS {
        // The best case of those that clean up later: at every point it has just been done.
        round::<B>(trial, true, "swept_", &mut figures);
    }
    figures
}

fn round<B: Backend>(trial: &Trial, sweeps: bool, prefix: &str, figures: &mut Figures) {
    let corpus = &trial.corpus;
    let held_at_end = corpus.held_at_end();
    let count = corpus.events().count();
    let resident = resident_bytes();
    heap::restart_peak();
    let base = heap::live();
    let backend = B::new(corpus.workers);
    let empty = heap::live() - base;
    let settle = || {
        backend.drain();
        if sweeps {
            backend.sweep();
        }
        heap::live() - base
    };
    let (mut held, mut total, mut points, mut most) = (0_isize, 0.0, 0, 0_isize);
    for (at, view) in corpus.events().enumerate() {
        match view {
            EventView::Stored { blocks, .. } => held += blocks.len() as isize,
            EventView::Removed { names, .. } => held -= names.len() as isize,
            EventView::Cleared { .. } => unreachable!("a corpus clears nobody"),
        }
        // Made one by one: a queue of events is no part of an index.
        backend.apply(backend.event(view));
        if (at + 1) % (count / 100).max(1) == 0 && points < 100 {
            let live = settle();
            most = most.max(live);
            total += live as f64 / held as f64;
            points += 1;
        }
    }
    let end = settle();
    let mut note = |name: &str, figure| figures.note(&format!("{prefix}{name}"), figure);
    note("bytes_per_membership", total / f64::from(points));
    note("bytes_per_membership_end", end as f64 / held as f64);
    note("resident_per_membership_end", (resident_bytes() - resident) / held as f64);
    note("memberships_end", held as f64);
    note("mb_end", end as f64 / 1e6);
    note("mb_most", most as f64 / 1e6);
    note("mb_peak", (heap::peak() - base) as f64 / 1e6);
    for (worker, names) in held_at_end.iter().enumerate() {
        for names in names.rchunks(64) {
            let names: Vec<u64> = names.iter().rev().copied().collect();
            let worker = worker as u32;
            backend.apply(backend.event(EventView::Removed { worker, names: &names }));
        }
        backend.drain();
    }
    note("mb_after_removal", settle() as f64 / 1e6);
    note("mb_empty", empty as f64 / 1e6);
}

/// What one more worker costs that holds what others hold already: runs of 64 blocks.
pub fn sharer<B: Backend>(_: &Trial) -> Figures {
    const RUNS: u64 = 2_000;
    const BLOCKS: usize = 64;
    let runs: Vec<_> = (0..RUNS).map(|tag| scenes::chain(tag, BLOCKS)).collect();
    let per_block = (RUNS as usize * BLOCKS) as f64;
    let backend = B::new(64);
    let mut live = heap::live();
    let mut costs = Vec::new();
    for worker in 0..64 {
        for blocks in &runs {
            backend.apply(backend.event(EventView::Stored { worker, parent: None, blocks }));
        }
        backend.drain();
        costs.push((heap::live() - live) as f64 / per_block);
        live = heap::live();
    }
    let mean = |costs: &[f64]| costs.iter().sum::<f64>() / costs.len() as f64;
    let mut figures = Figures::default();
    figures.note("bytes_per_block_first", costs[0]);
    figures.note("bytes_per_block_second", costs[1]);
    figures.note("bytes_per_block_2_to_16", mean(&costs[1..16]));
    figures.note("bytes_per_block_17_to_64", mean(&costs[16..]));
    figures
}
