//! The query: down the runs that spell the prompt, narrowing the set of holders that have all so far.

use super::Shared;
use super::seats::Plane;
use crate::ids::Tier;
use crate::index::arena::cover::{Cover, Prefix, WHOLE, each_bit};
use crate::index::arena::epoch::Pin;
use crate::index::arena::runs::{ROOT, RunId};
use crate::index::matches::Match;

/// What a walk needs beside its answer; kept between queries so that none allocates.
#[derive(Debug, Default)]
pub(in crate::index) struct Scratch {
    /// Slots that cover every block so far, and those of the run being looked at.
    alive: Vec<u64>,
    next: Vec<u64>,
    /// Slots and how far they got.
    found: Vec<(u16, u32)>,
    /// Runs of the walk: number, blocks before it, blocks of it.
    path: Vec<(RunId, u32, u32)>,
    /// Home slot -> place in the answer, where it is that slot's.
    places: Vec<u32>,
}

/// How many leading labels are equal.
#[inline]
pub(super) fn common(labels: &[u64], prompt: &[u64]) -> usize {
    let len = labels.len().min(prompt.len());
    let (labels, prompt) = (&labels[..len], &prompt[..len]);
    let mut at = 0;
    // Eight at a time without a branch between them: the compiler makes vector instructions of it.
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

    /// Walks the device and the predictions. Fills `found` with every slot that covers a first block.
    fn walk(&self, pin: &Pin<'_>, prompt: &[u64], only_who: bool, scratch: &mut Scratch) {
        let Scratch { alive, next, found, path, .. } = scratch;
        found.clear();
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
                // A slot opened since the walk began is left for the next query.
                if word >= words || alive[word] & bit == 0 {
                    return;
                }
                alive[word] &= !bit;
                let cut = usize::from(cut);
                if cut >= matched && goes_on {
                    next[word] |= bit;
                } else {
                    found.push((slot, (before + cut.min(matched)) as u32));
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
                            } else {
                                each_bit(at, here, |slot| found.push((slot, depth)));
                            }
                        }
                    }
                }
            }
            if !is_first {
                for (at, word) in alive.iter().enumerate() {
                    each_bit(at, *word, |slot| found.push((slot, before as u32)));
                }
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
                        // At least one deeper than all others, which is all that is asked for.
                        for (at, word) in alive.iter().enumerate() {
                            each_bit(at, *word, |slot| found.push((slot, before as u32)));
                        }
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
        self.walk(pin, prompt, only_who, scratch);
        if !self.seats.has_others() {
            out.extend(scratch.found.iter().map(|(slot, depth)| {
                let worker = self.seats.owner(*slot).worker;
                Match {
                    worker,
                    device: *depth,
                    host: *depth,
                    disk: *depth,
                    external: *depth,
                    predicted: 0,
                }
            }));
        } else {
            self.gather(pin, only_who, scratch, out);
        }
        if only_who {
            cut_last(out);
        }
    }

    /// Puts together what was found of each worker in its planes.
    fn gather(&self, pin: &Pin<'_>, only_who: bool, scratch: &mut Scratch, out: &mut Vec<Match>) {
        let Scratch { found, path, places, .. } = scratch;
        places.resize(self.seats.words() * 64, 0);
        // Slots opened from here on are left for the next query.
        let known = places.len();
        let mut homes: smallvec::SmallVec<[u16; 32]> = smallvec::SmallVec::new();
        let mut place = |home: u16, out: &mut Vec<Match>| {
            let at = places[usize::from(home)] as usize;
            // Left over from another query, the place is not this home's.
            if homes.get(at) == Some(&home) {
                return at;
            }
            places[usize::from(home)] = out.len() as u32;
            homes.push(home);
            let worker = self.seats.owner(home).worker;
            out.push(Match { worker, device: 0, host: 0, disk: 0, external: 0, predicted: 0 });
            out.len() - 1
        };
        for (slot, depth) in found.iter() {
            let owner = self.seats.owner(*slot);
            match owner.plane {
                _ if usize::from(owner.home) >= known => {}
                Plane::Predicted if only_who => {}
                Plane::Predicted => {
                    let at = place(owner.home, out);
                    out[at].predicted = *depth;
                }
                Plane::Held(_) => {
                    let at = place(owner.home, out);
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
                    place(owner.home, out);
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

    /// Goes on from a worker's device depth through its lower tiers.
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

/// With early exit, the last worker left is reported at the depth where it was left alone.
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
