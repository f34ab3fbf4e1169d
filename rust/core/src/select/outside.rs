//! Asking a policy outside the core, before a selection.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use super::ask::Ask;
use super::selector::Selector;
use crate::policy::desk::Failure;
use crate::policy::{Advice, Desk, Question};

impl Selector {
    /// The desk of the policy that chooses, if it is outside the core.
    pub fn desk(&self) -> Option<&Arc<Desk>> {
        self.router.policies.desk()
    }

    /// The question to ask about `ask`; `None` if there is none: no such policy, a single
    /// candidate, or a request that the selection itself will refuse.
    ///
    /// # Cost
    /// As a preview; the prompt is copied.
    pub fn question(&self, ask: &Ask<'_>) -> Option<Question> {
        self.desk()?;
        self.with_known(ask, |ask, _, _| self.router.question(ask)).ok().flatten()
    }

    /// The policy's advice for `ask`, for [`Ask::advice`]; blocks the thread for at most the
    /// deadline.
    pub fn advice(&self, ask: &Ask<'_>) -> Option<Advice> {
        let (desk, question) = (self.desk()?, self.question(ask)?);
        let (sender, receiver) = sync_channel(1);
        let number = desk.ask(question, move |answer| {
            // The receiver may have given up.
            let _gone = sender.send(answer);
        });
        let answer = match receiver.recv_timeout(Duration::from_millis(desk.deadline_ms())) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout) => {
                desk.take_back(number);
                Err(Failure::Late)
            }
            Err(RecvTimeoutError::Disconnected) => Err(Failure::Closed),
        };
        desk.settle(answer, self.now_ms())
    }

    /// The current time on the selector's clock.
    pub fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }
}
