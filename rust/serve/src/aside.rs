//! Builds expensive responses.

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::Semaphore;

/// Expensive responses built at once.
const MAX_AT_ONCE: usize = 4;

/// Builds responses that list every worker, which for thousands of them takes up to a tenth of a
/// second: other connections continue meanwhile. Only a few are built at once, so that frequent
/// requests occupy neither a thread each nor all processors.
#[derive(Debug)]
pub(super) struct Aside {
    turns: Semaphore,
    /// For responses to probes.
    probe_turns: Semaphore,
}

impl Default for Aside {
    fn default() -> Self {
        Self { turns: Semaphore::new(MAX_AT_ONCE), probe_turns: Semaphore::new(1) }
    }
}

/// Calls `make`; other tasks continue meanwhile, unless the runtime has a single thread.
pub(super) fn block_in_place<T>(make: impl FnOnce() -> T) -> T {
    match Handle::current().runtime_flavor() {
        RuntimeFlavor::CurrentThread => make(),
        _ => tokio::task::block_in_place(make),
    }
}

impl Aside {
    /// Calls `make` in turn, first come, first served. `make` must not call this itself.
    pub async fn make<T>(&self, make: impl FnOnce() -> T) -> T {
        let _turn = self.turns.acquire().await.expect("it is never closed");
        block_in_place(make)
    }

    /// The same for the response to a probe, which waits only for other probes.
    pub async fn make_for_probe<T>(&self, make: impl FnOnce() -> T) -> T {
        let _turn = self.probe_turns.acquire().await.expect("it is never closed");
        block_in_place(make)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::{Arc, mpsc};
    use std::time::Duration;

    use parking_lot::Mutex;

    use super::*;

    /// Time limit of the tests.
    const DEADLINE: Duration = Duration::from_secs(30);

    #[test]
    fn a_few_are_made_at_once_and_others_go_on() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let (aside, gate) = (Arc::new(Aside::default()), Arc::new(Mutex::new(())));
        let (begun, has_begun) = mpsc::channel();
        let held = gate.lock();
        let makes: Vec<_> = (0..2 * MAX_AT_ONCE)
            .map(|_| {
                let (aside, gate, begun) = (Arc::clone(&aside), Arc::clone(&gate), begun.clone());
                runtime.spawn(async move {
                    let make = || {
                        begun.send(()).unwrap();
                        drop(gate.lock());
                    };
                    aside.make(make).await;
                })
            })
            .collect();
        let probed = Arc::clone(&aside);
        for _ in 0..MAX_AT_ONCE {
            has_begun.recv_timeout(DEADLINE).unwrap();
        }
        // Tasks start in order: once this one has run, all the others have started.
        let (served, is_served) = mpsc::channel();
        let other = runtime.spawn(async move {
            probed.make_for_probe(|| served.send(()).unwrap()).await;
        });
        let outcome = is_served.recv_timeout(DEADLINE);
        let is_one_more = has_begun.try_recv().is_ok();
        drop(held);
        for task in makes.into_iter().chain([other]) {
            runtime.block_on(task).unwrap();
        }
        outcome.expect("the only serving thread was held up");
        assert!(!is_one_more, "more than {MAX_AT_ONCE} at once");
        assert_eq!(has_begun.try_iter().count(), MAX_AT_ONCE);
    }
}
