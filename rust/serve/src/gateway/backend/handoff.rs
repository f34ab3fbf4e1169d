//! What a prefill worker passes to the decode worker.

use kvflash_core::ids::Worker;
use serde::Serialize;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// The rendezvous of prefill and decode worker.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct BootstrapInfo {
    pub bootstrap_host: String,
    pub bootstrap_port: u16,
    pub bootstrap_room: u64,
}

/// The result of a prefill for the decode worker.
#[derive(Debug)]
pub(crate) enum Handoff {
    /// The decode worker prefills by itself.
    Alone,
    /// The prefill is done; these are its transfer parameters.
    Done { worker: Worker, params: rmpv::Value },
    /// The prefill runs beside the decode.
    Beside { worker: Worker, info: BootstrapInfo, pending: Pending },
}

impl Handoff {
    pub fn is_alone(&self) -> bool {
        matches!(self, Self::Alone)
    }

    /// The prefill worker.
    pub fn worker(&self) -> Option<Worker> {
        match self {
            Self::Alone => None,
            Self::Done { worker, .. } | Self::Beside { worker, .. } => Some(*worker),
        }
    }

    /// Waits until the concurrent prefill fails; forever if it does not.
    pub fn failure(&self) -> impl Future<Output = String> + Send + 'static {
        let failed = match self {
            Self::Beside { pending, .. } => Some(pending.failed.clone()),
            _ => None,
        };
        failure(failed)
    }

    /// The decode is complete: the prefill may end by itself.
    pub fn complete(&mut self) {
        if let Self::Beside { pending, .. } = self {
            pending.task = None;
        }
    }
}

/// A prefill that runs beside its decode. Dropping it ends the prefill.
#[derive(Debug)]
pub(crate) struct Pending {
    task: Option<JoinHandle<()>>,
    failed: watch::Receiver<Option<String>>,
}

/// Why the prefill failed, once it has failed.
async fn failure(failed: Option<watch::Receiver<Option<String>>>) -> String {
    if let Some(mut failed) = failed
        && let Ok(why) = failed.wait_for(Option::is_some).await
        && let Some(why) = &*why
    {
        return why.clone();
    }
    // There is no prefill, or it is complete.
    std::future::pending().await
}

impl Pending {
    pub fn new(task: JoinHandle<()>, failed: watch::Receiver<Option<String>>) -> Self {
        Self { task: Some(task), failed }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}
