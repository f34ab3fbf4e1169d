//! Which worker holds which block names in which cache group: what a hybrid model needs besides the
//! tree of contents.
//!
//! A hybrid model has several cache groups: full attention, sliding windows, states of linear
//! attention. The tree of contents ([`RadixIndex`](super::RadixIndex)) tracks full attention. The
//! other groups keep few of the same blocks, under the same names, and often without saying which
//! block a name stands for, so this table tracks only names. A *seat* is one worker in one tier, or
//! one store that workers share; per name and seat the table keeps a bit for each group. Each seat
//! also lists its names, to dump and to drop them without a look at those of others.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use hashbrown::{HashMap, HashSet, HashTable};
use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use serde::{Deserialize, Serialize};

use super::types::MAX_COPIES;
use crate::ids::{Tier, Worker};

/// Maximum cache groups of one worker.
pub const MAX_GROUPS: u32 = 16;

/// Tables over which names are spread, so that the growth of one delays few.
const SHARDS: usize = 64;

/// Holders of a name stored inline in the table; more of them get a separate list.
const BESIDE_EACH_OTHER: usize = 8;

/// In place of a seat: the holders are in a crowd.
const CROWD: u16 = u16::MAX;

/// A holder of names.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Holder {
    /// A worker, in one of its own tiers.
    Worker(Worker, Tier),
    /// A store that workers share, by the engines' name for it.
    Store(String),
}

/// Bits of groups; bit 0 is group 0.
pub type GroupBits = u16;

#[derive(Debug, Clone, Copy)]
#[repr(C, packed(4))]
struct Entry {
    name: u64,
    seat: u16,
    groups: GroupBits,
}

#[derive(Debug, Default)]
struct Shard {
    entries: HashTable<Entry>,
    /// Holders of names with many holders: ascending by seat.
    crowds: HashMap<u64, Vec<(u16, GroupBits)>>,
}

/// What a seat holds. Queries do not read it, so only updates and dumps of the same seat wait for
/// its lock, which comes after that of the seats and before those of the tables.
#[derive(Debug, Default)]
struct Names {
    held: HashSet<u64>,
    /// Names that it holds more than once in a group, with their count.
    copies: HashMap<(u64, u8), u32>,
}

#[derive(Debug)]
struct Seat {
    number: u16,
    names: Mutex<Names>,
}

#[derive(Debug, Default)]
struct Seats {
    given: BTreeMap<Holder, Seat>,
    /// One more than the highest number ever assigned.
    opened: u16,
    /// Numbers of cleared seats, oldest first.
    free: VecDeque<u16>,
}

impl Seats {
    /// A number for another seat; `None` if all are assigned. Freed ones come last, the oldest
    /// first: a query that runs while a seat is cleared must not count its names for another.
    fn number(&mut self) -> Option<u16> {
        if self.opened == CROWD {
            return self.free.pop_front();
        }
        self.opened += 1;
        Some(self.opened - 1)
    }
}

/// Names by cache group.
///
/// # Consistency
/// Each name is read at its own moment. A cleared seat is never seen again.
///
/// # Cost
/// About 35 bytes for a name with one holder, in any number of groups.
#[derive(Debug)]
pub struct GroupIndex {
    shards: Box<[RwLock<Shard>]>,
    seats: RwLock<Seats>,
    /// Number of held names, counted per seat.
    names: AtomicUsize,
    max_names: usize,
    hash_seed: u64,
}

/// Outcome of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GroupOutcome {
    /// Names held now.
    pub held: u32,
    /// Names without room, or in a group beyond [`MAX_GROUPS`].
    pub refused: u32,
}

/// Size of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GroupStats {
    /// Names held, counted per seat.
    pub names: usize,
    /// Bytes of the tables.
    pub bytes: usize,
}

/// One name of a seat, in the form sent to another replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GroupName {
    /// The engine's name.
    pub name: u64,
    /// The cache group.
    pub group: u8,
    /// How many copies are held.
    pub copies: u32,
}

impl GroupIndex {
    /// An empty table. `max_names`: 0 means no limit; `hash_seed` keys the tables.
    pub fn new(max_names: usize, hash_seed: u64) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| RwLock::default()).collect(),
            seats: RwLock::default(),
            names: AtomicUsize::new(0),
            max_names,
            hash_seed,
        }
    }

    fn hash(&self, name: u64) -> u64 {
        let wide =
            u128::from(self.hash_seed ^ name ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93;
        (wide as u64) ^ (wide >> 64) as u64
    }

    fn shard(&self, hash: u64) -> &RwLock<Shard> {
        // hashbrown uses bits from both ends of the hash.
        &self.shards[(hash >> 28) as usize % SHARDS]
    }

    /// The seats, with one for `holder` if there is a number left. As long as they are held, no seat
    /// is cleared, and no number goes to another holder.
    fn seats_with(&self, holder: &Holder) -> RwLockReadGuard<'_, Seats> {
        let seats = self.seats.read();
        if seats.given.contains_key(holder) {
            return seats;
        }
        drop(seats);
        let mut seats = self.seats.write();
        if !seats.given.contains_key(holder)
            && let Some(number) = seats.number()
        {
            seats.given.insert(holder.clone(), Seat { number, names: Mutex::default() });
        }
        RwLockWriteGuard::downgrade(seats)
    }

    /// Records that `holder` now holds `names` in `group`. A name stored twice must be removed twice,
    /// up to [`MAX_COPIES`] times.
    pub fn store(&self, holder: &Holder, group: u32, names: &[u64]) -> GroupOutcome {
        let mut outcome = GroupOutcome { held: 0, refused: names.len() as u32 };
        if group >= MAX_GROUPS {
            return outcome;
        }
        let seats = self.seats_with(holder);
        let Some(seat) = seats.given.get(holder) else { return outcome };
        let mut held = seat.names.lock();
        for name in names {
            // Relaxed: each concurrent writer may exceed the limit by one name.
            let is_full = self.max_names > 0 && self.names.load(Relaxed) >= self.max_names;
            if self.put(seat.number, &mut held, group as u8, *name, is_full) {
                outcome.held += 1;
                outcome.refused -= 1;
            }
        }
        outcome
    }

    fn put(&self, seat: u16, names: &mut Names, group: u8, name: u64, is_full: bool) -> bool {
        let hash = self.hash(name);
        let bit = 1 << group;
        let mut shard = self.shard(hash).write();
        let shard = &mut *shard;
        let groups = match shard.find_mut(hash, name, seat) {
            Some(groups) => groups,
            None if is_full => return false,
            None => {
                self.names.fetch_add(1, Relaxed);
                names.held.insert(name);
                let rehash = |entry: &Entry| self.hash(entry.name);
                shard.insert(hash, Entry { name, seat, groups: bit }, rehash);
                return true;
            }
        };
        if *groups & bit == 0 {
            *groups |= bit;
        } else {
            let copies = names.copies.entry((name, group)).or_insert(1);
            *copies = (*copies + 1).min(MAX_COPIES);
        }
        true
    }

    /// Records that `holder` removed `names` in `group`. Returns the number of names that it did
    /// not hold there.
    pub fn remove(&self, holder: &Holder, group: u32, names: &[u64]) -> u32 {
        let seats = self.seats.read();
        let seat = seats.given.get(holder).filter(|_| group < MAX_GROUPS);
        let Some(seat) = seat else { return names.len() as u32 };
        let mut held = seat.names.lock();
        let mut take = |name| self.take(seat.number, &mut held, group as u8, name);
        names.iter().map(|name| u32::from(!take(*name))).sum()
    }

    fn take(&self, seat: u16, names: &mut Names, group: u8, name: u64) -> bool {
        let hash = self.hash(name);
        let bit = 1 << group;
        let mut shard = self.shard(hash).write();
        let shard = &mut *shard;
        let Some(groups) = shard.find_mut(hash, name, seat) else { return false };
        if *groups & bit == 0 {
            return false;
        }
        if let Some(copies) = names.copies.get_mut(&(name, group)) {
            *copies -= 1;
            if *copies == 1 {
                names.copies.remove(&(name, group));
            }
            return true;
        }
        *groups &= !bit;
        if *groups == 0 {
            shard.forget(hash, name, seat);
            names.held.remove(&name);
            self.names.fetch_sub(1, Relaxed);
        }
        true
    }

    /// Drops everything that `holder` holds.
    ///
    /// # Cost
    /// O(names that it holds); queries go on meanwhile.
    pub fn clear(&self, holder: &Holder) {
        // No store is under way when it leaves its seat, and a later one takes another seat.
        let Some(Seat { number, names }) = self.seats.write().given.remove(holder) else { return };
        let names = names.into_inner().held;
        self.names.fetch_sub(names.len(), Relaxed);
        for name in &names {
            let hash = self.hash(*name);
            let mut shard = self.shard(hash).write();
            shard.forget(hash, *name, number);
            let room = shard.entries.len() * 2;
            if shard.entries.capacity() > room + 64 {
                shard.entries.shrink_to(room, |entry| self.hash(entry.name));
            }
        }
        self.seats.write().free.push_back(number);
    }

    /// Drops everything that a worker holds, in all tiers.
    pub fn remove_worker(&self, worker: Worker) {
        Tier::ALL.into_iter().for_each(|tier| self.clear(&Holder::Worker(worker, tier)));
    }

    /// The groups in which `holder` holds `name`.
    pub fn groups_of(&self, holder: &Holder, name: u64) -> GroupBits {
        let seats = self.seats.read();
        seats.given.get(holder).map_or(0, |seat| self.groups_at(seat.number, name))
    }

    fn groups_at(&self, seat: u16, name: u64) -> GroupBits {
        let hash = self.hash(name);
        self.shard(hash).read().find(hash, name, seat).unwrap_or(0)
    }

    /// The seat of each holder that has one, for [`find`](Self::find).
    pub fn seats<T>(&self, look: impl FnOnce(&dyn Fn(&Holder) -> Option<u16>) -> T) -> T {
        let seats = self.seats.read();
        look(&|holder| seats.given.get(holder).map(|seat| seat.number))
    }

    /// Calls `each` with the seat and the groups of every holder of `name`.
    ///
    /// # Cost
    /// One probe, and the holders.
    pub fn find(&self, name: u64, mut each: impl FnMut(u16, GroupBits)) {
        let hash = self.hash(name);
        let shard = self.shard(hash).read();
        let mut has_crowd = false;
        for entry in shard.entries.iter_hash(hash).filter(|entry| entry.name == name) {
            match entry.seat {
                CROWD => has_crowd = true,
                seat => each(seat, entry.groups),
            }
        }
        if has_crowd {
            let crowd = shard.crowds.get(&name);
            crowd.into_iter().flatten().for_each(|(seat, groups)| each(*seat, *groups));
        }
    }

    /// Sizes.
    ///
    /// # Cost
    /// O(holders, and names with many holders).
    pub fn stats(&self) -> GroupStats {
        let mut bytes = 0;
        for shard in &self.shards {
            let shard = shard.read();
            bytes += shard.entries.allocation_size() + shard.crowds.allocation_size();
            let crowds = shard.crowds.values();
            bytes +=
                crowds.map(|crowd| crowd.capacity() * size_of::<(u16, GroupBits)>()).sum::<usize>();
        }
        for seat in self.seats.read().given.values() {
            let names = seat.names.lock();
            bytes += names.held.allocation_size() + names.copies.allocation_size();
        }
        GroupStats { names: self.names.load(Relaxed), bytes }
    }

    /// The names of `holder` at one moment, ascending.
    ///
    /// # Cost
    /// O(n log n) for its n names.
    pub fn dump(&self, holder: &Holder) -> Vec<GroupName> {
        let seats = self.seats.read();
        let Some(seat) = seats.given.get(holder) else { return Vec::new() };
        let names = seat.names.lock();
        let mut dumped = Vec::with_capacity(names.held.len());
        for name in names.held.iter().copied() {
            let groups = self.groups_at(seat.number, name);
            for group in (0..MAX_GROUPS as u8).filter(|group| groups & 1 << group != 0) {
                let copies = names.copies.get(&(name, group)).copied().unwrap_or(1);
                dumped.push(GroupName { name, group, copies });
            }
        }
        dumped.sort_unstable();
        dumped
    }

    /// Restores the names that [`dump`](Self::dump) returned for `holder`.
    pub fn restore(&self, holder: &Holder, names: &[GroupName]) {
        for GroupName { name, group, copies } in names {
            for _ in 0..(*copies).min(MAX_COPIES) {
                self.store(holder, u32::from(*group), &[*name]);
            }
        }
    }
}

impl Shard {
    fn find(&self, hash: u64, name: u64, seat: u16) -> Option<GroupBits> {
        if let Some(crowd) = self.crowds.get(&name) {
            let at = crowd.binary_search_by_key(&seat, |(seat, _)| *seat).ok()?;
            return Some(crowd[at].1);
        }
        let is_it = |entry: &Entry| entry.name == name && entry.seat == seat;
        self.entries.find(hash, is_it).map(|entry| entry.groups)
    }

    fn find_mut(&mut self, hash: u64, name: u64, seat: u16) -> Option<&mut GroupBits> {
        let is_it = |entry: &Entry| entry.name == name && entry.seat == seat;
        if self.crowds.contains_key(&name) {
            let crowd = self.crowds.get_mut(&name)?;
            let at = crowd.binary_search_by_key(&seat, |(seat, _)| *seat).ok()?;
            return Some(&mut crowd[at].1);
        }
        // The field lies at a multiple of 4 bytes.
        self.entries.find_mut(hash, is_it).map(|entry| &mut entry.groups)
    }

    fn insert(&mut self, hash: u64, entry: Entry, rehash: impl Fn(&Entry) -> u64) {
        let (name, seat, groups) = (entry.name, entry.seat, entry.groups);
        if let Some(crowd) = self.crowds.get_mut(&name) {
            if let Err(at) = crowd.binary_search_by_key(&seat, |(seat, _)| *seat) {
                crowd.insert(at, (seat, groups));
            }
            return;
        }
        let same = |entry: &&Entry| entry.name == name;
        if self.entries.iter_hash(hash).filter(same).count() < BESIDE_EACH_OTHER {
            self.entries.insert_unique(hash, entry, rehash);
            return;
        }
        let mut crowd: Vec<(u16, GroupBits)> = Vec::with_capacity(BESIDE_EACH_OTHER * 2);
        while let Ok(found) = self.entries.find_entry(hash, |entry| entry.name == name) {
            let (entry, _) = found.remove();
            crowd.push((entry.seat, entry.groups));
        }
        crowd.push((seat, groups));
        crowd.sort_unstable();
        self.crowds.insert(name, crowd);
        self.entries.insert_unique(hash, Entry { name, seat: CROWD, groups: 0 }, rehash);
    }

    fn forget(&mut self, hash: u64, name: u64, seat: u16) {
        if let Some(crowd) = self.crowds.get_mut(&name) {
            if let Ok(at) = crowd.binary_search_by_key(&seat, |(seat, _)| *seat) {
                crowd.remove(at);
            }
            if crowd.is_empty() {
                self.desert(hash, name);
            }
            return;
        }
        let is_it = |entry: &Entry| entry.name == name && entry.seat == seat;
        if let Ok(entry) = self.entries.find_entry(hash, is_it) {
            entry.remove();
        }
    }

    /// Removes the crowd of a name that has become empty.
    fn desert(&mut self, hash: u64, name: u64) {
        self.crowds.remove(&name);
        if let Ok(entry) = self.entries.find_entry(hash, |entry| entry.name == name) {
            entry.remove();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn device(id: u64) -> Holder {
        Holder::Worker(Worker::new(id, 0), Tier::Device)
    }

    /// The holders of a name, with their groups.
    fn holders(index: &GroupIndex, name: u64, all: &[Holder]) -> BTreeMap<Holder, GroupBits> {
        let mut found = HashMap::new();
        index.find(name, |seat, groups| {
            assert!(found.insert(seat, groups).is_none(), "a seat comes once");
        });
        index.seats(|seat_of| {
            let of = |holder: &Holder| Some((holder.clone(), *found.get(&seat_of(holder)?)?));
            all.iter().filter_map(of).collect()
        })
    }

    #[test]
    fn names_stored_while_another_is_cleared_stay_its_own() {
        let index = GroupIndex::new(0, 7);
        let names = |id: u64| (id * 1_000..id * 1_000 + 64).collect::<Vec<u64>>();
        std::thread::scope(|scope| {
            for id in 0..4 {
                let index = &index;
                scope.spawn(move || {
                    // Of two threads for each holder one stores, while the other clears.
                    for _ in 0..100_000 {
                        match id % 2 {
                            0 => assert_eq!(
                                index.store(&device(id / 2), 0, &names(id / 2)).refused,
                                0
                            ),
                            _ => index.clear(&device(id / 2)),
                        }
                    }
                });
            }
        });
        for id in 0..2 {
            let of_other = names(1 - id);
            assert!(of_other.iter().all(|name| index.groups_of(&device(id), *name) == 0));
        }
        (0..2).for_each(|id| index.clear(&device(id)));
        assert_eq!(index.stats().names, 0);
    }

    #[test]
    fn names_that_many_hold_are_found_with_all_holders() {
        let index = GroupIndex::new(0, 7);
        let all: Vec<Holder> = (0..2_000).map(device).collect();
        for holder in &all {
            assert_eq!(index.store(holder, 1, &[5, 6]).held, 2);
        }
        assert_eq!(holders(&index, 5, &all).len(), 2_000);
        for holder in &all[..1_999] {
            assert_eq!(index.remove(holder, 1, &[5]), 0);
        }
        assert_eq!(holders(&index, 5, &all), BTreeMap::from([(device(1_999), 2)]));
        assert_eq!(index.stats().names, 2_001);
    }

    #[test]
    fn a_cleared_seat_is_the_last_to_be_taken_again() {
        let index = GroupIndex::new(0, 7);
        let mut taken = Vec::new();
        for worker in 0..3 {
            index.store(&device(worker), 0, &[1]);
            taken.push(index.seats(|seat_of| seat_of(&device(worker))));
            index.clear(&device(worker));
        }
        assert_eq!(taken, [Some(0), Some(1), Some(2)]);
        let mut seats = Seats { opened: CROWD, free: [5, 3].into(), ..Seats::default() };
        assert_eq!([(); 3].map(|()| seats.number()), [Some(5), Some(3), None]);
    }

    #[test]
    fn what_was_cleared_is_never_seen_again_and_leaves_no_room_behind() {
        let index = GroupIndex::new(0, 7);
        for round in 0..50_u64 {
            // The table shrinks after the first, which are many.
            let count = if round == 0 { 100_000 } else { 1_000 };
            let names: Vec<u64> = (0..count).map(|at| round << 32 | at).collect();
            index.store(&device(1), 0, &names);
            index.clear(&device(1));
            index.store(&device(2), 0, &names[..1]);
            assert_eq!(holders(&index, names[0], &[device(1), device(2)]).len(), 1);
        }
        assert_eq!(index.stats().names, 50);
        assert!(index.stats().bytes < 1 << 20, "{:?}", index.stats());
    }

    #[test]
    fn copies_are_counted_up_to_the_limit() {
        let index = GroupIndex::new(0, 1);
        for _ in 0..2 * MAX_COPIES {
            assert_eq!(index.store(&device(1), 2, &[7]).held, 1);
        }
        let (copy, dumped) = (GroupIndex::new(0, 1), index.dump(&device(1)));
        copy.restore(&device(1), &dumped);
        for index in [&index, &copy] {
            let removed = (0..2 * MAX_COPIES).filter(|_| index.remove(&device(1), 2, &[7]) == 0);
            assert_eq!(removed.count(), MAX_COPIES as usize);
        }
    }

    #[test]
    fn groups_and_names_beyond_the_limits_are_refused() {
        let index = GroupIndex::new(2, 7);
        assert_eq!(index.store(&device(1), MAX_GROUPS, &[1]), GroupOutcome { held: 0, refused: 1 });
        assert_eq!(index.store(&device(1), 0, &[1, 2, 3]), GroupOutcome { held: 2, refused: 1 });
        // Another group of a name that is held takes no more room.
        assert_eq!(index.store(&device(1), 1, &[1]), GroupOutcome { held: 1, refused: 0 });
        assert_eq!(index.remove(&device(1), MAX_GROUPS, &[1]), 1);
    }

    #[derive(Debug, Clone)]
    enum Op {
        Store(u64, u32, Vec<u64>),
        Remove(u64, u32, Vec<u64>),
        Clear(u64),
    }

    fn op() -> impl Strategy<Value = Op> {
        let names = prop::collection::vec(0..6_u64, 1..4);
        let place = (0..12_u64, 0..3_u32, names);
        prop_oneof![
            6 => place.clone().prop_map(|(id, group, names)| Op::Store(id, group, names)),
            4 => place.prop_map(|(id, group, names)| Op::Remove(id, group, names)),
            1 => (0..12_u64).prop_map(Op::Clear),
        ]
    }

    proptest! {
        #[test]
        fn it_answers_as_a_plain_map_does(ops in prop::collection::vec(op(), 1..200)) {
            let index = GroupIndex::new(0, 1);
            let all: Vec<Holder> = (0..12).map(device).collect();
            let mut twin: BTreeMap<(Holder, u64, u32), u32> = BTreeMap::new();
            for op in ops {
                match op {
                    Op::Store(id, group, names) => {
                        index.store(&device(id), group, &names);
                        for name in names {
                            *twin.entry((device(id), name, group)).or_default() += 1;
                        }
                    }
                    Op::Remove(id, group, names) => {
                        let mut unknown = 0;
                        for name in &names {
                            match twin.get_mut(&(device(id), *name, group)) {
                                Some(copies) if *copies > 0 => *copies -= 1,
                                _ => unknown += 1,
                            }
                        }
                        prop_assert_eq!(index.remove(&device(id), group, &names), unknown);
                    }
                    Op::Clear(id) => {
                        index.clear(&device(id));
                        twin.retain(|(holder, ..), _| *holder != device(id));
                    }
                }
                twin.retain(|_, copies| *copies > 0);
            }
            let mut dumped = BTreeMap::new();
            let copy = GroupIndex::new(0, 2);
            for holder in &all {
                let names = index.dump(holder);
                copy.restore(holder, &names);
                prop_assert_eq!(copy.dump(holder), &names[..]);
                for GroupName { name, group, copies } in names {
                    dumped.insert((holder.clone(), name, u32::from(group)), copies);
                }
            }
            let names: BTreeSet<(Holder, u64)> =
                twin.keys().map(|(holder, name, _)| (holder.clone(), *name)).collect();
            prop_assert_eq!(index.stats().names, names.len());
            for name in 0..6 {
                let mut wanted: BTreeMap<Holder, GroupBits> = BTreeMap::new();
                for (holder, _, group) in twin.keys().filter(|(_, other, _)| *other == name) {
                    *wanted.entry(holder.clone()).or_default() |= 1 << group;
                }
                for holder in &all {
                    let groups = wanted.get(holder).copied().unwrap_or(0);
                    prop_assert_eq!(index.groups_of(holder, name), groups);
                }
                prop_assert_eq!(holders(&index, name, &all), wanted);
            }
            prop_assert_eq!(dumped, twin);
        }
    }
}
