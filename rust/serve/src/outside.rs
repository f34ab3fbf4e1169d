//! Asking a policy outside the core without a thread that waits.

use std::time::Duration;

use kvflash_core::policy::desk::{Desk, Failure};
use kvflash_core::policy::{Advice, Question};
use kvflash_core::select::Selector;
use tokio::sync::oneshot;

/// The advice that `question` gets at the selector's desk; only this task waits, and for the deadline
/// at most.
pub(super) async fn advice(selector: &Selector, question: Option<Question>) -> Option<Advice> {
    let (desk, question) = (selector.desk()?, question?);
    let (sender, receiver) = oneshot::channel();
    let number = desk.ask(question, move |answer| {
        // Who has given up waiting does not listen any more.
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

/// A question of a client that may leave.
struct Asked<'a> {
    desk: &'a Desk,
    number: u64,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.desk.withdraw(self.number);
    }
}
