//! What comes back with the end of a request.

use super::marks::Marks;
use crate::policy::cost::Stage;

/// What the policy worked out for a request when it was routed; it comes back with its end.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Ticket {
    /// Prefixes of the prompt that count as wanted while the request runs.
    pub marks: Marks,
    /// Tokens of prefill that stood between the request and its first token.
    pub work_tokens: f64,
    /// Of these, its own.
    pub own_tokens: f64,
    /// Its answer comes as a whole.
    pub is_whole: bool,
    /// What of it the worker does.
    pub stage: Stage,
}
