//! The command line, for any list of backends.

use std::collections::HashMap;
use std::io::{self, Error, ErrorKind};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use serde_json::{Map, Value};

use crate::backend::Backend;
use crate::backends;
use crate::corpus::{Corpus, Names, Recipe};
use crate::modes::{self, Mode, Trial};
use crate::{file, heap, trace};

const HELP: &str = "\
corpus --out FILE [--trace FILE | --requests N] [--workers 16] [--capacity 16384] [--factor 1]
       [--batch 8] [--names agree|differ]         make what is replayed
one --backend B --mode M [--corpus FILE] [--blocks 10000000]
                                                  one trial in this process, one line of JSON
compare --backends B,B --modes M,M [--corpus FILE] [--trials 3] [--blocks N]
                                                  trials in fresh processes, taking turns
list                                              backends and modes";

/// A backend by name.
pub struct Entry {
    /// As the command line knows it.
    pub name: &'static str,
    /// Whether its calls return before they took effect.
    pub queued: bool,
    /// What can be measured.
    pub modes: Vec<Mode>,
}

/// An entry of a list of backends.
pub fn entry<B: Backend>(name: &'static str) -> Entry {
    Entry { name, queued: B::QUEUED, modes: modes::of::<B>() }
}

/// The backends of this crate.
pub fn own_backends() -> Vec<Entry> {
    let mut kvflash = entry::<backends::Kvflash>("kvflash");
    kvflash.modes.push(modes::own());
    vec![
        kvflash,
        entry::<backends::Current<backends::Copies>>("kvflash-copies"),
        entry::<backends::Current<backends::Aging>>("kvflash-aging"),
        entry::<backends::Plain>("plain"),
        entry::<backends::Null>("null"),
    ]
}

/// Runs what the arguments say.
pub fn main(backends: &[Entry]) -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let verb = arguments.next().unwrap_or_default();
    let rest: Vec<String> = arguments.collect();
    let done = options(&rest).and_then(|options| match verb.as_str() {
        "corpus" => corpus(&options),
        "one" => one(backends, &options),
        "compare" => compare(backends, &options),
        "list" => {
            list(backends);
            Ok(())
        }
        _ => Err(bad(HELP)),
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

type Options = HashMap<String, String>;

fn options(arguments: &[String]) -> io::Result<Options> {
    let pairs = arguments.chunks(2).map(|pair| match pair {
        [name, value] if name.starts_with("--") => Ok((name[2..].to_owned(), value.clone())),
        _ => Err(bad(&format!("expected --NAME VALUE, got {pair:?}\n{HELP}"))),
    });
    pairs.collect()
}

fn number<T: std::str::FromStr>(options: &Options, name: &str, default: T) -> io::Result<T> {
    let Some(text) = options.get(name) else { return Ok(default) };
    text.parse().map_err(|_| bad(&format!("--{name}: {text:?} is no number it can be")))
}

fn text<'a>(options: &'a Options, name: &str) -> io::Result<&'a str> {
    options.get(name).map(String::as_str).ok_or_else(|| bad(&format!("--{name} is missing")))
}

fn bad(what: &str) -> Error {
    Error::new(ErrorKind::InvalidInput, what.to_owned())
}

fn corpus(options: &Options) -> io::Result<()> {
    let mut requests = match options.get("trace") {
        Some(path) => trace::read(Path::new(path))?,
        None => trace::generate(number(options, "requests", 12_000)?, 42),
    };
    trace::stretch(&mut requests, number(options, "factor", 1)?);
    let recipe = Recipe {
        workers: number(options, "workers", 16)?,
        capacity_blocks: number(options, "capacity", 16_384)?,
        batch: number(options, "batch", 8)?,
        names: match options.get("names").map(String::as_str) {
            None | Some("agree") => Names::Agree,
            Some("differ") => Names::Differ,
            Some(other) => return Err(bad(&format!("--names: {other:?}"))),
        },
        ..Recipe::default()
    };
    let corpus = Corpus::build(&requests, &recipe);
    file::write(&corpus, Path::new(text(options, "out")?))?;
    println!(
        "{} prompts of {} blocks, {} events: {} blocks stored, {} removed; {} checks",
        corpus.queries.len(),
        corpus.locals.len() / corpus.queries.len().max(1),
        corpus.events().count(),
        corpus.blocks.len(),
        corpus.names.len(),
        corpus.checks.len(),
    );
    Ok(())
}

fn one(backends: &[Entry], options: &Options) -> io::Result<()> {
    let (backend, mode) = (text(options, "backend")?, text(options, "mode")?);
    let unknown = || bad(&format!("no backend {backend:?} with a mode {mode:?}; see list"));
    let entry = backends.iter().find(|entry| entry.name == backend).ok_or_else(unknown)?;
    let mode = entry.modes.iter().find(|known| known.name == mode).ok_or_else(unknown)?;
    if mode.counts {
        heap::count();
    }
    let mut trial = Trial { blocks: number(options, "blocks", 10_000_000)?, ..Trial::default() };
    if mode.needs_corpus {
        trial.corpus = file::read(Path::new(text(options, "corpus")?))?;
    }
    let mut row = Map::new();
    row.insert("backend".into(), backend.into());
    row.insert("mode".into(), mode.name.into());
    row.extend((mode.run)(&trial).0);
    println!("{}", Value::Object(row));
    Ok(())
}

/// Trials in fresh processes; the order of backends is turned round every time, so that whatever the
/// machine does meanwhile hits all alike.
fn compare(backends: &[Entry], options: &Options) -> io::Result<()> {
    let mut names: Vec<&str> = text(options, "backends")?.split(',').collect();
    let modes: Vec<&str> = text(options, "modes")?.split(',').collect();
    let program = std::env::current_exe()?;
    for name in &names {
        if !backends.iter().any(|entry| entry.name == *name) {
            return Err(bad(&format!("no backend {name:?}; see list")));
        }
    }
    for mode in modes {
        for _ in 0..number(options, "trials", 3)? {
            for name in &names {
                let mut command = Command::new(&program);
                command.args(["one", "--backend", name, "--mode", mode]).stdout(Stdio::inherit());
                for option in ["corpus", "blocks"] {
                    if let Some(value) = options.get(option) {
                        command.args([&format!("--{option}"), value]);
                    }
                }
                if !command.status()?.success() {
                    return Err(Error::other(format!("{name} failed at {mode}")));
                }
            }
            names.reverse();
        }
    }
    Ok(())
}

fn list(backends: &[Entry]) {
    for entry in backends {
        let modes: Vec<&str> = entry.modes.iter().map(|mode| mode.name).collect();
        let how = if entry.queued { "queued" } else { "inline" };
        println!("{} ({how}): {}", entry.name, modes.join(" "));
    }
}
