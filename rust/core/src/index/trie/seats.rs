//! Slot <-> worker and plane: the dense numbers that identify holders in covers.
//!
//! A worker's device slot is its *home*, under which a query collects the matches of its other
//! slots. A slot is reassigned only when no running query could have seen its last owner, so a
//! reader under one pin never confuses two workers.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

use crate::ids::{Tier, Worker};

const PAGE: usize = 256;
/// No slot.
pub(super) const NONE: u16 = u16::MAX;

/// Meaning of a slot's cover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Plane {
    /// Blocks held in a tier.
    Held(Tier),
    /// Predictions.
    Predicted,
}

impl Plane {
    pub const COUNT: usize = 5;

    pub fn number(self) -> usize {
        match self {
            Self::Held(tier) => tier as usize,
            Self::Predicted => 4,
        }
    }

    pub fn of(number: usize) -> Self {
        Tier::ALL.get(number).map_or(Self::Predicted, |tier| Self::Held(*tier))
    }

    /// Whether queries walk the plane from the prompt's start.
    pub fn is_prefix(self) -> bool {
        matches!(self, Self::Held(Tier::Device) | Self::Predicted)
    }
}

#[derive(Default)]
struct Seat {
    instance: AtomicU64,
    /// dp rank, home slot, plane.
    rest: AtomicU64,
}

type Lower = OnceLock<Box<[AtomicU64; PAGE]>>;

/// All slots, as readers see them.
pub(super) struct Seats {
    pages: Box<[OnceLock<Box<[Seat; PAGE]>>]>,
    /// By home: the slots of the tiers below the device, 16 bits each.
    lower_pages: Box<[Lower]>,
    /// One more than the highest slot ever assigned.
    opened: AtomicU32,
    /// Slots of planes other than the device: queries examine them only if there are any.
    others: AtomicU32,
    /// How many of those were ever assigned.
    others_given: AtomicU32,
    lower: AtomicU32,
}

/// The owner of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owner {
    pub worker: Worker,
    pub home: u16,
    pub plane: Plane,
}

const NO_LOWER: u64 = u64::MAX;

impl Seats {
    pub fn new() -> Self {
        Self {
            pages: (0..=usize::from(u16::MAX) / PAGE).map(|_| OnceLock::new()).collect(),
            lower_pages: (0..=usize::from(u16::MAX) / PAGE).map(|_| OnceLock::new()).collect(),
            opened: AtomicU32::new(0),
            others: AtomicU32::new(0),
            others_given: AtomicU32::new(0),
            lower: AtomicU32::new(0),
        }
    }

    fn seat(&self, slot: u16) -> &Seat {
        let page = &self.pages[usize::from(slot) / PAGE];
        let page = page.get_or_init(|| Box::new(std::array::from_fn(|_| Seat::default())));
        &page[usize::from(slot) % PAGE]
    }

    fn lower_of(&self, home: u16) -> &AtomicU64 {
        let page = &self.lower_pages[usize::from(home) / PAGE];
        let none = || Box::new(std::array::from_fn(|_| AtomicU64::new(NO_LOWER)));
        &page.get_or_init(none)[usize::from(home) % PAGE]
    }

    /// Number of words in a set of all slots.
    pub fn words(&self) -> usize {
        (self.opened.load(Acquire) as usize).div_ceil(64)
    }

    /// A mark for [`Seats::are_homes_since`], if all slots are for blocks on devices.
    #[inline]
    pub fn are_homes(&self) -> Option<u32> {
        let mark = self.others_given.load(Acquire);
        (self.others.load(Acquire) == 0).then_some(mark)
    }

    /// Whether all slots seen since the mark are homes.
    #[inline]
    pub fn are_homes_since(&self, mark: u32) -> bool {
        self.others_given.load(Acquire) == mark
    }

    /// Whether any worker has lower tiers.
    pub fn has_lower(&self) -> bool {
        self.lower.load(Relaxed) > 0
    }

    /// Appends the result of `make` for the workers of the slots in the `at`th word of a set. All
    /// must be homes, which holds while [`Seats::are_homes`] returns marks.
    #[inline]
    pub fn each_worker<T: Copy>(
        &self,
        at: usize,
        mut word: u64,
        out: &mut Vec<T>,
        make: impl Fn(Worker) -> T,
    ) {
        let first = (at * 64) as u16;
        self.seat(first);
        let Some(page) = self.pages[usize::from(first) / PAGE].get() else { return };
        let seats = &page[usize::from(first) % PAGE..][..64];
        let worker = |bit: u32| {
            let seat = &seats[bit as usize % 64];
            // Relaxed: as in `owner`.
            let rest = seat.rest.load(Relaxed);
            make(Worker::new(seat.instance.load(Relaxed), rest as u32))
        };
        if word == u64::MAX {
            // All of a large fleet: without examining single bits.
            out.extend((0..64).map(worker));
            return;
        }
        // Reserved at once: a loop of pushes would check the capacity each time.
        let old = out.len();
        out.resize(old + word.count_ones() as usize, worker(0));
        for place in &mut out[old..] {
            *place = worker(word.trailing_zeros());
            word &= word - 1;
        }
    }

    /// The owner of a slot, which must have been seen in a cover under the current pin.
    #[inline]
    pub fn owner(&self, slot: u16) -> Owner {
        let seat = self.seat(slot);
        // Relaxed: written before the slot's first cover was published, and not changed before all
        // pins that could have seen that are gone.
        let rest = seat.rest.load(Relaxed);
        Owner {
            worker: Worker::new(seat.instance.load(Relaxed), rest as u32),
            home: (rest >> 32) as u16,
            plane: Plane::of((rest >> 48) as usize),
        }
    }

    /// The slots of the tiers below the device of the worker at `home`.
    pub fn lower_slots(&self, home: u16) -> Option<[u16; 3]> {
        match self.lower_of(home).load(Acquire) {
            NO_LOWER => None,
            slots => Some([0, 16, 32].map(|shift| (slots >> shift) as u16)),
        }
    }

    /// Assigns a slot. Writer only.
    pub fn give(&self, slot: u16, worker: Worker, home: u16, plane: Plane) {
        let seat = self.seat(slot);
        seat.instance.store(worker.instance_id, Relaxed);
        let rest =
            u64::from(worker.dp_rank) | u64::from(home) << 32 | (plane.number() as u64) << 48;
        seat.rest.store(rest, Relaxed);
        if slot == home {
            if self.lower_pages[usize::from(slot) / PAGE].get().is_some() {
                self.lower_of(slot).store(NO_LOWER, Relaxed);
            }
        } else {
            // Before the slot's first cover is published, so that its readers find the mark
            // changed.
            self.others_given.fetch_add(1, Release);
            self.others.fetch_add(1, Release);
        }
        if let Plane::Held(tier) = plane
            && tier != Tier::Device
        {
            let shift = 16 * (tier as usize - 1);
            let at_home = self.lower_of(home);
            let others = at_home.load(Relaxed) & !(0xffff << shift);
            at_home.store(others | u64::from(slot) << shift, Release);
            self.lower.fetch_add(1, Relaxed);
        }
        self.opened.fetch_max(u32::from(slot) + 1, Release);
    }

    /// Frees a slot, which may be reassigned once no reader has seen it. Writer only.
    pub fn take_back(&self, slot: u16) {
        let Owner { home, plane, .. } = self.owner(slot);
        if slot != home {
            // After its last cover was removed.
            self.others.fetch_sub(1, Release);
        }
        if !plane.is_prefix() {
            self.lower.fetch_sub(1, Relaxed);
        }
    }

    pub fn bytes(&self) -> usize {
        let pages = self.pages.iter().filter(|page| page.get().is_some()).count();
        let lower = self.lower_pages.iter().filter(|page| page.get().is_some()).count();
        size_of_val(&*self.pages)
            + size_of_val(&*self.lower_pages)
            + pages * PAGE * size_of::<Seat>()
            + lower * PAGE * size_of::<AtomicU64>()
    }
}
