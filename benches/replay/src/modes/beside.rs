//! Prompts and events at the same time.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use super::{Trial, filled, prompts};
use crate::backend::Backend;
use crate::figures::Figures;
use crate::scenes;

/// One thread asks, another hands over events as fast as they are taken.
pub fn beside_full<B: Backend>(trial: &Trial) -> Figures {
    beside::<B>(trial, None)
}

/// One thread asks, another hands over 50,000 events a second.
pub fn beside_paced<B: Backend>(trial: &Trial) -> Figures {
    beside::<B>(trial, Some(50_000))
}

fn beside<B: Backend>(trial: &Trial, events_per_s: Option<usize>) -> Figures {
    let (mut native, mut map) = (Vec::new(), Vec::new());
    let (mut writing, mut written) = (Duration::ZERO, 0);
    for round in 0..40 {
        if round >= 2 && writing > Duration::from_millis(1_500) {
            break;
        }
        let as_map = round % 2 == 1;
        let samples = if as_map { &mut map } else { &mut native };
        let (took, events) = round_of::<B>(trial, events_per_s, as_map, samples);
        writing += took;
        written += events;
    }
    let mut figures = Figures::default();
    figures.note("million_events_per_s", written as f64 / writing.as_secs_f64() / 1e6);
    figures.note("reads_per_s", (native.len() + map.len()) as f64 / writing.as_secs_f64());
    figures.note_spread("native", "ns", &mut native, 1.0);
    figures.note_spread("map", "ns", &mut map, 1.0);
    figures
}

/// Second half of the corpus beside reads. Returns how long the writer took, and its events.
fn round_of<B: Backend>(
    trial: &Trial,
    events_per_s: Option<usize>,
    as_map: bool,
    samples: &mut Vec<u64>,
) -> (Duration, usize) {
    let (backend, rest) = filled::<B>(&trial.corpus, 0.5);
    let prompts = prompts(&backend, &trial.corpus);
    let keep = events_per_s.map_or(rest.len(), |rate| rest.len().min(rate));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let started = Instant::now();
            hand_over(&backend, rest.into_iter().take(keep), events_per_s);
            backend.drain();
            done.store(true, Relaxed);
            started.elapsed()
        });
        let mut out = B::Out::default();
        let (mut sum, mut last) = (0_u64, Instant::now());
        for prompt in prompts.iter().cycle() {
            if done.load(Relaxed) {
                break;
            }
            sum = sum.wrapping_add(match as_map {
                true => backend.ask_map(prompt, &mut out),
                false => backend.ask(prompt, &mut out),
            });
            let now = Instant::now();
            samples.push((now - last).as_nanos() as u64);
            last = now;
        }
        black_box(sum);
        (writer.join().expect("the writer does not panic"), keep)
    })
}

fn hand_over<B: Backend>(
    backend: &B,
    events: impl Iterator<Item = B::Event>,
    events_per_s: Option<usize>,
) {
    let started = Instant::now();
    for (at, event) in events.enumerate() {
        // Twenty at a time: sleeping is not precise enough for each.
        if let Some(rate) = events_per_s
            && at % 20 == 0
        {
            let due = Duration::from_secs_f64(at as f64 / rate as f64);
            thread::sleep(due.saturating_sub(started.elapsed()));
        }
        backend.apply(event);
    }
}

/// From the hand-over of an event until a prompt finds its blocks, asked over and over.
pub fn visible<B: Backend>(_: &Trial) -> Figures {
    const WORKERS: u32 = 16;
    const SEQUENCES: usize = 256;
    let (begin, appends) = scenes::decoding(WORKERS, SEQUENCES, 64);
    let backend = B::new(WORKERS);
    let mut prompts: Vec<Vec<u64>> = Vec::new();
    for step in &begin {
        prompts.push(scenes::locals(&step.blocks));
        backend.apply(backend.event(step.view()));
    }
    backend.drain();
    let mut out = B::Out::default();
    let mut samples = Vec::new();
    for (at, step) in appends.iter().enumerate() {
        let prompt = &mut prompts[at % SEQUENCES];
        prompt.push(step.blocks[0].local);
        let (asked, event) = (backend.prompt(prompt), backend.event(step.view()));
        let before = backend.ask(&asked, &mut out);
        // Keeping up: the last event's wake is over.
        pause(Duration::from_micros(30));
        let started = Instant::now();
        backend.apply(event);
        while B::ANSWERS && backend.ask(&asked, &mut out) == before {}
        samples.push(started.elapsed().as_nanos() as u64);
    }
    let mut figures = Figures::default();
    figures.note_spread("visible", "us", &mut samples, 1e3);
    figures
}

fn pause(length: Duration) {
    let started = Instant::now();
    while started.elapsed() < length {
        std::hint::spin_loop();
    }
}
