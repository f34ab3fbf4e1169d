//! Tasks that wait until a worker has room to prefill their requests.

use std::sync::Arc;

use kvflash_core::error::Result;
use kvflash_core::fair::Wish;
use kvflash_core::select::{Entered, Queue};
use tokio::sync::Notify;

/// The result of `book`, at once or when there is room; it is called again as long as it returns
/// `MustWait`. A cancelled wait leaves the queue.
///
/// `cached_tokens` returns how much of a prompt of `isl_tokens` the best worker holds. `is_open`
/// says whether every worker may take the request: if it found no room, there is none for others
/// either.
///
/// # Errors
/// Those of `book`; `Overloaded` if the queue is full, `AllBusy` after a timeout.
pub(super) async fn pass<T>(
    queue: &Arc<Queue>,
    wish: &Wish,
    isl_tokens: u64,
    cached_tokens: impl FnOnce() -> u64,
    is_open: impl Fn() -> bool,
    book: impl Fn() -> Result<T>,
) -> Result<T> {
    let notify = Arc::new(Notify::new());
    let notified = Arc::clone(&notify);
    let told = Arc::new(move || notified.notify_one());
    let mut waiting = match queue.enter(wish, isl_tokens, cached_tokens, told, &book)? {
        Entered::Booked(booked) => return Ok(booked),
        Entered::Waits(waiting) => waiting,
    };
    let mut deadline = std::pin::pin!(tokio::time::sleep(queue.max_wait()));
    loop {
        tokio::select! {
            biased;
            () = notify.notified() => {}
            () = &mut deadline => return Err(waiting.expire()),
        }
        if let Some(booked) = waiting.try_again(&is_open, &book)? {
            return Ok(booked);
        }
    }
}

#[cfg(test)]
mod tests;
