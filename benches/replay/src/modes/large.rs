//! An index of many blocks: what growing and clearing cost.

use std::time::Instant;

use super::Trial;
use crate::backend::Backend;
use crate::corpus::EventView;
use crate::figures::Figures;
use crate::scenes::{self, FLEET_BLOCKS};

fn workers(trial: &Trial) -> u32 {
    (trial.blocks / FLEET_BLOCKS).max(16) as u32
}

/// Clears some full workers of a large index, one by one.
pub fn clear<B: Backend>(trial: &Trial) -> Figures {
    let backend = B::new(workers(trial));
    for step in scenes::fleet(workers(trial)) {
        backend.apply(backend.event(step.view()));
    }
    backend.drain();
    let mut samples = Vec::new();
    for worker in 0..9 {
        let event = backend.event(EventView::Cleared { worker });
        let started = Instant::now();
        backend.apply(event);
        backend.drain();
        samples.push(started.elapsed().as_nanos() as u64);
    }
    let mut figures = Figures::default();
    figures.note("million_blocks", f64::from(workers(trial)) * FLEET_BLOCKS as f64 / 1e6);
    samples.sort_unstable();
    figures.note("clear_median_us", samples[samples.len() / 2] as f64 / 1e3);
    figures.note("clear_max_us", samples[samples.len() - 1] as f64 / 1e3);
    figures
}

/// Stores until the index is large. For a queued backend a call is the hand-over alone.
pub fn growth<B: Backend>(trial: &Trial) -> Figures {
    let backend = B::new(workers(trial));
    let mut samples = Vec::new();
    let (mut within, mut blocks) = (0.0, 0);
    let mut batch = Vec::new();
    let mut steps = scenes::fleet(workers(trial)).peekable();
    while steps.peek().is_some() {
        // Made in batches, so that making them does not pass between two stores.
        batch.extend(steps.by_ref().take(2_000).map(|step| backend.event(step.view())));
        blocks += batch.len() * 64;
        let started = Instant::now();
        let mut last = started;
        for event in batch.drain(..) {
            backend.apply(event);
            let now = Instant::now();
            samples.push((now - last).as_nanos() as u64);
            last = now;
        }
        backend.drain();
        within += started.elapsed().as_secs_f64();
    }
    let mut figures = Figures::default();
    figures.note("million_blocks", blocks as f64 / 1e6);
    figures.note("million_blocks_per_s", blocks as f64 / within / 1e6);
    figures.note_spread("call", "us", &mut samples, 1e3);
    figures
}
