//! What anybody would write first: the yardstick of the gates.

use kvflash_core::ids::Worker;
use parking_lot::RwLock;
use rustc_hash::{FxHashMap, FxHashSet};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{Owned, number};
use crate::backend::{Backend, fold};
use crate::corpus::{EventView, NamedBlock};

/// Hash maps behind one lock: who holds a prefix, and which prefix a worker's name of a block stands for.
///
/// It stays as it is: gates of other indexes are ratios to it.
#[derive(Default)]
pub struct Plain {
    tables: RwLock<Tables>,
}

#[derive(Default)]
struct Tables {
    holders: FxHashMap<u64, FxHashSet<Worker>>,
    prefixes: FxHashMap<Worker, FxHashMap<u64, u64>>,
}

/// The hash of a prefix, from that of the prefix before it and its last block.
fn prefix(before: u64, local: u64) -> u64 {
    xxh3_64_with_seed(&local.to_le_bytes(), before)
}

impl Tables {
    fn store(&mut self, worker: Worker, parent: Option<u64>, blocks: &[NamedBlock]) {
        let prefixes = self.prefixes.entry(worker).or_default();
        let mut before = match parent.map(|name| prefixes.get(&name)) {
            None => 0,
            Some(None) => return,
            Some(Some(&known)) => known,
        };
        for block in blocks {
            before = prefix(before, block.local);
            prefixes.insert(block.name, before);
            self.holders.entry(before).or_default().insert(worker);
        }
    }

    fn remove(&mut self, worker: Worker, names: &[u64]) {
        let Some(prefixes) = self.prefixes.get_mut(&worker) else { return };
        for name in names {
            if let Some(hash) = prefixes.remove(name) {
                Self::release(&mut self.holders, worker, hash);
            }
        }
    }

    fn clear(&mut self, worker: Worker) {
        for hash in self.prefixes.remove(&worker).unwrap_or_default().into_values() {
            Self::release(&mut self.holders, worker, hash);
        }
    }

    fn release(holders: &mut FxHashMap<u64, FxHashSet<Worker>>, worker: Worker, hash: u64) {
        if let Some(found) = holders.get_mut(&hash) {
            found.remove(&worker);
            if found.is_empty() {
                holders.remove(&hash);
            }
        }
    }

    fn walk(&self, locals: &[u64], out: &mut Vec<(Worker, u32)>) {
        out.clear();
        let mut hash = 0;
        for (depth, &local) in (1..).zip(locals) {
            hash = prefix(hash, local);
            let Some(holders) = self.holders.get(&hash) else { return };
            if depth == 1 {
                out.extend(holders.iter().map(|&worker| (worker, 1)));
                continue;
            }
            let mut is_over = true;
            for (worker, deepest) in out.iter_mut() {
                if *deepest == depth - 1 && holders.contains(worker) {
                    *deepest = depth;
                    is_over = false;
                }
            }
            if is_over {
                return;
            }
        }
    }
}

impl Backend for Plain {
    type Event = Owned<NamedBlock>;
    type Prompt = Vec<u64>;
    type Out = Vec<(Worker, u32)>;
    const QUEUED: bool = false;

    fn new(_: u32) -> Self {
        Self::default()
    }

    fn event(&self, view: EventView<'_>) -> Self::Event {
        Owned::of(view, |name, local| NamedBlock { name, local })
    }

    fn prompt(&self, locals: &[u64]) -> Self::Prompt {
        locals.to_vec()
    }

    fn apply(&self, event: Self::Event) {
        let mut tables = self.tables.write();
        match event {
            Owned::Stored { worker, parent, blocks } => tables.store(worker, parent, &blocks),
            Owned::Removed { worker, names } => tables.remove(worker, &names),
            Owned::Cleared { worker } => tables.clear(worker),
        }
    }

    fn drain(&self) {}

    fn ask(&self, prompt: &Self::Prompt, out: &mut Self::Out) -> u64 {
        self.tables.read().walk(prompt, out);
        let parts = out.iter().map(|&(worker, depth)| fold(worker.instance_id, depth));
        parts.fold(0, u64::wrapping_add)
    }

    fn ask_map(&self, prompt: &Self::Prompt, out: &mut Self::Out) -> u64 {
        self.tables.read().walk(prompt, out);
        let map: FxHashMap<Worker, u32> = out.iter().copied().collect();
        let parts = map.iter().map(|(worker, &depth)| fold(worker.instance_id, depth));
        parts.fold(0, u64::wrapping_add)
    }

    fn answer(&self, prompt: &Self::Prompt) -> Vec<(u32, u32)> {
        let mut out = Vec::new();
        self.tables.read().walk(prompt, &mut out);
        let mut answer: Vec<_> = out.iter().map(|&(at, depth)| (number(at), depth)).collect();
        answer.sort_unstable();
        answer
    }
}
