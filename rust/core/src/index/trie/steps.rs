//! Expiry times of the blocks of one member.
//!
//! Storing or predicting a block renews all blocks before it, so the earlier blocks of a run never
//! expire before the later ones. A few steps per member therefore describe the expiry of all
//! blocks.

/// Blocks up to `end` expire at `at`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Step {
    pub at: u64,
    pub end: u16,
}

/// Expiry of a member's blocks. This is the last step; the others end before it and expire later.
#[derive(Debug, Default)]
pub(super) struct Steps {
    at: u64,
    #[expect(clippy::box_collection, reason = "nearly always none: a word, not three")]
    before: Option<Box<Vec<Step>>>,
    /// Low half of the time under which the member is queued, at or before that of its last step.
    pub noted: u32,
    /// 0 without blocks.
    end: u16,
}

impl Steps {
    pub fn is_kept(&self) -> bool {
        self.end > 0
    }

    /// One more than the last block.
    pub fn end(&self) -> u16 {
        self.end
    }

    pub fn heap_bytes(&self) -> usize {
        self.before
            .as_ref()
            .map_or(0, |before| size_of::<Vec<Step>>() + before.capacity() * size_of::<Step>())
    }

    /// All steps, from the last to the first.
    pub fn iter(&self) -> impl Iterator<Item = Step> + '_ {
        let last = Step { at: self.at, end: self.end };
        let last = (last.end > 0).then_some(last);
        last.into_iter().chain(self.before.iter().flat_map(|b| b.iter().rev().copied()))
    }

    /// When the first block expires.
    pub fn front(&self) -> Option<u64> {
        let first = self.before.as_ref().and_then(|before| before.first());
        self.is_kept().then(|| first.map_or(self.at, |step| step.at))
    }

    /// Sets the steps, in the order of [`Steps::iter`]; an empty list removes all data.
    fn set(&mut self, mut steps: Vec<Step>) {
        let none = Step { at: 0, end: 0 };
        let Step { at, end } = steps.first().copied().unwrap_or(none);
        (self.at, self.end) = (at, end);
        steps.reverse();
        steps.pop();
        steps.shrink_to_fit();
        self.before = (!steps.is_empty()).then(|| Box::new(steps));
    }

    /// Makes all blocks valid until `at`.
    pub fn level(&mut self, at: u64) {
        self.before = None;
        self.at = at;
    }

    /// Makes blocks up to `end` valid until `at`, which is no earlier than any time set before.
    pub fn renew(&mut self, end: u16, at: u64) {
        debug_assert!(end > 0, "of no block nothing is kept");
        if self.end <= end {
            self.level(at);
            self.end = end;
            return;
        }
        if self.front() == Some(at) && self.iter().any(|step| step.at == at && step.end >= end) {
            return;
        }
        let mut steps: Vec<Step> = self.iter().filter(|step| step.end > end).collect();
        if steps.last().is_none_or(|later| later.at != at) {
            steps.push(Step { at, end });
        }
        self.set(steps);
    }

    /// Removes the blocks from `end` on.
    pub fn cut(&mut self, end: u16) {
        if self.end <= end {
            return;
        }
        if self.before.is_none() {
            self.end = end;
            return;
        }
        // Of the steps that reach beyond the cut, the one that expires last applies up to it.
        let mut steps: Vec<Step> = self.iter().collect();
        let beyond = steps.iter().take_while(|step| step.end > end).count();
        let covers = steps.get(beyond).map_or(0, |next| next.end);
        let at = steps[beyond - 1].at;
        steps.drain(..beyond);
        if covers < end {
            steps.insert(0, Step { at, end });
        }
        self.set(steps);
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    /// Compares with one time per block.
    #[test]
    fn steps_are_a_time_for_each_block() {
        let mut rng = SmallRng::seed_from_u64(1);
        let mut most = 0;
        for _ in 0..200 {
            let (mut steps, mut blocks) = (Steps::default(), Vec::<u64>::new());
            for at in 1..200 {
                let end = rng.random_range(0..12_usize);
                if rng.random_range(0..4) > 0 && end > 0 {
                    // Sometimes twice at one time.
                    let at = at - at % 3;
                    blocks.resize(blocks.len().max(end), at);
                    blocks[..end].fill(at);
                    steps.renew(end as u16, at);
                } else {
                    blocks.truncate(end);
                    steps.cut(end as u16);
                }
                let mut told = vec![0; usize::from(steps.end())];
                steps.iter().for_each(|step| told[..usize::from(step.end)].fill(step.at));
                assert_eq!(told, blocks);
                assert_eq!(steps.front(), blocks.first().copied());
                assert_eq!(steps.is_kept(), !blocks.is_empty());
                let all: Vec<_> = steps.iter().collect();
                assert!(all.windows(2).all(|w| w[0].end > w[1].end && w[0].at < w[1].at));
                most = most.max(all.len());
            }
        }
        assert!(most > 3);
    }
}
