//! An immutable set of worker slots: who holds a block.
//!
//! Changes make a new set; a reader that has the old one keeps a whole answer.

use smallvec::SmallVec;

/// Slots kept in place, without a heap allocation.
const FEW: usize = 11;

/// A set of slots. Equal sets have equal forms: the form follows from size and largest slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum HolderSet {
    /// Up to [`FEW`], ascending.
    Few { len: u8, slots: [u16; FEW] },
    /// Ascending; where a list is smaller than a bitset.
    List(Box<[u16]>),
    /// Bit `s % 64` of word `s / 64`; the last word is never 0.
    Bits(Box<[u64]>),
}

/// A set seen as what it is made of.
pub(super) enum View<'a> {
    /// Ascending slots.
    Slots(&'a [u16]),
    /// Words of a bitset.
    Words(&'a [u64]),
}

/// Calls `each` for every slot in `word`, the `at`-th of a bitset.
pub(super) fn each_bit(at: usize, mut word: u64, mut each: impl FnMut(u16)) {
    while word != 0 {
        // Slots are u16, so a bitset has at most 1,024 words.
        each((at * 64 + word.trailing_zeros() as usize) as u16);
        word &= word - 1;
    }
}

impl HolderSet {
    /// Nobody.
    pub const EMPTY: Self = Self::Few { len: 0, slots: [0; FEW] };

    /// What the set is made of.
    pub fn view(&self) -> View<'_> {
        match self {
            Self::Few { len, slots } => View::Slots(&slots[..usize::from(*len)]),
            Self::List(slots) => View::Slots(slots),
            Self::Bits(words) => View::Words(words),
        }
    }

    /// Whether nobody is in it.
    pub fn is_empty(&self) -> bool {
        matches!(self, Self::Few { len: 0, .. })
    }

    /// Whether `slot` is in it.
    pub fn contains(&self, slot: u16) -> bool {
        match self.view() {
            View::Slots(slots) => slots.contains(&slot),
            View::Words(words) => has(words, slot),
        }
    }

    /// The set with `slot`; `None` when it is in already.
    pub fn with(&self, slot: u16) -> Option<Self> {
        if self.contains(slot) {
            return None;
        }
        if let Self::Bits(words) = self
            && usize::from(slot) / 64 < words.len()
        {
            let mut words = words.clone();
            words[usize::from(slot) / 64] |= 1 << (slot % 64);
            return Some(Self::Bits(words));
        }
        let mut slots = self.collect();
        let at = slots.partition_point(|&s| s < slot);
        slots.insert(at, slot);
        Some(Self::from_sorted(&slots))
    }

    /// The set without `slot`; `None` when it is not in.
    pub fn without(&self, slot: u16) -> Option<Self> {
        if !self.contains(slot) {
            return None;
        }
        let mut slots = self.collect();
        slots.retain(|s| *s != slot);
        Some(Self::from_sorted(&slots))
    }

    /// Calls `each` for every slot, ascending.
    pub fn for_each(&self, mut each: impl FnMut(u16)) {
        match self.view() {
            View::Slots(slots) => slots.iter().copied().for_each(each),
            View::Words(words) => {
                words.iter().enumerate().for_each(|(at, &word)| each_bit(at, word, &mut each));
            }
        }
    }

    /// Bytes on the heap.
    pub fn heap_bytes(&self) -> usize {
        match self {
            Self::Few { .. } => 0,
            Self::List(slots) => size_of_val::<[u16]>(slots),
            Self::Bits(words) => size_of_val::<[u64]>(words),
        }
    }

    fn collect(&self) -> SmallVec<[u16; 64]> {
        let mut all = SmallVec::new();
        self.for_each(|slot| all.push(slot));
        all
    }

    fn from_sorted(sorted: &[u16]) -> Self {
        let words = sorted.last().map_or(0, |&max| usize::from(max) / 64 + 1);
        if sorted.len() <= FEW {
            let mut slots = [0; FEW];
            slots[..sorted.len()].copy_from_slice(sorted);
            Self::Few { len: sorted.len() as u8, slots }
        } else if size_of_val(sorted) < words * size_of::<u64>() {
            Self::List(sorted.into())
        } else {
            let mut bits = vec![0_u64; words];
            sorted.iter().for_each(|&s| bits[usize::from(s) / 64] |= 1 << (s % 64));
            Self::Bits(bits.into())
        }
    }
}

/// Whether `slot` is in the bitset `words`.
pub(super) fn has(words: &[u64], slot: u16) -> bool {
    words.get(usize::from(slot) / 64).is_some_and(|word| word >> (slot % 64) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn sorted(set: &HolderSet) -> Vec<u16> {
        let mut all = Vec::new();
        set.for_each(|s| all.push(s));
        all
    }

    #[test]
    fn a_set_is_three_words() {
        assert_eq!(size_of::<HolderSet>(), 24);
    }

    #[test]
    fn agrees_with_a_tree_set_in_every_form() {
        // Strides reach all three forms: dense, sparse, and both ends of the slot range.
        let mut forms = BTreeSet::new();
        for stride in [1_usize, 5, 63, 64, 65, 300] {
            let (mut set, mut twin) = (HolderSet::EMPTY, BTreeSet::new());
            let order: Vec<u16> =
                (0..200).map(|i| ((i * 89 % 200) * stride % 65_535) as u16).collect();
            for &slot in &order {
                match set.with(slot) {
                    Some(next) => {
                        assert!(twin.insert(slot));
                        set = next;
                    }
                    None => assert!(!twin.insert(slot)),
                }
                assert!(
                    set.contains(slot) && !set.contains(slot + 1) || twin.contains(&(slot + 1))
                );
                assert_eq!(sorted(&set), twin.iter().copied().collect::<Vec<_>>());
                assert_eq!(set, HolderSet::from_sorted(&sorted(&set)), "one form per set");
                forms.insert(match set {
                    HolderSet::Few { .. } => 0,
                    HolderSet::List(_) => 1,
                    HolderSet::Bits(_) => 2,
                });
            }
            for &slot in order.iter().rev() {
                match set.without(slot) {
                    Some(next) => {
                        assert!(twin.remove(&slot));
                        set = next;
                    }
                    None => assert!(!twin.remove(&slot)),
                }
                assert_eq!(sorted(&set), twin.iter().copied().collect::<Vec<_>>());
                assert_eq!(set, HolderSet::from_sorted(&sorted(&set)), "one form per set");
            }
            assert!(set.is_empty() && set == HolderSet::EMPTY);
        }
        assert_eq!(forms.len(), 3);
    }

    #[test]
    fn the_last_slot_fits() {
        let set = HolderSet::EMPTY.with(u16::MAX - 1).and_then(|set| set.with(0));
        assert_eq!(set.map(|s| sorted(&s)), Some(vec![0, u16::MAX - 1]));
    }
}
