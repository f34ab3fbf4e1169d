//! The workers that hold one block now, with reference counts.

/// The weight of a full block. Fractions are integers in units of this, so that adding and
/// subtracting never drifts as floats would.
pub(super) const WHOLE: u16 = 1 << 15;

/// A list shorter than this is never replaced by an array over all slots.
const FEW_MIN: usize = 16;

#[derive(Debug, Clone, Copy)]
pub(super) struct Holder {
    slot: u16,
    fraction: u16,
    references: u32,
}

/// The workers that hold one block: a single one, a sorted list while they are few, or an array
/// over all slots with a bitmap once they are a quarter of the fleet.
///
/// The array costs at most four times as much as the list, and a shared system prompt that is
/// active everywhere costs one bitmap per block instead of thousands of list entries. Most blocks
/// of a fleet have one holder: at 16 bytes, two of them fit into a cache line of the map.
#[derive(Debug)]
pub(super) enum Holders {
    One(Holder),
    // Boxed twice, for the size above.
    #[allow(clippy::box_collection)]
    Few(Box<Vec<Holder>>),
    Many(Box<Many>),
}

#[derive(Debug)]
pub(super) struct Many {
    cells: Vec<(u32, u16)>,
    bits: Vec<u64>,
    len: usize,
}

impl Holders {
    /// The block's first reference.
    pub(super) fn new(slot: u16) -> Self {
        Self::One(Holder { slot, fraction: WHOLE, references: 1 })
    }

    /// Number of workers that hold the block.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::One(_) => 1,
            Self::Few(list) => list.len(),
            Self::Many(many) => many.len,
        }
    }

    /// Adds a reference of `slot`; true if it is the slot's first. `slot_count` is the number of
    /// slots in the table.
    pub(super) fn acquire(&mut self, slot: u16, slot_count: usize) -> bool {
        if let Self::One(only) = self {
            if only.slot == slot {
                only.references += 1;
                return false;
            }
            *self = Self::Few(Box::new(vec![*only]));
        }
        match self {
            Self::One(_) => unreachable!("became a list above"),
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

    /// Drops a reference of `slot`. If it was the slot's last: the block's fraction, and whether
    /// the block has no holders any more (then it must not be used again).
    pub(super) fn release(&mut self, slot: u16) -> Option<(u16, bool)> {
        let fraction = match self {
            Self::One(only) if only.slot != slot => return None,
            Self::One(only) => {
                only.references -= 1;
                return (only.references == 0).then_some((only.fraction, true));
            }
            Self::Few(list) => {
                let at = list.binary_search_by_key(&slot, |holder| holder.slot).ok()?;
                list[at].references -= 1;
                if list[at].references > 0 {
                    return None;
                }
                list.remove(at).fraction
            }
            Self::Many(many) => many.release(slot)?,
        };
        match self {
            Self::Few(list) if list.len() == 1 => *self = Self::One(list[0]),
            // Half of the threshold for the array, so that a block near it does not flap.
            Self::Many(many) if many.len < FEW_MIN.max(many.cells.len() / 4) / 2 => {
                *self = Self::Few(Box::new(many.list()));
            }
            _ => {}
        }
        Some((fraction, false))
    }

    /// Sets the weight of a block with exactly one reference of `slot` to `fraction`; returns the
    /// previous fraction, `None` (and no change) if the block is shared or not held.
    pub(super) fn weigh(&mut self, slot: u16, fraction: u16) -> Option<u16> {
        let (references, held) = match self {
            Self::One(only) if only.slot == slot => (only.references, &mut only.fraction),
            Self::One(_) => return None,
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
            Self::One(only) => counts[usize::from(only.slot)] += blocks,
            Self::Few(list) => {
                for holder in list.iter() {
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

    /// Adds `blocks` to the count of every holder that does not hold the `narrower` block, whose
    /// holders are a subset. False (and nothing added) if that is no cheaper than
    /// [`credit`](Self::credit): then the caller credits all and starts over.
    pub(super) fn credit_without(&self, narrower: &Self, blocks: u32, counts: &mut [u32]) -> bool {
        let (Self::Many(wide), Self::Many(narrow)) = (self, narrower) else { return false };
        for (word, &bits) in wide.bits.iter().enumerate() {
            let held = narrow.bits.get(word).copied().unwrap_or(0);
            debug_assert_eq!(held & !bits, 0, "a nested block has a holder its parent has not");
            credit_bits(word, bits & !held, blocks, counts);
        }
        true
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

    fn list(&self) -> Vec<Holder> {
        let held = self.cells.iter().enumerate().filter(|(_, cell)| cell.0 > 0);
        held.map(|(slot, &(references, fraction))| Holder {
            slot: slot as u16,
            fraction,
            references,
        })
        .collect()
    }
}
