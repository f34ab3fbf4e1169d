//! Backends: an engine over HTTP, or a worker of the runtime; two of them with disaggregation.

pub(crate) mod disagg;
pub(super) mod openai;
pub(super) mod plane;
pub(super) mod worker;
