//! The rest of an upload: forwarded to a worker while its client sends it, never held as a whole.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::BoxError;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use parking_lot::Mutex;
use tokio::time::{Instant, Sleep, sleep};

use super::{Intake, LARGE_RATE, Unreadable};
use crate::Reject;

/// What a client still sends of an upload whose beginning was read.
///
/// Only time in which the worker waits for the client counts against the client.
pub(crate) struct Rest(Mutex<State>);

struct State {
    body: axum::body::Body,
    intake: Intake,
    /// Bytes that may still come.
    left: usize,
    /// Bytes that came, and the time that they were waited for.
    received: usize,
    waited: Duration,
    has_begun: bool,
    refused: Option<Reject>,
}

impl fmt::Debug for Rest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rest").field("has_begun", &self.has_begun()).finish_non_exhaustive()
    }
}

impl Rest {
    /// Of a `body` within the limits of `intake`, with at most `left` more bytes.
    pub(super) fn new(body: axum::body::Body, intake: Intake, left: usize) -> Arc<Self> {
        let (received, waited) = (0, Duration::ZERO);
        let state = State { body, intake, left, received, waited, has_begun: false, refused: None };
        Arc::new(Self(Mutex::new(state)))
    }

    /// Whether a worker has received any of it: no other worker can get all of it.
    pub fn has_begun(&self) -> bool {
        self.0.lock().has_begun
    }

    /// Why it was broken off, if its client is the reason.
    pub fn refused(&self) -> Option<Reject> {
        self.0.lock().refused.clone()
    }

    /// Bytes still to come, as far as the client has declared them.
    pub fn declared_bytes(&self) -> usize {
        usize::try_from(self.0.lock().body.size_hint().lower()).unwrap_or(usize::MAX)
    }
}

impl State {
    /// How much longer its client may take for the next bytes, and the reason if it takes longer.
    fn patience(&self) -> (Duration, Unreadable) {
        let (time, why) = self.intake.time_for(self.received, LARGE_RATE);
        (time.saturating_sub(self.waited), why)
    }

    fn refuse(&mut self, why: &Unreadable) -> BoxError {
        let reject = self.intake.refuse(why, self.intake.max_bytes);
        let message = reject.message.clone();
        self.refused = Some(reject);
        message.into()
    }
}

/// An upload for one worker: its beginning, then the rest as it comes.
#[derive(Debug)]
pub(crate) struct Forwarded {
    beginning: Option<Bytes>,
    rest: Arc<Rest>,
    /// Since when the client has been waited for, and until when.
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
}

impl Forwarded {
    pub fn new(beginning: Bytes, rest: Arc<Rest>) -> Self {
        Self { beginning: Some(beginning), rest, waiting: None }
    }
}

impl Body for Forwarded {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let Self { beginning, rest, waiting } = self.get_mut();
        if let Some(beginning) = beginning.take() {
            return Poll::Ready(Some(Ok(Frame::data(beginning))));
        }
        let state = &mut *rest.0.lock();
        state.has_begun = true;
        let Poll::Ready(frame) = Pin::new(&mut state.body).poll_frame(context) else {
            let (patience, why) = state.patience();
            let (_, until) =
                waiting.get_or_insert_with(|| (Instant::now(), Box::pin(sleep(patience))));
            ready!(until.as_mut().poll(context));
            return Poll::Ready(Some(Err(state.refuse(&why))));
        };
        if let Some((since, _)) = waiting.take() {
            state.waited += since.elapsed();
        }
        let Some(frame) = frame else { return Poll::Ready(None) };
        let Ok(frame) = frame else {
            return Poll::Ready(Some(Err(state.refuse(&Unreadable::CutOff))));
        };
        let bytes = frame.data_ref().map_or(0, Bytes::len);
        let Some(left) = state.left.checked_sub(bytes) else {
            return Poll::Ready(Some(Err(state.refuse(&Unreadable::TooLarge))));
        };
        (state.left, state.received) = (left, state.received + bytes);
        Poll::Ready(Some(Ok(frame)))
    }

    fn size_hint(&self) -> SizeHint {
        let beginning = self.beginning.as_ref().map_or(0, Bytes::len) as u64;
        let rest = self.rest.0.lock().body.size_hint();
        let mut hint = SizeHint::new();
        if let Some(upper) = rest.upper() {
            hint.set_upper(beginning + upper);
        }
        hint.set_lower(beginning + rest.lower());
        hint
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io;
    use std::sync::atomic::AtomicU64;

    use futures_util::stream;
    use http_body_util::BodyExt;
    use prometheus_client::registry::Registry;

    use super::*;

    const PIECE: usize = 64 * 1024;

    /// The refusal of an upload that is forwarded, whose client sends a piece at a time after each
    /// pause; a worker that reads a piece whenever `reads` have passed.
    async fn refusal(pauses: &[u64], limit: usize, reads: Duration) -> Option<(u16, String)> {
        let large = Arc::new(AtomicU64::new(0));
        let seconds = Duration::from_secs(60);
        let intake = Intake::new(limit, seconds, 0, &large, &mut Registry::default());
        let pauses: Vec<_> = pauses.iter().map(|pause| Duration::from_secs(*pause)).collect();
        let pieces = stream::unfold(pauses.into_iter(), |mut pauses| async {
            sleep(pauses.next()?).await;
            Some((Ok::<_, io::Error>(vec![0; PIECE]), pauses))
        });
        let rest = Rest::new(axum::body::Body::from_stream(pieces), intake, limit);
        let mut forwarded = Forwarded::new(Bytes::from_static(b"beginning"), Arc::clone(&rest));
        assert!(!rest.has_begun());
        let mut last = None;
        while let Some(frame) = forwarded.frame().await {
            last = Some(frame.map(|frame| frame.into_data().unwrap().len()));
            if !matches!(last, Some(Ok(_))) {
                break;
            }
            sleep(reads).await;
        }
        assert!(rest.has_begun());
        let refused = rest.refused().map(|reject| (reject.status.as_u16(), reject.message));
        assert_eq!(refused.is_none(), last.unwrap().is_ok());
        refused
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_has_the_time_that_its_worker_waits_for_it() {
        let (at_once, limit) = (Duration::ZERO, 100 * PIECE);
        assert_eq!(refusal(&[1; 4], limit, at_once).await, None);
        // A worker that takes its time is not the client's fault.
        assert_eq!(refusal(&[0; 100], limit, Duration::from_secs(60)).await, None);
        let (status, message) = refusal(&[1; 10], limit, at_once).await.unwrap();
        assert!(status == 408 && message.contains("too slowly"), "{message}");
        let (status, message) = refusal(&[0; 101], limit, at_once).await.unwrap();
        assert!(status == 413 && message.contains("limit of"), "{message}");
    }
}
