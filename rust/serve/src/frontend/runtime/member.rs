//! What the frontend keeps of a runtime worker.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Value, json};

use super::super::engine::EngineNotes;
use super::message::Formats;
use super::plane::Plane;
use super::spec::{LoadReport, ModelInput, WorkerSpec};
use super::texts::ModelText;

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
        json!(*self.loads.lock())
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
