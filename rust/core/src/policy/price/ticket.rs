//! Data that a policy gets back at the end of a request.

use super::marks::Marks;
use crate::policy::cost::Stage;

/// Values computed when a request was routed, returned to the policy at its end.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Ticket {
    /// Prefixes of the prompt that count as wanted while the request runs.
    pub marks: Marks,
    /// Prefill tokens between the request and its first token.
    pub work_tokens: f64,
    /// Of these, its own.
    pub own_tokens: f64,
    /// Hash of the prompt's last full block; `None` while unknown.
    pub tail: Option<u64>,
    /// Whether its answer is not streamed.
    pub is_whole: bool,
    /// The part of the request that the worker does.
    pub stage: Stage,
}
