//! What is measured. Each mode is one function; a trial runs one mode of one backend in a fresh process.

use crate::backend::Backend;
use crate::corpus::Corpus;
use crate::figures::Figures;

mod beside;
mod bytes;
mod check;
mod events;
mod large;
mod names;
mod reads;

/// What a trial gets.
#[derive(Default)]
pub struct Trial {
    /// Empty for the modes that make up their own load.
    pub corpus: Corpus,
    /// Blocks of the large modes.
    pub blocks: usize,
}

/// A mode for one backend.
pub type Run = fn(&Trial) -> Figures;

/// A mode's name and what it does.
pub struct Mode {
    /// As the command line knows it.
    pub name: &'static str,
    /// Whether it replays the corpus.
    pub needs_corpus: bool,
    /// Whether it counts bytes.
    pub counts: bool,
    /// Does it.
    pub run: Run,
}

/// All modes for one backend.
pub fn of<B: Backend>() -> Vec<Mode> {
    let on_corpus = |name, run| Mode { name, needs_corpus: true, counts: false, run };
    let made_up = |name, run| Mode { name, needs_corpus: false, counts: false, run };
    vec![
        on_corpus("check", check::check::<B> as Run),
        on_corpus("events", events::events::<B>),
        on_corpus("publishers_2", events::publishers::<B, 2>),
        on_corpus("publishers_4", events::publishers::<B, 4>),
        made_up("appends", events::appends::<B>),
        on_corpus("removals", events::removals::<B>),
        on_corpus("reads", reads::reads::<B>),
        on_corpus("beside_full", beside::beside_full::<B>),
        on_corpus("beside_paced", beside::beside_paced::<B>),
        made_up("matched", reads::matched::<B>),
        made_up("visible", beside::visible::<B>),
        Mode { counts: true, ..on_corpus("bytes", bytes::bytes::<B>) },
        Mode { counts: true, ..made_up("sharer", bytes::sharer::<B>) },
        made_up("clear", large::clear::<B>),
        made_up("growth", large::growth::<B>),
    ]
}

/// What can be measured of kvflash alone, without a peer.
pub fn own() -> Mode {
    Mode { name: "names", needs_corpus: false, counts: false, run: names::names }
}

/// An index that has taken the first `part` of the corpus' events; the rest, made beforehand.
fn filled<B: Backend>(corpus: &Corpus, part: f64) -> (B, Vec<B::Event>) {
    let backend = B::new(corpus.workers);
    let all = corpus.events().count();
    let first = (all as f64 * part) as usize;
    let mut events: Vec<B::Event> = corpus.events().map(|view| backend.event(view)).collect();
    let rest = events.split_off(first.min(all));
    for event in events {
        backend.apply(event);
    }
    backend.drain();
    (backend, rest)
}

/// All prompts in the backend's type.
fn prompts<B: Backend>(backend: &B, corpus: &Corpus) -> Vec<B::Prompt> {
    (0..corpus.queries.len()).map(|query| backend.prompt(corpus.query(query))).collect()
}
