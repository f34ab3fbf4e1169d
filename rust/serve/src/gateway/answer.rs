//! Relays a runtime worker's answer to the client.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use kvflash_core::select;
use serde_json::{Value, json};

use super::api::Api;
use super::attempts::{Failed, PREFILL_FAILED};
use super::backend::plane::{Opened, failed};
use super::backend::worker::Handoff;
use super::book::kept_alive;
use super::generation::{self, Generation};
use super::plan::Plan;
use super::relay::{Delivery, End};
use crate::Reject;
use crate::frontend::engine::Member;
use crate::frontend::runtime::item::{Collected, Item, Usage, failure, parse_chunk};
use crate::frontend::runtime::message::{Formats, Message, Parsing, Part};
use crate::frontend::runtime::plane::{Cause, Items, PlaneError};
use crate::frontend::runtime::spec::ModelInput;
use crate::frontend::runtime::texts::ModelText;
use crate::frontend::runtime::writing::{DONE, Ending, Wording, Writing};
use crate::metrics::OutcomeLabel;

/// Maximum items written to the client at once.
const MAX_BATCH: usize = 64;

/// Tokens at the end of a prompt in which its template may have opened the reasoning.
const PROMPT_END_TOKENS: usize = 16;

/// Time that a worker has to end a stream whose last item has come.
const LAST_FRAME_TIME: Duration = Duration::from_secs(1);

/// An answer between its worker and its client.
///
/// Dropping it at any point frees the booking, ends the concurrent prefill and, if the answer is
/// incomplete, closes the connection to the worker, which tells the worker that the client is gone.
pub(super) struct Answer {
    delivery: Delivery,
    api: Api,
    handoff: Handoff,
    /// `None` once the answer is over.
    items: Option<Items>,
    first: Option<Bytes>,
    /// Writes the text of a worker of tokens; one of text sends chunks of its own.
    writing: Option<Box<Writing>>,
    /// What its text is taken apart with, where it is a chat.
    parsing: Option<Box<Parsing>>,
    wording: Wording,
    usage: Usage,
    /// Chunks of a text worker; `usage` has its token counts once they are known.
    pieces: u64,
    includes_usage: bool,
    /// The client gets it in one piece, once it is complete.
    is_whole: bool,
    /// The worker yields plain strings, so only this side can tell that its text is complete.
    is_plain: bool,
    is_opened: bool,
    end: End,
}

/// Converts a worker's answer to the client's format: a stream, or a whole.
///
/// # Errors
/// It is requested as a whole, and the worker fails before that is complete: nothing has reached
/// the client, so another worker may be tried.
pub(super) async fn answer(
    delivery: Delivery,
    plan: &Plan,
    handoff: Handoff,
    opened: Opened,
) -> Result<Response, Failed> {
    let answer = Answer::new(delivery, plan, handoff, opened)?;
    if answer.is_whole { answer.whole().await } else { Ok(answer.stream()) }
}

impl Answer {
    /// # Errors
    /// 503 for a token worker without a tokenizer; 400 if its decoder fails on the prompt.
    fn new(
        delivery: Delivery,
        plan: &Plan,
        handoff: Handoff,
        opened: Opened,
    ) -> Result<Self, Failed> {
        let mut generation = plan.generation.clone().unwrap_or_default();
        let mut parsing = None;
        let writing = match (opened.member.spec.card.model_input, &opened.member.text) {
            (ModelInput::Text, _) => None,
            (ModelInput::Tokens, Some(text)) => {
                parsing =
                    parsing_of(plan, &generation, &opened.member, text).map_err(Failed::invalid)?;
                let tags = parsing.as_ref().map_or(&[][..], |parsing| parsing.tags());
                generation.keeps_special_tokens |=
                    parsing.is_some() && opened.member.formats.needs_special_tokens();
                let writing = Writing::new(Arc::clone(text), &generation).showing(tags);
                let writing = writing.map_err(|error| Failed::invalid(error.into()))?;
                Some(Box::new(writing))
            }
            (ModelInput::Tokens, None) => {
                let message = format!("worker {} has no tokenizer", opened.engine.id);
                return Err(Failed::new("not_ready", message, StatusCode::SERVICE_UNAVAILABLE));
            }
        };
        let api = plan.call.api();
        let prompt_tokens = plan.tokens.as_ref().map_or(0, |tokens| tokens.len() as u64);
        Ok(Self {
            delivery,
            api,
            wording: Wording::new(api, &plan.call.request_id, &plan.model),
            usage: Usage { prompt_tokens, ..Usage::default() },
            pieces: 0,
            includes_usage: generation.includes_usage,
            is_whole: !generation.is_stream,
            handoff,
            items: Some(opened.items),
            first: Some(opened.first),
            writing,
            parsing: parsing.map(Box::new),
            is_plain: false,
            is_opened: false,
            end: End::Open,
        })
    }

    /// The answer as an event stream.
    fn stream(self) -> Response {
        let events = stream::unfold(self, |mut answer| async move {
            let events = answer.events().await?;
            Some((Ok::<_, Infallible>(events), answer))
        });
        let mut response = Response::new(Body::from_stream(events));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        response
    }

    /// The complete answer in one piece.
    ///
    /// # Errors
    /// The worker fails.
    async fn whole(mut self) -> Result<Response, Failed> {
        let (mut message, mut collected) = (Message::default(), Collected::default());
        while self.end == End::Open {
            let next = self.next().await;
            let taken = next.and_then(|payload| self.gather(payload, &mut message, &mut collected));
            if let Err(error) = taken {
                let beside =
                    self.handoff.failed().filter(|_| matches!(error.cause, Cause::Prefill));
                let failed = self.broken(error);
                // Its load must not count against the next prefill.
                self.handoff.end().await;
                return Err(match beside {
                    Some(beside) => Failed { cause: PREFILL_FAILED, ..beside },
                    None => failed,
                });
            }
        }
        let answer = match &self.writing {
            Some(writing) => {
                let ending = self.ending(writing);
                Some(self.wording.whole(&message, &ending, self.usage))
            }
            None => collected.finish(self.api),
        };
        let Some(answer) = answer else {
            let message = format!("worker {} sent an empty answer", self.delivery.engine.id);
            self.broken(PlaneError::new(Cause::Worker("internal".to_owned()), &*message));
            self.handoff.end().await;
            return Err(Failed::new("no_answer", message, StatusCode::BAD_GATEWAY).lost());
        };
        self.complete();
        Ok(Json(answer).into_response())
    }

    /// The next events of the stream; `None` after the last one.
    async fn events(&mut self) -> Option<Bytes> {
        if self.end != End::Open {
            return None;
        }
        let mut out = String::new();
        let mut count = 0;
        while self.end == End::Open {
            let next = self.next().await;
            if let Err(error) = next.and_then(|payload| self.tell(payload, &mut out)) {
                for part in self.parsing.iter_mut().flat_map(|parsing| parsing.finish()) {
                    self.wording.part(&part, &mut out);
                }
                let message = format!(
                    "worker {} broke off its answer: {}",
                    self.delivery.engine.id, error.message
                );
                let status = self.broken(error).status.as_u16();
                let kind = "upstream_error";
                let event =
                    json!({ "error": { "message": message, "type": kind, "code": status } });
                out.push_str(&format!("data: {event}\n\n{DONE}"));
            }
            count += 1;
            // Items that have already arrived are sent together.
            let is_more = self.items.as_ref().is_some_and(Items::is_ready) && count < MAX_BATCH;
            if !out.is_empty() && !is_more {
                break;
            }
        }
        if self.end == End::Complete {
            self.complete();
        }
        (!out.is_empty()).then(|| Bytes::from(out))
    }

    /// Adds an item, or the end, to the whole answer.
    fn gather(
        &mut self,
        payload: Option<Bytes>,
        message: &mut Message,
        collected: &mut Collected,
    ) -> Result<(), PlaneError> {
        if self.writing.is_some() {
            let text = self.write(payload.as_deref())?;
            self.parts(text).into_iter().for_each(|part| message.add(part));
            return Ok(());
        }
        let Some(payload) = payload else {
            self.end = End::Complete;
            if self.is_plain {
                collected.close(self.plain_usage());
            }
            return Ok(());
        };
        self.pieces += 1;
        let chunk = match parse_chunk(&payload)? {
            Value::String(piece) => {
                self.is_plain = true;
                self.wording.chunk(&piece)
            }
            chunk => chunk,
        };
        if let Some(error) = failure(&chunk) {
            return Err(error);
        }
        self.note_usage(&chunk);
        collected.take(self.api, chunk);
        Ok(())
    }

    /// Writes an item, or the end, as events.
    fn tell(&mut self, payload: Option<Bytes>, out: &mut String) -> Result<(), PlaneError> {
        if self.writing.is_none() {
            let Some(payload) = payload else {
                self.end = End::Complete;
                match self.is_plain {
                    true => {
                        let usage = self.plain_usage().filter(|_| self.includes_usage);
                        self.wording.closing(&Ending::plain("stop"), usage, out);
                    }
                    false => out.push_str(DONE),
                }
                return Ok(());
            };
            self.pieces += 1;
            match parse_chunk(&payload)? {
                Value::String(piece) => {
                    if !std::mem::replace(&mut self.is_plain, true) {
                        self.wording.opening(out);
                    }
                    self.wording.piece(&piece, out);
                }
                chunk => {
                    self.note_usage(&chunk);
                    out.push_str(&format!("data: {chunk}\n\n"));
                    // The client has received the worker's own error, and nothing may follow it.
                    if let Some(error) = failure(&chunk) {
                        self.broken(error);
                        out.push_str(DONE);
                    }
                }
            }
            return Ok(());
        }
        let text = self.write(payload.as_deref())?;
        if !std::mem::replace(&mut self.is_opened, true) {
            self.wording.opening(out);
        }
        for part in self.parts(text) {
            self.wording.part(&part, out);
        }
        if self.end == End::Complete
            && let Some(writing) = &self.writing
        {
            let usage = self.includes_usage.then_some(self.usage);
            self.wording.closing(&self.ending(writing), usage, out);
        }
        Ok(())
    }

    /// The parts of the message that a piece of the text brings, at the end all that are left.
    fn parts(&mut self, text: String) -> Vec<Part> {
        let Some(parsing) = &mut self.parsing else {
            return if text.is_empty() { Vec::new() } else { vec![Part::Content(text)] };
        };
        let mut parts = parsing.push(text);
        if self.end == End::Complete {
            parts.extend(parsing.finish());
        }
        parts
    }

    fn ending(&self, writing: &Writing) -> Ending {
        let ending = writing.ending.clone().unwrap_or_default();
        match &self.parsing {
            None => ending,
            Some(parsing) => parsing.ending(ending),
        }
    }

    /// Take a token worker's item, or its end; the text that comes of it.
    fn write(&mut self, payload: Option<&[u8]>) -> Result<String, PlaneError> {
        let Some(writing) = &mut self.writing else { return Ok(String::new()) };
        let wrong =
            |error: kvflash_core::error::Error| PlaneError::new(Cause::Protocol, error.to_string());
        let text = match payload {
            None => writing.end().map_err(wrong)?,
            Some(payload) => {
                let item = Item::parse(payload)?;
                self.usage.cached_tokens = item.cached_tokens().or(self.usage.cached_tokens);
                self.usage.prompt_tokens = item.prompt_tokens().unwrap_or(self.usage.prompt_tokens);
                let text = writing.take(&item).map_err(wrong)?;
                let is_known = item.finish().is_some()
                    || writing.ending.as_ref().is_some_and(|ending| ending.reason == "length");
                if writing.ending.is_some() && is_known {
                    // The worker knows that, too: its last frame follows.
                    drain(self.items.take());
                }
                text
            }
        };
        self.usage.completion_tokens = writing.tokens;
        if writing.ending.is_some() {
            self.end = End::Complete;
        }
        Ok(text)
    }

    fn note_usage(&mut self, chunk: &Value) {
        let tokens = |path| chunk.pointer(path).and_then(Value::as_u64);
        let usage = &mut self.usage;
        usage.prompt_tokens = tokens("/usage/prompt_tokens").unwrap_or(usage.prompt_tokens);
        usage.completion_tokens =
            tokens("/usage/completion_tokens").unwrap_or(usage.completion_tokens);
        let cached = tokens("/usage/prompt_tokens_details/cached_tokens");
        usage.cached_tokens = cached.or(usage.cached_tokens);
    }

    /// Usage of a worker of plain strings, which tells none: each counts as a token. `None` where the prompt's tokens
    /// are not known.
    fn plain_usage(&self) -> Option<Usage> {
        let usage = Usage { completion_tokens: self.pieces, ..self.usage };
        (usage.prompt_tokens > 0).then_some(usage)
    }

    async fn next(&mut self) -> Result<Option<Bytes>, PlaneError> {
        self.note_generated();
        if let Some(first) = self.first.take() {
            return Ok(Some(first));
        }
        let Some(items) = &mut self.items else { return Ok(None) };
        let timeout = self.delivery.app.options.stream_idle_timeout;
        let item = tokio::time::timeout(timeout, items.next());
        let mut item = pin!(kept_alive(&self.delivery.booking, item));
        let item = async {
            if !self.is_whole {
                return item.await;
            }
            // Another worker can still take over where this one fails its checks.
            self.delivery.engine.while_well(item.as_mut()).await.unwrap_or_else(|| {
                let message = "it failed its health checks before its answer was complete";
                Ok(Err(PlaneError::new(Cause::Broken, message)))
            })
        };
        tokio::select! {
            biased;
            item = item => item.unwrap_or_else(|_| {
                let seconds = timeout.as_secs_f64();
                let message = format!("no item for {seconds} s (--stream-idle-timeout)");
                Err(PlaneError::new(Cause::Broken, message))
            }),
            failed = self.handoff.failure() => Err(PlaneError::new(Cause::Prefill, failed.message)),
        }
    }

    /// Counts the tokens so far.
    fn note_generated(&mut self) {
        self.delivery.generated(self.usage.completion_tokens.max(self.pieces));
    }

    /// The answer was sent completely.
    fn complete(&mut self) {
        self.note_generated();
        self.handoff.complete();
        // Notifies a worker that does not know yet that the answer is complete.
        self.items = None;
        self.count("complete");
        let used = self.used();
        self.delivery.complete(used);
    }

    /// The worker failed: what that means for the attempt, with the fault of the worker noted.
    fn broken(&mut self, error: PlaneError) -> Failed {
        self.end = End::Broken;
        self.items = None;
        self.count("broken");
        let why = error.message.clone();
        let failed = failed(&self.delivery.engine, error);
        self.delivery.broken(&why, failed.is_engine_at_fault);
        Failed { is_engine_at_fault: false, ..failed }
    }

    /// Usage of the request so far.
    fn used(&self) -> select::Usage {
        let Usage { prompt_tokens, cached_tokens, completion_tokens } = self.usage;
        let input_tokens = (prompt_tokens > 0).then_some(prompt_tokens);
        let output_tokens = if completion_tokens > 0 { completion_tokens } else { self.pieces };
        select::Usage { input_tokens, cached_tokens, output_tokens: Some(output_tokens) }
    }

    fn count(&self, outcome: &'static str) {
        self.delivery.app.metrics.answers.get_or_create(&OutcomeLabel { outcome }).inc();
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.delivery.used(self.used());
        if self.end == End::Open {
            self.count("client_gone");
            self.delivery.abandoned();
        }
    }
}

/// What a chat's text is taken apart with, where its worker's model has a format for that.
///
/// # Errors
/// 400 if the tokenizer's decoder fails on the prompt.
fn parsing_of(
    plan: &Plan,
    generation: &Generation,
    member: &Member,
    text: &ModelText,
) -> Result<Option<Parsing>, Reject> {
    let formats = &member.formats;
    if plan.call.api() != Api::Chat || *formats == Formats::default() {
        return Ok(None);
    }
    let tools = match formats.tools {
        None => Vec::new(),
        Some(_) => generation::tool_names(&plan.call.body)?,
    };
    let prompt = plan.tokens.as_deref().map(Vec::as_slice).unwrap_or_default();
    let prompt_end = &prompt[prompt.len().saturating_sub(PROMPT_END_TOKENS)..];
    let prompt_end = text.model.tokenizer.decode(prompt_end, false)?;
    let calls_max = if generation.has_one_call { 1 } else { usize::MAX };
    let parsing = Parsing::new(formats, &prompt_end, tools, calls_max);
    Ok((!parsing.is_idle()).then_some(parsing))
}

/// Read the end of a stream whose last item has come, so that its connection serves again.
fn drain(items: Option<Items>) {
    let Some(mut items) = items else { return };
    tokio::spawn(async move {
        let rest = async { while let Ok(Some(_)) = items.next().await {} };
        // A stream that continues is cut off.
        let _ = tokio::time::timeout(LAST_FRAME_TIME, rest).await;
    });
}
