//! What a queue can say of itself.

/// Numbers of a whole queue.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct FairStats {
    /// Requests that wait.
    pub queued: usize,
    /// Requests that were admitted and have not ended.
    pub running: usize,
    /// Clients that are remembered.
    pub clients: usize,
    /// Of these, clients with a request that waits.
    pub waiting_clients: usize,
    /// Requests admitted.
    pub admitted_total: u64,
    /// Requests refused because too many waited.
    pub refused_queue_total: u64,
    /// Requests refused because too many of their client waited.
    pub refused_client_queue_total: u64,
    /// Requests refused because there were too many clients.
    pub refused_clients_total: u64,
    /// Requests whose time ran out while they waited.
    pub expired_total: u64,
    /// Requests taken back while they waited.
    pub cancelled_total: u64,
    /// Clients that were lifted.
    pub lifted_total: u64,
    /// Idle clients that were forgotten to make room.
    pub forgotten_clients_total: u64,
    /// Time that admitted requests waited, added up, in milliseconds.
    pub waited_ms_total: u64,
}

/// Numbers of one client.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClientStats<'a> {
    /// Its name; `""` for those without one, who share.
    pub client: &'a str,
    /// Service it had, weighted, with what it was lifted by.
    pub counter: f64,
    /// Its weight.
    pub weight: f64,
    /// Requests that wait.
    pub queued: usize,
    /// Requests that were admitted and have not ended.
    pub running: usize,
    /// Service it had, weighted, without lifts and before its weight.
    pub served: f64,
}
