//! Asks a policy outside the core without blocking a thread.

use std::time::Duration;

use kvflash_core::policy::desk::{Desk, Failure};
use kvflash_core::policy::{Advice, Question};
use kvflash_core::select::Selector;
use tokio::sync::oneshot;

/// The advice for `question` from the selector's desk; only this task waits, at most for the
/// deadline.
pub(super) async fn advice(selector: &Selector, question: Option<Question>) -> Option<Advice> {
    let (desk, question) = (selector.desk()?, question?);
    let (sender, receiver) = oneshot::channel();
    let number = desk.ask(question, move |answer| {
        // The receiver may have given up.
        let _gone = sender.send(answer);
    });
    let asked = Asked { desk, number };
    let answer =
        match tokio::time::timeout(Duration::from_millis(desk.deadline_ms()), receiver).await {
            Ok(answer) => answer.unwrap_or(Err(Failure::Closed)),
            Err(_) => {
                desk.take_back(number);
                Err(Failure::Late)
            }
        };
    drop(asked);
    desk.settle(answer, selector.now_ms())
}

/// A question whose client may leave.
struct Asked<'a> {
    desk: &'a Desk,
    number: u64,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.desk.withdraw(self.number);
    }
}
