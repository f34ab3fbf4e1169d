//! Copies a worker's content for a dump.

use super::events::{Copied, Part};
use super::writer::Writer;
use crate::ids::{Tier, Worker};
use crate::index::arena::runs::{ROOT, RunId};
use crate::index::types::DEFAULT_SEED;

impl Writer {
    pub(super) fn seed_of(&self, run: RunId) -> u64 {
        self.tree.seeds.get(&run).copied().unwrap_or(DEFAULT_SEED)
    }

    /// Capacity needed for a copy of what `worker` holds.
    pub fn measure(&self, worker: Worker) -> (usize, usize) {
        let slots =
            self.owners.numbers.get(&worker).map(|number| self.worker(*number).fact_slots());
        let sizes = slots.into_iter().flatten().map(|slot| self.slot(slot));
        sizes.fold((0, 0), |(parts, names), slot| (parts + slot.members.len(), names + slot.held))
    }

    /// Copies what `worker` holds: names, and their locations. Labels are read later, under a pin
    /// that is older than the copy.
    pub fn copy_of(&self, worker: Worker, copied: &mut Copied) {
        let Some(&number) = self.owners.numbers.get(&worker) else { return };
        for slot in self.worker(number).fact_slots() {
            let state = self.slot(slot);
            let tier = Tier::ALL[state.plane.number()];
            for (run, id) in &state.members {
                let member = self.members.get(*id);
                let column = &self.tree.metas.get(*run).column(member.column).names;
                for (start, end) in member.spans.iter() {
                    let at = copied.names.len();
                    copied.names.extend_from_slice(&column[usize::from(start)..usize::from(end)]);
                    copied.parts.push(Part { run: *run, tier, start, end, at });
                }
            }
            copied.extra.extend(state.extra.iter().map(|(name, loc)| ((loc, tier), name)));
            copied.copies.extend(state.copies.iter().map(|(name, n)| ((tier, *name), *n)));
            if self.tree.seeds.is_empty() {
                continue;
            }
            // Runs between the held ones and the root have their own seeds.
            for run in state.members.keys().chain(state.waiting.keys()) {
                let mut run = *run;
                while run != ROOT && copied.seeds.insert(run, self.seed_of(run)).is_none() {
                    run = self.shared.runs.peek(&self.tree.runs, run).place().0;
                }
            }
        }
    }
}
