//! Connections reserved for probes while the limit is reached, so that clients that hold all others
//! can't make a service look dead.

use std::collections::VecDeque;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use parking_lot::Mutex;
use tokio::task::AbortHandle;

use super::Reject;
use super::body::discard;

/// Connections beyond `--max-connections`. Another one ends the oldest: a probe sends its request
/// right after connecting, so connections that send nothing do not block it.
const PLACES: usize = 64;

/// Lifetime of such a connection, which serves a single request.
pub(super) const RESERVED_TIME: Duration = Duration::from_secs(5);

/// Paths that it may request.
const PROBES: [&str; 4] = ["/live", "/ready", "/health", "/metrics"];

/// The reserved connections, oldest first.
#[derive(Debug, Default)]
pub(super) struct Reserve {
    open: Mutex<VecDeque<AbortHandle>>,
}

impl Reserve {
    /// Adds a connection; above the limit the oldest is closed.
    pub fn add(&self, connection: AbortHandle) {
        let mut open = self.open.lock();
        open.retain(|one| !one.is_finished());
        if open.len() >= PLACES
            && let Some(oldest) = open.pop_front()
        {
            oldest.abort();
        }
        open.push_back(connection);
    }
}

/// Whether a reserved connection may request this path.
pub(super) fn is_probe(path: &str) -> bool {
    PROBES.contains(&path)
}

/// The response to all other requests, after the body was discarded.
pub(super) async fn refuse(request: Request<Incoming>, max_connections: usize) -> Response<Body> {
    discard(&mut request.into_body()).await;
    let what = format!(
        "{max_connections} connections are open, the limit (--max-connections): only probes are answered, \
         try again"
    );
    Reject { retry_after_s: Some(1), ..Reject::new(StatusCode::SERVICE_UNAVAILABLE, what) }.openai()
}
