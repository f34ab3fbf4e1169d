//! A model's own text rules: template and tokens.

use std::path::PathBuf;

use pyo3::prelude::*;

use super::buffer::tokens;
use super::error::{OrRaise, raise};
use crate::error::Error;
use crate::text::{ChatRequest, TextModel};

/// Tokenizer and chat template of a model folder.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct Tokenizer {
    model: TextModel,
}

#[pymethods]
impl Tokenizer {
    #[new]
    #[pyo3(signature = (folder, *, cache_bytes=268_435_456))]
    fn new(py: Python<'_>, folder: PathBuf, cache_bytes: usize) -> PyResult<Self> {
        let model = py.detach(|| TextModel::from_folder(&folder, cache_bytes)).or_raise(py)?;
        Ok(Self { model })
    }

    #[pyo3(signature = (text, add_special_tokens=true))]
    fn encode(&self, py: Python<'_>, text: &str, add_special_tokens: bool) -> PyResult<Vec<u32>> {
        py.detach(|| self.model.completion_tokens(text, add_special_tokens))
            .map(|ids| ids.to_vec())
            .or_raise(py)
    }

    #[pyo3(signature = (ids, skip_special_tokens=true))]
    fn decode(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        skip_special_tokens: bool,
    ) -> PyResult<String> {
        let ids = tokens("ids", ids)?;
        let ids: &[u32] = &ids.as_slice();
        py.detach(|| self.model.decode(ids, skip_special_tokens)).or_raise(py)
    }

    #[pyo3(signature = (messages_json, add_generation_prompt=true, *, tools_json=None))]
    fn render_chat(
        &self,
        py: Python<'_>,
        messages_json: &str,
        add_generation_prompt: bool,
        tools_json: Option<&str>,
    ) -> PyResult<Option<String>> {
        with_chat(py, messages_json, tools_json, add_generation_prompt, |request| {
            self.model.render(request)
        })
    }

    #[pyo3(signature = (messages_json, add_generation_prompt=true, *, tools_json=None))]
    fn chat_tokens(
        &self,
        py: Python<'_>,
        messages_json: &str,
        add_generation_prompt: bool,
        tools_json: Option<&str>,
    ) -> PyResult<Option<Vec<u32>>> {
        with_chat(py, messages_json, tools_json, add_generation_prompt, |request| {
            self.model.chat_tokens(request).map(|ids| ids.map(|ids| ids.to_vec()))
        })
    }
}

fn with_chat<T: Send>(
    py: Python<'_>,
    messages: &str,
    tools: Option<&str>,
    add_generation_prompt: bool,
    call: impl FnOnce(&ChatRequest<'_>) -> crate::error::Result<T> + Send,
) -> PyResult<T> {
    let parse = |name: &str, text| {
        serde_json::from_str(text)
            .map_err(|error| raise(py, &Error::invalid(format!("{name}: {error}"))))
    };
    let messages: &serde_json::value::RawValue = parse("messages_json", messages)?;
    let tools: Option<&serde_json::value::RawValue> =
        tools.map(|text| parse("tools_json", text)).transpose()?;
    py.detach(|| {
        call(&ChatRequest {
            messages,
            tools,
            documents: None,
            chat_template_kwargs: None,
            add_generation_prompt,
            continue_final_message: false,
            add_special_tokens: false,
        })
    })
    .or_raise(py)
}
