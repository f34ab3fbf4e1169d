//! Time limits that nearly always are called off: one timer for each connection, not one for each request.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use hyper::rt::{Sleep, Timer};
use parking_lot::Mutex;

/// The timer of one connection, on which hyper sets the limit for a request's head anew with each request.
///
/// # Cost
/// A limit that is called off costs no turn of tokio's timers. They are asked once a limit's time instead:
/// whoever is woken then without need sleeps on, until the limit that is set now.
///
/// # Consistency
/// Only the task of the connection may wait: the last one to ask is the one that is woken.
#[derive(Debug, Clone, Default)]
pub(super) struct ConnectionTimer {
    alarm: Arc<Mutex<Alarm>>,
}

/// What tokio knows of it; `None` until somebody waits.
type Alarm = Option<Pin<Box<tokio::time::Sleep>>>;

impl Timer for ConnectionTimer {
    fn sleep(&self, duration: std::time::Duration) -> Pin<Box<dyn Sleep>> {
        self.sleep_until(self.now() + duration)
    }

    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn Sleep>> {
        Box::pin(Limit { deadline: deadline.into(), alarm: Arc::clone(&self.alarm) })
    }

    fn now(&self) -> Instant {
        tokio::time::Instant::now().into()
    }
}

/// A limit that is waited for.
struct Limit {
    deadline: tokio::time::Instant,
    alarm: Arc<Mutex<Alarm>>,
}

impl Sleep for Limit {}

impl Future for Limit {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut alarm = self.alarm.lock();
        let sleep = alarm.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(self.deadline)));
        // An alarm of an earlier limit may stand: it is earlier, so that it wakes in time.
        if sleep.deadline() > self.deadline {
            sleep.as_mut().reset(self.deadline);
        }
        while sleep.as_mut().poll(context).is_ready() {
            if sleep.deadline() >= self.deadline {
                return Poll::Ready(());
            }
            sleep.as_mut().reset(self.deadline);
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const SOON: Duration = Duration::from_millis(20);

    async fn is_pending(limit: &mut Pin<Box<dyn Sleep>>) -> bool {
        std::future::poll_fn(|context| Poll::Ready(limit.as_mut().poll(context).is_pending())).await
    }

    #[tokio::test]
    async fn limits_end_at_their_own_time_whatever_was_set_before() {
        let timer = ConnectionTimer::default();
        let began = timer.now();
        let wait =
            |until| async move { tokio::time::timeout(Duration::from_secs(30), until).await };
        // Called off after the alarm was set, and before it was.
        let mut called_off = timer.sleep(SOON);
        assert!(is_pending(&mut called_off).await);
        drop(called_off);
        drop(timer.sleep(SOON));
        assert!(wait(timer.sleep_until(began + 3 * SOON)).await.is_ok());
        assert!(timer.now() >= began + 3 * SOON, "not at the time of the first");
        // Over already, while a later alarm stands.
        let mut later = timer.sleep(Duration::from_secs(3_600));
        assert!(is_pending(&mut later).await);
        assert!(wait(timer.sleep_until(began)).await.is_ok());
        assert!(wait(timer.sleep(SOON)).await.is_ok());
        assert!(is_pending(&mut later).await);
    }
}
