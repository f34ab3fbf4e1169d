//! Memory of tables: the cost of growth, and shrinking.

use std::hash::{BuildHasher, Hash};

use hashbrown::{HashMap, HashSet};

/// A map with more capacity than this shrinks when it is mostly empty.
const ROOM_KEPT: usize = 56;

/// Capacity of a table of this size in bytes.
fn room<T>(allocation: usize) -> usize {
    allocation / (size_of::<T>() + 1) / 8 * 7
}

/// Bytes that a map requests to add `more` entries; briefly it has both of its tables.
pub(super) fn map_growth<K: Eq + Hash, V, S: BuildHasher>(
    map: &HashMap<K, V, S>,
    more: usize,
) -> usize {
    let (len, allocation) = (map.len() + more, map.allocation_size());
    if len <= map.capacity() || len * 2 <= room::<(K, V)>(allocation) {
        return 0;
    }
    let needed = (len * 8 / 7 + 1).next_power_of_two() * (size_of::<(K, V)>() + 1) + 16;
    needed.max(allocation * 2)
}

/// Shrinks a map that lost most of its entries.
pub(super) fn shrink_map<K: Eq + Hash, V, S: BuildHasher>(map: &mut HashMap<K, V, S>) {
    let room = room::<(K, V)>(map.allocation_size());
    if room > ROOM_KEPT && map.len() * 8 < room {
        map.shrink_to(map.len() * 2);
    }
}

/// As [`shrink_map`].
pub(super) fn shrink_set<K: Eq + Hash, S: BuildHasher>(set: &mut HashSet<K, S>) {
    let room = room::<K>(set.allocation_size());
    if room > ROOM_KEPT && set.len() * 8 < room {
        set.shrink_to(set.len() * 2);
    }
}
