//! Asking a policy outside the core without a thread that waits.

use std::time::Duration;

use tokio::sync::oneshot;

use crate::policy::desk::Failure;
use crate::policy::{Advice, Question};
use crate::select::Selector;

/// The advice that `question` gets at the selector's desk; only this task waits, and for the deadline
/// at most.
pub(super) async fn advice(selector: &Selector, question: Option<Question>) -> Option<Advice> {
    let (desk, question) = (selector.desk()?, question?);
    let (sender, receiver) = oneshot::channel();
    let number = desk.ask(question, move |answer| {
        // Who has given up waiting does not listen any more.
        let _gone = sender.send(answer);
    });
    let answer =
        match tokio::time::timeout(Duration::from_millis(desk.deadline_ms()), receiver).await {
            Ok(answer) => answer.unwrap_or(Err(Failure::Closed)),
            Err(_) => {
                desk.take_back(number);
                Err(Failure::Late)
            }
        };
    desk.settle(answer, selector.now_ms())
}
