//! Discovery says whether a worker is there; a failed connection puts it in doubt for a moment.

use std::sync::Arc;
use std::time::Duration;

use super::super::engine::Engine;
use super::member::Member;
use crate::Shutdown;

/// Pauses between two looks at a worker in doubt: the first, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Look after a worker until it is removed or the service stops.
pub(crate) async fn watch(engine: Arc<Engine>, member: Arc<Member>, shutdown: Shutdown) {
    let mut pause = FIRST_PAUSE;
    while !engine.is_removed() && !shutdown.is_stopped() {
        if engine.is_healthy() {
            tokio::select! {
                () = engine.doubt.notified() => {}
                () = shutdown.wait() => break,
            }
            continue;
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = shutdown.wait() => break,
        }
        match member.plane.ping(&member.spec).await {
            Ok(()) => {
                pause = FIRST_PAUSE;
                if !engine.is_removed() && engine.recovered() {
                    tracing::info!(worker = engine.id, url = engine.base, "worker is healthy");
                }
            }
            Err(error) => {
                pause = (pause * 2).min(LONGEST_PAUSE);
                engine.check_failed(&error.message);
            }
        }
    }
}
