//! Whether the answers are right.

use super::Trial;
use crate::backend::Backend;
use crate::figures::Figures;

/// Plays the corpus and compares the answers at its marked points with the right ones.
pub fn check<B: Backend>(trial: &Trial) -> Figures {
    let corpus = &trial.corpus;
    let backend = B::new(corpus.workers);
    let (mut answers, mut wrong, mut over, mut under) = (0_u32, 0_u32, 0_u32, 0_u32);
    let mut played = 0;
    for check in &corpus.checks {
        while played < check.after {
            if let Some(view) = corpus.event(played) {
                backend.apply(backend.event(view));
            }
            played += 1;
        }
        backend.drain();
        let got = backend.answer(&backend.prompt(corpus.query(check.query)));
        let depth = |answer: &[(u32, u32)], worker| {
            answer.binary_search_by_key(&worker, |at| at.0).map_or(0, |at| answer[at].1)
        };
        for worker in 0..corpus.workers {
            let (is, should) = (depth(&got, worker), depth(&check.answer, worker));
            answers += u32::from(should > 0 || is > 0);
            over += u32::from(is > should);
            under += u32::from(is < should);
        }
        wrong += u32::from(got != check.answer);
    }
    let mut figures = Figures::default();
    if B::ANSWERS {
        figures.note("queries", corpus.checks.len() as f64);
        figures.note("depths", f64::from(answers));
        figures.note("wrong_queries", f64::from(wrong));
        figures.note("over_depths", f64::from(over));
        figures.note("under_depths", f64::from(under));
    }
    figures
}
