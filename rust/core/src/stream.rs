//! The order of one publisher's batches: which to apply, which are missing, when it restarted.
//!
//! A publisher numbers its batches 0, 1, 2, ... and forgets the number when it restarts. Frames
//! arrive live, in order but with losses, and by replay, if the publisher still keeps them. This
//! state machine holds no frames and opens no sockets: the caller passes a number and gets the next
//! action.
//!
//! The caller's loop, for a live frame:
//!
//! 1. [`Stream::live`] returns [`Step::Apply`]: apply the batch, call [`Stream::applied`].
//! 2. [`Step::Gap`]: request a replay from `from` and pass its frames to [`Stream::replayed`];
//!    without a replay, [`Stream::skip_to`] the live frame. Then pass the live frame again.
//! 3. [`Step::Restarted`]: forget the publisher's blocks and pass the same frame again.
//! 4. [`Step::Duplicate`], [`Step::Invalid`]: drop the frame.
//!
//! A restart is detected because live frames never repeat. A restart goes unnoticed only if every
//! live frame up to the next expected number is lost as well; [`Stream::verify`] detects that, too.

/// The number that ends a replay; no batch uses it.
pub const END_OF_REPLAY: u64 = u64::MAX;

/// The action for a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// It is the next one: apply it.
    Apply,
    /// Frames before it are missing. Nothing changed: repair or give up, then pass it again.
    Gap {
        /// First missing number.
        from: u64,
        /// Last missing number.
        to: u64,
    },
    /// It was applied before, or given up: drop it.
    Duplicate,
    /// The publisher has restarted. Forget its blocks and pass the frame again; the machine has
    /// reset itself.
    Restarted,
    /// Its number is [`END_OF_REPLAY`], which no batch uses: drop it.
    Invalid,
}

/// The state machine of one publisher.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stream {
    /// The next number to apply; everything below it was applied or given up.
    next: u64,
    /// Number and, once known, payload hash of the last applied batch.
    last: Option<(u64, Option<u64>)>,
    /// The last accepted live frame. Gaps do not count: their frame is passed again.
    last_live: Option<u64>,
    /// `next` at the last counted gap, so that a gap under repair counts once.
    gap_at: Option<u64>,
    /// Detected gaps, each counted once however many frames wait behind it.
    pub gaps: u64,
    /// Batches given up by [`Stream::skip_to`].
    pub lost: u64,
}

impl Stream {
    /// Processes a live frame.
    pub fn live(&mut self, seq: u64) -> Step {
        // Subscriptions keep the order, so a number at or below the last live one means a restart.
        if seq != END_OF_REPLAY && self.last_live.is_some_and(|last| seq <= last) {
            self.reset();
            return Step::Restarted;
        }
        let step = self.take(seq);
        if matches!(step, Step::Apply | Step::Duplicate) {
            self.last_live = Some(seq);
        }
        step
    }

    /// Processes a replayed frame.
    pub fn replayed(&mut self, seq: u64) -> Step {
        self.take(seq)
    }

    /// Gives up on frames before `seq`, which is expected next. No effect if none are missing.
    ///
    /// The publisher's blocks may be wrong from here on, because evictions were missed.
    pub fn skip_to(&mut self, seq: u64) {
        if seq != END_OF_REPLAY && seq > self.next {
            self.lost = self.lost.saturating_add(seq - self.next);
            self.next = seq;
        }
    }

    /// Resets the position, as after a restart, and keeps the counters.
    pub fn reset(&mut self) {
        self.next = 0;
        self.last = None;
        self.last_live = None;
        self.gap_at = None;
    }

    /// Continues after batch `sequence`, which was applied by a trusted source: an earlier
    /// registration, or another replica whose blocks were taken over.
    ///
    /// `heard` means that it arrived live over our own subscription, so that a live number up to it
    /// is a restart; otherwise such numbers are duplicates still in transit.
    pub fn resume(&mut self, sequence: u64, payload_hash: Option<u64>, heard: bool) {
        self.reset();
        if sequence == END_OF_REPLAY {
            return;
        }
        self.next = sequence + 1;
        self.last = Some((sequence, payload_hash));
        self.last_live = heard.then_some(sequence);
    }

    /// The subscription has a new connection: nothing on it was published before it, so a live
    /// number up to the last applied one is a restart, also if another replica applied that.
    pub fn reconnected(&mut self) {
        self.last_live = self.last_live.or(self.last());
    }

    /// Whether a frame reported as a duplicate is not one: it has the number of the last applied
    /// batch and another payload. Then the publisher has restarted, and the machine has reset
    /// itself.
    pub fn contradicts(&mut self, seq: u64, payload_hash: u64) -> bool {
        let is_other = self.last.is_some_and(|(last, hash)| {
            last == seq && hash.is_some_and(|hash| hash != payload_hash)
        });
        if is_other {
            self.reset();
        }
        is_other
    }

    /// Stores the payload hash of the last applied batch, for [`Stream::verify`].
    pub fn applied(&mut self, payload_hash: u64) {
        if let Some((_, hash)) = &mut self.last {
            *hash = Some(payload_hash);
        }
    }

    /// Whether a replayed frame shows that this is still the same publisher.
    ///
    /// Request a replay that starts at [`Stream::last`], not after it, and pass its first frame
    /// here before the rest goes to [`Stream::replayed`]. True for the last applied batch with its
    /// original payload, and while nothing was applied. Anything else counts as a restart: the
    /// machine has reset itself, and the caller forgets the publisher's blocks. That includes a
    /// publisher that no longer keeps the batch, because nothing else proves that it is the same.
    /// An empty replay from `last` also means a restart: call [`Stream::reset`].
    pub fn verify(&mut self, seq: u64, payload_hash: u64) -> bool {
        let is_same = match self.last {
            None => true,
            Some(last) => last == (seq, Some(payload_hash)),
        };
        if !is_same {
            self.reset();
        }
        is_same
    }

    /// The next number to apply.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// The number of the last applied batch; `None` since the start or a restart.
    pub fn last(&self) -> Option<u64> {
        self.last.map(|(seq, _)| seq)
    }

    /// The payload hash of the last applied batch, if [`Stream::applied`] was called.
    pub fn last_payload_hash(&self) -> Option<u64> {
        self.last.and_then(|(_, hash)| hash)
    }

    fn take(&mut self, seq: u64) -> Step {
        if seq == END_OF_REPLAY {
            return Step::Invalid;
        }
        if seq < self.next {
            return Step::Duplicate;
        }
        if seq > self.next {
            if self.gap_at != Some(self.next) {
                self.gap_at = Some(self.next);
                self.gaps += 1;
            }
            return Step::Gap { from: self.next, to: seq - 1 };
        }
        // Can't overflow: END_OF_REPLAY was refused above.
        self.next = seq + 1;
        self.last = Some((seq, None));
        Step::Apply
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
