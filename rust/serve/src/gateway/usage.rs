//! Extracts the engine's token counts from a passing answer, without parsing it.

use std::sync::LazyLock;

use kvflash_core::select::Usage;
use memchr::memmem::Finder;

use super::api::{Api, Form, Row, Weight};

/// Scans an answer's bytes for its API's names of these counts, such as `"cached_tokens":N`; the
/// last ones count. Also counts the events of a stream.
///
/// Inside generated text quotes are escaped, so a model that writes these words has no effect.
#[derive(Debug, Default)]
pub(crate) struct UsageScanner {
    /// None if the answer reports no usage of its own: no model ran for it.
    names: Option<&'static Names>,
    /// Finds the counts of an answer that also repeats its request.
    objects: Option<UsageObjects>,
    /// End of the previous chunk, to find a name or number that was split.
    carry: Vec<u8>,
    /// Of the whole prompt, or without the cached part if that is counted separately.
    prompt_tokens: Option<u64>,
    pub cached_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    /// Written into the cache and not counted elsewhere.
    created_tokens: Option<u64>,
    /// Events that contain an object, most of which are a token each. An event that is split within
    /// its first bytes is missed.
    pub events: u64,
    /// One of them is the engine's own error.
    pub has_error: bool,
    is_final: bool,
    is_over: bool,
}

/// Longer than any name, separator and number that may be split.
const CARRY: usize = 48;

/// An API's names of its counts.
#[derive(Debug)]
struct Names {
    prompt: &'static [u8],
    cached: &'static [u8],
    completion: &'static [u8],
    /// Set if these and cached tokens are not included in the prompt's.
    created: Option<&'static [u8]>,
    /// Whether bytes show that the counts are final, where earlier events of a stream have some.
    are_final: Option<fn(&[u8]) -> bool>,
    /// What only the last event of a stream has.
    end: &'static LazyLock<Finder<'static>>,
}

/// `usage` of chats and completions.
const OPENAI: Names = Names {
    prompt: b"\"prompt_tokens\"",
    cached: b"\"cached_tokens\"",
    completion: b"\"completion_tokens\"",
    created: None,
    are_final: None,
    end: &DONE,
};
/// `meta_info` of SGLang's `/generate`, in each event.
static GENERATE: Names = Names { are_final: Some(is_finished), ..OPENAI };
static RESPONSES: Names =
    Names { prompt: b"\"input_tokens\"", completion: b"\"output_tokens\"", ..OPENAI };
static ANTHROPIC: Names = Names {
    prompt: b"\"input_tokens\"",
    cached: b"\"cache_read_input_tokens\"",
    completion: b"\"output_tokens\"",
    created: Some(b"\"cache_creation_input_tokens\""),
    // The first event of a stream already has some, which are not final.
    are_final: Some(|_| false),
    end: &STOP,
};
/// The last event of Anthropic's streams.
static STOP: LazyLock<Finder<'_>> = LazyLock::new(|| Finder::new(b"\"message_stop\""));
/// Why `/generate` ended; null before.
static FINISH: LazyLock<Finder<'_>> = LazyLock::new(|| Finder::new(b"\"finish_reason\""));
/// The last event of other streams. Inside generated text the line break would be escaped.
static DONE: LazyLock<Finder<'_>> = LazyLock::new(|| Finder::new(b"\ndata: [DONE]"));
/// How the names of all counts end.
static COUNT: LazyLock<Finder<'_>> = LazyLock::new(|| Finder::new(b"_tokens\""));

/// How an event's data begins.
static EVENT: LazyLock<Finder<'_>> = LazyLock::new(|| Finder::new(b"data:"));

impl UsageScanner {
    /// For answers to this row's requests.
    pub fn of(row: &Row) -> Self {
        let names = (row.weight != Weight::Nothing).then_some(match (row.api, row.form) {
            (Api::Generate, _) => &GENERATE,
            (_, Form::OpenAi) => &OPENAI,
            (_, Form::Responses) => &RESPONSES,
            (_, Form::Anthropic) => &ANTHROPIC,
        });
        let repeats_request = row.form == Form::Responses;
        Self { names, objects: repeats_request.then(UsageObjects::default), ..Self::default() }
    }

    pub fn feed(&mut self, chunk: &[u8]) {
        if self.names.is_none() {
            return;
        }
        let data = EVENT.find_iter(chunk).map(|at| &chunk[at + EVENT.needle().len()..]);
        for object in data.filter_map(object) {
            self.events += 1;
            self.has_error |= ERRORS.iter().any(|begin| object.starts_with(begin));
        }
        if let Some(objects) = &mut self.objects {
            for object in objects.feed(chunk) {
                self.count(&object);
            }
        }
        if self.carry.is_empty() {
            self.scan(chunk);
        } else {
            // Only the seam is scanned twice.
            let mut seam = std::mem::take(&mut self.carry);
            seam.extend_from_slice(&chunk[..chunk.len().min(CARRY)]);
            self.scan(&seam);
            self.scan(chunk);
            if chunk.len() < CARRY {
                let from = seam.len().saturating_sub(CARRY);
                self.carry = seam.split_off(from);
                return;
            }
            self.carry = seam;
        }
        self.carry.clear();
        self.carry.extend_from_slice(&chunk[chunk.len().saturating_sub(CARRY)..]);
    }

    fn scan(&mut self, bytes: &[u8]) {
        let Some(Names { are_final, end, .. }) = self.names else { return };
        self.is_final |= are_final.is_some_and(|are_final| are_final(bytes));
        self.is_over |= end.find(bytes).is_some();
        if self.objects.is_none() {
            self.count(bytes);
        }
    }

    fn count(&mut self, bytes: &[u8]) {
        let Some(Names { prompt, cached, completion, created, .. }) = self.names else { return };
        // Nearly every chunk has no usage at all.
        for at in COUNT.find_iter(bytes) {
            let (before, after) = bytes.split_at(at + COUNT.needle().len());
            for (name, count) in [
                (Some(*prompt), &mut self.prompt_tokens),
                (Some(*cached), &mut self.cached_tokens),
                (Some(*completion), &mut self.completion_tokens),
                (*created, &mut self.created_tokens),
            ] {
                if name.is_some_and(|name| before.ends_with(name)) {
                    *count = number(after).or(*count);
                }
            }
        }
    }

    /// Whether the engine has sent its last event or reported its complete usage, so that only the end of a stream is
    /// missing: many clients leave at the last event.
    pub fn is_told(&self) -> bool {
        let is_only_final = self.names.is_some_and(|names| names.are_final.is_none());
        self.is_over || (self.cached_tokens.is_some() && (is_only_final || self.is_final))
    }

    /// The engine's counts, with our count of generated tokens if it reported none.
    pub fn usage(&self) -> Usage {
        Usage {
            input_tokens: self.prompt_tokens.map(|tokens| {
                match self.names.and_then(|one| one.created) {
                    None => tokens,
                    Some(_) => {
                        let beside = [self.cached_tokens, self.created_tokens];
                        beside.into_iter().flatten().fold(tokens, u64::saturating_add)
                    }
                }
            }),
            cached_tokens: self.cached_tokens,
            output_tokens: self.completion_tokens.or(self.names.map(|_| self.events)),
        }
    }
}

/// Finds the object `usage` of an answer to `/v1/responses`, or of the response in each event. The answer also repeats
/// tools, metadata and the like of its request, where a client may choose the same names.
#[derive(Debug, Default)]
struct UsageObjects {
    /// Depth of the fields of the response: 1, in events 2; 0 before the first byte.
    level: u32,
    depth: u32,
    is_in_string: bool,
    is_escaped: bool,
    /// The last string, or its beginning.
    name: Vec<u8>,
    /// The last name was `usage`, and its value follows.
    is_named: bool,
    /// The object so far; empty outside.
    object: Vec<u8>,
}

/// Size limit of such an object, and of a name, in bytes.
const MAX_OBJECT_BYTES: usize = 4_096;
const MAX_FIELD_BYTES: usize = 16;

impl UsageObjects {
    /// The objects that end in this part of an answer.
    fn feed(&mut self, chunk: &[u8]) -> Vec<Vec<u8>> {
        let mut ended = Vec::new();
        for &byte in chunk {
            if self.level == 0 && !byte.is_ascii_whitespace() {
                self.level = if byte == b'{' { 1 } else { 2 };
            }
            if !self.object.is_empty() && self.object.len() < MAX_OBJECT_BYTES {
                self.object.push(byte);
            }
            if self.is_in_string {
                let is_end = byte == b'"' && !self.is_escaped;
                self.is_escaped = byte == b'\\' && !self.is_escaped;
                self.is_in_string = !is_end;
                if !is_end && self.name.len() < MAX_FIELD_BYTES {
                    self.name.push(byte);
                }
                continue;
            }
            let is_named = std::mem::take(&mut self.is_named);
            match byte {
                b'"' => {
                    self.is_in_string = true;
                    self.name.clear();
                }
                b':' => self.is_named = self.depth == self.level && self.name == b"usage",
                b'{' | b'[' => {
                    if is_named && byte == b'{' {
                        self.object.push(byte);
                    }
                    self.depth += 1;
                }
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == self.level && !self.object.is_empty() {
                        ended.push(std::mem::take(&mut self.object));
                    }
                }
                _ => self.is_named = is_named && byte.is_ascii_whitespace(),
            }
        }
        ended
    }
}

/// How a stream of Responses names an event, and the events that come before the prefill.
///
/// # Source
/// `responses_stream_generator` of vLLM 0.32 and of SGLang, which sends these before it waits for the first token.
static RESPONSE_EVENT: LazyLock<Finder<'_>> = LazyLock::new(|| Finder::new(b"event: response."));
const OPENING: [&[u8]; 3] = [b"created", b"in_progress", b"queued"];

/// Whether bytes of a stream of Responses have events, and whether the model's output has begun with them. The rest of
/// a name that was split is missed.
pub(super) fn events_of_response(bytes: &[u8]) -> (bool, bool) {
    let is_line = |at: &usize| *at == 0 || matches!(bytes[at - 1], b'\n' | b'\r');
    let names = RESPONSE_EVENT.find_iter(bytes).filter(is_line).filter_map(|at| {
        let rest = &bytes[at + RESPONSE_EVENT.needle().len()..];
        Some(&rest[..memchr::memchr2(b'\n', b'\r', rest)?])
    });
    names.fold((false, false), |(_, has_output), name| {
        (true, has_output || !OPENING.contains(&name))
    })
}

/// How the data of an engine's error begins: of OpenAI's APIs, of the others.
const ERRORS: [&[u8]; 3] = [b"{\"error\"", b"{\"type\":\"error\"", b"{\"type\": \"error\""];

/// An event's data, if it is an object. The space before it is optional. Inside generated text the quote would be
/// escaped.
fn object(data: &[u8]) -> Option<&[u8]> {
    let data = data.strip_prefix(b" ").unwrap_or(data);
    data.starts_with(b"{\"").then_some(data)
}

/// Whether an answer of `/generate` has a reason why it ended.
fn is_finished(bytes: &[u8]) -> bool {
    let mut reasons = FINISH.find_iter(bytes).map(|at| &bytes[at + FINISH.needle().len()..]);
    reasons.any(|rest| value(rest).is_some_and(|value| value[0] != b'n'))
}

/// What begins with the value after a name and its colon.
fn value(rest: &[u8]) -> Option<&[u8]> {
    let colon = rest.iter().position(|b| *b == b':')?;
    let rest = &rest[colon + 1..];
    let start = rest.iter().position(|b| !b.is_ascii_whitespace())?;
    Some(&rest[start..])
}

/// The complete number after a name and its colon; `None` if it is truncated, null or missing.
fn number(rest: &[u8]) -> Option<u64> {
    let value = value(rest)?;
    let digits = value.iter().position(|b| !b.is_ascii_digit())?;
    std::str::from_utf8(&value[..digits]).ok()?.parse().ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
