//! Which workers cover how much of a run: one word, replaced as a whole, so that a reader sees one
//! moment.
//!
//! A word is empty (0), or contains up to two prefix entries itself (lowest bit set), or is the
//! address of an immutable block of words. A replaced block is freed once no reader can see it.

use std::marker::PhantomData;

/// Cut of an entry that covers its run to its end, however long the run is.
pub(in crate::index) const WHOLE: u16 = 0x7fff;

/// From this number on, entries that cover their run completely are kept in a bitset.
const BITSET_FROM: usize = 8;
/// Words before the first bitset of a block.
const HEAD: usize = 2;
const NOBODY: u64 = 0xffff;

/// One holder of a leading part of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::index) struct Prefix {
    pub slot: u16,
    /// Blocks from the run's first on, or [`WHOLE`]; never 0.
    pub cut: u16,
}

/// One holder of a stretch of a run in a lower tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::index) struct Stretch {
    pub slot: u16,
    pub start: u16,
    pub end: u16,
}

/// A word's content in editable form. Kept between changes, so that no change allocates.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::index) struct Entries {
    /// Ascending by slot, one per slot.
    pub prefixes: Vec<Prefix>,
    /// Ascending.
    pub stretches: Vec<Stretch>,
}

impl Entries {
    /// Sets the number of leading blocks that `slot` covers; 0 removes the slot.
    pub fn set_prefix(&mut self, slot: u16, cut: u16) {
        match self.prefixes.binary_search_by_key(&slot, |entry| entry.slot) {
            Ok(at) if cut == 0 => _ = self.prefixes.remove(at),
            Ok(at) => self.prefixes[at].cut = cut,
            Err(_) if cut == 0 => {}
            Err(at) => self.prefixes.insert(at, Prefix { slot, cut }),
        }
    }

    /// Bytes on the heap.
    pub fn bytes(&self) -> usize {
        self.prefixes.capacity() * size_of::<Prefix>()
            + self.stretches.capacity() * size_of::<Stretch>()
    }

    /// Sets the stretches of `slot`.
    pub fn set_stretches(&mut self, slot: u16, stretches: impl Iterator<Item = (u16, u16)>) {
        self.stretches.retain(|entry| entry.slot != slot);
        self.stretches.extend(stretches.map(|(start, end)| Stretch { slot, start, end }));
        self.stretches.sort_unstable();
    }
}

fn inline(prefix: Option<Prefix>) -> u64 {
    prefix.map_or(NOBODY, |p| u64::from(p.slot)) | u64::from(prefix.map_or(0, |p| p.cut)) << 16
}

/// Packs two entries into a word: bit 0 is the marker, followed by 31 bits per entry (the last bit
/// of the second cut, which is at most [`WHOLE`], is free).
fn pack(first: Option<Prefix>, second: Option<Prefix>) -> u64 {
    1 | inline(first) << 1 | inline(second) << 32
}

fn unpack(half: u64) -> Option<Prefix> {
    let prefix = Prefix { slot: half as u16, cut: (half >> 16) as u16 & WHOLE };
    (u64::from(prefix.slot) != NOBODY).then_some(prefix)
}

/// Encodes a word. The caller must free a block's words with [`free`].
pub(in crate::index) fn encode(entries: &Entries) -> u64 {
    let Entries { prefixes, stretches } = entries;
    if stretches.is_empty() && prefixes.len() <= 2 {
        return match prefixes.as_slice() {
            [] => 0,
            [one] => pack(Some(*one), None),
            [one, two, ..] => pack(Some(*one), Some(*two)),
        };
    }
    let block = Layout::of(entries).build(entries);
    let address = Box::into_raw(block).cast::<u64>().expose_provenance() as u64;
    debug_assert!(address != 0 && address & 7 == 0, "words are aligned");
    address
}

/// Layout of a block: head, bitset of complete holders, groups of equal cut (cut, bitset), single
/// prefixes, stretches.
struct Layout {
    /// Words of a bitset; 0 without one.
    words: usize,
    whole_in_set: bool,
    /// Cuts shared by so many entries that a bitset is shorter than a list.
    groups: Vec<u16>,
}

impl Layout {
    fn of(entries: &Entries) -> Self {
        let words = entries.prefixes.last().map_or(0, |last| usize::from(last.slot) / 64 + 1);
        let whole = entries.prefixes.iter().filter(|p| p.cut == WHOLE).count();
        let mut groups = Vec::new();
        if entries.prefixes.len() - whole > words {
            let mut cuts: Vec<u16> =
                entries.prefixes.iter().map(|p| p.cut).filter(|cut| *cut != WHOLE).collect();
            cuts.sort_unstable();
            let shared = |same: &[u16]| same.len() > words + 1;
            groups.extend(cuts.chunk_by(|a, b| a == b).filter(|s| shared(s)).map(|same| same[0]));
        }
        let whole_in_set = whole >= BITSET_FROM && whole > words;
        let words = if whole_in_set || !groups.is_empty() { words } else { 0 };
        Self { words, whole_in_set, groups }
    }

    fn build(&self, entries: &Entries) -> Box<[u64]> {
        let words = self.words;
        let set_at = |group: usize| HEAD + words + group * (words + 1);
        let mut block = vec![0; set_at(self.groups.len())];
        for (at, cut) in self.groups.iter().enumerate() {
            block[set_at(at)] = u64::from(*cut);
        }
        let mut singles = 0;
        let mut tail = Vec::new();
        for prefix in &entries.prefixes {
            let set = if prefix.cut == WHOLE {
                self.whole_in_set.then_some(HEAD)
            } else {
                self.groups.binary_search(&prefix.cut).ok().map(|at| set_at(at) + 1)
            };
            match set {
                Some(at) => block[at + usize::from(prefix.slot) / 64] |= 1 << (prefix.slot % 64),
                None => {
                    tail.push(inline(Some(*prefix)));
                    singles += 1;
                }
            }
        }
        block.append(&mut tail);
        block.extend(
            entries
                .stretches
                .iter()
                .map(|s| u64::from(s.slot) | u64::from(s.start) << 16 | u64::from(s.end) << 32),
        );
        block[0] = words as u64 | (self.groups.len() as u64) << 16 | singles << 32;
        block[1] = entries.stretches.len() as u64;
        block.into_boxed_slice()
    }
}

/// A word as a reader sees it; its block lives as long as the pin behind `'a`.
#[derive(Clone, Copy)]
pub(in crate::index) enum Cover<'a> {
    /// Up to two entries.
    Few(u64),
    /// More than two entries.
    Block(Block<'a>),
}

/// An immutable block of words.
#[derive(Clone, Copy)]
pub(in crate::index) struct Block<'a>(&'a [u64]);

fn lengths(head: [u64; 2]) -> (usize, usize, usize, usize) {
    let words = head[0] as u16 as usize;
    let groups = (head[0] >> 16) as u16 as usize;
    (words, groups, (head[0] >> 32) as usize, head[1] as usize)
}

fn total(head: [u64; 2]) -> usize {
    let (words, groups, singles, stretches) = lengths(head);
    HEAD + words + groups * (words + 1) + singles + stretches
}

impl<'a> Cover<'a> {
    /// Reads a word.
    ///
    /// # Safety
    /// `word` was made by [`encode`], and its block is not freed during `'a`.
    pub unsafe fn read(word: u64, _life: PhantomData<&'a ()>) -> Self {
        if word & 1 == 1 || word == 0 {
            return Self::Few(word);
        }
        let at = std::ptr::with_exposed_provenance::<u64>(word as usize);
        debug_assert!(at.is_aligned(), "a block's address");
        // Safety: a word that is neither empty nor inline is the address of a block that `encode` made,
        // which begins with two words that say how long it is; the caller keeps it alive.
        let block = unsafe { std::slice::from_raw_parts(at, total([*at, *at.add(1)])) };
        Self::Block(Block(block))
    }

    /// Calls `see` for every prefix entry.
    pub fn each_prefix(self, mut see: impl FnMut(Prefix)) {
        match self {
            Self::Few(0) => {}
            Self::Few(word) => {
                unpack(word >> 1 & 0x7fff_ffff).into_iter().for_each(&mut see);
                unpack(word >> 32).into_iter().for_each(&mut see);
            }
            Self::Block(block) => {
                let mut each = |set: &[u64], cut| {
                    for (at, word) in set.iter().enumerate() {
                        each_bit(at, *word, |slot| see(Prefix { slot, cut }));
                    }
                };
                each(block.whole_set(), WHOLE);
                block.groups().for_each(|(cut, set)| each(set, cut));
                block.singles().for_each(see);
            }
        }
    }

    /// Stretches of lower tiers, ascending by slot and start.
    pub fn stretches(self) -> impl Iterator<Item = Stretch> + 'a {
        let words: &'a [u64] = match self {
            Self::Few(_) => &[],
            Self::Block(Block(words)) => {
                let (.., stretches) = lengths([words[0], words[1]]);
                &words[words.len() - stretches..]
            }
        };
        words.iter().map(|word| Stretch {
            slot: *word as u16,
            start: (*word >> 16) as u16,
            end: (*word >> 32) as u16,
        })
    }

    /// Decodes the word for editing.
    pub fn decode(self, into: &mut Entries) {
        into.prefixes.clear();
        self.each_prefix(|prefix| into.prefixes.push(prefix));
        into.prefixes.sort_unstable();
        into.stretches.clear();
        into.stretches.extend(self.stretches());
    }
}

impl<'a> Block<'a> {
    fn lengths(self) -> (usize, usize, usize, usize) {
        lengths([self.0[0], self.0[1]])
    }

    /// Bitset of the slots that cover the whole run; empty if there is none.
    pub fn whole_set(self) -> &'a [u64] {
        &self.0[HEAD..HEAD + self.lengths().0]
    }

    /// Cuts, each with the bitset of the slots that cover exactly that much.
    pub fn groups(self) -> impl Iterator<Item = (u16, &'a [u64])> {
        let (words, groups, ..) = self.lengths();
        let from = HEAD + words;
        let words = &self.0[from..from + groups * (words + 1)];
        words.chunks_exact(self.lengths().0 + 1).map(|group| (group[0] as u16, &group[1..]))
    }

    /// Entries outside of all bitsets.
    pub fn singles(self) -> impl Iterator<Item = Prefix> + 'a {
        let (words, groups, singles, _) = self.lengths();
        let from = HEAD + words + groups * (words + 1);
        self.0[from..from + singles].iter().filter_map(|word| unpack(*word))
    }
}

/// Calls `see` with the number of every bit of the `at`th word of a set.
#[inline]
pub(in crate::index) fn each_bit(at: usize, mut word: u64, mut see: impl FnMut(u16)) {
    while word != 0 {
        see((at * 64) as u16 + word.trailing_zeros() as u16);
        word &= word - 1;
    }
}

/// Bytes that a word's block occupies.
///
/// # Safety
/// As [`Cover::read`].
pub(in crate::index) unsafe fn heap_bytes(word: u64) -> usize {
    // Safety: the caller's promise is passed on.
    match unsafe { Cover::read(word, PhantomData) } {
        Cover::Few(_) => 0,
        Cover::Block(block) => size_of_val(block.0),
    }
}

/// Frees a word's block.
///
/// # Safety
/// `word` was made by [`encode`], was not freed before, and no thread reads it any more.
pub(in crate::index) unsafe fn free(word: u64) {
    // Safety: the caller's promise is passed on.
    if let Cover::Block(block) = unsafe { Cover::read(word, PhantomData) } {
        let whole = std::ptr::slice_from_raw_parts_mut(
            std::ptr::with_exposed_provenance_mut::<u64>(word as usize),
            block.0.len(),
        );
        // Safety: `encode` made the block with `Box::into_raw`, its head has its length, and no
        // thread reads it any more.
        drop(unsafe { Box::from_raw(whole) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(entries: &Entries) -> usize {
        let word = encode(entries);
        let mut back = Entries::default();
        // Safety: just made, freed below.
        unsafe {
            Cover::read(word, PhantomData).decode(&mut back);
            assert_eq!(&back, entries);
            let bytes = heap_bytes(word);
            free(word);
            bytes
        }
    }

    #[test]
    fn what_goes_in_comes_out() {
        let mut entries = Entries::default();
        assert_eq!(round_trip(&entries), 0);
        entries.set_prefix(65_534, 16_384);
        entries.set_prefix(3, WHOLE);
        assert_eq!(round_trip(&entries), 0, "two fit into the word");
        entries.set_prefix(9, 1);
        assert_eq!(round_trip(&entries), (2 + 3) * 8);
        entries.set_stretches(70, [(0, 4), (9, 16_000)].into_iter());
        assert_eq!(round_trip(&entries), (2 + 3 + 2) * 8);
        entries.set_stretches(70, std::iter::empty());
        for slot in [65_534, 3, 9] {
            entries.set_prefix(slot, 0);
        }
        assert_eq!(entries, Entries::default());
    }

    #[test]
    fn many_holders_are_bitsets() {
        let mut entries = Entries::default();
        (0..1_000).for_each(|slot| entries.set_prefix(slot, WHOLE));
        assert_eq!(round_trip(&entries), (2 + 16) * 8);
        (0..400).for_each(|slot| entries.set_prefix(slot, 10));
        (400..450).for_each(|slot| entries.set_prefix(slot, slot));
        assert_eq!(round_trip(&entries), (2 + 16 + 17 + 50) * 8);
    }
}
