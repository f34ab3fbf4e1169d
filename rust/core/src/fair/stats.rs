//! Statistics of a queue.

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
