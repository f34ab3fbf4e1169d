//! How fast events take effect.

use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use super::{Trial, filled};
use crate::backend::Backend;
use crate::corpus::EventView;
use crate::figures::{Figures, median, process_ns};
use crate::scenes;

/// Times that a timed part is repeated on a new index; the median counts.
const ROUNDS: usize = 5;

/// The corpus' events, as fast as they go, by one thread; until the last took effect.
pub fn events<B: Backend>(trial: &Trial) -> Figures {
    let corpus = &trial.corpus;
    let count = corpus.events().count() as f64;
    let blocks: usize = corpus.events().map(|view| view.len()).sum();
    let (mut seconds, mut cpu) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let (_backend, took, spent) = closed_loop::<B>(trial, |_, _| ());
        seconds.push(took);
        cpu.push(spent);
    }
    let mut calls = Vec::with_capacity(count as usize);
    closed_loop::<B>(trial, |before: Instant, after: Instant| {
        calls.push((after - before).as_nanos() as u64);
    });
    let seconds = median(seconds);
    let mut figures = Figures::default();
    figures.note("events", count);
    figures.note("blocks", blocks as f64);
    figures.note("million_blocks_per_s", blocks as f64 / seconds / 1e6);
    figures.note("million_events_per_s", count / seconds / 1e6);
    figures.note("cpu_ns_per_event", median(cpu) / count);
    // Of a queued backend this is the hand-over alone.
    figures.note_spread("call", "us", &mut calls, 1e3);
    figures
}

/// The corpus' events, each worker's by one of `THREADS` threads, as fast as they go.
pub fn publishers<B: Backend, const THREADS: usize>(trial: &Trial) -> Figures {
    let count = trial.corpus.events().count() as f64;
    let (mut seconds, mut cpu) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let backend = B::new(trial.corpus.workers);
        let mut parts: Vec<Vec<B::Event>> = (0..THREADS).map(|_| Vec::new()).collect();
        for view in trial.corpus.events() {
            parts[view.worker() as usize % THREADS].push(backend.event(view));
        }
        let start = Barrier::new(THREADS + 1);
        let (mut spent, mut started) = (0.0, Instant::now());
        thread::scope(|scope| {
            for part in parts {
                let (backend, start) = (&backend, &start);
                scope.spawn(move || {
                    start.wait();
                    part.into_iter().for_each(|event| backend.apply(event));
                });
            }
            (spent, started) = (process_ns(), Instant::now());
            start.wait();
        });
        backend.drain();
        seconds.push(started.elapsed().as_secs_f64());
        cpu.push(process_ns() - spent);
    }
    let mut figures = Figures::default();
    figures.note("million_events_per_s", count / median(seconds) / 1e6);
    figures.note("cpu_ns_per_event", median(cpu) / count);
    figures
}

/// Returns the index, seconds and nanoseconds of processor time. With a real `observe`, every call is
/// clocked, which costs more than some calls: not for rates.
fn closed_loop<B: Backend>(
    trial: &Trial,
    mut observe: impl FnMut(Instant, Instant),
) -> (B, f64, f64) {
    let backend = B::new(trial.corpus.workers);
    let events: Vec<B::Event> = trial.corpus.events().map(|view| backend.event(view)).collect();
    let spent = process_ns();
    let started = Instant::now();
    let mut last = started;
    let clocked = size_of_val(&observe) > 0;
    for event in events {
        backend.apply(event);
        if clocked {
            let now = Instant::now();
            observe(last, now);
            last = now;
        }
    }
    backend.drain();
    let seconds = started.elapsed().as_secs_f64();
    let spent = process_ns() - spent;
    (backend, seconds, spent)
}

/// 1-block stores: many sequences decode in turn.
pub fn appends<B: Backend>(_: &Trial) -> Figures {
    const WORKERS: u32 = 16;
    let (begin, appends) = scenes::decoding(WORKERS, 1_024, 256);
    let (mut rates, mut cpu) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let backend = B::new(WORKERS);
        for step in &begin {
            backend.apply(backend.event(step.view()));
        }
        backend.drain();
        let events: Vec<B::Event> = appends.iter().map(|s| backend.event(s.view())).collect();
        let count = events.len() as f64;
        let (spent, started) = (process_ns(), Instant::now());
        for event in events {
            backend.apply(event);
        }
        backend.drain();
        rates.push(count / started.elapsed().as_secs_f64() / 1e6);
        cpu.push((process_ns() - spent) / count);
    }
    let mut figures = Figures::default();
    figures.note("million_events_per_s", median(rates));
    figures.note("cpu_ns_per_event", median(cpu));
    figures
}

/// Everything that is held after the corpus goes, in random order.
pub fn removals<B: Backend>(trial: &Trial) -> Figures {
    /// Names in an event.
    const BATCH: usize = 16;
    let held = trial.corpus.held_at_end();
    let removals = scenes::random_removals(&held, BATCH, 7);
    let names: usize = removals.iter().map(|removal| removal.1.len()).sum();
    let (mut rates, mut cpu) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let (backend, _) = filled::<B>(&trial.corpus, 1.0);
        let view = |removal: &(u32, Vec<u64>)| {
            backend.event(EventView::Removed { worker: removal.0, names: &removal.1 })
        };
        let events: Vec<B::Event> = removals.iter().map(view).collect();
        let (spent, started) = (process_ns(), Instant::now());
        for event in events {
            backend.apply(event);
        }
        backend.drain();
        cpu.push((process_ns() - spent) / names as f64);
        rates.push(names as f64 / started.elapsed().as_secs_f64() / 1e6);
    }
    let mut figures = Figures::default();
    figures.note("names", names as f64);
    figures.note("million_blocks_per_s", median(rates));
    figures.note("cpu_ns_per_block", median(cpu));
    figures
}
