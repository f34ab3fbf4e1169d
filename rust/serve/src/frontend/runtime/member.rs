//! What the frontend keeps of a runtime worker, and the tokenizers that workers share.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use kvflash_core::error::{Error, Result};
use kvflash_core::text::{CacheOptions, TextModel, TextOptions};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::super::notes::EngineNotes;
use super::message::Formats;
use super::plane::Plane;
use super::spec::{LoadReport, ModelInput, WorkerSpec};

/// Tokenizers in memory at once.
const MAX_TOKENIZERS: usize = 64;

/// A worker's own side of an engine.
#[derive(Debug)]
pub(crate) struct Member {
    pub spec: WorkerSpec,
    pub plane: Plane,
    pub text: Option<Arc<ModelText>>,
    pub formats: Formats,
    /// Its last report of each rank.
    pub loads: Mutex<BTreeMap<u32, LoadReport>>,
}

impl Member {
    /// What it takes: tokens, or text.
    pub fn input(&self) -> ModelInput {
        self.spec.card.model_input
    }

    /// What it reported last, by rank.
    pub fn load_json(&self) -> Value {
        let loads = self.loads.lock();
        loads
            .iter()
            .map(|(rank, load)| {
                let fields = json!({
                    "kv_used_blocks": load.kv_used_blocks,
                    "kv_total_blocks": load.kv_total_blocks,
                    "active_decode_blocks": load.active_decode_blocks,
                    "active_prefill_tokens": load.active_prefill_tokens,
                });
                (rank.to_string(), fields)
            })
            .collect::<serde_json::Map<_, _>>()
            .into()
    }

    /// What its card says, as engines tell it over HTTP.
    pub fn notes(&self) -> EngineNotes {
        let card = &self.spec.card;
        let base = (card.model_name.clone(), None);
        let adapter = |name: &String| (name.clone(), Some(card.model_name.clone()));
        EngineNotes {
            models: std::iter::once(base).chain(card.lora_names.iter().map(adapter)).collect(),
            max_model_len: card.context_length,
            capacity_blocks: card.total_kv_blocks,
            block_size: card.kv_cache_block_size,
            ..EngineNotes::default()
        }
    }
}

/// A model's tokenizer, template and the tokens that end an answer.
#[derive(Debug)]
pub(crate) struct ModelText {
    pub folder: PathBuf,
    pub model: Arc<TextModel>,
    pub eos_token_ids: Vec<u32>,
}

impl ModelText {
    /// Load a model's folder.
    ///
    /// # Errors
    /// `Config` naming the file.
    pub fn load(folder: &Path, cache_bytes: usize) -> Result<Self> {
        let cache = CacheOptions { capacity_bytes: cache_bytes };
        let options = TextOptions { cache, ..TextOptions::default() };
        let model = TextModel::from_folder(folder, options)?;
        let eos_token_ids = eos_token_ids(folder, &model);
        Ok(Self { folder: folder.to_owned(), eos_token_ids, model: Arc::new(model) })
    }

    /// What `GET /health` says of the tokenizer.
    pub fn health(&self) -> Value {
        let report = self.model.tokenizer.encoder();
        json!({
            "folder": self.folder,
            "encoder": report.name(),
            "reason": report.reason,
            "checks": report.checks_total,
            "mismatches": report.mismatches_total,
        })
    }
}

/// The tokens that end an answer: what the generation config says, else the model's, and the tokenizer's. A
/// model that was tuned on another template often has the configs of the one it came from.
fn eos_token_ids(folder: &Path, model: &TextModel) -> Vec<u32> {
    let read = |name: &str| -> Value {
        // A file that is missing or broken says nothing about the end of an answer.
        let text = std::fs::read(folder.join(name)).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    };
    let named = |name: &&str| -> Vec<u32> {
        match &read(name)["eos_token_id"] {
            Value::Array(ids) => {
                ids.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect()
            }
            one => one.as_u64().and_then(|id| u32::try_from(id).ok()).into_iter().collect(),
        }
    };
    let configs = ["generation_config.json", "config.json"];
    let mut ids = configs.iter().map(named).find(|ids| !ids.is_empty()).unwrap_or_default();
    // A null in the main file is an answer; only a missing key is looked up in the other.
    let tokens = ["tokenizer_config.json", "special_tokens_map.json"].map(read);
    let token = tokens.iter().find_map(|tokens| tokens.get("eos_token"));
    let text = token.and_then(|token| token.as_str().or_else(|| token["content"].as_str()));
    if let Some(id) = text.and_then(|text| model.tokenizer.token_to_id(text))
        && !ids.contains(&id)
    {
        ids.push(id);
    }
    ids
}

/// One tokenizer per folder, as long as a worker uses it.
#[derive(Debug, Default)]
pub(crate) struct Tokenizers {
    by_folder: Mutex<HashMap<PathBuf, Weak<ModelText>>>,
}

impl Tokenizers {
    /// The folder's tokenizer, loaded when nobody has it yet.
    ///
    /// # Errors
    /// `Config` naming the file; `Overloaded` at the limit of tokenizers.
    ///
    /// # Cost
    /// A tokenizer takes up to seconds to load; others wait meanwhile.
    pub fn open(&self, folder: &Path, cache_bytes: usize) -> Result<Arc<ModelText>> {
        let mut known = self.by_folder.lock();
        if let Some(text) = known.get(folder).and_then(Weak::upgrade) {
            return Ok(text);
        }
        known.retain(|_, text| text.strong_count() > 0);
        if known.len() >= MAX_TOKENIZERS {
            return Err(Error::Overloaded(format!(
                "{MAX_TOKENIZERS} tokenizers are loaded, the limit; {} is one more",
                folder.display()
            )));
        }
        let text = Arc::new(ModelText::load(folder, cache_bytes)?);
        known.insert(folder.to_owned(), Arc::downgrade(&text));
        Ok(text)
    }

    /// Tokenizers in memory.
    pub fn loaded(&self) -> Vec<Arc<ModelText>> {
        self.by_folder.lock().values().filter_map(Weak::upgrade).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn configs_and_the_tokenizer_both_name_ends() {
        let tiny = Path::new("../../tests/vectors/tiny-llama");
        let folder = std::env::temp_dir().join(format!("kvflash-member-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let file = |name: &str, content: Value| {
            fs::write(folder.join(name), content.to_string()).unwrap();
        };
        fs::copy(tiny.join("tokenizer.json"), folder.join("tokenizer.json")).unwrap();
        let ends = || ModelText::load(&folder, 1 << 20).unwrap().eos_token_ids;
        let model = ModelText::load(tiny, 1 << 20).unwrap().model;
        let end = model.tokenizer.token_to_id("</s>").unwrap();
        assert!(ends().is_empty());
        file("special_tokens_map.json", json!({"eos_token": {"content": "</s>"}}));
        assert_eq!(ends(), [end]);
        file("config.json", json!({"eos_token_id": 7}));
        assert_eq!(ends(), [7, end]);
        file("generation_config.json", json!({"eos_token_id": [8, 9]}));
        assert_eq!(ends(), [8, 9, end]);
        file("tokenizer_config.json", json!({"eos_token": "<s>"}));
        assert_eq!(ends(), [8, 9, model.tokenizer.token_to_id("<s>").unwrap()]);
        file("tokenizer_config.json", json!({"eos_token": null}));
        assert_eq!(ends(), [8, 9]);
        fs::remove_dir_all(&folder).unwrap();
    }
}
