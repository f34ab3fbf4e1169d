//! Prompts of APIs other than chat and completions: token ids are used as given, text goes through
//! the tokenizer, and conversations become chats, rendered by the local template or by an engine.
//! If none of these is certain, the request is balanced by load.

use std::sync::Arc;

use kvflash_core::error::Error;
use kvflash_core::text::Tokens;
use serde::Deserialize;
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

/// The fields of these APIs that determine a prompt's tokens.
#[derive(Debug, Default, Deserialize)]
#[serde(expecting = "an object")]
struct Fields<'a> {
    /// Tokens API.
    #[serde(borrow)]
    content_parts: Option<Raw<'a>>,
    /// SGLang's Generate.
    input_ids: Option<Raw<'a>>,
    text: Option<Raw<'a>>,
    input_embeds: Option<Raw<'a>>,
    image_data: Option<Raw<'a>>,
    video_data: Option<Raw<'a>>,
    audio_data: Option<Raw<'a>>,
    lora_path: Option<Raw<'a>>,
    extra_key: Option<Raw<'a>>,
    /// Messages.
    thinking: Option<Raw<'a>>,
}

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
    let fields: Fields<'_> = call.body.read().map_err(refused)?;
    match call.api() {
        Api::Tokens => token_ids(app, call, &fields).await,
        Api::Generate => generate(app, call, envelope, pool, &fields).await,
        Api::Responses => {
            if stored::is_continued(&call.body) {
                // The engine has the preceding conversation.
                return Err(Untokenized::Unknown("stored"));
            }
            conversation(app, call, envelope, pool, Form::Responses).await
        }
        _ => {
            if fields.thinking.is_some_and(|thinking| thinking.get().contains("\"disabled\"")) {
                // Engines find out by trial how their template handles this; their renderer does
                // not.
                return Err(Untokenized::Unknown("not_text"));
            }
            conversation(app, call, envelope, pool, Form::Messages).await
        }
    }
}

/// `token_ids`, and `features` for images and other media among them.
async fn token_ids(app: &App, call: &Call, fields: &Fields<'_>) -> Result<Known, Untokenized> {
    if is_given(fields.content_parts) {
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
    fields: &Fields<'_>,
) -> Result<Known, Untokenized> {
    let unmatched = [
        fields.input_embeds,
        fields.image_data,
        fields.video_data,
        fields.audio_data,
        fields.lora_path,
        fields.extra_key,
    ];
    if unmatched.into_iter().any(is_given) {
        return Err(Untokenized::Unknown("not_text"));
    }
    if let Some(ids) = fields.input_ids.filter(|ids| is_given(Some(*ids))) {
        let is_batch = ids.get()[1..].trim_ascii_start().starts_with('[');
        if is_batch {
            return Err(Untokenized::Unknown("batch"));
        }
        let read = || serde_json::from_str::<Tokens>(ids.get());
        let ids = beside(app, call, read).await?;
        let wrong = |error| Untokenized::Refused(Error::invalid(format!("input_ids: {error}")));
        return ids.map(Known::from).map_err(wrong);
    }
    let Some(text) = fields.text.filter(|text| text.get().starts_with('"')) else {
        let is_batch = fields.text.is_some_and(|text| text.get().starts_with('['));
        return Err(match is_batch {
            true => Untokenized::Unknown("batch"),
            false => Untokenized::Refused(Error::invalid(
                "text: a string, a list of strings, or input_ids is required",
            )),
        });
    };
    let model = envelope.model.clone();
    let as_completion = Envelope { model, prompt: Some(text), ..Envelope::default() };
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
    let is_local = !app.parity.standings.of(&pool.name).remote.has(form);
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

fn is_given(raw: Option<Raw<'_>>) -> bool {
    raw.is_some_and(|raw| raw.get() != "null")
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
