//! Places for probes while all connections of a service are taken: clients that hold these must not make a
//! service look dead.

use std::collections::VecDeque;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use parking_lot::Mutex;
use tokio::task::AbortHandle;

use super::Reject;
use super::body::discard;

/// Connections beyond `--max-connections`. One more ends the oldest: a probe sends its question as soon as it is
/// connected, and connections that send nothing keep no other one out.
const PLACES: usize = 64;

/// Such a connection lasts no longer; it has one question.
pub(super) const RESERVED_TIME: Duration = Duration::from_secs(5);

/// What it may ask.
const PROBES: [&str; 4] = ["/live", "/ready", "/health", "/metrics"];

/// The connections in these places, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Reserve {
    open: Mutex<VecDeque<AbortHandle>>,
}

impl Reserve {
    /// One more; the oldest ends where there are too many.
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

/// Whether a reserved connection may ask this.
pub(super) fn is_probe(path: &str) -> bool {
    PROBES.contains(&path)
}

/// The answer to everything else, once the request's body is read away.
pub(super) async fn refuse(request: Request<Incoming>, max_connections: usize) -> Response<Body> {
    discard(&mut request.into_body()).await;
    let what = format!(
        "{max_connections} connections are open, the limit (--max-connections): only probes are answered, \
         try again"
    );
    Reject { retry_after_s: Some(1), ..Reject::new(StatusCode::SERVICE_UNAVAILABLE, what) }.openai()
}
