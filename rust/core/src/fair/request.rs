//! What goes into a queue and what comes out.

use super::order::Standing;
use crate::error::Error;

/// A request that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub(super) u64);

/// A request that was admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Grant(pub(super) u64);

/// What a request is expected to cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cost {
    /// Tokens of the prompt.
    pub input_tokens: u64,
    /// Of these, tokens that a worker is expected to have cached.
    pub cached_tokens: u64,
    /// Tokens that the answer is expected to have, where the caller knows better than the
    /// client's average; the true length for [`VtcOracle`](super::Discipline::VtcOracle).
    pub output_tokens: Option<u64>,
}

/// How a request waits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    /// Requests of the same client with a greater one go first. It gains nothing over other
    /// clients: weights do that.
    pub standing: Standing,
    /// It is given up from this time on; `None` for the queue's own limit.
    pub deadline_ms: Option<u64>,
}

/// What an admitted request really used; `None` where that is as it was expected and counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Used {
    /// Tokens of the prompt and, of these, cached ones.
    pub input_tokens: Option<(u64, u64)>,
    /// Generated tokens.
    pub output_tokens: Option<u64>,
}

/// A request whose turn it is.
#[derive(Debug, PartialEq)]
pub struct Granted<T> {
    /// The number by which it is charged.
    pub grant: Grant,
    /// The number it had while it waited.
    pub ticket: Ticket,
    /// What was pushed.
    pub item: T,
    /// How long it waited, in milliseconds.
    pub waited_ms: u64,
}

/// A request whose time ran out while it waited.
#[derive(Debug, PartialEq)]
pub struct Dropped<T> {
    /// The number it had.
    pub ticket: Ticket,
    /// What was pushed.
    pub item: T,
    /// How long it waited, in milliseconds.
    pub waited_ms: u64,
}

/// Why a request may not wait.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// Too many requests wait.
    QueueFull,
    /// Too many requests of this client wait.
    ClientQueueFull,
    /// Too many clients have requests.
    TooManyClients,
    /// The name of the client is too long; trying again does not help.
    Name(Error),
}

/// A request that may not wait, given back.
#[derive(Debug)]
pub struct Refused<T> {
    /// What was pushed.
    pub item: T,
    /// Why.
    pub refusal: Refusal,
    /// When it may try again, in milliseconds.
    pub retry_after_ms: u64,
    /// The same in words: HTTP 429, but for a name that is too long.
    pub error: Error,
}
