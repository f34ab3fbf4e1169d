//! What surrounds the app on each connection: its limits of time, and the stages before every
//! request, which are the connection limit, authorization and catching panics.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::header::CONNECTION;
use axum::http::{HeaderValue, Request, Response, StatusCode};
use futures_util::FutureExt;
use hyper::body::Incoming;
use hyper::rt::{Sleep, Timer};
use hyper::service::Service;
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::AbortHandle;

use super::body::discard;
use super::lock::{Lock, Side, Verdict};
use super::{Peer, Reject};

/// Admits or refuses requests, and answers 500 if the service panics, which ends only that request.
/// A connection beyond the limit only gets answers to probes.
pub(super) struct Guarded<S> {
    pub service: Arc<S>,
    pub lock: Lock,
    pub peer: SocketAddr,
    /// The DNS names in the client's certificate.
    pub certified: Vec<String>,
    pub panics: Counter,
    /// The connection limit, for a connection beyond it.
    pub beyond: Option<usize>,
}

impl<S> Service<Request<Incoming>> for Guarded<S>
where
    S: Service<Request<Incoming>, Response = Response<Body>, Error = Infallible, Future: Send>
        + Send
        + Sync
        + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        let (lock, service) = (self.lock.clone(), Arc::clone(&self.service));
        if let Some(limit) = self.beyond.filter(|_| !is_probe(request.uri().path())) {
            return refuse_beyond(lock, request, limit).map(Ok).boxed();
        }
        let (panics, peer) = (self.panics.clone(), self.peer);
        let verdict = lock.look(&request, peer, &self.certified);
        Box::pin(async move {
            let admitted = match verdict {
                Verdict::Open(admitted) => Ok(admitted),
                Verdict::Refused(refusal) => Err(refusal),
                Verdict::Answered(answer) => return Ok(answer),
                Verdict::Slow(key) => lock.compare(&request, peer, key).await,
            };
            let admitted = match admitted {
                Ok(admitted) => admitted,
                Err(refusal) => {
                    discard(request.body_mut()).await;
                    return Ok(lock.refuse(&request, peer, refusal));
                }
            };
            admitted.enter(&mut request);
            request.extensions_mut().insert(Peer(peer));
            // State that a panic may have left incomplete is not reused: state that outlives a
            // request is protected by parking_lot locks, which do not poison, and changes in calls
            // that do not panic midway.
            let answering = AssertUnwindSafe(async { service.call(request).await });
            let mut response = match answering.catch_unwind().await {
                Ok(Ok(response)) => response,
                Err(_) => {
                    panics.inc();
                    failed()
                }
            };
            admitted.leave(&mut response);
            Ok(response)
        })
    }
}

/// The response to a request on which the service panicked.
fn failed() -> Response<Body> {
    let what = "kvflash failed on this request; please report it with the lines of its log";
    let mut response = Reject::new(StatusCode::INTERNAL_SERVER_ERROR, what).openai();
    // It is unknown how much of the request's body was read.
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

/// Connections beyond `--max-connections`. Another one ends the oldest: a probe sends its request
/// right after connecting, so connections that send nothing do not block it.
const PLACES: usize = 64;

/// Lifetime of such a connection, which serves a single request.
pub(super) const RESERVED_TIME: Duration = Duration::from_secs(5);

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
fn is_probe(path: &str) -> bool {
    matches!(Side::of(path), Side::Probe | Side::Metrics)
}

/// The response to all other requests of such a connection, after the body was discarded.
async fn refuse_beyond(
    lock: Lock,
    mut request: Request<Incoming>,
    max_connections: usize,
) -> Response<Body> {
    discard(request.body_mut()).await;
    let what = format!(
        "{max_connections} connections are open, the limit (--max-connections): only probes are answered, \
         try again"
    );
    let mut response = Reject::momentary(StatusCode::SERVICE_UNAVAILABLE, what).openai();
    lock.show(&request, &mut response);
    response
}

/// The timer of a connection, on which hyper sets the limit for the request head with each request.
/// Nearly all limits are cancelled, so all share one timer.
///
/// The limit of a head counts from its first byte; before that the connection may be idle for
/// longer. For the first head it counts from the start.
///
/// # Cost
/// A cancelled limit does not touch tokio's timers. They fire at most once per limit; a task woken
/// too early sleeps on, until the current limit.
///
/// # Consistency
/// Only the task of the connection may wait: the last caller is the one that is woken.
#[derive(Debug, Clone)]
pub(super) struct ConnectionTimer {
    idle: Duration,
    state: Arc<Mutex<HeadTime>>,
}

#[derive(Debug, Default)]
struct HeadTime {
    /// The tokio timer; `None` until the first wait.
    alarm: Option<Pin<Box<tokio::time::Sleep>>>,
    /// Whether a byte of the awaited head has arrived.
    has_begun: bool,
    /// When it arrived, set by the waiting task.
    since: Option<tokio::time::Instant>,
    /// Whether there was a head before.
    is_kept: bool,
}

impl ConnectionTimer {
    /// For a connection that may be idle for `idle` between two requests.
    pub fn new(idle: Duration) -> Self {
        Self { idle, state: Arc::default() }
    }

    /// The same I/O, observed by the timer.
    pub fn watch<I>(&self, io: I) -> Watched<I> {
        Watched { io, state: Arc::clone(&self.state) }
    }
}

impl Timer for ConnectionTimer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Sleep>> {
        let mut state = self.state.lock();
        let is_kept = std::mem::replace(&mut state.is_kept, true);
        // Data from here on belongs to the next head.
        (state.has_begun, state.since) = (false, None);
        drop(state);
        let now = tokio::time::Instant::now();
        let idle = if is_kept { self.idle.max(duration) } else { duration };
        Box::pin(Limit { head: duration, idle_until: now + idle, state: Arc::clone(&self.state) })
    }

    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn Sleep>> {
        self.sleep(deadline.saturating_duration_since(self.now()))
    }

    fn now(&self) -> Instant {
        tokio::time::Instant::now().into()
    }
}

/// An awaited limit.
struct Limit {
    /// The time limit of a head from its first byte on.
    head: Duration,
    idle_until: tokio::time::Instant,
    state: Arc<Mutex<HeadTime>>,
}

impl Sleep for Limit {}

impl Future for Limit {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.state.lock();
        if state.has_begun && state.since.is_none() {
            state.since = Some(tokio::time::Instant::now());
        }
        let of_head = state.since.map(|since| since + self.head);
        let deadline = of_head.map_or(self.idle_until, |of_head| of_head.min(self.idle_until));
        let alarm = &mut state.alarm;
        let sleep = alarm.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
        // The alarm of an earlier limit may remain: it fires earlier, so it wakes the task in time.
        if sleep.deadline() > deadline {
            sleep.as_mut().reset(deadline);
        }
        while sleep.as_mut().poll(context).is_ready() {
            if sleep.deadline() >= deadline {
                return Poll::Ready(());
            }
            sleep.as_mut().reset(deadline);
        }
        Poll::Pending
    }
}

/// A connection that notifies its timer of received bytes.
pub(super) struct Watched<I> {
    io: I,
    state: Arc<Mutex<HeadTime>>,
}

impl<I: AsyncRead + Unpin> AsyncRead for Watched<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.io).poll_read(context, buffer);
        if buffer.filled().len() > before {
            self.state.lock().has_begun = true;
        }
        read
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Watched<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: Duration = Duration::from_secs(10);
    const IDLE: Duration = Duration::from_secs(75);

    async fn is_over(limit: &mut Pin<Box<dyn Sleep>>) -> bool {
        std::future::poll_fn(|context| Poll::Ready(limit.as_mut().poll(context).is_ready())).await
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_head_has_its_time_from_the_start() {
        let timer = ConnectionTimer::new(IDLE);
        let began = tokio::time::Instant::now();
        timer.sleep(HEAD).await;
        assert_eq!(began.elapsed().as_secs(), 10);
    }

    #[tokio::test(start_paused = true)]
    async fn later_heads_have_it_from_their_first_byte() {
        let timer = ConnectionTimer::new(IDLE);
        // Cancelled after the alarm was set.
        let mut first = timer.sleep(HEAD);
        assert!(!is_over(&mut first).await);
        drop(first);
        let began = tokio::time::Instant::now();
        timer.sleep(HEAD).await;
        assert_eq!(began.elapsed().as_secs(), 75, "idle all the time");
        let mut third = timer.sleep(HEAD);
        assert!(!is_over(&mut third).await);
        tokio::time::advance(Duration::from_secs(60)).await;
        timer.state.lock().has_begun = true;
        let began = tokio::time::Instant::now();
        assert!(!is_over(&mut third).await);
        third.await;
        assert_eq!(began.elapsed().as_secs(), 10);
    }
}
