//! The repair of one publisher's lost batches: requests a replay, checks it, gives up on missing
//! batches.
//!
//! The state machine has no socket and no clock. The transport reports frames of the subscription,
//! frames of a replay, connections and silence; the machine returns what the transport must do:
//!
//! - [`Effect::Ask`]: open a separate connection to the replay endpoint and ask from a number on;
//!   close the previous one, so that its late answers can't be confused with the new ones.
//! - [`Effect::Dismiss`]: close that connection.
//! - [`Effect::Peek`]: pass the frames that wait in the subscription now, even if there are none.
//! - [`Effect::Lost`], [`Effect::Failed`]: report to people.
//!
//! During a replay ([`Repair::wants_live`] is false) the transport leaves live frames in their
//! socket: it bounds their number, and frames dropped there show as the next gap.

use std::collections::VecDeque;
use std::num::NonZeroU64;

use crate::log_limit::LogLimit;
use crate::stream::END_OF_REPLAY;

/// Outcome of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameOutcome {
    /// Applied, even if some of its events were skipped and counted; or seen before.
    Applied,
    /// Batches `from..=to` are missing. Repair or give up, then pass this frame again.
    Gap {
        /// First missing sequence number.
        from: u64,
        /// Last missing sequence number.
        to: u64,
    },
    /// The publisher is no longer registered; close the socket.
    Closed,
}

/// A batch with its sequence number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Its number.
    pub sequence: u64,
    /// Its bytes.
    pub payload: Vec<u8>,
}

/// Applies the frames, and knows the stream position.
pub trait Feed {
    /// Applies a frame of the subscription.
    fn live(&self, sequence: u64, payload: &[u8]) -> FrameOutcome;
    /// Applies a frame of a replay.
    fn replayed(&self, sequence: u64, payload: &[u8]) -> FrameOutcome;
    /// Whether a replay from the last applied number continues the known stream; `None`: the engine
    /// had nothing to replay.
    fn verify(&self, first: Option<(u64, &[u8])>) -> bool;
    /// Gives up on the batches before this number.
    fn give_up(&self, sequence: u64);
    /// The next expected number, and the last applied one.
    fn position(&self) -> (u64, Option<u64>);
    /// Counts a message that is not a frame.
    fn malformed(&self);
    /// A replay was requested.
    fn replay_started(&self);
    /// A replay is over, or failed. `is_empty`: it was asked for everything and had nothing.
    fn replay_ended(&self, failure: Option<&str>, is_empty: bool);
}

/// An action for the transport.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Request the batches from this number on from the replay endpoint.
    Ask(u64),
    /// The replay is over.
    Dismiss,
    /// Pass the waiting live frames to [`Repair::live`].
    Peek,
    /// These batches were given up, because there is no replay endpoint; the number of such lines
    /// held back.
    Lost(u64, u64, u64),
    /// The replay from this number failed, with the reason.
    Failed(u64, String),
}

/// A part of the reply to a request for a replay.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answer {
    /// Received messages, in order; `None` stands for a message that is not a frame.
    pub frames: Vec<Option<Frame>>,
    /// Nothing follows.
    pub is_over: bool,
    /// Whether it ended with the end marker.
    pub has_ended: bool,
}

impl Answer {
    /// Adds a message: the number of its parts, the last one, and the sequence number in the one
    /// before that. A message after the end of the reply is skipped.
    pub fn add(&mut self, parts: usize, sequence: Option<u64>, payload: &[u8]) {
        if self.is_over {
            return;
        }
        // Engines end a replay with a marker; an empty or one-part message also ends it.
        self.has_ended = sequence == Some(END_OF_REPLAY);
        self.is_over = parts < 2 || self.has_ended || payload.is_empty();
        if !self.is_over {
            self.frames
                .push(sequence.map(|sequence| Frame { sequence, payload: payload.to_vec() }));
        }
    }
}

/// A replay in progress.
#[derive(Debug, Default)]
struct Replay {
    /// The requested number, or the one up to which everything was given up.
    first: u64,
    /// The first number that brings something new.
    wanted: u64,
    is_verifying: bool,
    has_answered: bool,
    has_ended: bool,
    /// Frames that wait until live ones were examined; they begin later than expected.
    stalled: Option<Answer>,
    deadline_ms: u64,
    /// Whether only unneeded data arrived since the deadline was set.
    is_idle: bool,
    /// Received frames.
    frames: u64,
}

/// Maximum frames of a reply: engines keep some ten thousand.
const FRAMES_MAX: u64 = 1 << 20;

/// After the timeout divided by this, the rest of a reply that stopped midway is requested again:
/// engines send thousands of batches at once, and their sockets drop what does not fit.
const PAUSES_PER_TIMEOUT: u64 = 10;

/// The state machine of one publisher.
#[derive(Debug, Default)]
pub struct Repair {
    has_endpoint: bool,
    timeout_ms: u64,
    replay: Option<Replay>,
    /// Live frames that wait for the end of the replay.
    waiting: VecDeque<Option<Frame>>,
    wants_verify: bool,
    /// The verification of the connection failed: the stream may be another one.
    is_unverified: bool,
    is_held: bool,
    effects: Vec<Effect>,
    /// Limits log lines about lost batches, and about failed replays.
    lost_lines: LogLimit,
    failed_lines: LogLimit,
}

impl Repair {
    /// For a publisher with or without a replay endpoint. A replay without data for `timeout_ms` is
    /// given up; one that stops midway is requested again after a tenth of that. While `is_held`,
    /// nothing is read.
    pub fn new(has_endpoint: bool, timeout_ms: u64, is_held: bool) -> Self {
        Self { has_endpoint, timeout_ms, is_held, ..Self::default() }
    }

    /// Whether the transport should read the subscription.
    pub fn wants_live(&self) -> bool {
        self.replay.is_none() && !self.is_held
    }

    /// Whether nothing is read before [`Repair::release`].
    pub fn is_held(&self) -> bool {
        self.is_held
    }

    /// When to call [`Repair::silent`], unless something arrives before.
    pub fn deadline_ms(&self) -> Option<u64> {
        self.replay.as_ref().map(|replay| replay.deadline_ms)
    }

    /// The subscription has connected.
    pub fn connected(&mut self, feed: &impl Feed, now_ms: u64) -> Vec<Effect> {
        self.check(feed, now_ms);
        self.told()
    }

    /// Read nothing before [`Repair::release`].
    pub fn hold(&mut self) {
        self.is_held = true;
    }

    /// Resumes reading; missed batches are requested if the subscription `is_connected`.
    pub fn release(&mut self, feed: &impl Feed, is_connected: bool, now_ms: u64) -> Vec<Effect> {
        self.is_held = false;
        if is_connected && self.replay.is_none() {
            self.check(feed, now_ms);
        }
        self.told()
    }

    /// Processes live frames.
    pub fn live(
        &mut self,
        feed: &impl Feed,
        frames: Vec<Option<Frame>>,
        now_ms: u64,
    ) -> Vec<Effect> {
        match &mut self.replay {
            None => self.offer(feed, frames.into(), None, now_ms),
            Some(replay) => {
                self.waiting.extend(frames);
                if let Some(answer) = replay.stalled.take() {
                    self.take(feed, answer, true, now_ms);
                }
            }
        }
        self.told()
    }

    /// Processes a part of the reply. Only needed data extends the deadline: an endpoint that sends
    /// the same batch forever counts as silent.
    pub fn answered(&mut self, feed: &impl Feed, answer: Answer, now_ms: u64) -> Vec<Effect> {
        let Some(replay) = &mut self.replay else { return Vec::new() };
        let wanted = feed.position().0;
        replay.is_idle = true;
        replay.frames += answer.frames.len() as u64;
        replay.has_ended |= answer.has_ended;
        if replay.frames > FRAMES_MAX {
            let why = format!("the replay endpoint sent more than {FRAMES_MAX} batches");
            self.end(feed, Some(why), now_ms);
            return self.told();
        }
        let has_news = answer.is_over || !answer.frames.is_empty();
        if replay.is_verifying && has_news && !replay.has_answered {
            let first = answer.frames.first();
            if first == Some(&None) {
                let why =
                    "the replay endpoint answered with something other than frames".to_owned();
                self.end(feed, Some(why), now_ms);
                return self.told();
            }
            let first = first.and_then(Option::as_ref);
            self.is_unverified = false;
            if !feed.verify(first.map(|frame| (frame.sequence, &frame.payload[..]))) {
                // Another stream: only its tail follows, so request it from its start.
                self.ask(feed, 0, false, now_ms);
                return self.told();
            }
        }
        // The reply to a verification begins with a known batch.
        let is_first = !replay.has_answered && !answer.frames.is_empty();
        replay.has_answered |= is_first;
        self.take(feed, answer, false, now_ms);
        let has_advanced = feed.position().0 > wanted;
        // A replay requested meanwhile, which has received nothing yet, gets the whole time.
        if let Some(replay) = self.replay.as_mut().filter(|replay| replay.frames > 0)
            && (is_first || has_advanced)
        {
            let parts = if has_advanced { PAUSES_PER_TIMEOUT } else { 1 };
            replay.deadline_ms = now_ms + self.timeout_ms / parts;
            replay.is_idle = false;
        }
        self.told()
    }

    /// Nothing arrived until the deadline. `has_more`: data has arrived and will be passed.
    pub fn silent(&mut self, feed: &impl Feed, has_more: bool, now_ms: u64) -> Vec<Effect> {
        let Some(replay) = &mut self.replay else { return Vec::new() };
        replay.deadline_ms = now_ms + self.timeout_ms;
        let was_idle = std::mem::take(&mut replay.is_idle);
        if !has_more || was_idle {
            if self.has_progressed(feed) {
                // The end of the reply was lost when the engine's queue overflowed.
                self.ask(feed, feed.position().0, false, now_ms);
            } else {
                let why = format!(
                    "the replay endpoint sent none of the missing batches for {} s",
                    self.timeout_ms as f64 / 1e3
                );
                self.end(feed, Some(why), now_ms);
            }
        }
        self.told()
    }

    /// The replay endpoint is unreachable.
    pub fn unreachable(&mut self, feed: &impl Feed, why: String, now_ms: u64) -> Vec<Effect> {
        self.end(feed, Some(why), now_ms);
        self.told()
    }

    fn told(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// Looks for missed batches after a new connection.
    fn check(&mut self, feed: &impl Feed, now_ms: u64) {
        // While it is held, missing batches are looked for on release.
        if self.is_held || !self.has_endpoint {
            return;
        }
        if self.replay.is_some() {
            // It began on the previous connection: verify again when it is over.
            self.wants_verify = true;
            return;
        }
        match feed.position() {
            // Catch up with batches from before the connection.
            (wanted, None) => self.ask(feed, wanted, false, now_ms),
            // The stream may continue, or be another one.
            (_, Some(last)) => self.ask(feed, last, true, now_ms),
        }
    }

    fn ask(&mut self, feed: &impl Feed, first: u64, is_verifying: bool, now_ms: u64) {
        feed.replay_started();
        let deadline_ms = now_ms + self.timeout_ms;
        let wanted = first.saturating_add(is_verifying.into());
        self.replay =
            Some(Replay { first, wanted, is_verifying, deadline_ms, ..Replay::default() });
        self.effects.push(Effect::Ask(first));
    }

    /// Requests the batches missing from `from` on. If it is not known whether this is still the
    /// same stream, begins with the last applied one.
    fn ask_missing(&mut self, feed: &impl Feed, from: u64, now_ms: u64) {
        match feed.position().1.filter(|_| self.is_unverified) {
            None => self.ask(feed, from, false, now_ms),
            Some(last) => {
                self.ask(feed, last, true, now_ms);
                // Without an answer, these are given up.
                self.replay.iter_mut().for_each(|replay| replay.first = from);
            }
        }
    }

    /// Passes live frames. Batches missing before one of them are requested; after a replay from
    /// `asked` they are given up, unless that began later: then the rest may come on request.
    fn offer(
        &mut self,
        feed: &impl Feed,
        mut frames: VecDeque<Option<Frame>>,
        asked: Option<u64>,
        now_ms: u64,
    ) {
        while let Some(next) = frames.front() {
            let outcome = next.as_ref().map(|frame| feed.live(frame.sequence, &frame.payload));
            match outcome {
                None => feed.malformed(),
                Some(FrameOutcome::Applied) => {}
                Some(FrameOutcome::Closed) => return,
                Some(FrameOutcome::Gap { from, to }) => {
                    if self.has_endpoint && asked.is_none_or(|asked| from > asked) {
                        self.waiting = frames;
                        self.ask_missing(feed, from, now_ms);
                        return;
                    }
                    if !self.has_endpoint
                        && let Some(held_back) = self.lost_lines.pass(now_ms)
                    {
                        let held_back = held_back.map_or(0, NonZeroU64::get);
                        self.effects.push(Effect::Lost(from, to, held_back));
                    }
                    feed.give_up(to + 1);
                    continue;
                }
            }
            frames.pop_front();
        }
    }

    /// Passes replayed frames; `has_looked`: the waiting live ones were examined.
    fn take(&mut self, feed: &impl Feed, mut answer: Answer, mut has_looked: bool, now_ms: u64) {
        let mut frames = std::mem::take(&mut answer.frames).into_iter().peekable();
        while let Some(next) = frames.peek() {
            let outcome = next.as_ref().map(|frame| feed.replayed(frame.sequence, &frame.payload));
            match outcome {
                None => feed.malformed(),
                Some(FrameOutcome::Applied) => {}
                Some(FrameOutcome::Closed) => break,
                Some(FrameOutcome::Gap { from, to }) => {
                    if self.has_progressed(feed) {
                        // The engine's queue overflowed within its reply: request the rest.
                        self.ask(feed, from, false, now_ms);
                        return;
                    }
                    // The engine's ring begins later than requested. Batches that arrived live
                    // meanwhile are not missing, whatever the reply says.
                    let live = self.waiting.iter().flatten().map(|frame| frame.sequence).next();
                    let Some(replay) = &mut self.replay else { return };
                    if self.waiting.is_empty() && !has_looked {
                        answer.frames = frames.collect();
                        replay.stalled = Some(answer);
                        self.effects.push(Effect::Peek);
                        return;
                    }
                    has_looked = true;
                    let found = live.filter(|&live| live <= to);
                    let next = found.unwrap_or(to + 1);
                    (replay.first, replay.wanted) = (next, next);
                    feed.give_up(next);
                    if found.is_some() {
                        self.end(feed, None, now_ms);
                        return;
                    }
                    continue;
                }
            }
            frames.next();
        }
        if answer.is_over {
            self.end(feed, None, now_ms);
        }
    }

    /// Whether the replay brought any needed batch, so that repeated requests terminate.
    fn has_progressed(&self, feed: &impl Feed) -> bool {
        self.replay.as_ref().is_some_and(|replay| feed.position().0 > replay.wanted)
    }

    fn end(&mut self, feed: &impl Feed, failure: Option<String>, now_ms: u64) {
        let Some(replay) = self.replay.take() else { return };
        self.effects.push(Effect::Dismiss);
        self.is_unverified |= failure.is_some() && replay.is_verifying && !replay.has_answered;
        let is_empty = replay.first == 0 && replay.has_ended && !replay.has_answered;
        feed.replay_ended(failure.as_deref(), is_empty);
        if let Some(why) = failure
            && let Some(held_back) = self.failed_lines.pass(now_ms)
        {
            let more = held_back.map_or(String::new(), |count| format!(" ({count} more since)"));
            self.effects.push(Effect::Failed(replay.first, why + &more));
        }
        let waiting = std::mem::take(&mut self.waiting);
        self.offer(feed, waiting, Some(replay.first), now_ms);
        if self.replay.is_none() && std::mem::take(&mut self.wants_verify) {
            self.check(feed, now_ms);
        }
    }
}

#[cfg(test)]
mod tests;
