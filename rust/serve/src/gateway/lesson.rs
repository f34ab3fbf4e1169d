//! A chat that is not made into tokens: what it may begin with as an engine told before, and what is learned from its
//! answer.

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use xxhash_rust::xxh3::Xxh3;

use super::body::message_bytes;
use super::call::Call;
use super::body::Envelope;
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

    /// The request's body with the question for its ids.
    pub fn question(call: &Call) -> Bytes {
        call.body.with_json(FIELD, b"true")
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
