//! Time limits that are nearly always cancelled: one timer per connection instead of one per
//! request.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use hyper::rt::{Sleep, Timer};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The timer of a connection, on which hyper sets the limit for the request head with each request.
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
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
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
    state: Arc<Mutex<State>>,
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
    state: Arc<Mutex<State>>,
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
