//! The single reverse map: block -> the workers that use it now, with reference counts.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry as Place;

/// The block directly before this one in the requests that hold it.
///
/// If every request that holds a block holds the same one directly before it, the workers of the
/// block are a subset of the workers of that one. Eight bytes: hashes equal to one of the two
/// numbers below are never taken for a parent, which costs time but not correctness.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Parent(u64);

impl Parent {
    /// It is the first block of its requests.
    const FIRST: Self = Self(0);
    /// Requests differ, so nothing can be concluded.
    const MIXED: Self = Self(1);

    fn of(hash: u64) -> Self {
        if hash > Self::MIXED.0 { Self(hash) } else { Self::MIXED }
    }

    fn is_block(self) -> bool {
        self.0 > Self::MIXED.0
    }
}

#[derive(Debug)]
struct Block {
    parent: Parent,
    holders: Holders,
}

/// Result of releasing a request's blocks on a worker.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Released {
    /// Blocks without users on the worker.
    pub(super) blocks: u64,
    /// Their discount from whole blocks, in units of `1 / WHOLE`.
    pub(super) discount: u64,
}

/// Blocks in use, with their workers.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    blocks: HashMap<u64, Block>,
}

impl Blocks {
    /// References every entry of `hashes` on `slot`; returns the number of blocks that are new to
    /// it.
    pub(super) fn acquire(&mut self, hashes: &[u64], slot: u16, slot_count: usize) -> u64 {
        let mut parent = Parent::FIRST;
        let mut added = 0;
        for &hash in hashes {
            added += u64::from(match self.blocks.entry(hash) {
                Place::Occupied(mut place) => {
                    let block = place.get_mut();
                    if block.parent != parent {
                        block.parent = Parent::MIXED;
                    }
                    block.holders.acquire(slot, slot_count)
                }
                Place::Vacant(place) => {
                    place.insert(Block { parent, holders: Holders::new(slot) });
                    true
                }
            });
            parent = Parent::of(hash);
        }
        added
    }

    /// Undo one [`acquire`](Self::acquire) of the same entries.
    pub(super) fn release(&mut self, hashes: &[u64], slot: u16) -> Released {
        let mut released = Released::default();
        for &hash in hashes {
            let Place::Occupied(mut place) = self.blocks.entry(hash) else { continue };
            if let Some((fraction, is_last)) = place.get_mut().holders.release(slot) {
                released.blocks += 1;
                released.discount += u64::from(WHOLE - fraction);
                if is_last {
                    place.remove();
                }
            }
        }
        // The end of a burst releases its memory; steady traffic never gets here.
        if self.blocks.is_empty() && self.blocks.capacity() > 4096 {
            self.blocks = HashMap::new();
        }
        released
    }

    /// Sets the weight of the entries with exactly one reference on `slot` to `fraction`; returns
    /// the change of the worker's discount, in units of `1 / WHOLE`.
    pub(super) fn weigh(&mut self, hashes: &[u64], slot: u16, fraction: u16) -> i64 {
        let mut change = 0;
        for hash in hashes {
            let block = self.blocks.get_mut(hash);
            if let Some(before) = block.and_then(|block| block.holders.weigh(slot, fraction)) {
                change += i64::from(before) - i64::from(fraction);
            }
        }
        change
    }

    /// Adds the number of entries of `hashes` that each slot uses now to `counts[slot]`.
    ///
    /// Along a chain of nested blocks a worker is credited once, where it drops out, and not once
    /// per block: a prompt that is active on every worker costs one pass over the workers.
    pub(super) fn count(&self, hashes: &[u64], counts: &mut [u32]) {
        // The holders of the previous block, and the number of blocks that they are still to be
        // credited with.
        let mut run: Option<(&Holders, u32)> = None;
        let mut before = Parent::FIRST;
        for &hash in hashes {
            let block = self.blocks.get(&hash);
            run = match (block, run) {
                (Some(block), Some((holders, owed)))
                    if before.is_block() && block.parent == before =>
                {
                    let is_same = holders.len() == block.holders.len();
                    if is_same || holders.credit_without(&block.holders, owed, counts) {
                        Some((&block.holders, owed + 1))
                    } else {
                        holders.credit(owed, counts);
                        Some((&block.holders, 1))
                    }
                }
                (block, run) => {
                    if let Some((holders, owed)) = run {
                        holders.credit(owed, counts);
                    }
                    block.map(|block| (&block.holders, 1))
                }
            };
            before = Parent::of(hash);
        }
        if let Some((holders, owed)) = run {
            holders.credit(owed, counts);
        }
    }

    /// Distinct blocks in use on any worker.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }
}

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
