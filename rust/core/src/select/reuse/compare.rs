//! Derives evidence from an answer.

use super::super::ask::Prompt;
use super::super::config::Overlap;
use super::super::record::Selection;
use super::super::selector::{SCRATCH, Selector};
use super::trust::{ReuseChange, ReuseSample};
use crate::catalog::Unheard;
use crate::ids::Worker;
use crate::select::router::RouteOverride;

impl Selector {
    /// Whether answers to `prompt` can be compared with events: the index was used for it.
    pub fn is_comparable(&self, prompt: &Prompt) -> bool {
        self.overlap != Overlap::Predictions
            && prompt.are_tokens_known()
            && self.uses_overlaps(&RouteOverride::default(), prompt)
    }

    /// Compares the answer of the engine in `selection`, which reports `reported_tokens` reused
    /// tokens. Returns the change in the worker's assessment, if any; nothing is stored for a
    /// worker that has left.
    ///
    /// # Cost
    /// O(1); a walk of the index if the engine reused more than its events announced at the
    /// decision, and of the worker's latest removals if it reused less.
    pub fn compare(
        &self,
        prompt: &Prompt,
        selection: &Selection,
        reported_tokens: Option<u64>,
    ) -> Option<ReuseChange> {
        let block_size = u64::from(prompt.block_size);
        let tokens = |blocks| prompt.reusable_blocks(blocks) * block_size;
        let mut explained_tokens = tokens(selection.reached_blocks.max(selection.held_blocks));
        let unheard = self.model.unheard(selection.worker);
        if unheard.is_some_and(|why| why.is_partly_heard()) {
            // Blocks stored before its events were received do not contradict the events.
            explained_tokens = explained_tokens.max(reported_tokens.unwrap_or(0));
        } else if reported_tokens.is_some_and(|reported| reported > explained_tokens + block_size) {
            // Events of requests that were running at the decision have arrived by now.
            explained_tokens =
                explained_tokens.max(tokens(self.reached_now(prompt, selection.worker)));
        }
        let mut predicted_tokens = tokens(selection.held_blocks);
        if let Some(reported) = reported_tokens.filter(|reported| *reported < predicted_tokens)
            && self.is_gone_since(prompt, selection, reported)
        {
            // True at the decision, and evicted before the engine started.
            predicted_tokens = reported;
        }
        let sample = ReuseSample {
            predicted_tokens,
            explained_tokens,
            reported_tokens,
            block_size: prompt.block_size,
            is_silent: unheard == Some(Unheard::Silent),
        };
        // Held so that a worker that leaves is removed with its evidence.
        let known = self.workers.lock();
        known.binary_search(&selection.worker).ok()?;
        self.reuse.take(selection.worker, &sample)
    }

    /// Whether the engine removed the first block that it did not reuse after it was chosen.
    fn is_gone_since(&self, prompt: &Prompt, selection: &Selection, reported_tokens: u64) -> bool {
        let first = (reported_tokens / u64::from(prompt.block_size.max(1))) as usize;
        let is_gone =
            |local| self.router.removals.has_removed(selection.worker, local, selection.at_ms);
        prompt.locals.get(first).is_some_and(|&local| is_gone(local))
    }

    /// Leading blocks of `prompt` that `worker` holds now, in any tier.
    fn reached_now(&self, prompt: &Prompt, worker: Worker) -> u32 {
        SCRATCH.with_borrow_mut(|scratch| {
            self.model.index.find_matches(&prompt.locals, &mut scratch.matches);
            let found = scratch.matches.as_slice().iter().find(|found| found.worker == worker);
            found.map_or(0, |found| found.external)
        })
    }
}
