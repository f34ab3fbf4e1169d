//! Characters a second by tokenizer and kind of text, on one core: the `tokenizers` crate, a [`Tokenizer`] that
//! sees the text for the first time, and the same text again. The three take turns.
//!
//! `KVFLASH_TOKENIZERS=FOLDER[:FOLDER...] cargo bench -p kvflash-core --bench tokenizer`; a folder has a model's
//! `tokenizer.json`. Source code is that of the crates in cargo's registry.

use std::fs;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::Instant;

use kvflash_core::text::Tokenizer;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// A prompt's size; each round has other ones.
const PROMPT_BYTES: usize = 60_000;
const ROUNDS: usize = 7;
const PROMPTS: usize = 12;
/// The reference is some fifty times slower, and gets fewer.
const REFERENCE_PROMPTS: usize = 1;

fn main() {
    let folders = std::env::var("KVFLASH_TOKENIZERS").unwrap_or_default();
    let mut folders: Vec<PathBuf> = std::env::split_paths(&folders).collect();
    if folders.is_empty() {
        folders.push(PathBuf::from("../../tests/vectors/tiny-llama"));
    }
    let mut rng = SmallRng::seed_from_u64(1);
    let bytes = PROMPT_BYTES * PROMPTS * ROUNDS;
    let kinds = [
        ("source code", source_code(bytes)),
        ("random words", random_words(&mut rng, bytes)),
        ("Chinese", chinese(&mut rng, bytes)),
    ];
    println!(
        "{:24} {:12} {:>10} {:>24} {:>24} {:>24}",
        "million characters/s", "", "", "tokenizers", "first time", "again"
    );
    for folder in folders {
        measure(&folder, &kinds);
    }
}

fn measure(folder: &Path, kinds: &[(&str, String)]) {
    let memory = resident_mib();
    let start = Instant::now();
    let tokenizer = match Tokenizer::from_folder(folder, 256 << 20) {
        Ok(tokenizer) => tokenizer,
        Err(error) => return println!("{}: {error}", folder.display()),
    };
    let (seconds, encoder) = (start.elapsed().as_secs_f64(), tokenizer.encoder());
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    println!(
        "{name}: loaded in {seconds:.2} s, {:.0} MiB; {}{}, {:?}",
        resident_mib() - memory,
        encoder.name(),
        encoder.reason.map(|reason| format!(" ({reason})")).unwrap_or_default(),
        tokenizer.cut_mode()
    );
    for (kind, text) in kinds {
        let prompts = prompts(text);
        let mut speeds = [(); 3].map(|()| Vec::new());
        for round in prompts.chunks(PROMPTS).take(ROUNDS) {
            let few = &round[..REFERENCE_PROMPTS.min(round.len())];
            let ids = |prompt: &&str| tokenizer.encode_uncached(prompt, false).expect("ids");
            let (speed, wanted) = timed(few, ids);
            speeds[0].push(speed);
            for speeds in &mut speeds[1..] {
                let (speed, got) =
                    timed(round, |prompt| tokenizer.encode(prompt, false).expect("ids"));
                assert_eq!(got[..wanted.len()], wanted, "{name}, {kind}: other ids");
                speeds.push(speed);
            }
        }
        let shown = speeds.map(spread);
        println!(
            "{name:24} {kind:12} {:>10} {:>24} {:>24} {:>24}",
            "", shown[0], shown[1], shown[2]
        );
    }
    println!("{name}: {:.0} MiB after that", resident_mib() - memory);
}

/// Million characters a second, and what came of it.
fn timed<T>(prompts: &[&str], encode: impl Fn(&&str) -> T) -> (f64, Vec<T>) {
    let start = Instant::now();
    let made: Vec<T> = prompts.iter().map(encode).collect();
    let seconds = start.elapsed().as_secs_f64();
    let characters: usize = prompts.iter().map(|prompt| prompt.chars().count()).sum();
    (characters as f64 / seconds / 1e6, black_box(made))
}

/// Median, least and most.
fn spread(mut speeds: Vec<f64>) -> String {
    speeds.sort_by(f64::total_cmp);
    match (speeds.first(), speeds.last()) {
        (Some(least), Some(most)) => {
            format!("{:.2} ({least:.2}-{most:.2})", speeds[speeds.len() / 2])
        }
        _ => "-".to_owned(),
    }
}

fn prompts(mut text: &str) -> Vec<&str> {
    let mut prompts = Vec::new();
    while text.len() > PROMPT_BYTES {
        let at = (PROMPT_BYTES..=text.len()).find(|&at| text.is_char_boundary(at));
        let (prompt, rest) = text.split_at(at.unwrap_or(text.len()));
        prompts.push(prompt);
        text = rest;
    }
    prompts
}

fn source_code(bytes: usize) -> String {
    let home = std::env::var("CARGO_HOME").map(PathBuf::from);
    let home = home.unwrap_or_else(|_| {
        PathBuf::from(std::env::var("HOME").unwrap_or_default()).join(".cargo")
    });
    let mut folders = vec![home.join("registry/src")];
    let (mut files, mut text) = (Vec::new(), String::new());
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|kind| kind == "rs") {
                files.push(path);
            }
        }
    }
    // Neighbours share words: the order is shuffled, the same way each time.
    files.sort();
    let mut rng = SmallRng::seed_from_u64(2);
    while text.len() < bytes && !files.is_empty() {
        let file = files.swap_remove(rng.random_range(0..files.len()));
        text.extend(fs::read_to_string(file));
    }
    text
}

fn random_words(rng: &mut SmallRng, bytes: usize) -> String {
    let mut text = String::new();
    while text.len() < bytes {
        text.extend((0..rng.random_range(2..11)).map(|_| rng.random_range('a'..='z')));
        text.push(' ');
    }
    text
}

/// Common characters in sentences without a space.
fn chinese(rng: &mut SmallRng, bytes: usize) -> String {
    let mut text = String::new();
    while text.len() < bytes {
        text.extend((0..rng.random_range(3..20)).map(|_| rng.random_range('\u{5000}'..'\u{8f00}')));
        text.push_str(if rng.random_bool(0.2) { "\u{3002}\n" } else { "\u{ff0c}" });
    }
    text
}

/// Memory of this process, MiB; 0 where the system does not say.
fn resident_mib() -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
    kib.unwrap_or_default() / 1024.0
}
