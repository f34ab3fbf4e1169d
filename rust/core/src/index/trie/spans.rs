//! The blocks of a run that one holder has: stretches, nearly always one.

/// Ascending, disjoint, non-adjacent stretches `start..end`.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Spans {
    /// Empty when there is none.
    first: (u16, u16),
    #[expect(
        clippy::box_collection,
        reason = "there is hardly ever more than one: a word, not three"
    )]
    more: Option<Box<Vec<(u16, u16)>>>,
}

impl Spans {
    pub fn is_empty(&self) -> bool {
        self.first.0 == self.first.1
    }

    /// Number of leading blocks; 0 if the first one is missing.
    pub fn lead(&self) -> u16 {
        if self.first.0 == 0 { self.first.1 } else { 0 }
    }

    /// One more than the last block.
    pub fn end(&self) -> u16 {
        self.more.as_ref().and_then(|more| more.last()).unwrap_or(&self.first).1
    }

    pub fn iter(&self) -> impl Iterator<Item = (u16, u16)> + '_ {
        let first = (!self.is_empty()).then_some(self.first);
        first.into_iter().chain(self.more.iter().flat_map(|more| more.iter().copied()))
    }

    pub fn len(&self) -> usize {
        self.iter().map(|(start, end)| usize::from(end - start)).sum()
    }

    pub fn contains(&self, at: u16) -> bool {
        self.around(at).is_some()
    }

    /// The stretch that contains block `at`.
    fn around(&self, at: u16) -> Option<(u16, u16)> {
        let is_in = |(start, end): &(u16, u16)| *start <= at && at < *end;
        if is_in(&self.first) {
            return Some(self.first);
        }
        let more = self.more.as_ref()?;
        let next = more.partition_point(|(_, end)| *end <= at);
        more.get(next).filter(|stretch| is_in(stretch)).copied()
    }

    /// Whether any block of `start..end` is included.
    pub fn meets(&self, start: u16, end: u16) -> bool {
        self.iter().any(|(from, to)| from < end && start < to)
    }

    /// The start of the stretch that contains block `at`.
    pub fn start_of(&self, at: u16) -> u16 {
        self.around(at).map_or(at, |(start, _)| start)
    }

    /// The end of the stretch that contains block `at`.
    pub fn end_of(&self, at: u16) -> u16 {
        self.around(at).map_or(at, |(_, end)| end)
    }

    pub fn add(&mut self, start: u16, end: u16) {
        debug_assert!(start < end);
        if self.is_empty() {
            self.first = (start, end);
        } else if self.more.is_none() && start <= self.first.1 && self.first.0 <= end {
            self.first = (self.first.0.min(start), self.first.1.max(end));
        } else {
            let mut all: Vec<_> = self.iter().chain([(start, end)]).collect();
            all.sort_unstable();
            let mut merged: Vec<(u16, u16)> = Vec::with_capacity(all.len());
            for (start, end) in all {
                match merged.last_mut() {
                    Some(last) if start <= last.1 => last.1 = last.1.max(end),
                    _ => merged.push((start, end)),
                }
            }
            self.set(merged);
        }
    }

    pub fn remove(&mut self, start: u16, end: u16) {
        debug_assert!(start < end);
        let (from, to) = self.first;
        if self.more.is_none() && (start <= from || to <= end) {
            self.first = match (start <= from, to <= end) {
                (true, true) => (0, 0),
                (true, false) => (from.max(end), to),
                _ => (from, to.min(start.max(from))),
            };
            if self.first.0 >= self.first.1 {
                self.first = (0, 0);
            }
            return;
        }
        if let Some(more) = &mut self.more
            && start >= to
        {
            // Usually within one of the later stretches: cut it in place.
            let at = more.partition_point(|(_, end)| *end <= start);
            if let Some((from, to)) = more.get(at).copied()
                && from <= start
                && end <= to
            {
                match (from < start, end < to) {
                    (true, true) => {
                        more[at].1 = start;
                        more.insert(at + 1, (end, to));
                    }
                    (true, false) => more[at].1 = start,
                    (false, true) => more[at].0 = end,
                    (false, false) => _ = more.remove(at),
                }
                if more.is_empty() {
                    self.more = None;
                }
                return;
            }
        }
        let left = self
            .iter()
            .flat_map(|(from, to)| [(from, to.min(start)), (from.max(end), to)])
            .filter(|(from, to)| from < to);
        let left = left.collect();
        self.set(left);
    }

    fn set(&mut self, mut all: Vec<(u16, u16)>) {
        self.first = if all.is_empty() { (0, 0) } else { all.remove(0) };
        self.more = (!all.is_empty()).then(|| Box::new(all));
    }

    /// Bytes on the heap.
    #[inline]
    pub fn heap_bytes(&self) -> usize {
        self.more.as_ref().map_or(0, |more| {
            size_of::<Vec<(u16, u16)>>() + more.capacity() * size_of::<(u16, u16)>()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    #[test]
    fn spans_are_a_set() {
        let mut rng = SmallRng::seed_from_u64(1);
        let (mut spans, mut set) = (Spans::default(), [false; 24]);
        for _ in 0..20_000 {
            let start = rng.random_range(0..23_u16);
            let end = rng.random_range(start + 1..=(start + 5).min(24));
            let add = rng.random_bool(0.5);
            set[start as usize..end as usize].fill(add);
            if add {
                spans.add(start, end)
            } else {
                spans.remove(start, end)
            }
            let is = |at: u16| set[at as usize];
            assert!((0..24).all(|at| spans.contains(at) == is(at)), "{spans:?}");
            assert_eq!(spans.len(), set.iter().filter(|is| **is).count());
            assert_eq!(spans.is_empty(), !set.contains(&true));
            assert_eq!(usize::from(spans.lead()), set.iter().take_while(|is| **is).count());
            let end = set.iter().rposition(|is| *is).map_or(0, |at| at + 1);
            assert_eq!(usize::from(spans.end()), end);
            let stretches: Vec<_> = spans.iter().collect();
            assert!(stretches.windows(2).all(|w| w[0].1 < w[1].0), "{spans:?}");
        }
    }
}
