//! Discovery says whether a worker is there; a failed connection, or a ping without an answer while requests wait,
//! puts it in doubt for a moment.

use std::sync::Arc;
use std::time::Duration;

use super::super::engine::Engine;
use super::member::Member;
use super::plane::Cause;
use crate::Shutdown;

/// Pauses between two looks at a worker in doubt: the first, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Look after a worker until it is removed or the service stops. While requests wait for its first byte it is asked
/// every `interval`, also once it is removed: one that is frozen takes no requests with it.
pub(crate) async fn watch(
    engine: Arc<Engine>,
    member: Arc<Member>,
    interval: Duration,
    shutdown: Shutdown,
) {
    let mut pause = FIRST_PAUSE;
    while (!engine.is_removed() || engine.is_waited_for()) && !shutdown.is_stopped() {
        if engine.is_healthy() {
            tokio::select! {
                () = engine.doubt.notified() => {}
                () = tokio::time::sleep(interval) => {}
                () = shutdown.wait() => break,
            }
            if engine.is_healthy() && !engine.is_waited_for() {
                continue;
            }
        } else {
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = shutdown.wait() => break,
            }
        }
        // Nothing speaks against it: only silence does.
        let is_looking = engine.is_healthy() || engine.is_removed();
        match member.plane.ping(&member.spec).await {
            Ok(()) => {
                pause = FIRST_PAUSE;
                if !engine.is_removed() && engine.recovered() {
                    tracing::info!(worker = engine.id, url = engine.base, "worker is healthy");
                }
            }
            // It closes its port before it ends, and still answers what it has.
            Err(error) if is_looking && error.cause != Cause::Silent => {}
            Err(error) => {
                pause = (pause * 2).min(LONGEST_PAUSE);
                engine.check_failed(&error.message);
            }
        }
    }
}
