//! Prompts of APIs other than chat and completions: token ids are used as given, text goes through
//! the tokenizer, and conversations become chats, rendered by the local template or by an engine.
//! If none of these is certain, the request is balanced by load.

use std::sync::Arc;

use kvflash_core::error::Error;
use kvflash_core::text::Tokens;
use serde_json::json;

use super::api::{Api, Row};
use super::as_chat;
use super::body::{Envelope, Raw};
use super::call::Call;
use super::stored;
use super::tokens::{Known, Rendered, Untokenized, ask, check_length, tokens};
use crate::Reject;
use crate::compute::Busy;
use crate::frontend::app::App;
use crate::frontend::engine::Pool;
use crate::frontend::forms::Form;

/// Size from which token ids are parsed on other threads than those that serve, in bytes.
const LONG_BYTES: usize = 32 * 1024;

/// Fields of SGLang's Generate beside its text and ids that change what a prompt's blocks are.
const UNMATCHED: [&str; 6] =
    ["input_embeds", "image_data", "video_data", "audio_data", "lora_path", "extra_key"];

/// The prompt of a request that is neither chat nor completion.
pub(super) async fn known(
    app: &App,
    call: &Call,
    envelope: &Envelope<'_>,
    pool: &Pool,
) -> Result<Known, Untokenized> {
    if call.api() == Api::Unmatched || !pool.selector.needs_tokens() && !call.nvext.is_query() {
        return Ok(Known::default());
    }
    check_length(app, call, pool).map_err(Untokenized::Refused)?;
    match call.api() {
        Api::Tokens => token_ids(app, call).await,
        Api::Generate => generate(app, call, envelope, pool).await,
        Api::Responses => {
            if stored::is_continued(&call.body) {
                // The engine has the preceding conversation.
                return Err(Untokenized::Unknown("stored"));
            }
            conversation(app, call, envelope, pool, Form::Responses).await
        }
        _ => {
            if given(call, "thinking")?.is_some_and(|thinking| thinking.contains("\"disabled\"")) {
                // Engines find out by trial how their template handles this; their renderer does
                // not.
                return Err(Untokenized::Unknown("not_text"));
            }
            conversation(app, call, envelope, pool, Form::Messages).await
        }
    }
}

/// `token_ids`, and `features` for images and other media among them.
async fn token_ids(app: &App, call: &Call) -> Result<Known, Untokenized> {
    if given(call, "content_parts")?.is_some() {
        return Err(Untokenized::Unknown("not_text"));
    }
    let answer = beside(app, call, || call.body.read::<Rendered>()).await?;
    answer.map_err(refused)?.known().ok_or(Untokenized::Unknown("not_text"))
}

/// SGLang's `input_ids` or `text`.
async fn generate(
    app: &App,
    call: &Call,
    envelope: &Envelope<'_>,
    pool: &Pool,
) -> Result<Known, Untokenized> {
    for name in UNMATCHED {
        if given(call, name)?.is_some() {
            return Err(Untokenized::Unknown("not_text"));
        }
    }
    if let Some(ids) = given(call, "input_ids")? {
        let is_batch = ids[1..].trim_ascii_start().starts_with('[');
        if is_batch {
            return Err(Untokenized::Unknown("batch"));
        }
        let read = || serde_json::from_str::<Tokens>(ids);
        let ids = beside(app, call, read).await?;
        let wrong = |error| Untokenized::Refused(Error::invalid(format!("input_ids: {error}")));
        return ids.map(Known::from).map_err(wrong);
    }
    let text = given(call, "text")?;
    let Some(text) = text.filter(|text| text.starts_with('"')) else {
        let is_batch = text.is_some_and(|text| text.starts_with('['));
        return Err(match is_batch {
            true => Untokenized::Unknown("batch"),
            false => Untokenized::Refused(Error::invalid(
                "text: a string, a list of strings, or input_ids is required",
            )),
        });
    };
    let model = envelope.model.clone();
    let as_completion = Envelope { model, prompt: Some(Raw::of(text)), ..Envelope::default() };
    tokens(app, call, Api::Completions, &as_completion, pool).await
}

/// A conversation: by the local template unless its tokens are known to differ, or else as an
/// engine renders it.
async fn conversation(
    app: &App,
    call: &Call,
    envelope: &Envelope<'_>,
    pool: &Pool,
    form: Form,
) -> Result<Known, Untokenized> {
    let is_local = !app.parity.standing(&pool.name).remote.has(form);
    if is_local && app.text_of(pool).is_some() {
        let chat = beside(app, call, || as_chat::chat_of(call.api(), &call.body)).await?;
        if let Some(chat) = chat {
            let row = Row::of_fields(true);
            let chat = Call { row, body: Arc::new(chat), ..call.clone() };
            let as_chat = chat.body.read::<Envelope<'_>>().map_err(refused)?;
            match tokens(app, &chat, Api::Chat, &as_chat, pool).await {
                // Ids can replace only the messages of a chat.
                Ok(known) => return Ok(Known { replaceable: None, ..known }),
                // The engine may know more than the local template.
                Err(Untokenized::Unknown("refused" | "template" | "not_text")) => {}
                Err(why) => return Err(why),
            }
        }
    }
    let path = call.api().renderer().ok_or(Untokenized::Unknown("not_text"))?;
    let name = envelope.model.as_deref().unwrap_or(&pool.name);
    let body = call.body.with(&[
        ("stream", Some(json!(false))),
        // Images as tensors are not needed here.
        ("mm_payload", Some(json!("none"))),
    ]);
    let answer = ask(app, pool, name, path, body.into()).await;
    answer.map_err(Untokenized::Unknown)
}

/// The JSON of a field, unless that is null.
fn given<'a>(call: &'a Call, name: &str) -> Result<Option<&'a str>, Untokenized> {
    let json = call.body.text_of_one(name).map_err(refused)?;
    Ok(json.filter(|json| *json != "null"))
}

fn refused(reject: Reject) -> Untokenized {
    Untokenized::Refused(Error::invalid(reject.message))
}

/// Parses token ids; long lists on other threads than those that serve.
async fn beside<T: Send>(
    app: &App,
    call: &Call,
    read: impl FnOnce() -> T + Send,
) -> Result<T, Untokenized> {
    let bytes = call.body.bytes().len();
    if bytes <= LONG_BYTES {
        return Ok(read());
    }
    call.head.compute(app, bytes, read).await.map_err(|Busy| Untokenized::Unknown("tokenizer_busy"))
}
