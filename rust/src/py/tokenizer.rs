//! A model's template and tokenizer.

use std::ffi::OsString;
use std::path::PathBuf;

use kvflash_core::error::Error;
use kvflash_core::text::{self, ChatRequest, Prompt, Rendered, TextModel};
use pyo3::prelude::*;

use super::buffer::tokens;
use super::error::{Raised, invalid, released};

/// The folder of a model, given as a path or as the id of a model in the local Hub cache.
///
/// Raises:
///     ConfigError: Neither exists; says how to download the model.
///
/// Cost: reads folders; releases the GIL.
#[pyfunction]
#[pyo3(signature = (named))]
pub(super) fn model_folder(py: Python<'_>, named: &str) -> Raised<OsString> {
    released(py, || text::model_folder(named).map(PathBuf::into_os_string))
}

/// Tokenizer and chat template of a model folder; results equal the engine's.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct Tokenizer {
    model: TextModel,
}

#[pymethods]
impl Tokenizer {
    #[new]
    #[pyo3(signature = (folder, *, cache_bytes=268_435_456))]
    fn new(py: Python<'_>, folder: PathBuf, cache_bytes: usize) -> Raised<Self> {
        let model = py.detach(|| TextModel::from_folder(&folder, cache_bytes))?;
        Ok(Self { model })
    }

    /// Token ids of a text, u32.
    #[pyo3(signature = (text, add_special_tokens=true))]
    fn encode(&self, py: Python<'_>, text: &str, add_special_tokens: bool) -> Raised<Vec<u32>> {
        released(py, || self.model.completion_tokens(text, add_special_tokens))
    }

    /// The text of token ids.
    #[pyo3(signature = (ids, skip_special_tokens=true))]
    fn decode(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        skip_special_tokens: bool,
    ) -> Raised<String> {
        let ids = tokens("ids", ids)?;
        let ids = ids.as_slice();
        released(py, || self.model.tokenizer.decode(ids, skip_special_tokens))
    }

    /// The prompt text of a chat; None for non-text content.
    #[pyo3(signature = (messages_json, add_generation_prompt=true, *, tools_json=None))]
    fn render_chat(
        &self,
        py: Python<'_>,
        messages_json: &str,
        add_generation_prompt: bool,
        tools_json: Option<&str>,
    ) -> Raised<Option<String>> {
        with_chat(py, messages_json, tools_json, add_generation_prompt, |request| {
            let template = self.model.template.as_ref();
            let template =
                template.ok_or_else(|| Error::invalid("the model has no chat template"))?;
            template.render(request).map(|rendered| match rendered {
                Rendered::Text(text) => Some(text),
                _ => None,
            })
        })
    }

    /// Token ids of a chat's prompt; None for non-text content.
    #[pyo3(signature = (messages_json, add_generation_prompt=true, *, tools_json=None))]
    fn chat_tokens(
        &self,
        py: Python<'_>,
        messages_json: &str,
        add_generation_prompt: bool,
        tools_json: Option<&str>,
    ) -> Raised<Option<Vec<u32>>> {
        with_chat(py, messages_json, tools_json, add_generation_prompt, |request| {
            self.model.chat_tokens(request).map(|prompt| match prompt {
                Prompt::Tokens(ids) => Some(ids),
                _ => None,
            })
        })
    }
}

fn with_chat<T: Send>(
    py: Python<'_>,
    messages: &str,
    tools: Option<&str>,
    add_generation_prompt: bool,
    call: impl FnOnce(&ChatRequest<'_>) -> kvflash_core::error::Result<T> + Send,
) -> Raised<T> {
    for (name, text) in [("messages_json", Some(messages)), ("tools_json", tools)] {
        let Some(text) = text else { continue };
        serde_json::from_str::<&serde_json::value::RawValue>(text)
            .map_err(|error| invalid(format!("{name}: {error}")))?;
    }
    released(py, || {
        call(&ChatRequest {
            messages: Some(messages),
            tools,
            add_generation_prompt: Some(add_generation_prompt),
            ..ChatRequest::default()
        })
    })
}
