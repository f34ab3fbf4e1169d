//! Whether an engine tells the ids of its prompts: it is asked with a request's own body until an answer shows that it
//! does not.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::app::App;
use super::engine::Engine;
use crate::metrics::CauseLabel;

/// What is known of one engine.
#[derive(Debug, Default)]
pub(crate) struct Teaches {
    // Relaxed: for people.
    has_told: AtomicBool,
    /// The start of the engine since which it is not asked.
    refused: Mutex<Option<u64>>,
}

impl Engine {
    /// Which of its starts the engine runs since. One that does not tell when it started has started anew, perhaps,
    /// where it was away.
    pub fn start(&self) -> u64 {
        let started_s = self.notes.lock().started_s;
        started_s.map_or_else(|| self.failures.load(Ordering::Relaxed), f64::to_bits)
    }

    /// Whether it may be asked for ids.
    pub fn may_teach(&self) -> bool {
        self.teaches.refused.lock().is_none_or(|start| start != self.start())
    }

    /// It told ids.
    pub fn has_taught(&self) {
        self.teaches.has_told.store(true, Ordering::Relaxed);
    }

    /// An answer shows that it does not tell ids: it is not asked again until it restarts.
    pub fn teaches_no_more(&self, app: &App, cause: &'static str, why: &str) {
        self.teaches.has_told.store(false, Ordering::Relaxed);
        let start = self.start();
        if self.teaches.refused.lock().replace(start) == Some(start) {
            return;
        }
        app.metrics.taught_given_up.get_or_create(&CauseLabel { cause }).inc();
        tracing::info!(
            worker = self.id,
            url = self.base,
            why,
            "the engine is not asked for its prompts' token ids until it restarts: chats that are not tokenized are \
             balanced by load; to match them, set --tokenizer to the model's folder"
        );
    }

    /// Whether it tells ids; `None` where it was not asked.
    pub fn tells_ids(&self) -> Option<bool> {
        match self.teaches.has_told.load(Ordering::Relaxed) {
            true => Some(true),
            false => (!self.may_teach()).then_some(false),
        }
    }
}
