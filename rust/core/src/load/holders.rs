//! The workers that use a run of blocks, with reference counts.

use smallvec::{SmallVec, smallvec};

/// The weight of a full block. Fractions are integers in units of this, so that adding and
/// subtracting never drifts as floats would.
pub(super) const WHOLE: u16 = 1 << 15;

/// A list shorter than this is never replaced by an array over all slots.
const FEW_MIN: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Holder {
    slot: u16,
    fraction: u16,
    references: u32,
}

/// The workers that hold a run of blocks: a sorted list while they are few, or an array over all
/// slots with a bitmap once they are a quarter of the fleet.
///
/// The array costs at most four times as much as the list. With it, a shared system prompt that is
/// active everywhere costs a bitmap instead of thousands of list entries.
#[derive(Debug, Clone)]
pub(super) enum Holders {
    Few(SmallVec<[Holder; 2]>),
    Many(Box<Many>),
}

#[derive(Debug, Clone)]
pub(super) struct Many {
    cells: Vec<(u32, u16)>,
    bits: Vec<u64>,
    len: usize,
}

impl Holders {
    /// Without holders.
    pub(super) fn none() -> Self {
        Self::Few(smallvec![])
    }

    /// Number of workers.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Few(list) => list.len(),
            Self::Many(many) => many.len,
        }
    }

    /// Adds a reference of `slot`; true if it is the slot's first. `slot_count` is the number of
    /// slots in the table.
    pub(super) fn acquire(&mut self, slot: u16, slot_count: usize) -> bool {
        match self {
            Self::Few(list) => match list.binary_search_by_key(&slot, |holder| holder.slot) {
                Ok(at) => {
                    list[at].references += 1;
                    false
                }
                Err(at) => {
                    list.insert(at, Holder { slot, fraction: WHOLE, references: 1 });
                    if list.len() > FEW_MIN.max(slot_count / 4) {
                        *self = Self::Many(Box::new(Many::of(list, slot_count)));
                    }
                    true
                }
            },
            Self::Many(many) => many.acquire(slot),
        }
    }

    /// Drops a reference of `slot`. If it was the slot's last: the fraction of its blocks.
    pub(super) fn release(&mut self, slot: u16) -> Option<u16> {
        match self {
            Self::Few(list) => {
                let at = list.binary_search_by_key(&slot, |holder| holder.slot).ok()?;
                list[at].references -= 1;
                (list[at].references == 0).then(|| list.remove(at).fraction)
            }
            Self::Many(many) => {
                let fraction = many.release(slot)?;
                // Half of the threshold for the array, so that a run near it does not flap.
                if many.len < FEW_MIN.max(many.cells.len() / 4) / 2 {
                    *self = Self::Few(many.list());
                }
                Some(fraction)
            }
        }
    }

    /// Sets the weight of blocks with exactly one reference of `slot` to `fraction`; returns the
    /// previous fraction, `None` (and no change) if they are shared or not held.
    pub(super) fn weigh(&mut self, slot: u16, fraction: u16) -> Option<u16> {
        let (references, held) = match self {
            Self::Few(list) => {
                let at = list.binary_search_by_key(&slot, |holder| holder.slot).ok()?;
                let holder = &mut list[at];
                (holder.references, &mut holder.fraction)
            }
            Self::Many(many) => {
                let cell = many.cells.get_mut(usize::from(slot))?;
                (cell.0, &mut cell.1)
            }
        };
        (references == 1).then(|| std::mem::replace(held, fraction))
    }

    /// Adds `blocks` to the count of every holder.
    pub(super) fn credit(&self, blocks: u32, counts: &mut [u32]) {
        match self {
            Self::Few(list) => {
                for holder in list {
                    counts[usize::from(holder.slot)] += blocks;
                }
            }
            Self::Many(many) => {
                for (word, &bits) in many.bits.iter().enumerate() {
                    credit_bits(word, bits, blocks, counts);
                }
            }
        }
    }

    /// Adds `blocks` to the count of every holder that does not hold the `narrower` run, whose
    /// holders are a subset. False (and nothing added) if that is no cheaper than
    /// [`credit`](Self::credit): then the caller credits all and starts over.
    pub(super) fn credit_without(&self, narrower: &Self, blocks: u32, counts: &mut [u32]) -> bool {
        if self.len() == narrower.len() {
            return true;
        }
        let (Self::Many(wide), Self::Many(narrow)) = (self, narrower) else { return false };
        for (word, &bits) in wide.bits.iter().enumerate() {
            let held = narrow.bits.get(word).copied().unwrap_or(0);
            debug_assert_eq!(held & !bits, 0, "a run has a holder that the run before lacks");
            credit_bits(word, bits & !held, blocks, counts);
        }
        true
    }

    /// Whether references and weights equal those of the `narrower` run, whose holders are a subset.
    pub(super) fn equal(&self, narrower: &Self) -> bool {
        self.len() == narrower.len()
            && match (self, narrower) {
                (Self::Few(wide), Self::Few(narrow)) => wide == narrow,
                (Self::Many(wide), Self::Many(narrow)) => {
                    wide.slots().all(|slot| narrow.cells.get(slot) == Some(&wide.cells[slot]))
                }
                _ => self.list() == narrower.list(),
            }
    }

    fn list(&self) -> SmallVec<[Holder; 2]> {
        match self {
            Self::Few(list) => list.clone(),
            Self::Many(many) => many.list(),
        }
    }
}

fn credit_bits(word: usize, mut bits: u64, blocks: u32, counts: &mut [u32]) {
    while bits != 0 {
        counts[word * 64 + bits.trailing_zeros() as usize] += blocks;
        bits &= bits - 1;
    }
}

impl Many {
    fn of(list: &[Holder], slot_count: usize) -> Self {
        let mut many = Self { cells: Vec::new(), bits: Vec::new(), len: list.len() };
        // The list is sorted, so its last slot is the largest. Slots may be added later.
        let last = list.last().map_or(0, |holder| usize::from(holder.slot) + 1);
        many.resize(slot_count.max(last));
        for holder in list {
            let slot = usize::from(holder.slot);
            many.cells[slot] = (holder.references, holder.fraction);
            many.bits[slot / 64] |= 1 << (slot % 64);
        }
        many
    }

    fn resize(&mut self, slot_count: usize) {
        self.cells.resize(slot_count, (0, WHOLE));
        self.bits.resize(slot_count.div_ceil(64), 0);
    }

    fn acquire(&mut self, slot: u16) -> bool {
        let slot = usize::from(slot);
        if slot >= self.cells.len() {
            self.resize(slot + 1);
        }
        let cell = &mut self.cells[slot];
        cell.0 += 1;
        if cell.0 > 1 {
            return false;
        }
        cell.1 = WHOLE;
        self.bits[slot / 64] |= 1 << (slot % 64);
        self.len += 1;
        true
    }

    fn release(&mut self, slot: u16) -> Option<u16> {
        let slot = usize::from(slot);
        let cell = self.cells.get_mut(slot).filter(|cell| cell.0 > 0)?;
        cell.0 -= 1;
        if cell.0 > 0 {
            return None;
        }
        self.bits[slot / 64] &= !(1 << (slot % 64));
        self.len -= 1;
        Some(cell.1)
    }

    fn slots(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.cells.len()).filter(|&slot| self.cells[slot].0 > 0)
    }

    fn list(&self) -> SmallVec<[Holder; 2]> {
        let holder = |slot: usize| {
            let (references, fraction) = self.cells[slot];
            Holder { slot: slot as u16, fraction, references }
        };
        self.slots().map(holder).collect()
    }
}
