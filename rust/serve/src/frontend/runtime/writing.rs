//! From a worker's tokens to the text that a client may see, and the end of it; and OpenAI's JSON around that text: whole,
//! or as the events of a stream.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use kvflash_core::error::Result;
use kvflash_core::text::{Detokenizer, Tokenizer};
use serde_json::{Value, json};

use super::item::{Item, Usage};
use super::message::{Message, NamedCall, Part};
use super::texts::ModelText;
use crate::gateway::api::Api;
use crate::gateway::generation::{Generation, Limits};

/// A tokenizer that lives as long as somebody writes with it.
#[derive(Debug)]
struct Shared(Arc<ModelText>);

impl AsRef<Tokenizer> for Shared {
    fn as_ref(&self) -> &Tokenizer {
        &self.0.model.tokenizer
    }
}

/// Why the text is over, in OpenAI's words.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Ending {
    pub reason: String,
    /// The stop string or token that ended it.
    pub stop_reason: Option<Value>,
}

impl Ending {
    /// No string or token ended it.
    pub fn plain(reason: &str) -> Self {
        Self { reason: reason.to_owned(), stop_reason: None }
    }
}

/// Writes one answer.
///
/// # Consistency
/// What is given out is never taken back: no half character, nothing of a stop string, nothing behind
/// the end. All pieces together are the text of all tokens before the end, decoded at once, without a
/// last character that the end cuts.
#[derive(Debug)]
pub(crate) struct Writing {
    detokenizer: Detokenizer<Shared>,
    stop: StopStrings,
    limits: Limits,
    text: Arc<ModelText>,
    /// Special tokens that are in the text all the same.
    shown: Vec<(u32, &'static str)>,
    /// Tokens generated so far.
    pub tokens: u64,
    pub ending: Option<Ending>,
}

impl Writing {
    pub fn new(text: Arc<ModelText>, generation: &Generation) -> Self {
        let limits = generation.limits.clone();
        Self {
            detokenizer: Detokenizer::new(
                Shared(Arc::clone(&text)),
                !generation.keeps_special_tokens,
            ),
            stop: StopStrings::new(limits.stop.clone(), limits.is_stop_included),
            limits,
            text,
            shown: Vec::new(),
            tokens: 0,
            ending: None,
        }
    }

    /// The same, with these tags in the text even where they are special tokens.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn showing(mut self, tags: &[&'static str]) -> Result<Self> {
        let tokenizer = &self.text.model.tokenizer;
        for tag in tags {
            if let Some(id) = tokenizer.token_to_id(tag)
                && tokenizer.decode(&[id], true)?.is_empty()
            {
                self.shown.push((id, tag));
            }
        }
        Ok(self)
    }

    /// Take an item; the text that may be given out with it.
    ///
    /// # Errors
    /// `InvalidArgument` if the tokenizer's decoder fails.
    pub fn take(&mut self, item: &Item) -> Result<String> {
        let mut out = String::new();
        if item.token_ids().is_empty()
            && let Some(text) = &item.text
        {
            self.scan(text.clone(), &mut out);
        }
        for id in item.token_ids() {
            if self.ending.is_some() {
                break;
            }
            self.token(*id, &mut out)?;
        }
        if self.ending.is_none()
            && let Some(reason) = item.finish()
        {
            let stop_reason = item.stop_reason.clone();
            self.finish(Ending { stop_reason, ..Ending::plain(reason) }, &mut out)?;
        }
        Ok(out)
    }

    /// The worker has nothing more: the rest of the text.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn end(&mut self) -> Result<String> {
        let mut out = String::new();
        if self.ending.is_none() {
            self.finish(Ending::plain("stop"), &mut out)?;
        }
        Ok(out)
    }

    fn token(&mut self, id: u32, out: &mut String) -> Result<()> {
        self.tokens += 1;
        let may_stop = self.tokens > self.limits.min_tokens;
        if may_stop && self.limits.stop_token_ids.contains(&id) {
            let stop_reason = Some(id.into());
            return self.finish(Ending { stop_reason, ..Ending::plain("stop") }, out);
        }
        if may_stop && !self.limits.ignore_eos && self.text.eos_token_ids.contains(&id) {
            return self.finish(Ending::plain("stop"), out);
        }
        let piece = match self.shown.iter().find(|(shown, _)| *shown == id) {
            Some((_, tag)) => self.detokenizer.finish()? + tag,
            None => self.detokenizer.push(id)?,
        };
        if may_stop {
            self.scan(piece, out);
        } else {
            out.push_str(&self.stop.pass(&piece));
        }
        if self.ending.is_none() && self.limits.max_tokens == Some(self.tokens) {
            self.finish(Ending::plain("length"), out)?;
        }
        Ok(())
    }

    fn scan(&mut self, piece: String, out: &mut String) {
        let scanned = self.stop.scan(piece);
        out.push_str(&scanned.text);
        if let Some(found) = scanned.found {
            self.ending = Some(Ending { stop_reason: Some(found.into()), ..Ending::plain("stop") });
        }
    }

    /// The text is over, unless what was held back ends it in another way.
    fn finish(&mut self, ending: Ending, out: &mut String) -> Result<()> {
        let mut rest = self.detokenizer.finish()?;
        // As by vLLM; the bytes of half a character have no text.
        rest.truncate(rest.trim_end_matches(char::REPLACEMENT_CHARACTER).len());
        if self.tokens > self.limits.min_tokens {
            self.scan(rest, out);
        } else {
            out.push_str(&self.stop.pass(&rest));
        }
        if self.ending.is_none() {
            out.push_str(&self.stop.pass(""));
            self.ending = Some(ending);
        }
        Ok(())
    }
}

/// Finds the first stop string, wherever the pieces are cut, and holds back what may become one.
#[derive(Debug)]
struct StopStrings {
    strings: Vec<String>,
    /// Include what was found in the text.
    is_included: bool,
    /// Not given out: the longest end of the text with which a stop string begins.
    held: String,
}

/// What a piece of text led to.
#[derive(Debug, PartialEq, Eq)]
struct Scanned {
    /// Text that may be given out now.
    pub text: String,
    /// The stop string that was found; the text is over.
    pub found: Option<String>,
}

impl StopStrings {
    pub fn new(strings: Vec<String>, is_included: bool) -> Self {
        Self { strings, is_included, held: String::new() }
    }

    /// Take a piece of text in which stop strings count.
    ///
    /// # Cost
    /// O(bytes of the piece and of the longest stop string, times their number).
    pub fn scan(&mut self, piece: String) -> Scanned {
        if self.strings.is_empty() || (piece.is_empty() && self.held.is_empty()) {
            return Scanned { text: piece, found: None };
        }
        let mut text = std::mem::take(&mut self.held);
        text.push_str(&piece);
        // The first one counts; of two at one place the one that was named first.
        let hits = self.strings.iter().filter_map(|stop| Some((text.find(stop.as_str())?, stop)));
        if let Some((at, stop)) = hits.min_by_key(|(at, _)| *at) {
            let found = Some(stop.clone());
            text.truncate(if self.is_included { at + stop.len() } else { at });
            return Scanned { text, found };
        }
        let from = self.begin_of_one(&text);
        self.held = text.split_off(from);
        Scanned { text, found: None }
    }

    /// Take a piece in which they do not count yet, or none at the end; all of it and what was held back may be given out.
    pub fn pass(&mut self, piece: &str) -> String {
        let mut text = std::mem::take(&mut self.held);
        text.push_str(piece);
        text
    }

    /// Where the longest end of `text` starts that begins a stop string.
    fn begin_of_one(&self, text: &str) -> usize {
        let longest = self.strings.iter().map(String::len).max().unwrap_or(0);
        let from = text.len().saturating_sub(longest.saturating_sub(1));
        (from..text.len())
            .filter(|at| text.is_char_boundary(*at))
            .find(|at| self.strings.iter().any(|stop| stop.starts_with(&text[*at..])))
            .unwrap_or(text.len())
    }
}

/// The end of every stream.
pub(crate) const DONE: &str = "data: [DONE]\n\n";

/// The words around an answer's text: a chat's, or for every other API a completion's.
#[derive(Debug)]
pub(crate) struct Wording {
    api: Api,
    id: String,
    model: String,
    created_s: u64,
    /// What every event of the stream begins with, up to its choices.
    prefix: String,
}

impl Wording {
    pub fn new(api: Api, request_id: &str, model: &str) -> Self {
        let (kind, object) = match api {
            Api::Chat => ("chatcmpl", "chat.completion.chunk"),
            _ => ("cmpl", "text_completion"),
        };
        let id = format!("{kind}-{request_id}");
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let created_s = since.map_or(0, |time| time.as_secs());
        let head =
            json!({ "id": id, "object": object, "created": created_s, "model": model }).to_string();
        let prefix = format!("data: {},\"choices\":", head.trim_end_matches('}'));
        Self { api, id, model: model.to_owned(), created_s, prefix }
    }

    /// The event that opens a chat's stream; completions have none.
    pub fn opening(&self, out: &mut String) {
        if self.api == Api::Chat {
            let delta = json!({ "role": "assistant", "content": "" });
            self.event(out, &json!([{ "index": 0, "delta": delta, "finish_reason": null }]));
        }
    }

    /// The event of a piece of text.
    pub fn piece(&self, text: &str, out: &mut String) {
        let text = Value::from(text);
        out.push_str(&self.prefix);
        // Written by hand: this is what is written for every token of every answer.
        let (before, after) = match self.api {
            Api::Chat => {
                ("[{\"index\":0,\"delta\":{\"content\":", "},\"finish_reason\":null}]}\n\n")
            }
            _ => ("[{\"index\":0,\"text\":", ",\"finish_reason\":null}]}\n\n"),
        };
        out.push_str(before);
        out.push_str(&text.to_string());
        out.push_str(after);
    }

    /// The event of a part of a chat's message.
    pub fn part(&self, part: &Part, out: &mut String) {
        let delta = match part {
            Part::Content(text) => return self.piece(text, out),
            Part::Reasoning(text) => json!({ "reasoning_content": text }),
            Part::Call(call) => {
                let mut told = call.json();
                told["index"] = call.index.into();
                json!({ "tool_calls": [told] })
            }
        };
        self.event(out, &json!([{ "index": 0, "delta": delta, "finish_reason": null }]));
    }

    /// A piece of text as a chunk of its own.
    pub fn chunk(&self, text: &str) -> Value {
        let choice = match self.api {
            Api::Chat => json!({ "index": 0, "delta": { "content": text } }),
            _ => json!({ "index": 0, "text": text }),
        };
        json!({
            "id": self.id, "created": self.created_s, "model": self.model, "choices": [choice]
        })
    }

    /// The events that end a stream.
    pub fn closing(&self, ending: &Ending, usage: Option<Usage>, out: &mut String) {
        let (reason, stop_reason) = (&ending.reason, &ending.stop_reason);
        let (key, nothing) = match self.api {
            Api::Chat => ("delta", json!({})),
            _ => ("text", json!("")),
        };
        self.event(
            out,
            &json!([{
                "index": 0, (key): nothing, "finish_reason": reason, "stop_reason": stop_reason
            }]),
        );
        if let Some(usage) = usage {
            out.push_str(&self.prefix);
            out.push_str(&format!("[],\"usage\":{}}}\n\n", usage.json()));
        }
        out.push_str(DONE);
    }

    fn event(&self, out: &mut String, choices: &Value) {
        out.push_str(&self.prefix);
        out.push_str(&choices.to_string());
        out.push_str("}\n\n");
    }

    /// The whole answer.
    pub fn whole(&self, message: &Message, ending: &Ending, usage: Usage) -> Value {
        let (reason, stop_reason) = (&ending.reason, &ending.stop_reason);
        let (object, key, said) = match self.api {
            Api::Chat => ("chat.completion", "message", told(message)),
            _ => ("text_completion", "text", json!(message.content)),
        };
        let choice = json!({
            "index": 0,
            (key): said,
            "logprobs": null,
            "finish_reason": reason,
            "stop_reason": stop_reason,
        });
        json!({
            "id": self.id,
            "object": object,
            "created": self.created_s,
            "model": self.model,
            "choices": [choice],
            "usage": usage.json(),
        })
    }
}

/// A chat's message. Without content beside calls or reasoning that is null.
fn told(message: &Message) -> Value {
    let Message { reasoning, content, calls } = message;
    let is_silent = content.is_empty() && !(calls.is_empty() && reasoning.is_empty());
    let content = if is_silent { Value::Null } else { json!(content) };
    let mut told = json!({ "role": "assistant", "content": content });
    if !reasoning.is_empty() {
        told["reasoning_content"] = json!(reasoning);
    }
    if !calls.is_empty() {
        told["tool_calls"] = calls.iter().map(NamedCall::json).collect();
    }
    told
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
