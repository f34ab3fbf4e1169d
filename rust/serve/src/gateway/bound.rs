//! Refuses prompts that are too long before any work is done on them.

use kvflash_core::error::{Error, Result};

use super::api::Api;
use super::call::Call;
use crate::frontend::app::App;
use crate::frontend::pool::Pool;

/// Bodies up to this size are below every model's limit.
const SHORT_BYTES: usize = 32 * 1024;
/// Bytes of text per token of a model's limit: four times as many as English text has.
const BYTES_PER_TOKEN: u64 = 16;
/// The limit while no worker has reported its context length.
const UNKNOWN_BYTES: usize = 4 * 1024 * 1024;

/// The longest prompt for `pool` in bytes, and the reason.
fn limit(app: &App, pool: &Pool) -> (usize, String) {
    let given = app.options.max_prompt_bytes;
    if given > 0 {
        return (given, "--max-prompt-bytes".to_owned());
    }
    let members = pool.members();
    let tokens = members.all().filter_map(|engine| engine.notes.lock().max_model_len).min();
    match tokens {
        None => (
            UNKNOWN_BYTES,
            "the default while no worker reports max_model_len; --max-prompt-bytes".to_owned(),
        ),
        Some(tokens) => {
            let bytes = tokens.saturating_mul(BYTES_PER_TOKEN).max(SHORT_BYTES as u64);
            let why = format!("max_model_len is {tokens}; --max-prompt-bytes");
            (usize::try_from(bytes).unwrap_or(usize::MAX), why)
        }
    }
}

/// The longest text to which this request's prompt may be rendered, in bytes.
///
/// # Errors
/// `InvalidArgument` for a prompt that is already too long, with its length and the limit.
///
/// # Cost
/// None: the weights were computed when the fields were located.
pub(super) fn check(app: &App, call: &Call, pool: &Pool) -> Result<usize> {
    if call.body.bytes().len() <= SHORT_BYTES {
        return Ok(UNKNOWN_BYTES);
    }
    let (limit, why) = limit(app, pool);
    let (what, fields) = prompt_fields(call.api());
    let bytes = call.body.weight(fields);
    if bytes > limit {
        return Err(Error::invalid(format!(
            "{what} more than {limit} bytes of text, the limit ({why}); a number or token id \
             counts 8"
        )));
    }
    Ok(limit)
}

/// The fields of a prompt, and their name in errors.
fn prompt_fields(api: Api) -> (&'static str, &'static [&'static str]) {
    match api {
        Api::Chat => (
            "messages: messages, tools and template arguments have",
            &["messages", "tools", "documents", "chat_template_kwargs", "tool_choice"],
        ),
        Api::Completions => ("prompt: it has", &["prompt"]),
        Api::Tokens => ("token_ids: they have", &["token_ids"]),
        Api::Generate => ("text: text and input_ids have", &["text", "input_ids"]),
        Api::Responses => {
            ("input: instructions, input and tools have", &["instructions", "input", "tools"])
        }
        Api::Messages => {
            ("messages: system, messages and tools have", &["system", "messages", "tools"])
        }
        Api::Unmatched => ("the body: it has", &[]),
    }
}
