//! The order of one publisher's batches: what to apply, what is missing, when it started over.
//!
//! A publisher numbers its batches 0, 1, 2, ... and forgets the number when it restarts. Frames
//! come live, in order but with losses, and by replay, where the publisher still keeps them. The
//! machine here holds no frames and opens no sockets: it is told of a number and answers with
//! what the caller is to do.
//!
//! The caller's loop, for a live frame:
//!
//! 1. [`Stream::live`] says [`Step::Apply`]: apply the batch, tell [`Stream::applied`].
//! 2. [`Step::Gap`]: ask for a replay from `from` and offer what comes to [`Stream::replayed`];
//!    where no replay comes, [`Stream::skip_to`] the live frame. Then offer the live frame again.
//! 3. [`Step::Restarted`]: forget what this publisher was known to hold and offer the same frame
//!    again.
//! 4. [`Step::Duplicate`], [`Step::Invalid`]: drop the frame.
//!
//! A restart shows because live frames never repeat. One hides only when every live frame up to
//! the number expected next is lost as well; [`Stream::verify`] finds that, too.

/// The number that ends a replay; no batch has it.
pub const END_OF_REPLAY: u64 = u64::MAX;

/// What to do with a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// It is the next one: apply it.
    Apply,
    /// Frames before it are missing. Nothing changed: repair or give up, then offer it again.
    Gap {
        /// First missing number.
        from: u64,
        /// Last missing number.
        to: u64,
    },
    /// It was applied before, or given up: drop it.
    Duplicate,
    /// The publisher started over. Forget its blocks and offer the frame again; the machine has
    /// reset itself.
    Restarted,
    /// Its number is [`END_OF_REPLAY`], which no batch has: drop it.
    Invalid,
}

/// Sequence machine of one publisher.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stream {
    /// The number to apply next; everything below it was applied or given up.
    next: u64,
    /// Number and, once told, payload hash of the batch applied last.
    last: Option<(u64, Option<u64>)>,
    /// The live frame that was taken last. Gaps do not count: their frame is offered again.
    last_live: Option<u64>,
    /// `next` when a gap was last counted, so that a gap under repair counts once.
    gap_at: Option<u64>,
    gaps: u64,
    lost: u64,
    restarts: u64,
    duplicates: u64,
}

impl Stream {
    /// A machine that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes a frame that came live.
    pub fn live(&mut self, seq: u64) -> Step {
        // Subscriptions keep order, so a number at or below the last live one is a new count.
        if seq != END_OF_REPLAY && self.last_live.is_some_and(|last| seq <= last) {
            self.restart();
            return Step::Restarted;
        }
        let step = self.take(seq);
        if matches!(step, Step::Apply | Step::Duplicate) {
            self.last_live = Some(seq);
        }
        step
    }

    /// Takes a frame that came by replay.
    pub fn replayed(&mut self, seq: u64) -> Step {
        self.take(seq)
    }

    /// Gives up what is missing before `seq`: it is expected next. Without effect if nothing is.
    ///
    /// What the publisher was known to hold may be wrong from here on: evictions were missed.
    pub fn skip_to(&mut self, seq: u64) {
        if seq != END_OF_REPLAY && seq > self.next {
            self.lost = self.lost.saturating_add(seq - self.next);
            self.next = seq;
        }
    }

    /// Forgets the position, as after a restart, and keeps the counters.
    pub fn reset(&mut self) {
        self.next = 0;
        self.last = None;
        self.last_live = None;
        self.gap_at = None;
    }

    /// Goes on behind batch `sequence`, which was applied before by somebody whose word counts: an
    /// earlier registration, or another replica whose blocks were taken over.
    ///
    /// `heard` says that it came live over a subscription of ours, so that a live number up to it is a
    /// restart; without it such numbers are duplicates that were still on their way.
    pub fn resume(&mut self, sequence: u64, payload_hash: Option<u64>, heard: bool) {
        self.reset();
        if sequence == END_OF_REPLAY {
            return;
        }
        self.next = sequence + 1;
        self.last = Some((sequence, payload_hash));
        self.last_live = heard.then_some(sequence);
    }

    /// Whether a frame that was called a duplicate is none: it has the number of the batch applied
    /// last and another payload. Then the publisher restarted, and the machine has reset itself.
    pub fn contradicts(&mut self, seq: u64, payload_hash: u64) -> bool {
        let is_other = self.last.is_some_and(|(last, hash)| {
            last == seq && hash.is_some_and(|hash| hash != payload_hash)
        });
        if is_other {
            self.restart();
        }
        is_other
    }

    /// Remembers the payload's hash of the batch that was applied last, for [`Stream::verify`].
    pub fn applied(&mut self, payload_hash: u64) {
        if let Some((_, hash)) = &mut self.last {
            *hash = Some(payload_hash);
        }
    }

    /// Whether a replayed frame shows that the publisher is still the one we followed.
    ///
    /// Ask for a replay that starts at [`Stream::last`], not after it, and offer its first frame
    /// here before the rest goes to [`Stream::replayed`]. True for the batch applied last with
    /// the payload it had then, and while nothing was applied. Anything else counts as a restart:
    /// the machine has reset itself, the caller forgets the publisher's blocks. That includes a
    /// publisher that no longer keeps the batch, since nothing else proves that it is the same.
    /// A replay from `last` that is empty means a restart too: call [`Stream::reset`].
    pub fn verify(&mut self, seq: u64, payload_hash: u64) -> bool {
        let is_same = match self.last {
            None => true,
            Some(last) => last == (seq, Some(payload_hash)),
        };
        if !is_same {
            self.restart();
        }
        is_same
    }

    /// The number to apply next.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// The number of the batch applied last; `None` since the start or a restart.
    pub fn last(&self) -> Option<u64> {
        self.last.map(|(seq, _)| seq)
    }

    /// The payload's hash of the batch applied last, if [`Stream::applied`] was told.
    pub fn last_payload_hash(&self) -> Option<u64> {
        self.last.and_then(|(_, hash)| hash)
    }

    /// Gaps met, each counted once however many frames wait behind it.
    pub fn gaps(&self) -> u64 {
        self.gaps
    }

    /// Batches given up by [`Stream::skip_to`].
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Restarts seen, by a live number that repeats or by [`Stream::verify`].
    pub fn restarts(&self) -> u64 {
        self.restarts
    }

    /// Frames dropped because they were applied or given up before.
    pub fn duplicates(&self) -> u64 {
        self.duplicates
    }

    fn take(&mut self, seq: u64) -> Step {
        if seq == END_OF_REPLAY {
            return Step::Invalid;
        }
        if seq < self.next {
            self.duplicates += 1;
            return Step::Duplicate;
        }
        if seq > self.next {
            if self.gap_at != Some(self.next) {
                self.gap_at = Some(self.next);
                self.gaps += 1;
            }
            return Step::Gap { from: self.next, to: seq - 1 };
        }
        // Cannot overflow: END_OF_REPLAY was refused above.
        self.next = seq + 1;
        self.last = Some((seq, None));
        Step::Apply
    }

    fn restart(&mut self) {
        self.restarts += 1;
        self.reset();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
