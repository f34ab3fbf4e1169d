//! The served APIs, one row per path: where a request's prompt is found, its weight without one,
//! and the format of refusals, usage and the end of a stream. Everything else is the same for all
//! of them.

use axum::http::Method;
use axum::response::Response;
use serde_json::json;

use crate::Reject;
use crate::spelling::nearest;

/// Without tokens a prompt's length is estimated from its bytes: English text has about four per
/// token.
const TEXT_BYTES_PER_TOKEN: usize = 4;
/// The same for audio: about 16 KiB per second, of which an encoder makes some tens of tokens.
const SOUND_BYTES_PER_TOKEN: usize = 1_024;
/// Characters of a client's path that refusals and log lines repeat.
pub(crate) const MAX_PATH_CHARS: usize = 200;

/// How the prompt of a request is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Api {
    /// `messages`, by the chat template.
    Chat,
    /// `prompt`: text or token ids.
    Completions,
    /// OpenAI's Responses, converted to a chat like the engine does.
    Responses,
    /// Anthropic's Messages, converted to a chat like the engine does.
    Messages,
    /// vLLM's `/inference/v1/generate`: `token_ids`.
    Tokens,
    /// SGLang's `/generate`: `text` or `input_ids`.
    Generate,
    /// Requests without prefix caching: balanced by load.
    Unmatched,
}

impl Api {
    /// Whether workers of the runtime can serve it: they take tokens or OpenAI's chat and
    /// completions.
    pub fn is_for_runtime(self) -> bool {
        matches!(self, Self::Chat | Self::Completions)
    }

    /// vLLM's endpoint that returns the tokens of such a request, for APIs with conversations of
    /// their own.
    pub fn renderer(self) -> Option<&'static str> {
        match self {
            Self::Responses => Some("/v1/responses/render"),
            Self::Messages => Some("/v1/messages/render"),
            _ => None,
        }
    }

    /// The field that limits the answer's tokens, for APIs with separate prefill.
    pub fn output_limit(self) -> Option<&'static str> {
        match self {
            Self::Chat | Self::Completions | Self::Messages => Some("max_tokens"),
            Self::Responses => Some("max_output_tokens"),
            Self::Tokens | Self::Generate | Self::Unmatched => None,
        }
    }
}

/// Format of the response to a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// OpenAI's chat and completions; also used for other APIs.
    OpenAi,
    /// OpenAI's Responses: errors as above, streams of named events.
    Responses,
    /// Anthropic's Messages.
    Anthropic,
}

impl Form {
    /// Of responses to requests for this path, which may have no row.
    pub fn of(path: &str) -> Self {
        match Row::of(path) {
            Some(row) => row.form,
            None if path.starts_with("/v1/messages/") => Self::Anthropic,
            None => Self::OpenAi,
        }
    }

    /// A refusal in this format.
    pub fn refuse(self, reject: Reject) -> Response {
        match self {
            Self::OpenAi | Self::Responses => reject.openai(),
            Self::Anthropic => reject.anthropic(),
        }
    }

    /// The end of a stream that its worker interrupted after this many events. The blank line ends
    /// an event whose lines were sent without one.
    pub fn broken_stream(self, message: &str, events: u64) -> String {
        let error = json!({ "message": message, "type": "upstream_error", "code": 502 });
        match self {
            Self::OpenAi => format!("\n\ndata: {}\n\ndata: [DONE]\n\n", json!({ "error": error })),
            Self::Responses => {
                // The API's reference has the fields beside `error`; clients look for `error`.
                let event = json!({
                    "type": "error",
                    "sequence_number": events,
                    "code": "upstream_error",
                    "message": message,
                    "param": null,
                    "error": error,
                });
                format!("\n\nevent: error\ndata: {event}\n\n")
            }
            Self::Anthropic => {
                let error = json!({ "type": "api_error", "message": message });
                let event = json!({ "type": "error", "error": error });
                format!("\n\nevent: error\ndata: {event}\n\n")
            }
        }
    }
}

/// Weight of a request with unknown tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Weight {
    Text,
    /// An upload, in parts.
    Sound,
    /// No model is run.
    Nothing,
}

impl Weight {
    /// The estimate for a body of this size.
    pub fn tokens(self, bytes: usize) -> u64 {
        let tokens = match self {
            Self::Text => bytes / TEXT_BYTES_PER_TOKEN,
            Self::Sound => bytes / SOUND_BYTES_PER_TOKEN,
            Self::Nothing => 0,
        };
        tokens as u64
    }
}

/// A served path.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub path: &'static str,
    pub method: Method,
    pub api: Api,
    pub form: Form,
    pub weight: Weight,
}

const fn row(path: &'static str, api: Api, form: Form, weight: Weight) -> Row {
    Row { path, method: Method::POST, api, form, weight }
}

/// A row that is balanced by load.
const fn by_load(path: &'static str, weight: Weight) -> Row {
    row(path, Api::Unmatched, Form::OpenAi, weight)
}

/// A row for a response kept by a worker.
const fn of_response(method: Method, path: &'static str) -> Row {
    let api = Api::Unmatched;
    Row { path, method, api, form: Form::Responses, weight: Weight::Nothing }
}

const CHAT: usize = 0;
const COMPLETIONS: usize = 1;

/// Every path whose request is sent to a worker with its body.
pub(crate) static ROWS: [Row; 20] = [
    row("/v1/chat/completions", Api::Chat, Form::OpenAi, Weight::Text),
    row("/v1/completions", Api::Completions, Form::OpenAi, Weight::Text),
    row("/v1/responses", Api::Responses, Form::Responses, Weight::Text),
    row("/v1/messages", Api::Messages, Form::Anthropic, Weight::Text),
    row("/v1/messages/count_tokens", Api::Unmatched, Form::Anthropic, Weight::Nothing),
    row("/inference/v1/generate", Api::Tokens, Form::OpenAi, Weight::Text),
    row("/generate", Api::Generate, Form::OpenAi, Weight::Text),
    by_load("/v1/embeddings", Weight::Text),
    by_load("/v1/rerank", Weight::Text),
    by_load("/v2/rerank", Weight::Text),
    by_load("/rerank", Weight::Text),
    by_load("/v1/score", Weight::Text),
    by_load("/score", Weight::Text),
    by_load("/classify", Weight::Text),
    by_load("/pooling", Weight::Text),
    by_load("/v1/audio/transcriptions", Weight::Sound),
    by_load("/v1/audio/translations", Weight::Sound),
    by_load("/v1/audio/speech", Weight::Text),
    by_load("/tokenize", Weight::Nothing),
    by_load("/detokenize", Weight::Nothing),
];

/// Every path that names a response: its worker answers, and no body is read.
pub(crate) static RESPONSES: [Row; 3] = [
    of_response(Method::GET, "/v1/responses/{id}"),
    of_response(Method::DELETE, "/v1/responses/{id}"),
    of_response(Method::POST, "/v1/responses/{id}/cancel"),
];

impl Row {
    /// The row of a path.
    pub fn of(path: &str) -> Option<&'static Self> {
        ROWS.iter().find(|row| row.path == path)
    }

    /// The response named by `path`, if this is a row of [`RESPONSES`].
    pub fn response_of<'a>(&self, path: &'a str) -> Option<&'a str> {
        let (head, tail) = self.path.split_once("{id}")?;
        path.strip_prefix(head)?.strip_suffix(tail)
    }

    /// Whether it is one of [`RESPONSES`].
    pub fn names_response(&self) -> bool {
        self.path.contains("{id}")
    }

    /// Whether engines may keep its response for later requests.
    pub fn is_of_responses(&self) -> bool {
        self.api == Api::Responses || self.names_response()
    }

    /// The row of a request without a path: a chat if it has messages.
    pub fn of_fields(has_messages: bool) -> &'static Self {
        if has_messages { &ROWS[CHAT] } else { &ROWS[COMPLETIONS] }
    }

    /// The served path that `path` means: itself, or the one with a `/v1` more or less.
    pub fn meant_by(path: &str) -> Option<String> {
        let bare = path.trim_end_matches('/');
        let inner = bare.trim_start_matches("/v1");
        [bare.to_owned(), inner.to_owned(), format!("/v1{inner}")]
            .into_iter()
            .find(|path| Self::of(path).is_some() || path == "/v1/models")
    }

    /// Why `path`, which has no row, can't be explained.
    pub fn unexplained(path: &str) -> String {
        let meant = Self::meant_by(path).filter(|path| Self::of(path).is_some());
        let hint = match meant.as_deref().or_else(|| near(path)) {
            Some(meant) => format!("did you mean {meant}?"),
            None => format!("it supports {}", ROWS.each_ref().map(|row| row.path).join(", ")),
        };
        format!("/explain does not support {path}; {hint}")
    }

    /// The response for a path that is not served, and its format.
    pub fn missing(path: &str) -> (Form, String) {
        let meant = Self::meant_by(path).or_else(|| near(path).map(str::to_owned));
        let bare = path.trim_end_matches('/');
        let form = Form::of(meant.as_deref().unwrap_or(bare));
        let hint = match meant {
            Some(meant) if path.starts_with("/v1/v1") => {
                format!(
                    "did you mean {meant}? Leave /v1 out of the client's base URL: the client adds it"
                )
            }
            Some(meant) if meant.strip_prefix("/v1") == Some(bare) => {
                format!("did you mean {meant}? End the client's base URL with /v1")
            }
            Some(meant) => format!("did you mean {meant}?"),
            None => {
                let mut paths: Vec<_> = ROWS.iter().chain(&RESPONSES).map(|row| row.path).collect();
                paths.dedup();
                format!("the APIs served are {}, /v1/models", paths.join(", "))
            }
        };
        let shown: String = path.chars().take(MAX_PATH_CHARS).collect();
        (form, format!("no such path: {shown}; {hint}"))
    }
}

/// The served path that differs from `path` by at most two letters.
///
/// # Cost
/// Nothing for a path longer than all served ones.
fn near(path: &str) -> Option<&'static str> {
    nearest(path.trim_end_matches('/'), ROWS.iter().map(|row| row.path))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_found_by_path_and_by_fields() {
        for (at, row) in ROWS.iter().enumerate() {
            assert!(
                std::ptr::eq(Row::of(row.path).unwrap(), &ROWS[at]),
                "{} appears twice",
                row.path
            );
        }
        assert_eq!(Row::of_fields(true).api, Api::Chat);
        assert_eq!(Row::of_fields(false).api, Api::Completions);
    }

    #[test]
    fn a_path_that_is_missing_names_the_one_that_was_meant() {
        for (path, wanted) in [
            (
                "/v1/v1/chat/completions",
                "did you mean /v1/chat/completions? Leave /v1 out of the client's base URL",
            ),
            (
                "/chat/completions",
                "did you mean /v1/chat/completions? End the client's base URL with /v1",
            ),
            ("/models", "did you mean /v1/models? End"),
            ("/v1/rerank/", "did you mean /v1/rerank?"),
            ("/v1/generate", "did you mean /generate?"),
            ("/v1/embedding", "did you mean /v1/embeddings?"),
            ("/v1/chat/completion/", "did you mean /v1/chat/completions?"),
            ("/v2/rerrank", "did you mean /v2/rerank?"),
            ("/v1/images", "the APIs served are /v1/chat/completions, /v1/completions, "),
        ] {
            let (form, message) = Row::missing(path);
            assert!(message.contains(wanted), "{path}: {message}");
            assert_eq!(form, Form::OpenAi, "{path}");
        }
        // This base URL ends with a slash, and the client adds /v1.
        let (_, message) = Row::missing("//v1/chat/completions");
        assert!(message.ends_with("did you mean /v1/chat/completions?"), "{message}");
        for (path, wanted) in [
            ("/v1/models", "; it supports /v1/chat/completions, /v1/completions, "),
            ("/v1/responses/resp_1", "; it supports "),
            ("/completions", "; did you mean /v1/completions?"),
            ("/v1/embedding", "; did you mean /v1/embeddings?"),
        ] {
            let message = Row::unexplained(path);
            let wanted = format!("/explain does not support {path}{wanted}");
            assert!(message.starts_with(&wanted), "{message}");
            assert!(!message.contains("{id}"), "{message}");
        }
        for path in ["/v1/v1/messages", "/v1/messages/batches", "/v1/message"] {
            assert_eq!(Row::missing(path).0, Form::Anthropic, "{path}");
        }
    }

    #[test]
    fn a_broken_stream_ends_as_its_api_does() {
        let [openai, responses, anthropic] = [Form::OpenAi, Form::Responses, Form::Anthropic]
            .map(|form| form.broken_stream("gone", 7));
        assert!(openai.contains(r#"data: {"error":{"#) && openai.ends_with("data: [DONE]\n\n"));
        assert!(
            responses.starts_with("\n\nevent: error\ndata: {")
                && responses.contains(r#""sequence_number":7"#)
        );
        let data = anthropic.strip_prefix("\n\nevent: error\ndata: ").unwrap();
        assert_eq!(
            serde_json::from_str::<serde_json::Value>(data).unwrap(),
            json!({"type": "error", "error": {"type": "api_error", "message": "gone"}})
        );
    }
}
