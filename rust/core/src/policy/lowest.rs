//! The lowest of many values, and the number of ties.

/// The lowest value so far. A value above the two lowest costs one comparison.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lowest {
    /// Index of the first of the lowest.
    pub index: usize,
    /// The lowest value; ties are broken by the lowest rank.
    pub value: f64,
    pub rank: u64,
    /// How many have this value and rank; 0 before the first value.
    pub ties: usize,
    /// The lowest of all other values; infinite without any.
    pub next: f64,
}

impl Lowest {
    pub fn new() -> Self {
        Self { index: 0, value: f64::INFINITY, rank: u64::MAX, ties: 0, next: f64::INFINITY }
    }

    /// Adds a value, which must not be NaN; `rank` is called only if it may decide.
    #[inline(always)]
    pub fn see(&mut self, index: usize, value: f64, rank: impl FnOnce() -> u64) {
        if value <= self.next {
            self.take(index, value, rank());
        }
    }

    #[inline(never)]
    fn take(&mut self, index: usize, value: f64, rank: u64) {
        if self.ties == 0 {
            *self = Self { index, value, rank, ties: 1, next: self.next };
        } else if (value, rank) < (self.value, self.rank) {
            *self = Self { index, value, rank, ties: 1, next: self.value };
        } else {
            self.next = value;
            self.ties += usize::from((value, rank) == (self.value, self.rank));
        }
    }

    /// The difference between the lowest of the others and the lowest.
    pub fn margin(&self) -> f64 {
        self.next - self.value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lowest(values: &[(f64, u64)]) -> Lowest {
        let mut lowest = Lowest::new();
        for (index, &(value, rank)) in values.iter().enumerate() {
            lowest.see(index, value, || rank);
        }
        lowest
    }

    #[test]
    fn the_lowest_its_equals_and_the_next_are_those_of_a_sorted_list() {
        let lists: [&[(f64, u64)]; 7] = [
            &[(3.0, 0), (1.0, 0), (2.0, 0)],
            &[(1.0, 0), (1.0, 0), (2.0, 0), (1.0, 0)],
            &[(1.0, 1), (1.0, 0), (1.0, 0), (0.5, 7), (0.5, 7)],
            &[(2.0, 0), (1.0, 1), (1.0, 0)],
            &[(f64::INFINITY, 0), (f64::INFINITY, 0)],
            &[(5.0, 3)],
            &[(4.0, 0), (3.0, 0), (3.5, 0), (9.0, 0), (3.2, 0)],
        ];
        for list in lists {
            let mut sorted: Vec<_> = list.iter().copied().enumerate().collect();
            sorted.sort_by(|a, b| a.1.partial_cmp(&b.1).expect("no NaN"));
            let found = lowest(list);
            let (index, best) = sorted[0];
            assert_eq!((found.index, (found.value, found.rank)), (index, best), "{list:?}");
            assert_eq!(found.ties, list.iter().filter(|&&one| one == best).count(), "{list:?}");
            let next = sorted.get(1).map_or(f64::INFINITY, |(_, (value, _))| *value);
            assert_eq!(found.next, next, "{list:?}");
        }
        assert_eq!(lowest(&[]).ties, 0);
    }
}
