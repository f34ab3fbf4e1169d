//! The repair of one publisher's lost batches: ask for a replay, check it, give up what does not come.
//!
//! The machine has no socket and no clock. It is told what came over the subscription, what came as a
//! replay, of connections and of silence, and says what the door is to do:
//!
//! - [`Effect::Ask`]: open a connection of its own to the replay endpoint and ask from a number on; close
//!   the one before, so that late answers to it can't be mistaken.
//! - [`Effect::Dismiss`]: close that connection.
//! - [`Effect::Peek`]: hand over what waits in the subscription now, be it nothing.
//! - [`Effect::Lost`], [`Effect::Failed`]: tell people.
//!
//! While a replay is under way ([`Repair::wants_live`] is false) the door leaves live frames where they
//! are: their number is bounded there, and what is dropped beyond it shows as the next gap.

use std::collections::VecDeque;

use crate::log_limit::LogLimit;

/// What became of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameOutcome {
    /// Taken in (also when some of its events were skipped and counted).
    Applied,
    /// Seen before; nothing to do.
    Duplicate,
    /// Batches `from..=to` are missing. Repair or give up, then offer this frame again.
    Gap {
        /// First missing sequence number.
        from: u64,
        /// Last missing sequence number.
        to: u64,
    },
    /// The publisher is not registered any more; close the socket.
    Closed,
}

/// A batch with its number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Its number.
    pub sequence: u64,
    /// Its bytes.
    pub payload: Vec<u8>,
}

/// Takes the frames, and knows the place in the stream.
pub trait Feed {
    /// Takes a frame that came over the subscription.
    fn live(&self, frame: &Frame) -> FrameOutcome;
    /// Takes a frame that came as a replay.
    fn replayed(&self, frame: &Frame) -> FrameOutcome;
    /// Whether a replay from the last applied number shows the stream that was followed; `None`: the
    /// engine had nothing to replay.
    fn verify(&self, first: Option<&Frame>) -> bool;
    /// The batches before this number will not come.
    fn give_up(&self, sequence: u64);
    /// The number wanted next, and the one applied last.
    fn position(&self) -> (u64, Option<u64>);
    /// A message that is no frame was passed over.
    fn malformed(&self);
    /// The engine is asked for batches again.
    fn replay_started(&self);
    /// A replay is over, or failed. `is_empty`: it was asked for everything and had nothing.
    fn replay_ended(&self, failure: Option<&str>, is_empty: bool);
}

/// What the door is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Ask the replay endpoint for the batches from this number on.
    Ask(u64),
    /// The replay is over.
    Dismiss,
    /// Hand over the live frames that wait, to [`Repair::live`].
    Peek,
    /// These batches were given up, since there is no replay endpoint; so many such lines were held back.
    Lost(u64, u64, u64),
    /// The replay from this number failed, and why.
    Failed(u64, String),
}

/// A part of the answer to a request for a replay.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answer {
    /// What came, in order; `None` stands for a message that is no frame.
    pub frames: Vec<Option<Frame>>,
    /// Nothing follows.
    pub is_over: bool,
    /// It ended with the mark of its end.
    pub has_ended: bool,
}

/// A replay under way.
#[derive(Debug)]
struct Replay {
    /// The number that was asked for, or up to which everything was given up.
    first: u64,
    is_verifying: bool,
    has_answered: bool,
    has_ended: bool,
    /// Frames that wait for a look at the live ones; they begin later than what is wanted.
    stalled: Option<Answer>,
    deadline_ms: u64,
    /// Something came since the deadline was set, and nothing of it was wanted.
    is_idle: bool,
    /// Frames that have come.
    frames: u64,
}

/// An answer of more frames is none: engines keep some ten thousand.
const FRAMES_MAX: u64 = 1 << 20;

/// The machine of one publisher.
#[derive(Debug)]
pub struct Repair {
    has_endpoint: bool,
    timeout_ms: u64,
    replay: Option<Replay>,
    /// Live frames that wait for the end of the replay.
    waiting: VecDeque<Option<Frame>>,
    wants_verify: bool,
    is_held: bool,
    effects: Vec<Effect>,
    /// Lines about batches that are lost, and about replays that fail.
    lost_lines: LogLimit,
    failed_lines: LogLimit,
}

impl Repair {
    /// Of a publisher that has a replay endpoint or not. A replay that brings nothing for `timeout_ms` is
    /// given up; while `is_held`, nothing is read.
    pub fn new(has_endpoint: bool, timeout_ms: u64, is_held: bool) -> Self {
        Self {
            has_endpoint,
            timeout_ms,
            replay: None,
            waiting: VecDeque::new(),
            wants_verify: false,
            is_held,
            effects: Vec::new(),
            lost_lines: LogLimit::default(),
            failed_lines: LogLimit::default(),
        }
    }

    /// Whether the door is to read the subscription.
    pub fn wants_live(&self) -> bool {
        self.replay.is_none() && !self.is_held
    }

    /// Whether nothing is read before [`Repair::release`].
    pub fn is_held(&self) -> bool {
        self.is_held
    }

    /// When [`Repair::silent`] is to be called, unless something comes before.
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

    /// Read on; what was missed meanwhile is looked for if the subscription `is_connected`.
    pub fn release(&mut self, feed: &impl Feed, is_connected: bool, now_ms: u64) -> Vec<Effect> {
        self.is_held = false;
        if is_connected && self.replay.is_none() {
            self.check(feed, now_ms);
        }
        self.told()
    }

    /// Live frames came.
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

    /// A part of the answer came. Only what was wanted puts the end of the wait off: an endpoint that sends
    /// the same batch for ever is silent, too.
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
            if !feed.verify(first.and_then(Option::as_ref)) {
                // Another stream: what follows is its tail only, so ask for it from its start.
                self.ask(feed, 0, false, now_ms);
                return self.told();
            }
        }
        // The answer to a check begins with a batch that is known.
        let is_first = !replay.has_answered && !answer.frames.is_empty();
        replay.has_answered |= is_first;
        self.take(feed, answer, false, now_ms);
        if let Some(replay) = &mut self.replay
            && (is_first || feed.position().0 > wanted)
        {
            replay.deadline_ms = now_ms + self.timeout_ms;
            replay.is_idle = false;
        }
        self.told()
    }

    /// Nothing came until the deadline. `has_more`: it is here, and was not handed over yet.
    pub fn silent(&mut self, feed: &impl Feed, has_more: bool, now_ms: u64) -> Vec<Effect> {
        let Some(replay) = &mut self.replay else { return Vec::new() };
        replay.deadline_ms = now_ms + self.timeout_ms;
        let was_idle = std::mem::take(&mut replay.is_idle);
        if !has_more || was_idle {
            if self.has_progressed(feed) {
                // The end of the answer was lost when the engine's queue overflowed.
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

    /// The door can't ask.
    pub fn unreachable(&mut self, feed: &impl Feed, why: String, now_ms: u64) -> Vec<Effect> {
        self.end(feed, Some(why), now_ms);
        self.told()
    }

    fn told(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// Looks for what was missed, on a connection that is new.
    fn check(&mut self, feed: &impl Feed, now_ms: u64) {
        // While it is held, what is missing is looked for when it reads.
        if self.is_held || !self.has_endpoint {
            return;
        }
        if self.replay.is_some() {
            // It began on the previous connection: check again when it is over.
            self.wants_verify = true;
            return;
        }
        match feed.position() {
            // Catch up with what was published before the connection.
            (wanted, None) => self.ask(feed, wanted, false, now_ms),
            // The stream may go on, or be another one.
            (_, Some(last)) => self.ask(feed, last, true, now_ms),
        }
    }

    fn ask(&mut self, feed: &impl Feed, first: u64, is_verifying: bool, now_ms: u64) {
        feed.replay_started();
        self.replay = Some(Replay {
            first,
            is_verifying,
            has_answered: false,
            has_ended: false,
            stalled: None,
            deadline_ms: now_ms + self.timeout_ms,
            is_idle: false,
            frames: 0,
        });
        self.effects.push(Effect::Ask(first));
    }

    /// Hands over live frames. What is missing before one of them is asked for; behind a replay from
    /// `asked` it is given up, unless it begins later: the rest may come when it is asked for.
    fn offer(
        &mut self,
        feed: &impl Feed,
        mut frames: VecDeque<Option<Frame>>,
        asked: Option<u64>,
        now_ms: u64,
    ) {
        while let Some(next) = frames.front() {
            let outcome = next.as_ref().map(|frame| feed.live(frame));
            match outcome {
                None => feed.malformed(),
                Some(FrameOutcome::Applied | FrameOutcome::Duplicate) => {}
                Some(FrameOutcome::Closed) => return,
                Some(FrameOutcome::Gap { from, to }) => {
                    if self.has_endpoint && asked.is_none_or(|asked| from > asked) {
                        self.waiting = frames;
                        self.ask(feed, from, false, now_ms);
                        return;
                    }
                    if !self.has_endpoint
                        && let Some(held_back) = self.lost_lines.pass(now_ms)
                    {
                        self.effects.push(Effect::Lost(from, to, held_back));
                    }
                    feed.give_up(to + 1);
                    continue;
                }
            }
            frames.pop_front();
        }
    }

    /// Hands over replayed frames; `has_looked` at the live ones that wait.
    fn take(&mut self, feed: &impl Feed, mut answer: Answer, mut has_looked: bool, now_ms: u64) {
        let mut frames = std::mem::take(&mut answer.frames).into_iter().peekable();
        while let Some(next) = frames.peek() {
            let outcome = next.as_ref().map(|frame| feed.replayed(frame));
            match outcome {
                None => feed.malformed(),
                Some(FrameOutcome::Applied | FrameOutcome::Duplicate) => {}
                Some(FrameOutcome::Closed) => break,
                Some(FrameOutcome::Gap { from, to }) => {
                    if self.has_progressed(feed) {
                        // The engine's queue overflowed in the middle of its answer: ask for the rest.
                        self.ask(feed, from, false, now_ms);
                        return;
                    }
                    // The engine's ring begins later than what was asked for. What came live meanwhile
                    // is not missing, whatever the answer says.
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
                    replay.first = next;
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

    /// Has the replay brought anything that was wanted? Then asking again ends some time.
    fn has_progressed(&self, feed: &impl Feed) -> bool {
        let wanted = self.replay.as_ref().map(|it| it.first.saturating_add(it.is_verifying.into()));
        wanted.is_some_and(|wanted| feed.position().0 > wanted)
    }

    fn end(&mut self, feed: &impl Feed, failure: Option<String>, now_ms: u64) {
        let Some(replay) = self.replay.take() else { return };
        self.effects.push(Effect::Dismiss);
        let is_empty = replay.first == 0 && replay.has_ended && !replay.has_answered;
        feed.replay_ended(failure.as_deref(), is_empty);
        if let Some(why) = failure
            && let Some(held_back) = self.failed_lines.pass(now_ms)
        {
            let more =
                if held_back > 0 { format!(" ({held_back} more since)") } else { String::new() };
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
