//! Relays an answer chunk by chunk, an event stream in whole lines, and frees its load however it
//! ends.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::BoxError;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::Response;
use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use kvflash_core::select::{Outcome, Reservation, Usage};
use tokio::time::{Instant, Sleep};

use super::api::{Api, Form, Row};
use super::backend::openai::{More, Opened};
use super::book::{Choice, Expectation};
use super::lesson::{Lesson, ToldIds};
use super::plan::Plan;
use super::send::InFlight;
use super::usage::{UsageScanner, events_of_response};
use crate::frontend::app::App;
use crate::frontend::engine::Engine;
use crate::outbound::in_full;

/// Bookings and counters of an answer in progress, for any kind of worker.
pub(super) struct Delivery {
    pub app: Arc<App>,
    pub engine: Arc<Engine>,
    pub booking: Reservation,
    in_flight: Arc<InFlight>,
    /// Tokens of the prompt as routing counted them; `None` if unknown.
    counted: Option<u64>,
    /// The requested API, for a request whose tokens may be sent as ids, and whether they were.
    pub ids: Option<(Api, bool)>,
    /// What the answer teaches of a prompt whose tokens were not known.
    lesson: Option<Arc<Lesson>>,
    /// What the engine's own figures are compared with at the end.
    expected: Option<Expectation>,
    /// This worker computes the prompt; otherwise it counts what it fetched as cached.
    is_alone: bool,
    /// Tokens generated so far, and when the last of them came.
    tokens: u64,
    last_token: Option<Instant>,
    /// Since when the model's output is awaited, after events that come before it.
    output_awaited_since: Option<std::time::Instant>,
}

impl Delivery {
    /// For a worker that answers `plan`'s request; `expected` if its answer is evidence about its
    /// events, `is_alone` if the worker computes the prompt, `output_awaited_since` if the model's
    /// output is still to come.
    pub fn new(
        app: &Arc<App>,
        plan: &Plan,
        choice: Choice,
        in_flight: Arc<InFlight>,
        expected: Option<Expectation>,
        is_alone: bool,
        output_awaited_since: Option<std::time::Instant>,
    ) -> Self {
        let Choice { engine, booking, .. } = choice;
        let (app, counted) = (Arc::clone(app), plan.prompt_tokens());
        let ids = plan.replaceable.map(|_| (plan.call.api(), false));
        let lesson = plan.lesson.clone();
        Self {
            app,
            engine,
            booking,
            in_flight,
            counted,
            ids,
            lesson,
            expected,
            is_alone,
            tokens: 0,
            last_token: None,
            output_awaited_since,
        }
    }

    /// The awaited output has begun.
    fn output_begins(&mut self) {
        if let Some(since) = self.output_awaited_since.take() {
            self.app.metrics.first_byte_seconds.observe(since.elapsed().as_secs_f64());
            self.booking.first_token();
        }
    }

    /// What reads the ids that an answer may tell, which was asked for them here or by its client.
    fn told(
        &self,
        status: StatusCode,
        headers: &HeaderMap,
        is_event_stream: bool,
        is_asked_here: bool,
    ) -> Option<ToldIds> {
        let lesson = self.lesson.as_ref().filter(|_| status.is_success())?;
        if !is_asked_here && !lesson.is_asked {
            return None;
        }
        if headers.contains_key(header::CONTENT_ENCODING) {
            if is_asked_here {
                let why = "its answer is compressed, although the request accepts no compression";
                self.engine.teaches_no_more(&self.app, "encoded", why);
            }
            return None;
        }
        let most_ids = self.app.taught.most_ids();
        Some(ToldIds::new(is_event_stream, is_asked_here, most_ids))
    }

    /// The engine told the ids of the prompt.
    fn learn(&self, ids: &[u32]) {
        self.engine.ids.lock().has_told = true;
        if let Some(lesson) = &self.lesson {
            lesson.learn(&self.app, ids);
        }
    }

    /// Data has arrived; sets the number of tokens generated so far.
    pub fn generated(&mut self, tokens: u64) {
        self.in_flight.generated(tokens);
        self.booking.generated(tokens);
        self.booking.touch();
        if tokens > self.tokens {
            self.tokens = tokens;
            let now = Instant::now();
            if let Some(last) = self.last_token.replace(now) {
                self.app.metrics.inter_token_seconds.observe((now - last).as_secs_f64());
            }
        }
    }

    /// The answer is complete; records the engine's usage.
    pub fn complete(&mut self, usage: Usage) {
        let usage = usage.plausible();
        self.booking.ended(Outcome::Complete);
        let metrics = &self.app.metrics;
        if let Some(tokens) = usage.cached_tokens {
            metrics.delivered.inc_by(tokens);
            self.booking.cached(tokens);
            metrics.usage_reported.inc();
        }
        if let Some(expected) = self.expected.take() {
            expected.compare(&self.app, usage.input_tokens, usage.cached_tokens);
        }
        match (self.counted, usage.input_tokens) {
            (None, Some(reported)) => {
                metrics.input.inc_by(reported);
            }
            // The engine saw another prompt than routing did, so hashes can't match either.
            (Some(counted), Some(reported)) if counted != reported => {
                metrics.token_mismatches.inc();
                if let Some((api, is_sent)) = self.ids {
                    let how = if is_sent { "as token ids" } else { "as text" };
                    let why = format!(
                        "the engine counted {reported} tokens of a prompt sent {how}, kvflash {counted}"
                    );
                    self.engine.gets_no_ids(&self.app, api, "other_count", &why);
                }
            }
            _ => {}
        }
        if let (Some((_, true)), Some(counted)) = (self.ids, self.counted) {
            metrics.ids_sent.inc_by(counted);
        }
    }

    /// The worker interrupted the answer.
    pub fn broken(&self, why: &str, is_engine_at_fault: bool) {
        self.booking.ended(Outcome::Broken);
        self.app.metrics.streams_broken.inc();
        if is_engine_at_fault {
            self.engine.failed(&format!("answer broke off: {why}"));
        }
    }

    /// The client left before the end.
    pub fn abandoned(&self) {
        self.booking.ended(Outcome::ClientGone);
        self.app.metrics.clients_gone.inc();
    }

    /// Records the usage at the end.
    pub fn used(&self, usage: Usage) {
        let usage = usage.plausible();
        self.booking.used(usage);
        let cached_tokens = usage.cached_tokens.filter(|_| self.is_alone);
        self.in_flight.used(Usage { cached_tokens, ..usage });
    }
}

/// How an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Open,
    Complete,
    Broken,
}

/// The body of an answer.
///
/// Dropping it at any point frees the booking and, if the answer is incomplete, closes the
/// connection to the engine, which tells the engine that the client is gone.
struct Relay {
    delivery: Delivery,
    upstream: Incoming,
    /// Chunk that was awaited before the response head was forwarded.
    first: Option<Bytes>,
    is_success: bool,
    is_event_stream: bool,
    form: Form,
    scanner: UsageScanner,
    /// The ids of its prompt, if the engine tells them.
    told: Option<ToldIds>,
    /// What came of a line of an event stream that is not whole yet.
    lines: WholeLines,
    end: End,
    /// Start of the current wait for the engine; `None` while it sends as fast as the client reads.
    waits_since: Option<Instant>,
    /// Created at the first wait and reset only when it fires: chunks arrive too often to move it
    /// each time.
    alarm: Option<Pin<Box<Sleep>>>,
    /// Waits until answers are cut off; only once a stop was announced.
    cut: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

/// Passes an engine's answer through.
pub(super) fn relay(mut delivery: Delivery, row: &Row, opened: Opened) -> Response {
    let Opened { status, headers, is_event_stream, first, upstream, more } = opened;
    let is_taken = more == Some(More::Ids) && status.is_success();
    delivery.ids = delivery.ids.map(|(api, _)| (api, is_taken));
    let is_asked_here = more == Some(More::Question);
    let told = delivery.told(status, &headers, is_event_stream, is_asked_here);
    let is_shorter = told.as_ref().is_some_and(ToldIds::is_hiding);
    let mut relay = Relay {
        delivery,
        upstream,
        first,
        is_success: status.is_success(),
        is_event_stream,
        form: row.form,
        scanner: UsageScanner::of(row),
        told,
        lines: WholeLines::default(),
        end: End::Open,
        waits_since: None,
        alarm: None,
        cut: None,
    };
    if relay.first.is_none() && relay.upstream.is_end_stream() {
        relay.finish();
    }
    let mut response = Response::new(axum::body::Body::new(relay));
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    if is_event_stream || is_shorter {
        // A stream that breaks ends with an event more than its engine announced.
        response.headers_mut().remove(header::CONTENT_LENGTH);
    }
    response
}

impl Relay {
    /// A chunk for the client; `None` while nothing may be sent yet.
    fn pass(&mut self, chunk: Bytes) -> Option<Bytes> {
        self.scanner.feed(&chunk);
        if self.delivery.output_awaited_since.is_some() && events_of_response(&chunk).1 {
            self.delivery.output_begins();
        }
        match self.delivery.output_awaited_since {
            None => self.delivery.generated(self.scanner.events),
            Some(_) => self.delivery.booking.touch(),
        }
        let chunk = match &mut self.told {
            None => chunk,
            Some(told) => {
                let (chunk, ids) = told.take(chunk);
                ids.into_iter().for_each(|ids| self.delivery.learn(&ids));
                chunk
            }
        };
        let mut ready = if self.is_event_stream { self.lines.take(chunk) } else { chunk };
        if let Some(told) = self.told.as_mut().filter(|_| self.is_event_stream) {
            ready = told.without_empty(ready);
        }
        if self.upstream.is_end_stream() {
            self.finish();
            ready = self.lines.end(ready);
        }
        (!ready.is_empty()).then_some(ready)
    }

    fn finish(&mut self) {
        self.end = End::Complete;
        if !self.is_success {
            return self.delivery.booking.ended(Outcome::Failed);
        }
        self.delivery.output_begins();
        if self.scanner.has_error {
            // The client has received it.
            return self.delivery.broken("the engine sent an error", false);
        }
        let is_silent = |told: &ToldIds| told.is_hiding() && told.has_choices && !told.has_told;
        if self.told.as_ref().is_some_and(is_silent) {
            let Delivery { app, engine, .. } = &self.delivery;
            engine.teaches_no_more(app, "absent", "its answer has no ids");
        }
        self.delivery.complete(Usage { output_tokens: None, ..self.scanner.usage() });
    }

    /// Ready when the engine has sent nothing for `--stream-idle-timeout`: if its packets are lost
    /// or its process is stopped, nothing else would end the wait. The booking does not expire
    /// meanwhile.
    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<String> {
        let timeout = self.delivery.app.options.stream_idle_timeout;
        let due = *self.waits_since.get_or_insert_with(Instant::now) + timeout;
        let interval = self.delivery.booking.touch_interval();
        let next = || due.min(Instant::now() + interval);
        let alarm = self.alarm.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(next())));
        loop {
            ready!(alarm.as_mut().poll(cx));
            if alarm.deadline() >= due {
                let seconds = timeout.as_secs_f64();
                return Poll::Ready(format!("nothing for {seconds} s (--stream-idle-timeout)"));
            }
            self.delivery.booking.touch();
            alarm.as_mut().reset(next());
        }
    }

    /// Ready when the answer must end because the process does. An answer that sends nothing from
    /// the announcement of the stop on does not notice, and ends with its connection.
    fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let shutdown = self.delivery.app.options.http.shutdown();
        if !shutdown.is_announced() {
            return Poll::Pending;
        }
        let cut = self.cut.get_or_insert_with(|| Box::pin(shutdown.clone().until_cut_off()));
        cut.as_mut().poll(cx)
    }

    fn broken(&mut self, error: BoxError) -> Option<Result<Frame<Bytes>, BoxError>> {
        let why = in_full(&*error);
        self.delivery.broken(&why, true);
        let message = format!("worker {} broke off the answer: {why}", self.delivery.engine.id);
        self.end_with(&message, error)
    }

    fn cut_off(&mut self) -> Option<Result<Frame<Bytes>, BoxError>> {
        let why = "the server is stopping, and the answer did not end within --drain-timeout: send the request again";
        self.delivery.broken(why, false);
        self.end_with(why, why.into())
    }

    /// Ends an incomplete answer.
    fn end_with(
        &mut self,
        message: &str,
        error: BoxError,
    ) -> Option<Result<Frame<Bytes>, BoxError>> {
        self.end = End::Broken;
        if !self.is_event_stream {
            // A truncated JSON answer: only breaking the connection signals that reliably.
            return Some(Err(error));
        }
        // The client already has all complete lines; an error can only be sent inside the stream.
        let end = self.form.broken_stream(message, self.scanner.events);
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
                if self.poll_cut(cx).is_ready() {
                    return Poll::Ready(self.cut_off());
                }
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
                    // Trailers come last. The rest of an incomplete line goes before them, and
                    // replaces them.
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
        if self.is_event_stream || self.told.as_ref().is_some_and(ToldIds::is_hiding) {
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
        let is_told = self.scanner.is_told() || self.scanner.has_error;
        let mut usage = self.scanner.usage();
        if self.delivery.output_awaited_since.is_some() && !is_told {
            // Only the events before the output came.
            usage.output_tokens = Some(0);
        }
        self.delivery.used(usage);
        match self.end {
            // The engine has already reported its usage or an error: only the end of the stream is missing.
            End::Open if is_told => self.finish(),
            End::Open => self.delivery.abandoned(),
            End::Complete | End::Broken => {}
        }
    }
}

/// Maximum bytes of an incomplete line that are held back; longer ones are passed on as they
/// arrive.
const MAX_HELD_BYTES: usize = 1 << 18;

/// Holds back a line until it is complete: a client can't use part of an event's data, and if the
/// engine is lost after it, would take the part for the whole.
///
/// # Cost
/// A check of the last byte of a chunk that ends with an event, which nearly all do; a copy of an
/// incomplete line.
#[derive(Debug, Default)]
pub(crate) struct WholeLines {
    held: BytesMut,
    /// Part of the current line was already sent.
    is_cut: bool,
}

impl WholeLines {
    /// Whether nothing is held back.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// The data to send after `chunk` has arrived.
    pub fn take(&mut self, chunk: Bytes) -> Bytes {
        // A CR alone also ends a line; an LF after it belongs to it.
        let end = memchr::memrchr2(b'\n', b'\r', &chunk).map_or(0, |at| at + 1);
        if self.held.is_empty() {
            let goes_on = self.is_cut && end == 0;
            if goes_on || end == chunk.len() {
                self.is_cut = goes_on;
                return chunk;
            }
        }
        self.is_cut = false;
        let whole = match (self.held.is_empty(), end) {
            (_, 0) => Bytes::new(),
            (true, end) => chunk.slice(..end),
            (false, end) => {
                self.held.extend_from_slice(&chunk[..end]);
                self.held.split().freeze()
            }
        };
        self.held.extend_from_slice(&chunk[end..]);
        if self.held.len() > MAX_HELD_BYTES {
            self.is_cut = true;
            return self.end(whole);
        }
        whole
    }

    /// At the end of the stream: `last`, after the held data.
    pub fn end(&mut self, last: Bytes) -> Bytes {
        let held = std::mem::take(&mut self.held);
        match (last.is_empty(), held.is_empty()) {
            (_, true) => last,
            (true, false) => held.freeze(),
            (false, false) => Bytes::from([&last[..], &held[..]].concat()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
