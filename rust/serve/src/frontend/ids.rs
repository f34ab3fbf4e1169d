//! Whether an engine accepts a prompt's token ids, so that it need not tokenize again: tested once
//! at each of its starts, and revoked when an answer contradicts. And whether it tells the ids of
//! its prompts: it is asked with a request's own body until an answer shows that it does not.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};

use super::app::App;
use super::engine::Engine;
use super::engine::Field;
use super::parity::{Tokenized, tokenize};
use crate::gateway::api::{Api, Row};
use crate::gateway::usage::UsageScanner;
use crate::metrics::CauseLabel;

/// Longest wait for a test's response: the engine may be busy, and nothing depends on it.
const TIMEOUT: Duration = Duration::from_secs(60);
/// A response with one token has a few hundred bytes.
const MAX_ANSWER_BYTES: usize = 1024 * 1024;
/// The text of a test: it has more tokens than the ids sent with it.
const QUESTION: &str = "One two three four five six seven eight nine ten eleven twelve.";
/// Number of ids sent for a text prompt, for a chat in vLLM's field, and for a chat in SGLang's.
const IDS: [usize; 3] = [3, 4, 5];

impl Engine {
    /// An answer contradicts the test: it gets no more ids until it restarts.
    pub fn gets_no_ids(&self, app: &App, api: Api, cause: &'static str, why: &str) {
        if self.ids.cell(api).is_none_or(|cell| cell.swap(0, Ordering::Relaxed) == 0) {
            return;
        }
        app.metrics.ids_given_up.get_or_create(&CauseLabel { cause }).inc();
        let path = Row::of_fields(api == Api::Chat).path;
        tracing::warn!(
            worker = self.id,
            url = self.base,
            path,
            why,
            "token ids are no longer sent to the worker"
        );
        self.ids.notes.lock().why = Some(format!(
            "POST {path}: {why}; the engine tokenizes prompts itself until it restarts"
        ));
    }
}

/// Tests whether `engine` accepts ids, once per start: one request per API, with a few tokens and
/// one to generate. Nothing waits for the responses.
pub(super) fn ask_once(app: &Arc<App>, engine: &Arc<Engine>) {
    if !app.options.send_token_ids
        || engine.member.is_some()
        || engine.spec.is_prefill
        || !engine.is_healthy()
    {
        return;
    }
    let pool = app.fleet.pool_of(engine.id);
    let Some(pool) = pool.filter(|pool| pool.selector.needs_tokens()) else { return };
    let Some(text) = app.text_of(&pool) else { return };
    let start = engine.start();
    {
        let mut notes = engine.ids.notes.lock();
        if notes.asked.replace(start) == Some(start) {
            return;
        }
        notes.why = None;
    }
    engine.ids.learn(Api::Completions, None);
    engine.ids.learn(Api::Chat, None);
    let id =
        text.model.completion_tokens(QUESTION, false).ok().and_then(|ids| ids.first().copied());
    let Some(id) = id else { return };
    let (app, engine, name) = (Arc::clone(app), Arc::clone(engine), pool.name.clone());
    tokio::spawn(async move {
        tokio::select! {
            () = ask(&app, &engine, &name, id) => {}
            () = app.shutdown.wait() => {}
        }
    });
}

async fn ask(app: &App, engine: &Engine, model: &str, id: u32) {
    let [of_prompt, of_params, of_input] = IDS.map(|count| vec![id; count]);
    let body = json!({ "model": model, "prompt": of_prompt, "max_tokens": 1 });
    if prompt_tokens(app, engine, Api::Completions, &body).await == Some(of_prompt.len()) {
        engine.ids.learn(Api::Completions, Some(Field::Prompt));
    }
    let body = json!({
        "model": model,
        "messages": [{ "role": "user", "content": QUESTION }],
        "max_tokens": 1,
        "kv_transfer_params": { "prompt_token_ids": of_params },
        "input_ids": of_input,
    });
    let counted = prompt_tokens(app, engine, Api::Chat, &body).await;
    let field = match counted {
        Some(count) if count == of_params.len() => Some(Field::KvTransferParams),
        Some(count) if count == of_input.len() => {
            has_template(app, engine, model).await.then_some(Field::InputIds)
        }
        _ => None,
    };
    engine.ids.learn(Api::Chat, field);
    let name = |api| engine.ids.field(api).map_or("none", Field::name);
    tracing::info!(
        worker = engine.id,
        completions = name(Api::Completions),
        chats = name(Api::Chat),
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
    let url = format!("{}{}", engine.base, row.path);
    let call =
        app.upstream.post_json(&engine.spec, &url, body.to_string().into_bytes(), MAX_ANSWER_BYTES);
    let (status, answer) = tokio::time::timeout(TIMEOUT, call).await.ok()?.ok()?;
    let mut scanner = UsageScanner::of(row);
    scanner.feed(&answer);
    scanner.usage().input_tokens.filter(|_| status.is_success()).map(|tokens| tokens as usize)
}

impl Engine {
    /// Which of its starts the engine runs since. One that does not tell when it started has started anew, perhaps,
    /// where it was away.
    pub fn start(&self) -> u64 {
        let started_s = self.notes.lock().started_s;
        started_s.map_or_else(|| self.failures.load(Ordering::Relaxed), f64::to_bits)
    }

    /// Whether it may be asked for ids.
    pub fn may_teach(&self) -> bool {
        self.teaches.refused.lock().is_none_or(|start| start != self.start())
    }

    /// It told ids.
    pub fn has_taught(&self) {
        self.teaches.has_told.store(true, Ordering::Relaxed);
    }

    /// An answer shows that it does not tell ids: it is not asked again until it restarts.
    pub fn teaches_no_more(&self, app: &App, cause: &'static str, why: &str) {
        self.teaches.has_told.store(false, Ordering::Relaxed);
        let start = self.start();
        if self.teaches.refused.lock().replace(start) == Some(start) {
            return;
        }
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
        match self.teaches.has_told.load(Ordering::Relaxed) {
            true => Some(true),
            false => (!self.may_teach()).then_some(false),
        }
    }
}
