//! Serve an axum router on a listener until told to stop. The caller owns socket and signal.

use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};

/// Limits on connections.
#[derive(Debug, Clone)]
pub struct ServeLimits {
    /// Connections open at once; further ones wait in the system's accept queue.
    pub max_connections: usize,
    /// Time that a client may take to send its request's head.
    pub header_timeout: Duration,
    /// Time that open connections get to finish after the stop.
    pub drain_timeout: Duration,
}

impl Default for ServeLimits {
    fn default() -> Self {
        Self {
            max_connections: 16_384,
            header_timeout: Duration::from_secs(10),
            drain_timeout: Duration::from_secs(30),
        }
    }
}

/// The caller's signal to stop; cloned into every server that shall obey it.
#[derive(Debug, Clone)]
pub struct Shutdown {
    stopped: Arc<watch::Sender<bool>>,
}

impl Default for Shutdown {
    fn default() -> Self {
        Self { stopped: Arc::new(watch::Sender::new(false)) }
    }
}

impl Shutdown {
    /// Stop every server that has this signal.
    pub fn stop(&self) {
        self.stopped.send_replace(true);
    }

    /// Has it been given?
    pub fn is_stopped(&self) -> bool {
        *self.stopped.borrow()
    }

    /// Wait for it.
    pub async fn wait(&self) {
        let mut seen = self.stopped.subscribe();
        // The sender lives in self, so waiting ends only by the signal.
        let _ = seen.wait_for(|stopped| *stopped).await;
    }
}

/// Serve until `shutdown`, then let open requests finish for `limits.drain_timeout`.
///
/// # Errors
/// Only the listener's own; a broken connection ends that connection.
pub async fn serve(
    listener: TcpListener,
    app: axum::Router,
    limits: ServeLimits,
    shutdown: Shutdown,
) -> std::io::Result<()> {
    let permits = Arc::new(Semaphore::new(limits.max_connections));
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(limits.header_timeout);
    loop {
        // Waiting for a free place must not hide the stop.
        let permit = tokio::select! {
            permit = Arc::clone(&permits).acquire_owned() => permit,
            () = shutdown.wait() => break,
        };
        let Ok(permit) = permit else { break };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = shutdown.wait() => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of file descriptors, or a client that hung up while queued: the listener lives on.
                tracing::warn!(%error, "could not accept a connection");
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            }
        };
        // Without it small answers wait for the client's delayed acknowledgement.
        let _ = stream.set_nodelay(true);
        let service = TowerToHyperService::new(app.clone());
        let connection = builder.serve_connection(TokioIo::new(stream), service);
        let shutdown = shutdown.clone();
        tokio::spawn(async move {
            let mut connection = std::pin::pin!(connection);
            tokio::select! {
                // An error here is a client that hung up or sent no HTTP: nobody is left to tell.
                _ = connection.as_mut() => {}
                () = shutdown.wait() => {
                    connection.as_mut().graceful_shutdown();
                    let _ = connection.await;
                }
            }
            drop(permit);
        });
    }
    drop(listener);
    let all = u32::try_from(limits.max_connections).unwrap_or(u32::MAX);
    if tokio::time::timeout(limits.drain_timeout, permits.acquire_many(all)).await.is_err() {
        tracing::warn!(
            open = limits.max_connections - permits.available_permits(),
            "stopped with connections still open: they did not finish within the drain time"
        );
    }
    Ok(())
}
