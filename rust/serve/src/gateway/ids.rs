//! A prompt's token ids in place of its text, so that an engine need not tokenize again: whether they mean the same
//! in a request, and whether an engine accepts them. That is tested once at each of its starts, and revoked when an
//! answer contradicts. And whether an engine tells the ids of its prompts: it is asked with a request's own body until
//! an answer shows that it does not.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};

use super::api::{Api, Row};
use super::body::{Body, Envelope};
use super::usage::UsageScanner;
use crate::frontend::app::App;
use crate::frontend::engine::{Engine, Field, Pool};
use crate::frontend::forms::{Form, Forms};
use crate::frontend::parity::{Tokenized, tokenize};
use crate::metrics::CauseLabel;

/// Fields that change what the engine does with its prompt's text, or that need the text. A request with one of them
/// goes as it came.
const BOUND: [&str; 11] = [
    "truncate_prompt_tokens",
    "chat_template",
    "documents",
    "reasoning_effort",
    "suffix",
    "prompt_embeds",
    "truncation_side",
    "return_token_offsets",
    "input_ids",
    "mm_processor_kwargs",
    "media_io_kwargs",
];

/// A request to which the ids of its prompt mean the same as its text, at any engine that takes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Replaceable {
    /// Tokens that it asks for; 0 where it does not say.
    output_tokens: u64,
}

impl Replaceable {
    /// The field in which `engine` gets the `ids` of this request, if any.
    pub fn field(self, engine: &Engine, api: Api, ids: &[u32]) -> Option<Field> {
        // An engine holds a chat's text, but not its ids, to the room that is left beside the answer: where that is not
        // known to suffice, it is to say so itself.
        let needed = (ids.len() as u64).saturating_add(self.output_tokens.max(1));
        let fits = || engine.notes.lock().max_model_len.is_some_and(|room| needed <= room);
        let is_sent = !ids.is_empty() && (api == Api::Completions || fits());
        engine.ids.lock().next(api).filter(|_| is_sent)
    }
}

/// Whether, and for what, the ids of a prompt mean the same as its text.
pub(super) fn replaceable(body: &Body, envelope: &Envelope<'_>) -> Option<Replaceable> {
    let given = |name| body.text_of(name).filter(|json| *json != "null");
    let output = given("max_completion_tokens").or_else(|| given("max_tokens"));
    let output_tokens = output.map_or(Some(0), |json| json.parse().ok())?;
    let is_plain_chat = envelope.messages.is_none()
        || (envelope.add_generation_prompt != Some(false)
            && envelope.continue_final_message != Some(true)
            && envelope.add_special_tokens.is_none()
            && envelope.tool_choice.is_none_or(|raw| raw.get() != "\"none\""));
    let is_off = |name| given(name).is_none_or(|json| json == "false" || json == "\"\"");
    let is_plain = envelope.reuses_prefix() && is_plain_chat && BOUND.into_iter().all(is_off);
    is_plain.then_some(Replaceable { output_tokens })
}

/// Whether the engines of `pool` are known to make the same tokens of such a prompt as the tokenizer here.
pub(super) fn are_proven(app: &App, envelope: &Envelope<'_>, pool: &Pool) -> bool {
    let proven = app.parity.standing(&pool.name).proven;
    let least = if envelope.messages.is_some() { Form::Chat } else { Form::Text };
    if !proven.has(least) {
        return false;
    }
    let unproven = proven.others();
    let is_adapter = envelope.model.as_deref().is_some_and(|name| name != pool.name);
    Forms::of(envelope, is_adapter, unproven).is_empty()
}

/// The request with `ids` in `field`; everything else stands as it came.
pub(super) fn body_with(body: &Body, field: Field, ids: &[u32]) -> Bytes {
    // A token is up to six digits and a comma, mostly.
    let mut json = Vec::with_capacity(7 * ids.len() + 32);
    if field == Field::KvTransferParams {
        json.extend_from_slice(b"{\"prompt_token_ids\":");
    }
    serde_json::to_writer(&mut json, ids).expect("numbers are JSON, and memory takes them");
    match field {
        Field::Prompt => body.with_json("prompt", &json),
        Field::InputIds => body.with_json("input_ids", &json),
        Field::KvTransferParams => {
            json.push(b'}');
            body.with_json("kv_transfer_params", &json)
        }
    }
}

/// Longest wait for a test's response: the engine may be busy, and nothing depends on it.
const TIMEOUT: Duration = Duration::from_secs(60);
/// A response with one token has a few hundred bytes.
const MAX_ANSWER_BYTES: usize = 1024 * 1024;
/// The text of a test: it has more tokens than the ids sent with it.
const QUESTION: &str = "One two three four five six seven eight nine ten eleven twelve.";
/// Number of ids sent for a text prompt, for a chat in vLLM's field, and for a chat in SGLang's.
const IDS: [usize; 3] = [3, 4, 5];

impl Engine {
    /// Which of its starts the engine runs since. One that does not tell when it started has started anew, perhaps,
    /// where it was away.
    pub fn start(&self) -> u64 {
        let started_s = self.notes.lock().started_s;
        started_s.map_or_else(|| self.failures.load(Ordering::Relaxed), f64::to_bits)
    }

    /// Whether it may be asked for ids.
    pub fn may_teach(&self) -> bool {
        let start = self.start();
        self.ids.lock().asked_in_vain != Some(start)
    }

    /// An answer shows that it does not tell ids: it is not asked again until it restarts.
    pub fn teaches_no_more(&self, app: &App, cause: &'static str, why: &str) {
        let start = self.start();
        let mut ids = self.ids.lock();
        ids.has_told = false;
        if ids.asked_in_vain.replace(start) == Some(start) {
            return;
        }
        drop(ids);
        app.metrics.taught_given_up.get_or_create(&CauseLabel { cause }).inc();
        tracing::info!(
            worker = self.id,
            url = self.base,
            why,
            "the engine is not asked for its prompts' token ids until it restarts: chats that are not tokenized are \
             balanced by load; to match them, set --tokenizer to the model's folder"
        );
    }

    /// Whether it tells ids; `None` where it was not asked.
    pub fn tells_ids(&self) -> Option<bool> {
        let has_told = self.ids.lock().has_told;
        (has_told || !self.may_teach()).then_some(has_told)
    }

    /// An answer contradicts the test: it gets no more ids until it restarts.
    pub fn gets_no_ids(&self, app: &App, api: Api, cause: &'static str, why: &str) {
        let path = Row::of_fields(api == Api::Chat).path;
        {
            let mut ids = self.ids.lock();
            if ids.field_mut(api).and_then(Option::take).is_none() {
                return;
            }
            ids.why = Some(format!(
                "POST {path}: {why}; the engine tokenizes prompts itself until it restarts"
            ));
        }
        app.metrics.ids_given_up.get_or_create(&CauseLabel { cause }).inc();
        tracing::warn!(
            worker = self.id,
            url = self.base,
            path,
            why,
            "token ids are no longer sent to the worker"
        );
    }
}

/// Tests whether `engine` accepts ids, once per start: one request per API, with a few tokens and
/// one to generate. Nothing waits for the responses.
pub(crate) fn ask_once(app: &Arc<App>, engine: &Arc<Engine>) {
    let found = app.tokenized(engine).filter(|_| app.options.send_token_ids);
    let Some((pool, text)) = found else { return };
    let start = engine.start();
    {
        let mut ids = engine.ids.lock();
        if ids.tested.replace(start) == Some(start) {
            return;
        }
        (ids.why, ids.completions, ids.chats) = (None, None, None);
    }
    let id =
        text.model.completion_tokens(QUESTION, false).ok().and_then(|ids| ids.first().copied());
    let Some(id) = id else { return };
    let (app, engine, name) = (Arc::clone(app), Arc::clone(engine), pool.name.clone());
    tokio::spawn(async move {
        tokio::select! {
            () = ask(&app, &engine, &name, id, start) => {}
            () = app.options.http.shutdown().wait() => {}
        }
    });
}

async fn ask(app: &App, engine: &Engine, model: &str, id: u32, start: u64) {
    // A test that was overtaken by one of a later start has nothing to say.
    let learn = |api, field| {
        let mut ids = engine.ids.lock();
        if ids.tested == Some(start)
            && let Some(known) = ids.field_mut(api)
        {
            *known = field;
        }
    };
    let [of_prompt, of_params, of_input] = IDS.map(|count| vec![id; count]);
    let body = json!({ "model": model, "prompt": of_prompt, "max_tokens": 1 });
    let counted = prompt_tokens(app, engine, Api::Completions, &body).await;
    let completions = (counted == Some(of_prompt.len())).then_some(Field::Prompt);
    learn(Api::Completions, completions);
    let body = json!({
        "model": model,
        "messages": [{ "role": "user", "content": QUESTION }],
        "max_tokens": 1,
        "kv_transfer_params": { "prompt_token_ids": of_params },
        "input_ids": of_input,
    });
    let counted = prompt_tokens(app, engine, Api::Chat, &body).await;
    let chats = match counted {
        Some(count) if count == of_params.len() => Some(Field::KvTransferParams),
        Some(count) if count == of_input.len() => {
            has_template(app, engine, model).await.then_some(Field::InputIds)
        }
        _ => None,
    };
    learn(Api::Chat, chats);
    let name = |field: Option<Field>| field.map_or("none", Field::name);
    tracing::info!(
        worker = engine.id,
        completions = name(completions),
        chats = name(chats),
        "fields in which the engine takes token ids"
    );
}

/// Whether an engine with SGLang's field renders chats by the model's template. With a built-in
/// conversation format it would stop at strings that it omits when it receives ids.
async fn has_template(app: &App, engine: &Engine, model: &str) -> bool {
    let messages = json!([{ "role": "user", "content": QUESTION }]);
    let body = json!({ "model": model, "messages": messages, "add_generation_prompt": true });
    matches!(tokenize(app, engine, &body).await, Tokenized::Tokens(_))
}

/// The engine's token count of a test's prompt; `None` if it refused, or reported none.
async fn prompt_tokens(app: &App, engine: &Engine, api: Api, body: &Value) -> Option<usize> {
    let row = Row::of_fields(api == Api::Chat);
    let body = body.to_string().into_bytes();
    let call = app.upstream.post_json(&engine.spec, row.path, body, MAX_ANSWER_BYTES, TIMEOUT);
    let (status, answer) = call.await.ok()?;
    let mut scanner = UsageScanner::of(row);
    scanner.feed(&answer);
    scanner.usage().input_tokens.filter(|_| status.is_success()).map(|tokens| tokens as usize)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
