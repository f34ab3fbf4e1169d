//! How fast prompts are answered, while nothing changes.

use std::hint::black_box;
use std::time::{Duration, Instant};

use super::{Trial, filled, prompts};
use crate::backend::Backend;
use crate::corpus::EventView;
use crate::figures::{Figures, median, thread_ns};
use crate::scenes;

/// How long each way of asking is timed, at least.
const AT_LEAST: Duration = Duration::from_millis(700);

/// All prompts of the corpus, of an index that has taken all its events.
pub fn reads<B: Backend>(trial: &Trial) -> Figures {
    let (backend, _) = filled::<B>(&trial.corpus, 1.0);
    let prompts = prompts(&backend, &trial.corpus);
    let mut figures = Figures::default();
    figures.note("prompts", prompts.len() as f64);
    figures.note("prompt_blocks_mean", trial.corpus.locals.len() as f64 / prompts.len() as f64);
    let matched: usize = prompts.iter().map(|prompt| backend.answer(prompt).len()).sum();
    figures.note("matched_workers_mean", matched as f64 / prompts.len() as f64);
    both_ways(&backend, &prompts, &mut figures);
    figures
}

/// One prompt that a thousand workers hold.
pub fn matched<B: Backend>(_: &Trial) -> Figures {
    const WORKERS: u32 = 1_000;
    let backend = B::new(WORKERS);
    let held = scenes::chain(1, 96);
    for worker in 0..WORKERS {
        backend.apply(backend.event(EventView::Stored { worker, parent: None, blocks: &held }));
    }
    backend.drain();
    let prompt = backend.prompt(&scenes::locals(&scenes::chain(1, 128)));
    let mut figures = Figures::default();
    figures.note("matched_workers", backend.answer(&prompt).len() as f64);
    both_ways(&backend, &[prompt], &mut figures);
    figures
}

fn both_ways<B: Backend>(backend: &B, prompts: &[B::Prompt], figures: &mut Figures) {
    let mut out = B::Out::default();
    timed("native", prompts, figures, |prompt| backend.ask(prompt, &mut out));
    timed("map", prompts, figures, |prompt| backend.ask_map(prompt, &mut out));
}

/// Nanoseconds of processor time per prompt over whole passes (median of the passes), then the spread of
/// single ones by the clock on the wall, whose own cost is contained.
fn timed<P>(name: &str, prompts: &[P], figures: &mut Figures, mut ask: impl FnMut(&P) -> u64) {
    // Few prompts are asked often, so that the clock does not weigh.
    let times = 2_000_usize.div_ceil(prompts.len());
    let mut sum = 0_u64;
    let mut pass = || {
        for _ in 0..times {
            for prompt in prompts {
                sum = sum.wrapping_add(ask(prompt));
            }
        }
    };
    pass();
    let (mut passes, started) = (Vec::new(), Instant::now());
    while started.elapsed() < AT_LEAST || passes.len() < 5 {
        let spent = thread_ns();
        pass();
        passes.push((thread_ns() - spent) / (times * prompts.len()) as f64);
    }
    figures.note(&format!("{name}_ns"), median(passes));
    let mut samples = Vec::with_capacity(times * prompts.len());
    let mut last = Instant::now();
    for prompt in prompts.iter().cycle().take(times * prompts.len()) {
        sum = sum.wrapping_add(ask(prompt));
        let now = Instant::now();
        samples.push((now - last).as_nanos() as u64);
        last = now;
    }
    black_box(sum);
    figures.note_spread(name, "ns", &mut samples, 1.0);
}
