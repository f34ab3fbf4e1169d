//! How much of a prompt an engine with several cache groups can reuse.
//!
//! The tree of contents knows how far full attention reaches. Reuse ends at the deepest position
//! from which *every* group can continue. The table of names ([`GroupIndex`]) has the groups'
//! blocks, under the names that the prompt's blocks have in that engine.

use std::collections::BTreeMap;
use std::sync::Arc;

use hashbrown::HashMap;

use super::cache_groups::{Group, Layout, Rule};
use super::naming::Naming;
use crate::hash::engine::{NameCache, NameKeys};
use crate::ids::{Tier, Worker};
use crate::index::groups::{GroupBits, GroupIndex, Holder};
use crate::index::{Match, Matches, RadixIndex};

/// The workers with a cache that the tree of contents does not describe completely.
#[derive(Debug, Clone, Default)]
pub struct Layouts {
    of: BTreeMap<Worker, Arc<Layout>>,
    /// Their different naming schemes.
    namings: Vec<Naming>,
}

impl Layouts {
    /// A copy with another layout for `worker`; a plain one, or `None`, removes the entry.
    #[must_use]
    pub fn with(&self, worker: Worker, layout: Option<Arc<Layout>>) -> Self {
        let mut of = self.of.clone();
        match layout.filter(|layout| !layout.is_plain()) {
            Some(layout) => of.insert(worker, layout),
            None => of.remove(&worker),
        };
        let mut namings: Vec<Naming> = Vec::new();
        for naming in of.values().filter_map(|layout| layout.naming.as_ref()) {
            if !namings.contains(naming) {
                namings.push(naming.clone());
            }
        }
        Self { of, namings }
    }

    /// Whether some cache group has blocks of `size` tokens, or hashes in such steps.
    pub fn have_block_size(&self, size: u32) -> bool {
        self.of.values().any(|layout| {
            layout.others.iter().any(|group| group.block_size == size)
                || layout.naming.as_ref().is_some_and(|naming| naming.unit == size)
        })
    }

    /// Whether some worker uses the shared store of this name.
    pub fn use_store(&self, name: &str) -> bool {
        self.of.values().any(|layout| layout.stores.iter().any(|store| store == name))
    }

    /// Whether there are no layouts.
    pub fn is_empty(&self) -> bool {
        self.of.is_empty()
    }

    /// The layout of a worker, if it has one.
    pub fn get(&self, worker: Worker) -> Option<&Layout> {
        self.of.get(&worker).map(AsRef::as_ref)
    }

    /// The prompt's names in every scheme that its workers use.
    ///
    /// # Cost
    /// Nothing without such workers; otherwise one digest per block and scheme, unless cached.
    pub fn names(&self, cache: &NameCache, tokens: &[u32], keys: &NameKeys<'_>) -> PromptNames {
        let named = |naming: &Naming| {
            let mut names = Vec::new();
            let is_whole = cache.names(&naming.scheme, tokens, naming.unit, keys, &mut names);
            (naming.clone(), if is_whole { names } else { Vec::new() })
        };
        PromptNames { of: self.namings.iter().map(named).collect() }
    }
}

/// The engines' names of one prompt's blocks; empty if they can't be computed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PromptNames {
    of: Vec<(Naming, Vec<u64>)>,
}

impl PromptNames {
    fn get(&self, naming: &Naming) -> Option<&[u64]> {
        let (_, names) = self.of.iter().find(|(known, _)| known == naming)?;
        (!names.is_empty()).then_some(names)
    }
}

/// Tokens of a prompt that one worker can reuse; each tier includes the faster ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reuse {
    /// The worker.
    pub worker: Worker,
    /// From the device.
    pub device: u32,
    /// Including host memory.
    pub host: u32,
    /// Including disks and shared stores.
    pub disk: u32,
}

/// A prompt in a query.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    /// Local hashes of its full blocks.
    pub locals: &'a [u64],
    /// The engines' names of its blocks.
    pub names: &'a PromptNames,
    /// Its length.
    pub tokens: u32,
    /// Tokens in a block of the tree of contents.
    pub block_size: u32,
}

/// The groups of one worker along a prompt: per unit and tier, the groups that hold the block which
/// ends there. In the order of tiers; shared stores count as disks.
#[derive(Debug, Default)]
struct Stand([Vec<GroupBits>; 3]);

impl Stand {
    fn reset(&mut self, units: usize) {
        for tier in &mut self.0 {
            tier.clear();
            tier.resize(units, 0);
        }
    }

    fn tier_mut(&mut self, tier: Tier) -> &mut [GroupBits] {
        &mut self.0[(tier as usize).min(2)]
    }
}

/// Computes what every worker of `layouts` can reuse, and updates `matches` in blocks.
///
/// Appends the same in tokens to `out`, ascending by worker.
pub(super) fn evaluate(
    layouts: &Layouts,
    index: &RadixIndex,
    groups: &GroupIndex,
    question: Question<'_>,
    matches: &mut Matches,
    out: &mut Vec<Reuse>,
) {
    let mut tree: HashMap<Worker, Match> =
        matches.as_slice().iter().map(|found| (found.worker, *found)).collect();
    let mut stand = Stand::default();
    // Holders of the prompt's names, by seat; collected once per naming.
    for (naming, names) in &question.names.of {
        if names.is_empty() {
            continue;
        }
        let mut by_seat: HashMap<u16, Vec<(u32, GroupBits)>> = HashMap::new();
        for (at, name) in names.iter().enumerate() {
            groups.find(*name, |seat, bits| {
                by_seat.entry(seat).or_default().push((at as u32, bits));
            });
        }
        let own = layouts.of.iter().filter(|(_, layout)| layout.naming.as_ref() == Some(naming));
        groups.seats(|seat_of| {
            for (worker, layout) in own {
                let found = tree.get(worker).copied();
                let seats = holders(*worker, layout)
                    .filter_map(|(tier, holder)| Some((tier, by_seat.get(&seat_of(&holder)?)?)));
                stand.reset(names.len());
                let mut is_anywhere = found.is_some_and(|found| found.device > 0);
                for (tier, list) in seats {
                    is_anywhere = true;
                    for (at, bits) in list {
                        stand.tier_mut(tier)[*at as usize] |= bits;
                    }
                }
                if is_anywhere {
                    let prompt =
                        Prompt { layout, unit: naming.unit, len: question.tokens, stand: &stand };
                    out.push(prompt.reuse(*worker, found, question.block_size));
                }
            }
        });
    }
    // If names can't be computed, the tree has the worker's names of the blocks that it holds.
    let mut names = Vec::new();
    for (worker, layout) in &layouts.of {
        if layout.naming.as_ref().is_some_and(|naming| question.names.get(naming).is_some()) {
            continue;
        }
        let Some(found) = tree.get(worker).copied() else { continue };
        let unit = question.block_size;
        if layout.main.is_none_or(|main| main.block_size != unit) {
            continue;
        }
        index.names_along(*worker, question.locals, &mut names);
        stand.reset((question.tokens / unit) as usize);
        for (tier, holder) in holders(*worker, layout) {
            for (name, bits) in names.iter().zip(stand.tier_mut(tier)) {
                *bits |= name.map_or(0, |name| groups.groups_of(&holder, name));
            }
        }
        let prompt = Prompt { layout, unit, len: question.tokens, stand: &stand };
        out.push(prompt.reuse(*worker, Some(found), unit));
    }
    out.sort_unstable_by_key(|reuse| reuse.worker);
    // The tree alone overestimates these workers.
    for worker in layouts.of.keys() {
        if let Some(found) = tree.get_mut(worker) {
            *found = Match { predicted: found.predicted, ..Match::on_device(*worker, 0) };
        }
    }
    for reuse in out.iter() {
        let blocks = |tokens: u32| tokens.checked_div(question.block_size).unwrap_or(0);
        let predicted = tree.get(&reuse.worker).map_or(0, |found| found.predicted);
        let found = Match {
            worker: reuse.worker,
            device: blocks(reuse.device),
            host: blocks(reuse.host),
            disk: blocks(reuse.disk),
            external: blocks(reuse.disk),
            predicted,
        };
        tree.insert(reuse.worker, found);
    }
    matches.replace(tree.into_values().filter(|found| found.external > 0 || found.predicted > 0));
}

fn holders(worker: Worker, layout: &Layout) -> impl Iterator<Item = (Tier, Holder)> + '_ {
    let own = Tier::ALL.into_iter().map(move |tier| (tier, Holder::Worker(worker, tier)));
    let shared = layout.stores.iter().map(|store| (Tier::External, Holder::Store(store.clone())));
    own.chain(shared)
}

/// One worker's cache, from the view of one prompt.
struct Prompt<'a> {
    layout: &'a Layout,
    unit: u32,
    len: u32,
    stand: &'a Stand,
}

impl Prompt<'_> {
    fn reuse(&self, worker: Worker, found: Option<Match>, block_size: u32) -> Reuse {
        let tree = found.map_or(0, |found| found.device);
        let is_of_tree = self.layout.is_of_tree();
        let device = if is_of_tree {
            // The last token is always computed, but it may be loaded.
            tree.saturating_mul(block_size).min(self.len.saturating_sub(1) / self.unit * self.unit)
        } else {
            self.resumable(tree)
        };
        let [_, of_host, of_disk] = &self.stand.0;
        let mut host = self.with_lower(device, |at| self.bits(of_host, at)).max(device);
        let both = |at| self.bits(of_host, at) | self.bits(of_disk, at);
        let mut disk = self.with_lower(device, both).max(host);
        if let Some(found) = found.filter(|_| is_of_tree && !self.layout.has_lower) {
            host = host.max(found.host.saturating_mul(block_size));
            disk = disk.max(found.disk.max(found.external).saturating_mul(block_size));
        }
        Reuse { worker, device, host, disk }
    }

    fn bits(&self, tier: &[GroupBits], at: u32) -> GroupBits {
        let unit = (at / self.unit).checked_sub(1);
        unit.and_then(|unit| tier.get(unit as usize)).copied().unwrap_or(0)
    }

    fn holds(&self, group: &Group, at: u32) -> bool {
        group.idx < GroupBits::BITS && self.bits(&self.stand.0[0], at) & 1 << group.idx != 0
    }

    /// The deepest position from which every group can continue, on the device alone. At least one
    /// token is always computed.
    fn resumable(&self, tree_blocks: u32) -> u32 {
        let last = self.len.saturating_sub(1);
        let Layout { main, others, .. } = self.layout;
        let mut deepest = match main {
            Some(main) => self.reach(main, tree_blocks),
            None => last,
        };
        for group in others.iter().filter(|group| group.rule == Rule::Full) {
            deepest = deepest.min(self.reach(group, 0));
        }
        let align = self.alignment();
        let mut end = deepest.min(last) / align * align;
        while end > 0 {
            let missing = others.iter().find_map(|group| self.missing(group, end));
            match missing {
                None => return end,
                // A prefix that ends at or after the missing block needs it.
                Some(at) => end = (at - 1).min(end - 1) / align * align,
            }
        }
        0
    }

    /// Distance between possible ends of hits.
    fn alignment(&self) -> u32 {
        let groups = self.layout.main.iter().chain(&self.layout.others);
        let is_fine = |group: &Group| group.rule == Rule::State && self.unit < group.block_size;
        if groups.clone().any(is_fine) {
            return self.unit;
        }
        groups.map(|group| group.block_size.max(1)).fold(1, lcm)
    }

    /// How far a group holds everything from the start, the first blocks according to the tree; up
    /// to the first incomplete block.
    fn reach(&self, group: &Group, tree_blocks: u32) -> u32 {
        let (size, last) = (group.block_size.max(1), self.len.saturating_sub(1));
        let mut whole = tree_blocks.min(last / size) * size;
        while whole + size <= last && self.holds(group, whole + size) {
            whole += size;
        }
        let end = (whole + size).min(self.len);
        let mut parts = (whole + self.unit..end).step_by(self.unit as usize);
        parts.rfind(|at| self.holds(group, *at)).unwrap_or(whole)
    }

    /// The end of a missing block that the group needs for a prefix that ends at `end`.
    fn missing(&self, group: &Group, end: u32) -> Option<u32> {
        let size = group.block_size.max(1);
        if group.rule == Rule::Full {
            return None;
        }
        let Some(from) = group.needs_from(end, &self.layout.facts) else { return Some(1) };
        let mut at = end;
        while at > from {
            if !self.holds(group, at) {
                return Some(at);
            }
            at = at.saturating_sub(size);
        }
        None
    }

    /// Tokens including what can be loaded from slower tiers after `local` ones, chunk by chunk.
    /// Nothing shorter than a chunk is loaded.
    ///
    /// # Source
    /// `_lookup_complete_chunks` of vLLM's offloading connector.
    fn with_lower(&self, local: u32, bits: impl Fn(u32) -> GroupBits) -> u32 {
        let Layout { main, others, facts, seen_chunk, has_lower, .. } = self.layout;
        let known = facts.offload_chunk.unwrap_or(*seen_chunk);
        let smallest = main.iter().chain(others).map(|group| group.block_size).min();
        let chunk = if known > 0 { known } else { smallest.unwrap_or(self.unit) };
        let has_groups = main.is_some() || !others.is_empty();
        if !has_lower || !has_groups || chunk == 0 || !chunk.is_multiple_of(self.unit) {
            return local;
        }
        let is_window = |group: &&Group| matches!(group.rule, Rule::Window { .. });
        let windows = others.iter().filter(is_window).count();
        let mut limit =
            (self.len - u32::from(windows > 0).min(self.len)).min(self.len / chunk * chunk);
        let start = local / chunk;
        // The engine's events say how long a chunk is.
        let least = local.saturating_add(chunk);
        loop {
            let before = limit;
            let all_first = main.iter().chain(others.iter().filter(|group| !is_window(group)));
            for group in all_first.chain(others.iter().filter(is_window)) {
                if limit < least {
                    return local;
                }
                let held = |chunk_at: u32| {
                    group.idx < GroupBits::BITS
                        && bits((chunk_at + 1) * chunk) & 1 << group.idx != 0
                };
                let end = limit.div_ceil(chunk).min(self.len / chunk);
                let hits = match group.rule {
                    Rule::Window { tokens } => {
                        last_window(held, start, end, tokens, chunk, limit.min(end * chunk))
                    }
                    _ => (start..end).take_while(|at| held(*at)).count() as u32,
                };
                if hits == 0 {
                    return local;
                }
                limit = limit.min((start + hits) * chunk);
            }
            if limit == before || windows < 2 {
                return if limit >= least { limit } else { local };
            }
        }
    }
}

/// The chunks from `start` to the end of the last run of chunks that covers a window; the rightmost
/// may need one more chunk on its left.
fn last_window(
    held: impl Fn(u32) -> bool,
    start: u32,
    end: u32,
    window: u32,
    chunk: u32,
    last: u32,
) -> u32 {
    let needed = window.div_ceil(chunk).max(window.saturating_sub(1).div_ceil(chunk));
    // Tokens of the last chunk beyond the limit.
    let beyond = last.next_multiple_of(chunk) - last;
    let reach = (window.saturating_sub(1) + beyond).div_ceil(chunk);
    let mut required = needed.max(reach);
    let mut run = 0;
    for at in (start..end).rev() {
        if held(at) {
            run += 1;
        } else {
            (run, required) = (0, needed);
        }
        if run == required {
            return at - start + required;
        }
    }
    run
}

fn lcm(a: u32, b: u32) -> u32 {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    (a / x.max(1)).saturating_mul(b)
}
