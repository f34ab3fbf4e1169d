//! An answer on its way through: copied chunk by chunk, its load freed whichever way it ends.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::BoxError;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use kvflash_core::select::{Outcome, Reservation};
use serde_json::json;
use tokio::time::{Instant, Sleep};

use super::app::{App, InFlight};
use super::engine::Engine;
use super::event_stream::WholeLines;
use super::evidence::Expectation;
use super::usage::UsageScanner;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Open,
    Complete,
    Broken,
}

/// The body of an answer.
///
/// Dropping it at any point frees the booking and, where the answer is not complete, closes the connection to
/// the engine, which is how the engine learns that nobody is listening any more.
pub(super) struct Relay {
    pub app: Arc<App>,
    pub engine: Arc<Engine>,
    pub upstream: Incoming,
    /// Chunk that was awaited before the answer's head was sent on.
    pub first: Option<Bytes>,
    pub booking: Reservation,
    pub is_event_stream: bool,
    pub scanner: UsageScanner,
    /// Tokens of the prompt as routing counted them; `None` when they were not known.
    pub prompt_tokens: Option<u64>,
    pub in_flight: InFlight,
    /// What the engine's own figures are compared with at the end.
    expected: Option<Expectation>,
    /// What came of a line of an event stream that is not whole yet.
    lines: WholeLines,
    end: End,
    /// Since when the engine is waited for; `None` while it sends as fast as the client takes it.
    waits_since: Option<Instant>,
    /// Made at the first wait and set anew only when it rings: chunks come too often to move it each time.
    alarm: Option<Pin<Box<Sleep>>>,
}

impl Relay {
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        app: Arc<App>,
        engine: Arc<Engine>,
        upstream: Incoming,
        first: Option<Bytes>,
        booking: Reservation,
        is_event_stream: bool,
        prompt_tokens: Option<u64>,
        in_flight: InFlight,
        expected: Option<Expectation>,
    ) -> Self {
        let mut relay = Self {
            app,
            engine,
            upstream,
            first,
            booking,
            is_event_stream,
            scanner: UsageScanner::default(),
            prompt_tokens,
            in_flight,
            expected,
            lines: WholeLines::default(),
            end: End::Open,
            waits_since: None,
            alarm: None,
        };
        if relay.first.is_none() && relay.upstream.is_end_stream() {
            relay.finish();
        }
        relay
    }

    /// A chunk as the client gets it; `None` while nothing of it may go out yet.
    fn pass(&mut self, chunk: Bytes) -> Option<Bytes> {
        self.scanner.feed(&chunk);
        self.in_flight.generated(self.scanner.events);
        self.booking.generated(self.scanner.events);
        self.booking.touch();
        let mut ready = if self.is_event_stream { self.lines.take(chunk) } else { chunk };
        if self.upstream.is_end_stream() {
            self.finish();
            ready = self.lines.end(ready);
        }
        (!ready.is_empty()).then_some(ready)
    }

    fn finish(&mut self) {
        self.end = End::Complete;
        self.booking.ended(Outcome::Complete);
        let metrics = &self.app.metrics;
        if let Some(tokens) = self.scanner.cached_tokens {
            metrics.delivered.inc_by(tokens);
            self.booking.cached(tokens);
            metrics.usage_reported.inc();
        }
        if let Some(expected) = self.expected.take() {
            expected.compare(&self.app, self.scanner.prompt_tokens, self.scanner.cached_tokens);
        }
        match (self.prompt_tokens, self.scanner.prompt_tokens) {
            (None, Some(reported)) => {
                metrics.input.inc_by(reported);
            }
            // The engine saw another prompt than routing did: hashes of it can't match either.
            (Some(counted), Some(reported)) if counted != reported => {
                metrics.token_mismatches.inc();
            }
            _ => {}
        }
    }

    /// Ready when the engine has sent nothing for `--stream-idle-timeout`: with its packets lost on the way,
    /// or its process stopped, nothing else would ever end the wait.
    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<String> {
        let timeout = self.app.options.stream_idle_timeout;
        let due = *self.waits_since.get_or_insert_with(Instant::now) + timeout;
        let alarm = self.alarm.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(due)));
        loop {
            ready!(alarm.as_mut().poll(cx));
            if alarm.deadline() >= due {
                let seconds = timeout.as_secs_f64();
                return Poll::Ready(format!("nothing for {seconds} s (--stream-idle-timeout)"));
            }
            alarm.as_mut().reset(due);
        }
    }

    fn broken(&mut self, error: BoxError) -> Option<Result<Frame<Bytes>, BoxError>> {
        self.end = End::Broken;
        self.booking.ended(Outcome::Broken);
        self.app.metrics.streams_broken.inc();
        self.engine.failed(&format!("answer broke off: {error}"));
        if !self.is_event_stream {
            // A JSON answer cut short: breaking the connection is the only honest end.
            return Some(Err(error));
        }
        // All whole lines are with the client already; what follows can only be said inside the stream.
        let message = format!("worker {} broke off the answer: {error}", self.engine.id);
        let event =
            json!({ "error": { "message": message, "type": "upstream_error", "code": 502 } });
        // The blank line ends an event whose lines went out without one.
        let end = format!("\n\ndata: {event}\n\ndata: [DONE]\n\n");
        Some(Ok(Frame::data(Bytes::from(end))))
    }
}

impl Body for Relay {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if self.end != End::Open {
            return Poll::Ready(None);
        }
        if let Some(chunk) = self.first.take()
            && let Some(ready) = self.pass(chunk)
        {
            return Poll::Ready(Some(Ok(Frame::data(ready))));
        }
        while self.end == End::Open {
            let Poll::Ready(next) = Pin::new(&mut self.upstream).poll_frame(cx) else {
                let silence = ready!(self.poll_silence(cx));
                return Poll::Ready(self.broken(silence.into()));
            };
            self.waits_since = None;
            match next {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(chunk) => {
                        if let Some(ready) = self.pass(chunk) {
                            return Poll::Ready(Some(Ok(Frame::data(ready))));
                        }
                    }
                    // Trailers come last. Where half a line is left it goes before them, and in their place.
                    Err(trailers) => {
                        self.finish();
                        let rest = self.lines.end(Bytes::new());
                        let last = if rest.is_empty() { trailers } else { Frame::data(rest) };
                        return Poll::Ready(Some(Ok(last)));
                    }
                },
                Some(Err(error)) => return Poll::Ready(self.broken(error.into())),
                None => {
                    self.finish();
                    let rest = self.lines.end(Bytes::new());
                    return Poll::Ready((!rest.is_empty()).then(|| Ok(Frame::data(rest))));
                }
            }
        }
        Poll::Ready(None)
    }

    fn is_end_stream(&self) -> bool {
        let is_all_given = self.first.is_none() && self.lines.is_empty();
        self.end != End::Open || (is_all_given && self.upstream.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        if self.is_event_stream {
            // A stream that breaks ends with an event more than its engine announced.
            return SizeHint::new();
        }
        let rest = self.upstream.size_hint();
        match (rest.exact(), &self.first) {
            (Some(bytes), Some(first)) => SizeHint::with_exact(bytes + first.len() as u64),
            (Some(bytes), None) => SizeHint::with_exact(bytes),
            (None, _) => SizeHint::new(),
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.booking.used(self.scanner.usage());
        self.in_flight.used(self.scanner.usage());
        match self.end {
            // The engine has told its usage already: only the end of the stream is missing.
            End::Open if self.scanner.cached_tokens.is_some() => self.finish(),
            End::Open => {
                self.booking.ended(Outcome::ClientGone);
                self.app.metrics.clients_gone.inc();
            }
            End::Complete | End::Broken => {}
        }
    }
}
