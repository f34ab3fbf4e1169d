//! A chat that is not made into tokens: what it may begin with as an engine told before, and what is learned from its
//! answer, which the token ids that were asked for here are taken out of on its way through.

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Map, Value};
use xxhash_rust::xxh3::Xxh3;

use super::body::Envelope;
use super::body::message_bytes;
use super::call::Call;
use crate::frontend::app::App;
use crate::frontend::taught::Beginning;
use crate::metrics::OutcomeLabel;

/// A chat of more messages is routed as if the engine had told nothing.
const MAX_MESSAGES: usize = 4_096;

/// A text without tokens is guessed to have so many bytes a token.
const BYTES_PER_TOKEN: usize = 4;

/// The field that asks an engine for the ids of its prompt.
///
/// # Source
/// vLLM 0.10.2 and newer: `prompt_token_ids` of the answer or of a stream's first chunk, `token_ids` of each choice.
pub(crate) const FIELD: &str = "return_token_ids";

/// Fields that no template sees: requests that differ in these only have the same prompt. Whatever is not listed keeps
/// conversations apart.
const NOT_OF_THE_PROMPT: [&str; 34] = [
    "messages",
    "model",
    "cache_salt",
    FIELD,
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "n",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "priority",
    "request_id",
    "nvext",
];

/// What a conversation is known by, and what its prompt is expected to begin with.
#[derive(Debug)]
pub(crate) struct Lesson {
    /// One for the first message, one for the first two, and so on.
    keys: Vec<u128>,
    /// What the engine told of an earlier turn.
    pub beginning: Option<Beginning>,
    /// Bytes of text in the messages of which nothing is known.
    new_bytes: usize,
    /// The client wants the ids itself.
    pub is_asked: bool,
    is_learned: AtomicBool,
}

impl Lesson {
    /// Of a chat; `None` where nothing of it can be learned: prompts that are cut, and bodies whose messages are no
    /// list.
    pub fn of(app: &App, call: &Call, envelope: &Envelope<'_>, model: &str) -> Option<Self> {
        if app.taught.is_off() || envelope.truncate_prompt_tokens.is_some() {
            return None;
        }
        let (messages, places) = (envelope.messages?.get(), call.body.messages()?);
        if places.is_empty() || places.len() > MAX_MESSAGES {
            return None;
        }
        // Random, so that no client can make two conversations share a key.
        static SEED: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(0));
        let mut hasher = Xxh3::with_seed(*SEED);
        let tenant = call.head.caller.client().map_or("", |key| &*key.tenant);
        for text in [model, tenant, envelope.cache_salt.as_deref().unwrap_or_default()] {
            add(&mut hasher, text.as_bytes());
        }
        for (name, json) in call.body.fields() {
            if !NOT_OF_THE_PROMPT.contains(&name) {
                add(&mut hasher, name.as_bytes());
                add(&mut hasher, json.as_bytes());
            }
        }
        let keys: Vec<u128> = places
            .iter()
            .map(|place| {
                add(&mut hasher, &messages.as_bytes()[place.clone()]);
                hasher.digest128()
            })
            .collect();
        let beginning = app.taught.find(&keys);
        let known = beginning.as_ref().map_or(0, |beginning| beginning.messages);
        let new_bytes =
            places[known..].iter().map(|place| message_bytes(&messages[place.clone()])).sum();
        let is_asked = call.body.text_of(FIELD).is_some_and(|json| json == "true");
        Some(Self { keys, beginning, new_bytes, is_asked, is_learned: AtomicBool::new(false) })
    }

    /// Length of the prompt in tokens, more or less: what is known of it, and a guess of the rest.
    pub fn guessed_tokens(&self) -> u64 {
        let known = self.beginning.as_ref().map_or(0, |beginning| beginning.ids().len());
        (known + self.new_bytes / BYTES_PER_TOKEN) as u64
    }

    /// The engine told the ids of the prompt.
    pub fn learn(&self, app: &App, ids: &[u32]) {
        if self.is_learned.swap(true, Ordering::Relaxed) {
            return;
        }
        if self.beginning.as_ref().is_some_and(|beginning| !ids.starts_with(beginning.ids())) {
            count(app, "corrected");
        }
        count(app, "learned");
        app.taught.learn(&self.keys, ids);
    }
}

/// Hash one part, apart from those before and behind it.
fn add(hasher: &mut Xxh3, part: &[u8]) {
    hasher.update(&part.len().to_le_bytes());
    hasher.update(part);
}

/// Count what became of a chat.
pub(super) fn count(app: &App, outcome: &'static str) {
    app.metrics.taught.get_or_create(&OutcomeLabel { outcome }).inc();
}

/// Names of lists of ids: beside the choices, and in each of them.
const OF_PROMPT: &[u8] = b"prompt_token_ids";
const OF_CHOICE: &[u8] = b"token_ids";
const CHOICES: &[u8] = b"choices";

/// How an event begins that has nothing in it; others are not parsed.
const EMPTY: [&[u8]; 2] = [b"\"delta\":{}", b"\"delta\": {}"];

/// A list that is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum List {
    OfPrompt,
    OfChoice,
}

/// Reads an answer byte by byte; nothing of it is held back.
///
/// Its client sees `null` in place of a list, as in an answer to a request without the field.
///
/// # Source
/// vLLM 0.32 `OpenAIServingChat`: `prompt_token_ids` of the answer and of a stream's first chunk, `token_ids` of each
/// choice; both are null unless they were asked for. With them a stream has chunks of an empty `delta`, too, for tokens
/// that a parser holds back.
#[derive(Debug, Default)]
pub(super) struct ToldIds {
    is_event_stream: bool,
    /// The client has not asked: it does not see them.
    is_hidden: bool,
    most_ids: usize,
    /// Objects and lists that are open, and which of the outermost are objects.
    depth: usize,
    is_object: [bool; 4],
    is_in_string: bool,
    is_escaped: bool,
    /// The last string, as far as it may be a name that counts.
    word: Vec<u8>,
    is_in_choices: bool,
    /// The name before the value that comes next.
    named: Option<List>,
    list: Option<List>,
    number: Option<u64>,
    ids: Vec<u32>,
    is_unusable: bool,
    /// The answer has choices: it is no error.
    pub has_choices: bool,
    /// The engine told the prompt's ids.
    pub has_told: bool,
    /// The blank line of an event that was left out comes next.
    skips_blank: bool,
}

impl ToldIds {
    /// Of an answer; of a prompt of more than `most_ids` tokens nothing is handed on.
    pub fn new(is_event_stream: bool, is_hidden: bool, most_ids: usize) -> Self {
        Self { is_event_stream, is_hidden, most_ids, ..Self::default() }
    }

    /// Whether the answer has fewer bytes than its engine announced.
    pub fn is_hiding(&self) -> bool {
        self.is_hidden
    }

    /// A chunk as its client gets it, and the ids of the prompt where the last one has come with it.
    pub fn take(&mut self, chunk: Bytes) -> (Bytes, Option<Vec<u32>>) {
        let mut out = Vec::with_capacity(if self.is_hidden { chunk.len() } else { 0 });
        let (mut at, mut told) = (0, None);
        while let Some(&byte) = chunk.get(at) {
            let from = at;
            at += 1;
            if self.list.is_some() {
                told = self.in_list(byte).or(told);
                if self.is_hidden {
                    continue;
                }
            } else if self.is_in_string {
                at = from + self.in_string(&chunk[from..]);
            } else if self.outside(byte) && self.is_hidden {
                out.extend_from_slice(b"null");
                continue;
            }
            if self.is_hidden {
                out.extend_from_slice(&chunk[from..at]);
            }
        }
        (if self.is_hidden { out.into() } else { chunk }, told)
    }

    /// A byte of a list of ids; the prompt's, at its end.
    fn in_list(&mut self, byte: u8) -> Option<Vec<u32>> {
        match byte {
            b'0'..=b'9' => {
                let before = self.number.unwrap_or(0);
                self.number =
                    Some(before.saturating_mul(10).saturating_add(u64::from(byte - b'0')));
            }
            b',' | b']' => {
                if let Some(number) = self.number.take() {
                    self.add(number);
                }
            }
            b' ' | b'\t' | b'\n' | b'\r' => {}
            _ => self.is_unusable = true,
        }
        if byte != b']' || self.list.take() != Some(List::OfPrompt) {
            return None;
        }
        self.has_told = true;
        let ids = std::mem::take(&mut self.ids);
        (!self.is_unusable && !ids.is_empty()).then_some(ids)
    }

    fn add(&mut self, number: u64) {
        if self.list != Some(List::OfPrompt) {
            return;
        }
        match u32::try_from(number) {
            Ok(id) if self.ids.len() < self.most_ids => self.ids.push(id),
            _ => self.is_unusable = true,
        }
    }

    /// The next bytes, the first of which is within a string; how many were read.
    fn in_string(&mut self, bytes: &[u8]) -> usize {
        if self.is_escaped {
            self.is_escaped = false;
            self.see(&bytes[..1]);
            return 1;
        }
        let plain = memchr::memchr3(b'"', b'\\', b'\n', bytes).unwrap_or(bytes.len());
        self.see(&bytes[..plain]);
        match bytes.get(plain) {
            None => return plain,
            Some(b'"') => self.is_in_string = false,
            Some(b'\\') => self.is_escaped = true,
            Some(_) => self.line_ends(),
        }
        plain + 1
    }

    /// A part of a string: of one that is longer than all names that count, enough to tell.
    fn see(&mut self, part: &[u8]) {
        let room = (OF_PROMPT.len() + 1).saturating_sub(self.word.len());
        self.word.extend_from_slice(&part[..part.len().min(room)]);
    }

    /// A byte that is in no string; whether a list of ids begins with it.
    fn outside(&mut self, byte: u8) -> bool {
        match byte {
            b'"' if self.depth > 0 => {
                self.is_in_string = true;
                self.word.clear();
                self.named = None;
            }
            b':' if self.depth > 0 => self.named = self.name(),
            b'[' if self.named.is_some() => {
                self.list = self.named.take();
                return true;
            }
            b'{' | b'[' if byte == b'{' || self.depth > 0 => {
                self.depth += 1;
                if let Some(is_object) = self.is_object.get_mut(self.depth) {
                    *is_object = byte == b'{';
                }
                self.named = None;
            }
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                self.named = None;
            }
            b'\n' => self.line_ends(),
            b' ' | b'\t' | b'\r' => {}
            _ => self.named = None,
        }
        false
    }

    /// What the value behind this name is, which stands where we are.
    fn name(&mut self) -> Option<List> {
        match self.depth {
            1 if self.is_object[1] => {
                self.is_in_choices = self.word == CHOICES;
                self.has_choices |= self.is_in_choices;
                (self.word == OF_PROMPT).then_some(List::OfPrompt)
            }
            3 if self.is_in_choices && !self.is_object[2] && self.is_object[3] => {
                (self.word == OF_CHOICE).then_some(List::OfChoice)
            }
            _ => None,
        }
    }

    /// In a stream each event is a line, and what it left open does not go on in the next.
    fn line_ends(&mut self) {
        if self.is_event_stream {
            (self.depth, self.named, self.is_in_string) = (0, None, false);
        }
    }

    /// The lines `ready` without events that have nothing in them but ids.
    pub fn without_empty(&mut self, ready: Bytes) -> Bytes {
        let may_have =
            |lines: &[u8]| EMPTY.iter().any(|one| memchr::memmem::find(lines, one).is_some());
        if !self.is_hidden || !(self.skips_blank || may_have(&ready)) {
            return ready;
        }
        let mut out = Vec::with_capacity(ready.len());
        for line in ready.split_inclusive(|byte| *byte == b'\n') {
            let is_blank = line.trim_ascii().is_empty();
            if is_blank && std::mem::take(&mut self.skips_blank) {
                continue;
            }
            self.skips_blank = line.strip_prefix(b"data:").is_some_and(is_empty);
            if !self.skips_blank {
                out.extend_from_slice(line);
            }
        }
        out.into()
    }
}

/// Whether an event tells nothing of any choice.
fn is_empty(event: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Chunk {
        choices: Vec<Choice>,
    }
    #[derive(Deserialize)]
    struct Choice {
        delta: Map<String, Value>,
        finish_reason: Option<Value>,
        logprobs: Option<Value>,
    }
    let chunk: Option<Chunk> = serde_json::from_slice(event).ok();
    let tells = |choice: &Choice| {
        !choice.delta.is_empty() || choice.finish_reason.is_some() || choice.logprobs.is_some()
    };
    chunk.is_some_and(|chunk| !chunk.choices.is_empty() && !chunk.choices.iter().any(tells))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const ANSWER: &str = r#"{"id":"token_ids","choices":[{"index":0,"message":{"content":"\"token_ids\":[1]","token_ids":[7]},"token_ids":[5, 6],"x":{"token_ids":[1]},"z":"\",\"token_ids\":[1]"}],"usage":{"a":{"token_ids":[2]}},"prompt_token_ids":[11,12 ,4294967295],"y":[{"prompt_token_ids":[3],"token_ids":[4]}]}"#;
    const SEEN: &str = r#"{"id":"token_ids","choices":[{"index":0,"message":{"content":"\"token_ids\":[1]","token_ids":[7]},"token_ids":null,"x":{"token_ids":[1]},"z":"\",\"token_ids\":[1]"}],"usage":{"a":{"token_ids":[2]}},"prompt_token_ids":null,"y":[{"prompt_token_ids":[3],"token_ids":[4]}]}"#;

    /// The bytes that a client sees of an answer in chunks of `size` bytes, and the ids that are read from it.
    fn read(told: &mut ToldIds, answer: &str, size: usize) -> (String, Vec<Vec<u32>>) {
        let (mut seen, mut ids) = (Vec::new(), Vec::new());
        for chunk in answer.as_bytes().chunks(size) {
            let (out, told) = told.take(Bytes::copy_from_slice(chunk));
            seen.extend_from_slice(&out);
            ids.extend(told);
        }
        (String::from_utf8(seen).unwrap(), ids)
    }

    #[test]
    fn ids_are_taken_out_however_the_answer_is_cut() {
        for size in 1..=ANSWER.len() {
            let mut told = ToldIds::new(false, true, 10);
            let (seen, ids) = read(&mut told, ANSWER, size);
            assert_eq!((seen.as_str(), ids), (SEEN, vec![vec![11, 12, u32::MAX]]), "by {size}");
            assert!(told.has_told && told.has_choices);
            let mut told = ToldIds::new(false, false, 10);
            let (seen, ids) = read(&mut told, ANSWER, size);
            assert_eq!((seen.as_str(), ids.len()), (ANSWER, 1), "its client has asked");
        }
    }

    #[test]
    fn ids_that_cannot_be_used_are_hidden_all_the_same() {
        for list in ["[1,2,3,4]", "[-1]", "[4294967296]", "[1.5]", "[]"] {
            let answer = format!(r#"{{"prompt_token_ids":{list},"a":1}}"#);
            let mut told = ToldIds::new(false, true, 3);
            let (seen, ids) = read(&mut told, &answer, 5);
            assert_eq!(seen, r#"{"prompt_token_ids":null,"a":1}"#);
            assert!(ids.is_empty() && told.has_told, "{list}");
        }
        let null = r#"{"choices":[{"token_ids":null}],"prompt_token_ids":null}"#;
        let mut told = ToldIds::new(false, true, 3);
        assert_eq!(read(&mut told, null, 7), (null.to_owned(), vec![]));
        assert!(!told.has_told);
    }

    #[test]
    fn a_stream_has_neither_ids_nor_events_that_only_have_these() {
        let stream = [
            r#"data: {"prompt_token_ids":[1,2],"choices":[{"delta":{"role":"assistant"}}]}"#,
            ": a { ping \" [",
            r#"data: {"choices":[{"delta":{},"logprobs":null,"token_ids":[3],"finish_reason":null}]}"#,
            r#"data: {"choices":[{"delta":{"content":"\\"},"token_ids":[4]}]}"#,
            r#"data: {"choices":[{"delta":{},"token_ids":[5],"finish_reason":"stop"}]}"#,
            r#"data: {"choices":[],"usage":{"prompt_tokens":2}}"#,
            "data: [DONE]",
        ];
        let seen = [
            r#"data: {"prompt_token_ids":null,"choices":[{"delta":{"role":"assistant"}}]}"#,
            ": a { ping \" [",
            r#"data: {"choices":[{"delta":{"content":"\\"},"token_ids":null}]}"#,
            r#"data: {"choices":[{"delta":{},"token_ids":null,"finish_reason":"stop"}]}"#,
            r#"data: {"choices":[],"usage":{"prompt_tokens":2}}"#,
            "data: [DONE]",
        ];
        for end in ["\n\n", "\r\n\r\n"] {
            let mut told = ToldIds::new(true, true, 10);
            let (stream, seen) = (stream.join(end) + end, seen.join(end) + end);
            let (lines, ids) = read(&mut told, &stream, 11);
            assert_eq!(ids, [[1, 2]]);
            let mut out = Vec::new();
            for line in lines.split_inclusive('\n') {
                out.extend_from_slice(&told.without_empty(Bytes::copy_from_slice(line.as_bytes())));
            }
            assert_eq!(String::from_utf8(out).unwrap(), seen);
        }
    }
}
