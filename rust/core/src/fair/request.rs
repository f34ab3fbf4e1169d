//! Inputs and results of a queue.

use crate::error::Error;

/// The client of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientName<'a> {
    /// Clients of one group have the turns of one client together, and take turns for these. `None` for a client
    /// that takes its own.
    pub group: Option<&'a str>,
    /// `""` for those without a name, who share one.
    pub client: &'a str,
}

impl<'a> From<&'a str> for ClientName<'a> {
    fn from(client: &'a str) -> Self {
        Self { group: None, client }
    }
}

/// A request that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub(super) u64);

/// An admitted request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Grant(pub(super) u64);

/// Expected cost of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cost {
    /// Tokens of the prompt.
    pub input_tokens: u64,
    /// Of these, tokens that a worker is expected to have cached.
    pub cached_tokens: u64,
}

/// Actual usage of an admitted request; `None` if it equals what was expected and counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Used {
    /// Tokens of the prompt and, of these, cached ones.
    pub input_tokens: Option<(u64, u64)>,
    /// Generated tokens.
    pub output_tokens: Option<u64>,
}

/// A request whose turn has come.
#[derive(Debug, PartialEq)]
pub struct Granted<T> {
    /// Its number for charges.
    pub grant: Grant,
    /// The pushed item.
    pub item: T,
}

/// Why a request may not wait.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// Too many requests wait.
    QueueFull,
    /// Too many requests of this client, or of its group, wait.
    ClientQueueFull,
    /// Too many clients have requests.
    TooManyClients,
    /// The client's name is too long; a retry would not help.
    Name(Error),
}

/// A refused request.
#[derive(Debug)]
pub struct Refused {
    /// The reason.
    pub refusal: Refusal,
    /// When it may retry, in milliseconds.
    pub retry_after_ms: u64,
    /// The same as text: HTTP 429, except for a name that is too long.
    pub error: Error,
}

/// Statistics of a whole queue.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct FairStats {
    /// Waiting requests.
    pub queued: usize,
    /// Admitted and unfinished requests.
    pub running: usize,
    /// Remembered clients.
    pub clients: usize,
    /// Admitted requests.
    pub admitted_total: u64,
    /// Requests refused because too many waited.
    pub refused_queue_total: u64,
    /// Requests refused because too many of their client waited.
    pub refused_client_queue_total: u64,
    /// Requests refused because there were too many clients.
    pub refused_clients_total: u64,
    /// Requests refused because their client's name was too long.
    pub refused_names_total: u64,
    /// Requests that timed out while they waited.
    pub expired_total: u64,
    /// Requests cancelled while they waited.
    pub cancelled_total: u64,
    /// Idle clients forgotten to make room.
    pub forgotten_clients_total: u64,
}
