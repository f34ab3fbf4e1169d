//! What is known of an engine: whether it accepts a prompt's token ids, and tells those that it made.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::gateway::api::Api;

/// One of this many requests with possible ids is sent without them: only then the engine's count
/// of its prompt's tokens shows whether the ids are still correct.
const REQUESTS_PER_CHECK: u32 = 64;

/// The field of a request with its prompt's ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Field {
    /// A completion's own field.
    Prompt,
    /// `kv_transfer_params.prompt_token_ids` of a chat.
    ///
    /// # Source
    /// vLLM 0.32 `_reused_prompt_token_ids`: needs no KV connector; tool choice and stops still
    /// come from the messages.
    KvTransferParams,
    /// `input_ids` of a chat.
    ///
    /// # Source
    /// SGLang 0.5.23 `OpenAIServingChat._process_messages`.
    InputIds,
}

impl Field {
    pub fn name(self) -> &'static str {
        match self {
            Self::Prompt => "prompt",
            Self::KvTransferParams => "kv_transfer_params.prompt_token_ids",
            Self::InputIds => "input_ids",
        }
    }

    fn of(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Prompt),
            2 => Some(Self::KvTransferParams),
            3 => Some(Self::InputIds),
            _ => None,
        }
    }

    fn code(field: Option<Self>) -> u8 {
        match field {
            None => 0,
            Some(Self::Prompt) => 1,
            Some(Self::KvTransferParams) => 2,
            Some(Self::InputIds) => 3,
        }
    }
}

/// Whether an engine accepts token ids, and in which field.
#[derive(Debug, Default)]
pub(crate) struct TakesIds {
    // Relaxed throughout: with an outdated value a request uses the other way, which works as well.
    completions: AtomicU8,
    chats: AtomicU8,
    sent: AtomicU32,
    pub(super) notes: Mutex<Notes>,
}

#[derive(Debug, Default)]
pub(super) struct Notes {
    /// The start of the engine at which it was tested.
    pub asked: Option<u64>,
    /// Why it gets no ids, as text.
    pub why: Option<String>,
}

impl TakesIds {
    /// `None` for APIs whose prompts are sent unchanged.
    pub(super) fn cell(&self, api: Api) -> Option<&AtomicU8> {
        match api {
            Api::Chat => Some(&self.chats),
            Api::Completions => Some(&self.completions),
            _ => None,
        }
    }

    /// The field for ids; `None` if there is none.
    pub fn field(&self, api: Api) -> Option<Field> {
        Field::of(self.cell(api)?.load(Ordering::Relaxed))
    }

    /// As [`field`](Self::field), for the next request: also `None` for the few requests that
    /// reveal the engine's own count.
    pub fn next(&self, api: Api) -> Option<Field> {
        let field = self.field(api)?;
        let sent = self.sent.fetch_add(1, Ordering::Relaxed);
        (!(sent + 1).is_multiple_of(REQUESTS_PER_CHECK)).then_some(field)
    }

    pub(super) fn learn(&self, api: Api, field: Option<Field>) {
        if let Some(cell) = self.cell(api) {
            cell.store(Field::code(field), Ordering::Relaxed);
        }
    }

    /// The state in `GET /workers`.
    pub fn view(&self) -> Value {
        let name = |api| self.field(api).map(Field::name);
        let notes = self.notes.lock();
        json!({
            "asked": notes.asked.is_some(),
            "chat": name(Api::Chat),
            "completions": name(Api::Completions),
            "why_not": notes.why,
        })
    }

    /// Why it gets no more ids, if an answer contradicted.
    pub fn trouble(&self) -> Option<String> {
        self.notes.lock().why.clone()
    }
}

/// Whether an engine tells the ids of its prompts.
#[derive(Debug, Default)]
pub(crate) struct Teaches {
    // Relaxed: for people.
    pub has_told: AtomicBool,
    /// The start of the engine since which it is not asked.
    pub refused: Mutex<Option<u64>>,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn one_request_in_so_many_goes_without() {
        let ids = TakesIds::default();
        assert_eq!(ids.next(Api::Chat), None);
        ids.learn(Api::Chat, Some(Field::InputIds));
        let sent = (0..640).filter(|_| ids.next(Api::Chat).is_some()).count();
        assert_eq!((sent, ids.next(Api::Completions)), (630, None));
        for field in [Field::Prompt, Field::KvTransferParams, Field::InputIds] {
            assert_eq!(Field::of(Field::code(Some(field))), Some(field));
        }
    }
}
