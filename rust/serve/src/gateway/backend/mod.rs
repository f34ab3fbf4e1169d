//! Backends: an engine over HTTP, or a worker of the runtime; two of them with disaggregation.

pub(crate) mod disagg;
pub(super) mod failed;
pub(super) mod handoff;
pub(super) mod openai;
pub(super) mod plane;
pub(super) mod worker;

use super::book::Choice;
use super::plan::Plan;
use crate::frontend::app::App;
use failed::Failed;
use handoff::Handoff;

/// Sends a request to the worker that was chosen for it.
pub(crate) trait Backend {
    /// An answer whose first byte or item has arrived.
    type Opened;

    /// Sends `plan`'s request, with the prompt prefilled as `handoff` says, and waits for the
    /// answer to begin.
    fn open(
        &self,
        app: &App,
        plan: &Plan,
        choice: &Choice,
        handoff: &Handoff,
    ) -> impl Future<Output = Result<Self::Opened, Failed>> + Send;

    /// Prefills the prompt; returns what the decode worker needs.
    fn prefill(
        &self,
        app: &App,
        plan: &Plan,
        choice: &Choice,
    ) -> impl Future<Output = Result<rmpv::Value, Failed>> + Send;
}
