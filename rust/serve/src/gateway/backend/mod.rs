//! Backends: an engine over HTTP, or a worker of the runtime; two of them with disaggregation.

pub(super) mod openai;
pub(super) mod plane;
pub(crate) mod worker;
