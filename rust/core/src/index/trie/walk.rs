//! The query: follows the runs of the prompt, narrowing the set of holders that have all blocks so
//! far.

use super::scratch::{Scratch, Track};
use super::seats::Plane;
use super::shared::Shared;
use crate::ids::Tier;
use crate::index::arena::cover::{Cover, Prefix, WHOLE, each_bit};
use crate::index::arena::epoch::Pin;
use crate::index::arena::runs::{ROOT, RunId};
use crate::index::matches::{Depth, ManyMatches, Match};

/// Prompts, and their blocks, answered under one pin: together some tens of microseconds, which the
/// writer can wait before it frees memory.
const PROMPTS_PER_PIN: usize = 32;
const BLOCKS_PER_PIN: usize = 16_384;

/// Splits prompts into parts to answer under one pin; a prompt that is too long for that forms its
/// own part.
pub(super) fn parts<'a>(mut prompts: &'a [&'a [u64]]) -> impl Iterator<Item = &'a [&'a [u64]]> {
    std::iter::from_fn(move || {
        let mut blocks = 0;
        let fits = |prompt: &&&[u64]| {
            blocks += prompt.len();
            blocks <= BLOCKS_PER_PIN
        };
        let count = prompts.iter().take(PROMPTS_PER_PIN).take_while(fits).count().max(1);
        let (part, rest) = prompts.split_at_checked(count)?;
        prompts = rest;
        Some(part)
    })
}

/// Number of equal leading labels.
#[inline]
pub(super) fn common(labels: &[u64], prompt: &[u64]) -> usize {
    let len = labels.len().min(prompt.len());
    let (labels, prompt) = (&labels[..len], &prompt[..len]);
    let mut at = 0;
    // Eight at a time without branches, so that the compiler vectorizes it.
    for (a, b) in labels.chunks_exact(8).zip(prompt.chunks_exact(8)) {
        let differing = (0..8).fold(0, |all, i| all | (a[i] ^ b[i]));
        if differing != 0 {
            break;
        }
        at += 8;
    }
    while at < len && labels[at] == prompt[at] {
        at += 1;
    }
    at
}

/// Calls `see` with every non-empty word of a set, and its index.
#[inline]
fn each_word(set: &[u64], mut see: impl FnMut(usize, u64)) {
    set.iter().enumerate().filter(|(_, word)| **word != 0).for_each(|(at, word)| see(at, *word));
}

impl Shared {
    /// The child of `(run, offset)` that begins with `first`.
    #[inline]
    pub(super) fn child(
        &self,
        pin: &Pin<'_>,
        run: RunId,
        offset: u32,
        first: u64,
    ) -> Option<RunId> {
        let is_child = |child| self.runs.get(pin, child).is_at(run, offset, first);
        self.edges.find(pin, run, offset, first, is_child)
    }

    /// Walks the device and the predictions. Emits every slot that covers a first block and its
    /// depth: as a word of a set of slots, with its index in the set, and the depth of all slots in
    /// it.
    #[inline]
    fn walk(
        &self,
        pin: &Pin<'_>,
        prompt: &[u64],
        only_who: bool,
        track: &mut Track,
        mut emit: impl FnMut(usize, u64, u32),
    ) {
        let Track { alive, next, path } = track;
        path.clear();
        let Some(mut run) = prompt.first().and_then(|first| self.child(pin, ROOT, 0, *first))
        else {
            return;
        };
        let words = self.seats.words();
        let keeps_path = !only_who && self.seats.has_lower();
        alive.clear();
        alive.resize(words, u64::MAX);
        next.clear();
        next.resize(words, 0);
        let (mut before, mut is_first) = (0, true);
        loop {
            let at = self.runs.get(pin, run);
            let labels = at.labels();
            let matched = common(labels, &prompt[before..]);
            let child = prompt.get(before + matched).and_then(|label| {
                let child = self.child(pin, run, matched as u32, *label)?;
                self.runs.get(pin, child).prefetch();
                Some(child)
            });
            if keeps_path {
                path.push((run, before as u32, matched as u32));
            }
            let goes_on = child.is_some();
            // After the labels, see `Runs`.
            let cover = at.cover();
            let mut one = |Prefix { slot, cut }: Prefix| {
                let (word, bit) = (usize::from(slot) / 64, 1 << (slot % 64));
                // A slot opened since the walk began is left to the next query.
                if word >= words || alive[word] & bit == 0 {
                    return;
                }
                alive[word] &= !bit;
                let cut = usize::from(cut);
                if cut >= matched && goes_on {
                    next[word] |= bit;
                } else {
                    emit(word, bit, (before + cut.min(matched)) as u32);
                }
            };
            match cover {
                Cover::Few(_) => cover.each_prefix(one),
                Cover::Block(block) => {
                    block.singles().for_each(&mut one);
                    let sets = [(WHOLE, block.whole_set())].into_iter().chain(block.groups());
                    for (cut, set) in sets {
                        let depth = (before + usize::from(cut).min(matched)) as u32;
                        let stays = goes_on && usize::from(cut) >= matched;
                        for (at, word) in set.iter().enumerate().take(words) {
                            let here = alive[at] & word;
                            alive[at] &= !word;
                            if stays {
                                next[at] |= here;
                            } else if here != 0 {
                                emit(at, here, depth);
                            }
                        }
                    }
                }
            }
            if !is_first {
                each_word(alive, |at, word| emit(at, word, before as u32));
            }
            std::mem::swap(alive, next);
            next.fill(0);
            is_first = false;
            before += matched;
            match child {
                None => return,
                Some(child) => {
                    run = child;
                    let left: u32 = alive.iter().map(|word| word.count_ones()).sum();
                    if left == 0 && !keeps_path {
                        return;
                    }
                    if only_who && left == 1 {
                        // At least one is deeper than all others, which is all that was asked.
                        each_word(alive, |at, word| emit(at, word, before as u32));
                        return;
                    }
                }
            }
        }
    }

    /// Finds the matches of a prompt.
    pub(super) fn find(
        &self,
        pin: &Pin<'_>,
        prompt: &[u64],
        only_who: bool,
        scratch: &mut Scratch,
        out: &mut Vec<Match>,
    ) {
        out.clear();
        let mut is_done = false;
        if let Some(mark) = self.seats.are_homes() {
            self.walk(pin, prompt, only_who, &mut scratch.track, |at, word, depth| {
                self.seats.each_worker(at, word, out, |worker| Match::on_device(worker, depth));
            });
            is_done = self.seats.are_homes_since(mark);
        }
        if !is_done {
            out.clear();
            let Scratch { track, found, .. } = scratch;
            found.clear();
            self.walk(pin, prompt, only_who, track, |at, word, depth| {
                each_bit(at, word, |slot| found.push((slot, depth)));
            });
            self.gather(pin, only_who, scratch, out);
        }
        if only_who {
            cut_last(out);
        }
    }

    /// Appends the matches of several prompts.
    pub(super) fn find_some(&self, pin: &Pin<'_>, prompts: &[&[u64]], many: &mut ManyMatches) {
        let ManyMatches { found, ends, scratch } = many;
        let (old_found, old_ends) = (found.len(), ends.len());
        if let Some(mark) = self.seats.are_homes() {
            for prompt in prompts {
                self.walk(pin, prompt, false, &mut scratch.track, |at, word, depth| {
                    let on_device = |worker| Match::on_device(worker, depth);
                    self.seats.each_worker(at, word, found, on_device);
                });
                ends.push(found.len());
            }
            if self.seats.are_homes_since(mark) {
                return;
            }
            found.truncate(old_found);
            ends.truncate(old_ends);
        }
        let mut one = std::mem::take(&mut scratch.one);
        for prompt in prompts {
            self.find(pin, prompt, false, scratch, &mut one);
            found.extend_from_slice(&one);
            ends.push(found.len());
        }
        scratch.one = one;
    }

    /// Finds how many leading blocks each worker holds on the device.
    pub(super) fn find_depths(
        &self,
        pin: &Pin<'_>,
        prompt: &[u64],
        scratch: &mut Scratch,
        out: &mut Vec<Depth>,
    ) {
        out.clear();
        if let Some(mark) = self.seats.are_homes() {
            self.walk(pin, prompt, false, &mut scratch.track, |at, word, blocks| {
                self.seats.each_worker(at, word, out, |worker| Depth::new(worker, blocks));
            });
            if self.seats.are_homes_since(mark) {
                return;
            }
            out.clear();
        }
        let Scratch { track, .. } = scratch;
        self.walk(pin, prompt, false, track, |at, word, blocks| {
            each_bit(at, word, |slot| {
                let owner = self.seats.owner(slot);
                if owner.plane == Plane::Held(Tier::Device) {
                    out.push(Depth::new(owner.worker, blocks));
                }
            });
        });
    }

    /// Combines each worker's matches in its planes.
    fn gather(&self, pin: &Pin<'_>, only_who: bool, scratch: &mut Scratch, out: &mut Vec<Match>) {
        let Scratch { track: Track { path, .. }, found, places, homes, .. } = scratch;
        homes.clear();
        places.resize(self.seats.words() * 64, 0);
        // Slots opened from here on are left to the next query.
        let known = places.len();
        let mut place = |home: u16, homes: &mut Vec<u16>, out: &mut Vec<Match>| {
            let at = places[usize::from(home)] as usize;
            // An entry left over from another query does not belong to this home.
            if homes.get(at) == Some(&home) {
                return at;
            }
            places[usize::from(home)] = out.len() as u32;
            homes.push(home);
            let worker = self.seats.owner(home).worker;
            out.push(Match::on_device(worker, 0));
            out.len() - 1
        };
        for (slot, depth) in found.iter() {
            let owner = self.seats.owner(*slot);
            match owner.plane {
                _ if usize::from(owner.home) >= known => {}
                Plane::Predicted if only_who => {}
                Plane::Predicted => {
                    let at = place(owner.home, homes, out);
                    out[at].predicted = *depth;
                }
                Plane::Held(_) => {
                    let at = place(owner.home, homes, out);
                    let depth = *depth;
                    let all = &mut out[at];
                    (all.device, all.host, all.disk, all.external) = (depth, depth, depth, depth);
                }
            }
        }
        if let Some((first, ..)) = path.first() {
            for stretch in self.runs.get(pin, *first).cover().stretches() {
                let owner = self.seats.owner(stretch.slot);
                let is_known = usize::from(owner.home) < known;
                if stretch.start == 0 && !owner.plane.is_prefix() && is_known {
                    place(owner.home, homes, out);
                }
            }
            for at in 0..out.len() {
                if let Some(slots) = self.seats.lower_slots(homes[at]) {
                    self.go_lower(pin, slots, path, &mut out[at]);
                }
            }
        }
        out.retain(|found| found.external > 0 || found.predicted > 0);
    }

    /// Continues from a worker's device depth through its lower tiers.
    fn go_lower(
        &self,
        pin: &Pin<'_>,
        slots: [u16; 3],
        path: &[(RunId, u32, u32)],
        found: &mut Match,
    ) {
        let mut depth = found.device;
        let mut at = path.partition_point(|(_, before, blocks)| before + blocks <= depth);
        for (slot, reach) in slots.into_iter().zip(1..) {
            while let Some((run, before, blocks)) = path.get(at) {
                let offset = (depth - before) as u16;
                let end = self
                    .runs
                    .get(pin, *run)
                    .cover()
                    .stretches()
                    .find(|s| s.slot == slot && s.start <= offset && offset < s.end)
                    .map(|s| u32::from(s.end));
                let Some(end) = end else { break };
                depth = before + end.min(*blocks);
                if end >= *blocks {
                    at += 1;
                } else {
                    break;
                }
            }
            match reach {
                1 => (found.host, found.disk, found.external) = (depth, depth, depth),
                2 => (found.disk, found.external) = (depth, depth),
                _ => found.external = depth,
            }
        }
    }
}

/// With early exit, the last worker is reported at the depth where it became the only one.
fn cut_last(out: &mut [Match]) {
    let deepest = out.iter().map(|found| found.device).max().unwrap_or(0);
    let mut rest = 0;
    let mut last = None;
    for (at, found) in out.iter().enumerate() {
        if found.device == deepest && last.is_none() {
            last = Some(at);
        } else {
            rest = rest.max(found.device);
        }
    }
    if let Some(at) = last
        && rest < deepest
    {
        let depth = rest + 1;
        let found = &mut out[at];
        (found.device, found.host, found.disk, found.external) = (depth, depth, depth, depth);
    }
}

const _: () = assert!(Tier::Device as usize == 0);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_all_and_none_is_long() {
        let lens = [0, 1, 5, 600, BLOCKS_PER_PIN, BLOCKS_PER_PIN + 1, 40_000];
        let labels: Vec<u64> = (0..40_000).collect();
        let prompts: Vec<&[u64]> =
            (0..1_000_usize).map(|n| &labels[..lens[n * 3 % lens.len()]]).collect();
        let mut seen = 0;
        let mut alone = 0;
        for part in parts(&prompts) {
            assert!(part.iter().zip(&prompts[seen..]).all(|(a, b)| a.len() == b.len()));
            seen += part.len();
            let blocks: usize = part.iter().map(|prompt| prompt.len()).sum();
            assert!(!part.is_empty() && part.len() <= PROMPTS_PER_PIN);
            assert!(blocks <= BLOCKS_PER_PIN || part.len() == 1);
            alone += usize::from(blocks > BLOCKS_PER_PIN);
        }
        assert_eq!(seen, prompts.len());
        assert!(alone > 100);
        assert_eq!(parts(&prompts[..0]).count(), 0);
        assert_eq!(parts(&[&labels[..1]; 65]).map(<[_]>::len).collect::<Vec<_>>(), [32, 32, 1]);
    }
}
