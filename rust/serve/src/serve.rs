//! Serve an app on a listener until told to stop. The caller owns socket and signal.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::TokioIo;
use hyper_util::service::{TowerToHyperService, TowerToHyperServiceFuture};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::timer::ConnectionTimer;
use super::tls::{Handshake, Tls};

/// A client that is gone without a word is noticed after silence, probes and the time for their answer;
/// one that takes nothing of its answer, after that time, too.
const KEEPALIVE_TIME: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
#[cfg(target_os = "linux")]
const UNACKED_TIME: Duration = Duration::from_secs(120);

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

/// Who is at the other end of a request's connection.
#[derive(Debug, Clone, Copy)]
pub struct Peer(pub SocketAddr);

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

/// What [`serve`] serves: an axum router, or what answers some requests before one.
pub trait App: Send + 'static {
    /// Answers one request of a connection after the other.
    type Service: Service<Request<Incoming>, Response = Response<Body>, Error = Infallible, Future: Send>
        + Send
        + 'static;

    /// What answers the requests of a connection from `peer`.
    fn serve_peer(&self, peer: Peer) -> Self::Service;
}

impl App for axum::Router {
    type Service = PeerRouter;

    fn serve_peer(&self, peer: Peer) -> PeerRouter {
        PeerRouter { router: TowerToHyperService::new(self.clone()), peer }
    }
}

/// Routes, and who asks: handlers find the [`Peer`] among a request's extensions.
#[derive(Debug)]
pub struct PeerRouter {
    router: TowerToHyperService<axum::Router>,
    peer: Peer,
}

impl Service<Request<Incoming>> for PeerRouter {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = TowerToHyperServiceFuture<axum::Router, Request<Incoming>>;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        request.extensions_mut().insert(self.peer);
        self.router.call(request)
    }
}

/// Answer the requests of a connection until its end, or until the stop and the end of the open one.
async fn answer<I, S>(connection: http1::Connection<TokioIo<I>, S>, shutdown: Shutdown)
where
    I: AsyncRead + AsyncWrite + Unpin,
    S: Service<Request<Incoming>, Response = Response<Body>, Error = Infallible>,
{
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        biased;
        // An error here is a client that hung up or sent no HTTP: nobody is left to tell.
        _ = connection.as_mut() => {}
        () = shutdown.wait() => {
            connection.as_mut().graceful_shutdown();
            let _ = connection.await;
        }
    }
}

/// What every connection of a server is given.
struct Door<A> {
    tls: Option<Tls>,
    app: A,
    limits: ServeLimits,
    shutdown: Shutdown,
}

impl<A: App> Door<A> {
    /// Answer what comes over `stream` in a task of its own, which holds `permit` until its end.
    fn let_in(&self, stream: TcpStream, peer: SocketAddr, permit: OwnedSemaphorePermit) {
        // All of these only make things better; a system without them still works. Small answers do not
        // wait for the client's delayed acknowledgement, and one that is gone is noticed.
        let _ = stream.set_nodelay(true);
        let socket = SockRef::from(&stream);
        let keepalive =
            TcpKeepalive::new().with_time(KEEPALIVE_TIME).with_interval(KEEPALIVE_INTERVAL);
        let _ = socket.set_tcp_keepalive(&keepalive);
        #[cfg(target_os = "linux")]
        let _ = socket.set_tcp_user_timeout(Some(UNACKED_TIME));
        let service = self.app.serve_peer(Peer(peer));
        let limit = self.limits.header_timeout;
        let mut builder = http1::Builder::new();
        builder.header_read_timeout(limit).timer(ConnectionTimer::default());
        let shutdown = self.shutdown.clone();
        let Some(tls) = self.tls.clone() else {
            let connection = builder.serve_connection(TokioIo::new(stream), service);
            tokio::spawn(async move {
                answer(connection, shutdown).await;
                drop(permit);
            });
            return;
        };
        tokio::spawn(async move {
            let encrypted = tokio::select! {
                done = tokio::time::timeout(limit, tls.accept(stream)) => done,
                () = shutdown.wait() => return,
            };
            match encrypted {
                Ok(Ok(stream)) => {
                    tls.count(Handshake::Done);
                    answer(builder.serve_connection(TokioIo::new(stream), service), shutdown).await;
                }
                Ok(Err(error)) => {
                    tls.count(Handshake::Failed);
                    tracing::debug!(%peer, %error, "TLS handshake failed");
                }
                Err(_) => {
                    tls.count(Handshake::Slow);
                    tracing::debug!(%peer, ?limit, "TLS handshake took too long");
                }
            }
            drop(permit);
        });
    }
}

/// Serve until `shutdown`, then let open requests finish for `limits.drain_timeout`. A request that had
/// reached the system's accept queue before the stop is answered, too.
///
/// # Errors
/// Only the listener's own; a broken connection ends that connection.
pub async fn serve(
    listener: TcpListener,
    app: impl App,
    limits: ServeLimits,
    shutdown: Shutdown,
) -> std::io::Result<()> {
    serve_over(None, listener, app, limits, shutdown).await
}

/// As [`serve`], over TLS where that is given, with the files' newest certificate. A handshake has the
/// time of a request's head, and holds up no other connection.
///
/// # Errors
/// As [`serve`].
pub async fn serve_over(
    tls: Option<Tls>,
    listener: TcpListener,
    app: impl App,
    limits: ServeLimits,
    shutdown: Shutdown,
) -> std::io::Result<()> {
    let permits = Arc::new(Semaphore::new(limits.max_connections));
    let renewal = tls.clone().map(|tls| tokio::spawn(tls.keep_renewing()));
    let door = Door { tls, app, limits: limits.clone(), shutdown };
    loop {
        // Waiting for a free place must not hide the stop.
        let permit = tokio::select! {
            permit = Arc::clone(&permits).acquire_owned() => permit,
            () = door.shutdown.wait() => break,
        };
        let Ok(permit) = permit else { break };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = door.shutdown.wait() => break,
        };
        match accepted {
            Ok((stream, peer)) => door.let_in(stream, peer, permit),
            Err(error) => {
                // Out of file descriptors, or a client that hung up while queued: the listener lives on.
                tracing::warn!(%error, "could not accept a connection");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
    // To these the system has already said yes; dropping the listener would reset them.
    let listener = listener.into_std()?;
    while let Ok(permit) = Arc::clone(&permits).try_acquire_owned() {
        let Ok((stream, peer)) = listener.accept() else { break };
        stream.set_nonblocking(true)?;
        let has_asked = stream.peek(&mut [0]).is_ok_and(|bytes| bytes > 0);
        let stream = TcpStream::from_std(stream)?;
        if has_asked {
            // Known to tokio, too, so that its question is read before the stop is heard of.
            stream.readable().await?;
        }
        door.let_in(stream, peer, permit);
    }
    drop(listener);
    if let Some(renewal) = renewal {
        renewal.abort();
    }
    let all = u32::try_from(limits.max_connections).unwrap_or(u32::MAX);
    if tokio::time::timeout(limits.drain_timeout, permits.acquire_many(all)).await.is_err() {
        tracing::warn!(
            open = limits.max_connections - permits.available_permits(),
            "stopped with connections still open: they did not finish within the drain time"
        );
    }
    Ok(())
}
