//! Chain hash -> the block and who holds it: one lock-free table for all workers.
//!
//! A node is immutable. A change copies it and swaps the copy in, retrying when another worker's
//! change came between; so readers see a node whole or not at all, and wait for nobody.

use std::cell::Cell;
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use papaya::{HashMap, HashMapRef, LocalGuard, ResizeMode};

use super::holders::HolderSet;
use kvflash_core::ids::Tier;

/// The sets of the tiers below [`Tier::Device`], nearest first.
pub(super) type LowerSets = [HolderSet; 3];

/// Entries that a write moves while the table grows. A table doubles, so 2 would do to be done in
/// time; more ends the time in which queries look in two tables sooner.
const RESIZE_CHUNK: usize = 16;

/// One block: where it stands, and who holds it in which tier.
#[derive(Debug, Clone)]
pub(super) struct Node {
    local: u64,
    /// Chain hash of the parent; a prompt's first block, which has none, carries its own.
    parent: u64,
    device: HolderSet,
    /// Only when somebody holds the block in a lower tier; never all empty.
    lower: Option<Box<LowerSets>>,
}

impl Node {
    /// Who holds the block on the device.
    pub fn device(&self) -> &HolderSet {
        &self.device
    }

    /// Who holds it in the lower tiers, if anybody does.
    pub fn lower(&self) -> Option<&LowerSets> {
        self.lower.as_deref()
    }

    fn set(&self, tier: Tier) -> &HolderSet {
        match (tier, self.lower()) {
            (Tier::Device, _) => &self.device,
            (_, Some(sets)) => &sets[tier as usize - 1],
            (_, None) => &HolderSet::EMPTY,
        }
    }

    fn is_empty(&self) -> bool {
        self.device.is_empty() && self.lower.is_none()
    }

    fn heap_bytes(&self) -> usize {
        let lower = |sets: &LowerSets| {
            size_of::<LowerSets>() + sets.iter().map(HolderSet::heap_bytes).sum::<usize>()
        };
        self.device.heap_bytes() + self.lower().map_or(0, lower)
    }

    /// The node with the set of `tier` changed; `None` when the change changes nothing.
    fn changed(
        &self,
        tier: Tier,
        change: impl FnOnce(&HolderSet) -> Option<HolderSet>,
    ) -> Option<Self> {
        if tier == Tier::Device {
            return Some(Self {
                device: change(&self.device)?,
                lower: self.lower.clone(),
                ..*self
            });
        }
        let mut lower = match &self.lower {
            Some(sets) => sets.clone(),
            None => Box::new([HolderSet::EMPTY; 3]),
        };
        let set = &mut lower[tier as usize - 1];
        *set = change(set)?;
        let lower = lower.iter().any(|set| !set.is_empty()).then_some(lower);
        Some(Self { device: self.device.clone(), lower, ..*self })
    }
}

/// The table, read through one pin of the calling thread.
pub(super) type Pinned<'a> = HashMapRef<'a, u64, Node, Mix, LocalGuard<'a>>;

/// All blocks that anybody holds.
pub(super) struct Nodes {
    map: HashMap<u64, Node, Mix>,
    /// Bits set in lower-tier sets: a query walks those tiers only when there are any.
    lower_bits: AtomicUsize,
    heap_bytes: AtomicUsize,
}

impl Nodes {
    pub fn new(mix: Mix, expected_blocks: usize) -> Self {
        Self {
            // Growth moves a few entries with each write: nobody ever waits for a whole table.
            map: HashMap::builder()
                .capacity(expected_blocks)
                .hasher(mix)
                .resize_mode(ResizeMode::Incremental(RESIZE_CHUNK))
                .build(),
            lower_bits: AtomicUsize::new(0),
            heap_bytes: AtomicUsize::new(0),
        }
    }

    /// Opens the table to this thread; nodes read through the pin live as long as it does.
    pub fn pin(&self) -> Pinned<'_> {
        self.map.pin()
    }

    /// Distinct blocks.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether anybody holds a block below the device.
    pub fn has_lower(&self) -> bool {
        // A stale answer is an answer of a moment ago, which queries may give.
        self.lower_bits.load(Relaxed) != 0
    }

    /// Adds `slot` to the holders of a block in `tier`. False when it is there already.
    pub fn hold(
        &self,
        pin: &Pinned<'_>,
        chain: u64,
        (parent, local): (Option<u64>, u64),
        tier: Tier,
        slot: u16,
    ) -> bool {
        // Nobody else changes this worker's bit, so what is read here stays true.
        let is_new = match pin.get(&chain) {
            Some(node) if node.set(tier).contains(slot) => return false,
            found => found.is_none(),
        };
        let empty =
            Node { local, parent: parent.unwrap_or(chain), device: HolderSet::EMPTY, lower: None };
        // Update and insert in turn, not one `compute`: inserts made by `compute` do not help an
        // incremental resize along, and the tables chain up (papaya 0.2.5: ten times the time).
        // Most stored blocks are new to everybody: those begin with the insert.
        if is_new || !self.update(pin, chain, tier, |set| set.with(slot)) {
            loop {
                let fresh =
                    empty.changed(tier, |set| set.with(slot)).unwrap_or_else(|| empty.clone());
                let bytes = fresh.heap_bytes();
                if pin.try_insert(chain, fresh).is_ok() {
                    self.account(0, bytes);
                    break;
                }
                if self.update(pin, chain, tier, |set| set.with(slot)) {
                    break;
                }
            }
        }
        if tier != Tier::Device {
            self.lower_bits.fetch_add(1, Relaxed);
        }
        true
    }

    /// Takes `slot` from the holders of a block in `tier`; the last one takes the block with it.
    /// False when it is not among them.
    pub fn release(&self, pin: &Pinned<'_>, chain: u64, tier: Tier, slot: u16) -> bool {
        // As above: this worker's bit is this worker's.
        match pin.get(&chain) {
            Some(node) if node.set(tier).contains(slot) => {}
            _ => return false,
        }
        let is_last =
            |node: &Node| node.changed(tier, |set| set.without(slot)).is_none_or(|n| n.is_empty());
        if !self.remove_if(pin, chain, is_last) {
            self.update(pin, chain, tier, |set| set.without(slot));
            // Another worker may have left in between, thinking that this one stays.
            self.remove_if(pin, chain, Node::is_empty);
        }
        if tier != Tier::Device {
            self.lower_bits.fetch_sub(1, Relaxed);
        }
        true
    }

    /// Parent chain and local hash of a block; `None` when nobody holds it.
    pub fn content(pin: &Pinned<'_>, chain: u64) -> Option<(Option<u64>, u64)> {
        let node = pin.get(&chain)?;
        Some(((node.parent != chain).then_some(node.parent), node.local))
    }

    /// Bytes of the table and its nodes. Capacity is not told by the map: it is taken as the power of
    /// two above 4/3 of the blocks, with a pointer and a tag byte per place.
    pub fn estimated_bytes(&self) -> usize {
        let len = self.len();
        let places = (len * 4 / 3).next_power_of_two();
        // 16: what common allocators add and round up per allocation of this size.
        let node = size_of::<u64>() + size_of::<Node>() + 16;
        len * node + places * 9 + self.heap_bytes.load(Relaxed)
    }

    /// Changes the set of `tier` in a block that is there; false when it is not.
    fn update(
        &self,
        pin: &Pinned<'_>,
        chain: u64,
        tier: Tier,
        change: impl Fn(&HolderSet) -> Option<HolderSet>,
    ) -> bool {
        // Set anew by each attempt; the last one is the one that took effect.
        let old = Cell::new(0);
        let updated = pin.update(chain, |node| {
            old.set(node.heap_bytes());
            node.changed(tier, &change).unwrap_or_else(|| node.clone())
        });
        if let Some(node) = updated {
            self.account(old.get(), node.heap_bytes());
        }
        updated.is_some()
    }

    fn remove_if(&self, pin: &Pinned<'_>, chain: u64, test: impl Fn(&Node) -> bool) -> bool {
        match pin.remove_if(&chain, |_, node| test(node)) {
            Ok(Some((_, node))) => {
                self.account(node.heap_bytes(), 0);
                true
            }
            _ => false,
        }
    }

    /// Books heap bytes that became `new` from `old`.
    fn account(&self, old: usize, new: usize) {
        if old != new {
            // Wrapping: changes of different workers may be booked in another order than made.
            self.heap_bytes.fetch_add(new.wrapping_sub(old), Relaxed);
        }
    }
}

/// Hashes keys that are hashes already: one keyed multiplication spreads them over the table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mix(u64);

impl Mix {
    pub fn new(seed: u64) -> Self {
        // The odd constant keeps seed 0 from mapping key 0 to 0.
        Self(seed ^ 0x9e37_79b9_7f4a_7c15)
    }
}

impl BuildHasher for Mix {
    type Hasher = Mix;
    fn build_hasher(&self) -> Mix {
        *self
    }
}

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }
    fn write_u64(&mut self, value: u64) {
        let wide = u128::from(self.0 ^ value) * 0xd6e8_feb8_6659_fd93;
        self.0 = (wide as u64) ^ (wide >> 64) as u64;
    }
    fn write_isize(&mut self, value: isize) {
        self.write_u64(value as u64);
    }
}
