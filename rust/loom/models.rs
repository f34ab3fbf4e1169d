//! Models of the index's shared memory: loom runs each in every interleaving, and with every value a
//! load may see, that a few preemptions can bring about.
//!
//! A model that breaks a rule shows that the rule is needed, and that its absence would be noticed. Such
//! models report what they saw instead of panicking: a model that panics cannot be taken down cleanly.
#![cfg(test)]

#[allow(dead_code)]
#[path = "../core/src/index/arena/mod.rs"]
mod arena;

mod append;
mod edges;
mod epoch;
mod writers;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

/// What went wrong in any interleaving. Not modelled itself.
#[derive(Clone, Default)]
struct Faults(Arc<Mutex<BTreeSet<&'static str>>>);

impl Faults {
    fn check(&self, is_right: bool, fault: &'static str) {
        if !is_right {
            self.0.lock().unwrap().insert(fault);
        }
    }
}

/// Explores `model` and returns its faults. Few preemptions find nearly every mistake, and many take
/// for ever.
fn explore(
    preemptions: usize,
    model: impl Fn(Faults) + Sync + Send + 'static,
) -> BTreeSet<&'static str> {
    let faults = Faults::default();
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check({
        let faults = faults.clone();
        move || model(faults.clone())
    });
    faults.0.lock().unwrap().clone()
}

const NONE: BTreeSet<&str> = BTreeSet::new();
