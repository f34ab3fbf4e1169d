//! Names a worker evicted lately, so that a child stored after its parent went still finds its place.

use std::collections::VecDeque;

use hashbrown::HashMap;

use super::nodes::Mix;

#[derive(Debug, Clone, Copy)]
struct Ghost {
    chain: u64,
    seed: u64,
    /// Which entry of `order` is this one's; older entries of the same name are stale.
    turn: u64,
}

/// A bounded first-in first-out of evicted names.
pub(super) struct Ghosts {
    by_name: HashMap<u64, Ghost, Mix>,
    order: VecDeque<(u64, u64)>,
    turn: u64,
}

impl Ghosts {
    pub fn new(mix: Mix) -> Self {
        Self { by_name: HashMap::with_hasher(mix), order: VecDeque::new(), turn: 0 }
    }

    /// Chain hash and seed of an evicted name.
    pub fn find(&self, name: u64) -> Option<(u64, u64)> {
        self.by_name.get(&name).map(|ghost| (ghost.chain, ghost.seed))
    }

    /// Adds a name that was just evicted, and lets the oldest go beyond `cap`.
    pub fn push(&mut self, name: u64, chain: u64, seed: u64, cap: usize) {
        self.turn += 1;
        self.by_name.insert(name, Ghost { chain, seed, turn: self.turn });
        self.order.push_back((name, self.turn));
        while self.by_name.len() > cap {
            let Some((name, turn)) = self.order.pop_front() else { break };
            if self.is_current(name, turn) {
                self.by_name.remove(&name);
            }
        }
        // Names stored again leave stale entries behind; sweep when they outnumber the living.
        if self.order.len() > 2 * self.by_name.len() + 64 {
            let by_name = &self.by_name;
            self.order.retain(|(name, turn)| by_name.get(name).is_some_and(|g| g.turn == *turn));
        }
    }

    /// Takes out a name that is held again.
    pub fn forget(&mut self, name: u64) {
        self.by_name.remove(&name);
    }

    /// Bytes on the heap.
    pub fn heap_bytes(&self) -> usize {
        self.by_name.allocation_size() + self.order.capacity() * size_of::<(u64, u64)>()
    }

    fn is_current(&self, name: u64, turn: u64) -> bool {
        self.by_name.get(&name).is_some_and(|ghost| ghost.turn == turn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_go_first_and_a_return_renews() {
        let mut ghosts = Ghosts::new(Mix::new(0));
        for name in [1, 2, 3, 1] {
            ghosts.push(name, name * 10, 7, 3);
        }
        assert_eq!(ghosts.find(1), Some((10, 7)));
        ghosts.push(4, 40, 7, 3);
        assert_eq!(ghosts.find(2), None, "2 is now the oldest");
        assert!(ghosts.find(3).is_some() && ghosts.find(1).is_some());
        ghosts.forget(3);
        ghosts.push(5, 50, 7, 3);
        assert!([1, 4, 5].iter().all(|n| ghosts.find(*n).is_some()));
    }

    #[test]
    fn churn_of_one_name_stays_small() {
        let mut ghosts = Ghosts::new(Mix::new(0));
        for _ in 0..10_000 {
            ghosts.push(1, 10, 7, 4);
            ghosts.forget(1);
        }
        assert!(ghosts.order.len() <= 66);
        assert!(ghosts.heap_bytes() < 8192);
    }
}
