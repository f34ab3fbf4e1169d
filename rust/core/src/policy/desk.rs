//! Asks a policy outside the core: questions wait here until they are answered or their deadline
//! has passed.
//!
//! The core never waits for such a policy while it holds a lock. It asks first, about the
//! candidates of a moment before, and receives scores; the choice among the eligible candidates is
//! then made under the lock, by these scores.

use std::collections::VecDeque;
use std::fmt;

use parking_lot::{Condvar, Mutex};

use super::contract::Sample;
use super::question::{Advice, News, Question};

/// Maximum waiting questions.
pub const MAX_QUESTIONS: usize = 1_024;
/// Maximum waiting news.
pub const MAX_NEWS: usize = 8_192;
/// The number of a refused question.
const NOT_ASKED: u64 = u64::MAX;
/// Minimum time between two log lines.
const LOG_INTERVAL_MS: u64 = 60_000;

named! {
    /// Why there is no advice.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Failure {
        /// No answer within the deadline.
        Late = "late",
        /// The policy raised an error.
        Raised = "raised",
        /// The answer is not a valid choice among the candidates.
        Nonsense = "nonsense",
        /// Too many questions are waiting.
        Full = "full",
        /// The desk is closed.
        Closed = "closed",
        /// It was not asked, because it is still busy with a question that timed out.
        Stuck = "stuck",
    }
}

/// The outcome of a question.
pub type Answer = Result<Advice, Failure>;
type Reply = Box<dyn FnOnce(Answer) + Send>;

/// A question that waits for its answer; dropping it unanswered counts as a failure.
pub struct Asked {
    /// The question.
    pub question: Question,
    reply: Option<Reply>,
}

impl Asked {
    /// Answers it; has no effect if the asker has given up.
    pub fn answer(mut self, answer: Answer) {
        if let Some(reply) = self.reply.take() {
            reply(answer);
        }
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        if let Some(reply) = self.reply.take() {
            reply(Err(Failure::Closed));
        }
    }
}

impl fmt::Debug for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Asked").field("question", &self.question).finish_non_exhaustive()
    }
}

/// The next task of the answering thread.
#[derive(Debug)]
pub enum Task {
    /// Answer this question.
    Answer(Asked),
    /// Process this news.
    Note(News),
}

#[derive(Default)]
struct State {
    tasks: VecDeque<(u64, Task)>,
    questions: usize,
    next: u64,
    /// The task in progress, and the next question number when it was taken.
    in_hand: Option<(u64, u64)>,
    /// Whether it takes longer than a question may.
    is_stuck: bool,
    is_closed: bool,
    counts: Counts,
}

impl State {
    /// Removes the question of this number, if it still waits.
    fn take_out(&mut self, number: u64) -> Option<(u64, Task)> {
        let place = self.tasks.binary_search_by_key(&number, |(known, _)| *known).ok()?;
        let taken = self.tasks.remove(place);
        self.questions -= usize::from(taken.is_some());
        taken
    }
}

#[derive(Debug, Default)]
struct Counts {
    followed: u64,
    outdated: u64,
    failed: [u64; Failure::ALL.len()],
    dropped_news: u64,
    /// When a failure was last logged.
    logged_ms: Option<u64>,
    /// Failures since the last advice, and the cause of the latest.
    failed_in_row: u64,
    last_failure: Option<Failure>,
}

/// The events that the policy handles.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Interests {
    /// [`News::Routed`].
    pub routed: bool,
    /// [`News::Finished`].
    pub finished: bool,
    /// [`News::Removed`].
    pub removed: bool,
}

/// The queue of questions for one policy.
///
/// # Consistency
/// Questions and news are handed out in order, to one thread. An asker that stops waiting withdraws
/// its question, unless it is being answered. A policy that is still busy after that is not asked
/// again until it returns; requests meanwhile fail at once instead of waiting.
pub struct Desk {
    name: Box<str>,
    deadline_ms: u64,
    interests: Interests,
    state: Mutex<State>,
    arrived: Condvar,
}

impl Desk {
    /// An empty desk for the policy of this name, with this deadline for answers.
    pub fn new(name: &str, deadline_ms: u64, interests: Interests) -> Self {
        Self {
            name: name.into(),
            deadline_ms,
            interests,
            state: Mutex::default(),
            arrived: Condvar::new(),
        }
    }

    /// The policy's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Longest wait for an answer.
    pub fn deadline_ms(&self) -> u64 {
        self.deadline_ms
    }

    /// Asks; `reply` is called once with the outcome, possibly at once. The returned number
    /// withdraws the question.
    pub fn ask(&self, question: Question, reply: impl FnOnce(Answer) + Send + 'static) -> u64 {
        let asked = Asked { question, reply: Some(Box::new(reply)) };
        let refused = {
            let mut state = self.state.lock();
            if !state.is_closed && !state.is_stuck && state.questions < MAX_QUESTIONS {
                let number = state.next;
                state.next += 1;
                state.questions += 1;
                state.tasks.push_back((number, Task::Answer(asked)));
                self.arrived.notify_one();
                return number;
            }
            match *state {
                State { is_closed: true, .. } => Failure::Closed,
                State { is_stuck: true, .. } => Failure::Stuck,
                _ => Failure::Full,
            }
        };
        asked.answer(Err(refused));
        NOT_ASKED
    }

    /// Withdraws a question before its deadline.
    pub fn withdraw(&self, number: u64) {
        // Its reply is called without the lock.
        let taken = self.state.lock().take_out(number);
        drop(taken);
    }

    /// Withdraws a question after its deadline.
    pub fn take_back(&self, number: u64) {
        let taken = {
            let mut state = self.state.lock();
            let taken = state.take_out(number);
            let is_busy_since = |(task, next): (u64, u64)| task == number || next <= number;
            state.is_stuck |= number != NOT_ASKED && state.in_hand.is_some_and(is_busy_since);
            taken
        };
        // Its reply is called without the lock.
        drop(taken);
    }

    /// Reports an event, if the policy handles it.
    pub fn tell(&self, news: impl FnOnce() -> News, is_wanted: fn(&Interests) -> bool) {
        if !is_wanted(&self.interests) {
            return;
        }
        let news = news();
        let mut state = self.state.lock();
        if state.is_closed || state.tasks.len() - state.questions >= MAX_NEWS {
            state.counts.dropped_news += 1;
            return;
        }
        let number = state.next;
        state.next += 1;
        state.tasks.push_back((number, Task::Note(news)));
        self.arrived.notify_one();
    }

    /// Waits for a task, after finishing the previous one; `None` once it is closed.
    pub fn next(&self) -> Option<Task> {
        let mut state = self.state.lock();
        (state.in_hand, state.is_stuck) = (None, false);
        loop {
            if state.is_closed {
                return None;
            }
            if let Some((number, task)) = state.tasks.pop_front() {
                state.in_hand = Some((number, state.next));
                state.questions -= usize::from(matches!(task, Task::Answer(_)));
                return Some(task);
            }
            self.arrived.wait(&mut state);
        }
    }

    /// Closes the desk: nothing more is asked, waiting requests are decided without the policy.
    pub fn close(&self) {
        let left = {
            let mut state = self.state.lock();
            state.is_closed = true;
            state.questions = 0;
            std::mem::take(&mut state.tasks)
        };
        self.arrived.notify_all();
        drop(left);
    }

    /// The advice in `answer`, if there is any; failures are counted, and logged once a minute.
    pub fn settle(&self, answer: Answer, now_ms: u64) -> Option<Advice> {
        let mut state = self.state.lock();
        let counts = &mut state.counts;
        let failure = match answer {
            Ok(advice) => {
                counts.failed_in_row = 0;
                return Some(advice);
            }
            Err(failure) => failure,
        };
        counts.failed[failure as usize] += 1;
        counts.last_failure = Some(failure);
        counts.failed_in_row += 1;
        if counts.logged_ms.is_none_or(|at| now_ms.saturating_sub(at) >= LOG_INTERVAL_MS) {
            counts.logged_ms = Some(now_ms);
            // A blocked log must not hold up the requests.
            drop(state);
            let (policy, cause, deadline_ms) = (&*self.name, failure.name(), self.deadline_ms);
            tracing::warn!(
                policy,
                cause,
                deadline_ms,
                "the policy gave no decision; kv decides instead"
            );
        }
        None
    }

    /// Why the policy does not decide at the moment, as text for operators.
    pub fn trouble(&self) -> Option<String> {
        let state = self.state.lock();
        let failures = state.counts.failed_in_row;
        let cause = state.counts.last_failure.filter(|_| failures > 0)?;
        let name = &self.name;
        let why = if state.is_stuck {
            let deadline_ms = self.deadline_ms;
            format!(
                "a call has not returned within {deadline_ms} ms and still runs; the policy gets no calls until it \
                 returns"
            )
        } else {
            format!("see the log, and kvflash_outside_policy_answers_total{{outcome=\"{cause}\"}}")
        };
        Some(format!(
            "policy {name} gave no decision {failures} times in a row ({cause}), so kv decides: {why}"
        ))
    }

    /// Counts whether a request followed the advice given for it.
    pub fn followed(&self, is_followed: bool) {
        let Counts { followed, outdated, .. } = &mut self.state.lock().counts;
        *(if is_followed { followed } else { outdated }) += 1;
    }

    /// Reports every counter.
    pub fn samples(&self, visit: &mut dyn FnMut(Sample<'_>)) {
        let name = "outside_policy_answers_total";
        let state = self.state.lock();
        let Counts { followed, outdated, failed, dropped_news, .. } = &state.counts;
        let failures = Failure::ALL.map(Failure::name).into_iter().zip(*failed);
        for (outcome, count) in
            [("followed", *followed), ("outdated", *outdated)].into_iter().chain(failures)
        {
            let help = "Calls of a policy in Python, by outcome";
            visit(Sample { name, help, label: ("outcome", outcome), value: count as f64 });
        }
        let help =
            "News of requests and workers that was dropped because the policy in Python was slow";
        visit(Sample::plain("outside_policy_dropped_news_total", help, *dropped_news as f64));
        let help = "Calls that wait for a policy in Python";
        visit(Sample::plain("outside_policy_waiting", help, state.tasks.len() as f64));
    }
}

impl fmt::Debug for Desk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Desk").field("name", &self.name).finish_non_exhaustive()
    }
}
