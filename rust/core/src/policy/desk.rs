//! Asks a policy outside the core: questions wait here until they are answered or their deadline
//! has passed.
//!
//! The core never waits for such a policy while it holds a lock. It asks first, about the
//! candidates of a moment before, and receives scores; the choice among the eligible candidates is
//! then made under the lock, by these scores.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

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
    advised: AtomicU64,
    outdated: AtomicU64,
    failed: [AtomicU64; Failure::ALL.len()],
    dropped_news: AtomicU64,
    logged_ms: AtomicU64,
    /// Failures since the last advice, and the cause of the latest.
    failed_in_row: AtomicU64,
    last_failure: AtomicUsize,
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
    counts: Counts,
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
            counts: Counts::default(),
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
            // Relaxed: a statistic.
            self.counts.dropped_news.fetch_add(1, Ordering::Relaxed);
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
        match answer {
            Ok(advice) => {
                // Relaxed: a slightly outdated report does no harm.
                self.counts.failed_in_row.store(0, Ordering::Relaxed);
                Some(advice)
            }
            Err(failure) => {
                // Relaxed: statistics; of concurrent threads one logs.
                self.counts.failed[failure as usize].fetch_add(1, Ordering::Relaxed);
                self.counts.last_failure.store(failure as usize, Ordering::Relaxed);
                self.counts.failed_in_row.fetch_add(1, Ordering::Relaxed);
                let is_due = |logged_ms| {
                    let is_late = now_ms.saturating_sub(logged_ms) >= LOG_INTERVAL_MS;
                    (logged_ms == 0 || is_late).then_some(now_ms.max(1))
                };
                let logged_ms = &self.counts.logged_ms;
                if logged_ms.fetch_update(Ordering::Relaxed, Ordering::Relaxed, is_due).is_ok() {
                    let (policy, cause) = (&*self.name, failure.name());
                    let deadline_ms = self.deadline_ms;
                    tracing::warn!(
                        policy,
                        cause,
                        deadline_ms,
                        "the policy gave no decision; kv decides instead"
                    );
                }
                None
            }
        }
    }

    /// Why the policy does not decide at the moment, as text for operators.
    pub fn trouble(&self) -> Option<String> {
        // Relaxed: a slightly outdated report does no harm.
        let failures = self.counts.failed_in_row.load(Ordering::Relaxed);
        if failures == 0 {
            return None;
        }
        let last = self.counts.last_failure.load(Ordering::Relaxed);
        let (name, cause) = (&self.name, Failure::ALL[last].name());
        let why = if self.state.lock().is_stuck {
            let deadline_ms = self.deadline_ms;
            format!(
                "a call has not returned within {deadline_ms} ms and still runs; it is asked again once it returns"
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
        let Counts { advised, outdated, .. } = &self.counts;
        // Relaxed: statistics.
        (if is_followed { advised } else { outdated }).fetch_add(1, Ordering::Relaxed);
    }

    /// Reports every counter.
    pub fn samples(&self, visit: &mut dyn FnMut(Sample<'_>)) {
        let name = "outside_policy_answers_total";
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as f64;
        let mut answers = |outcome, counter: &AtomicU64| {
            let help = "Calls of a policy in Python, by outcome";
            visit(Sample { name, help, label: ("outcome", outcome), value: count(counter) });
        };
        answers("followed", &self.counts.advised);
        answers("outdated", &self.counts.outdated);
        for failure in Failure::ALL {
            answers(failure.name(), &self.counts.failed[failure as usize]);
        }
        let dropped = count(&self.counts.dropped_news);
        let help =
            "News of requests and workers that was dropped because the policy in Python was slow";
        visit(Sample::plain("outside_policy_dropped_news_total", help, dropped));
        let waiting = self.state.lock().tasks.len() as f64;
        let help = "Calls that wait for a policy in Python";
        visit(Sample::plain("outside_policy_waiting", help, waiting));
    }
}

impl fmt::Debug for Desk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Desk").field("name", &self.name).finish_non_exhaustive()
    }
}
