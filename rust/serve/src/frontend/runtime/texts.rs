//! The tokenizers that workers share, and which of them `--tokenizer` names, by model.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use kvflash_core::error::{Error, Result};
use kvflash_core::text::{ChatRequest, Effort, TextModel, model_folder};
use parking_lot::Mutex;
use serde_json::{Value, json};

/// Tokenizers in memory at once.
const MAX_TOKENIZERS: usize = 64;

/// A model's tokenizer, template and the tokens that end an answer.
#[derive(Debug)]
pub(crate) struct ModelText {
    pub folder: PathBuf,
    pub model: TextModel,
    pub eos_token_ids: Vec<u32>,
    /// Why the template does not even render a plain chat.
    template_fault: Option<String>,
}

impl ModelText {
    /// Load a model's folder.
    ///
    /// # Errors
    /// `Config` naming the file.
    pub fn load(folder: &Path, cache_bytes: usize) -> Result<Self> {
        let model = TextModel::from_folder(folder, cache_bytes)?;
        let eos_token_ids = eos_token_ids(folder, &model);
        let template_fault = template_fault(&model);
        Ok(Self { folder: folder.to_owned(), eos_token_ids, template_fault, model })
    }

    /// Why its chats are not matched, as a warning.
    pub fn warning(&self) -> Option<String> {
        let why = self.template_fault.as_ref()?;
        Some(format!(
            "the chat template in {} does not render a plain chat ({why}): chats are routed by load. Set --tokenizer \
             to the folder of the model that the engines serve, with its chat template",
            self.folder.display()
        ))
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

/// Why the template does not render a chat that every model takes; `None` without a template.
fn template_fault(model: &TextModel) -> Option<String> {
    let messages = Some(r#"[{"role": "user", "content": "Hello"}]"#);
    let chat = ChatRequest { messages, ..ChatRequest::default() };
    let effort = Effort { is_quick: true, ..Effort::FULL };
    model.template.as_ref()?.render_within(&chat, effort).err().map(|error| error.to_string())
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
    /// Held while a tokenizer is loaded: one at a time.
    loading: Mutex<()>,
}

impl Tokenizers {
    /// The folder's tokenizer, loaded when nobody has it yet.
    ///
    /// # Errors
    /// `Config` naming the file; `Overloaded` at the limit of tokenizers.
    ///
    /// # Cost
    /// A tokenizer takes up to seconds to load; others to be loaded wait meanwhile.
    pub fn open(&self, folder: &Path, cache_bytes: usize) -> Result<Arc<ModelText>> {
        let known = || self.by_folder.lock().get(folder).and_then(Weak::upgrade);
        if let Some(text) = known() {
            return Ok(text);
        }
        let _loading = self.loading.lock();
        if let Some(text) = known() {
            return Ok(text);
        }
        let others = {
            let mut by_folder = self.by_folder.lock();
            by_folder.retain(|_, text| text.strong_count() > 0);
            by_folder.len()
        };
        if others >= MAX_TOKENIZERS {
            return Err(Error::Overloaded(format!(
                "{MAX_TOKENIZERS} tokenizers are loaded, the limit; {} is not loaded",
                folder.display()
            )));
        }
        let text = Arc::new(ModelText::load(folder, cache_bytes)?);
        self.by_folder.lock().insert(folder.to_owned(), Arc::downgrade(&text));
        Ok(text)
    }

    /// Tokenizers in memory; those that are being loaded are not waited for.
    pub fn loaded(&self) -> Vec<Arc<ModelText>> {
        self.by_folder.lock().values().filter_map(Weak::upgrade).collect()
    }
}

/// The tokenizers that the operator named.
#[derive(Debug, Default)]
pub(crate) struct ModelTexts {
    of_all: Option<Arc<ModelText>>,
    by_model: BTreeMap<String, Arc<ModelText>>,
}

impl ModelTexts {
    /// Load what `named` says: `FOLDER` for all models, `MODEL=FOLDER` for one; a Hub id that is in the local cache
    /// may stand for its folder.
    ///
    /// # Errors
    /// `Config` naming the entry or the file, `Overloaded` at the limit of tokenizers.
    pub fn open(named: &[String], tokenizers: &Tokenizers, cache_bytes: usize) -> Result<Self> {
        let mut texts = Self::default();
        for entry in named {
            let (model, folder) = parts(entry);
            let folder = model_folder(folder)
                .map_err(|error| Error::Config(format!("--tokenizer {error}")))?;
            let text = tokenizers.open(&folder, cache_bytes).map_err(|error| match error {
                Error::Config(why) => Error::Config(format!("--tokenizer {entry}: {why}")),
                other => other,
            })?;
            let is_new = match model {
                Some(model) => texts.by_model.insert(model.to_owned(), text).is_none(),
                None => texts.of_all.replace(text).is_none(),
            };
            if !is_new {
                let target =
                    model.map_or("all models".to_owned(), |model| format!("model {model:?}"));
                return Err(Error::Config(format!(
                    "--tokenizer {entry:?}: {target} already has one"
                )));
            }
        }
        Ok(texts)
    }

    /// The tokenizer that is named for this model.
    pub fn of(&self, model: &str) -> Option<Arc<ModelText>> {
        self.by_model.get(model).cloned()
    }

    /// The models that one is named for.
    pub fn models(&self) -> impl Iterator<Item = &str> {
        self.by_model.keys().map(String::as_str)
    }

    /// The tokenizer of models that none is named for.
    pub fn of_all(&self) -> Option<Arc<ModelText>> {
        self.of_all.clone()
    }
}

/// The model, if one is named, and its folder. A folder may have an equals sign in its name.
fn parts(entry: &str) -> (Option<&str>, &str) {
    match entry.split_once('=') {
        Some((model, folder)) if !model.is_empty() && !Path::new(entry).is_dir() => {
            (Some(model), folder)
        }
        _ => (None, entry),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;

    use super::*;

    const TINY: &str = "../../tests/vectors/tiny-llama";

    fn open(named: &[&str]) -> Result<ModelTexts> {
        let named: Vec<String> = named.iter().map(|&entry| entry.to_owned()).collect();
        ModelTexts::open(&named, &Tokenizers::default(), 1 << 20)
    }

    #[test]
    fn a_model_has_its_own_or_that_of_all() {
        let texts = open(&[&format!("org/m={TINY}")]).unwrap();
        assert!(texts.of("org/m").is_some() && texts.of("m").is_none());
        assert!(texts.of_all().is_none());
        let texts = open(&[TINY, &format!("a={TINY}")]).unwrap();
        // One folder is loaded once.
        assert!(Arc::ptr_eq(&texts.of("a").unwrap(), &texts.of_all().unwrap()));
    }

    #[test]
    fn refusals_name_the_entry_and_what_came() {
        let folder = std::env::temp_dir().join(format!("kvflash-broken-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("tokenizer.json"), "{").unwrap();
        let broken = folder.to_str().unwrap().to_owned();
        for (named, wanted) in [
            (vec![TINY, TINY], "all models already has one"),
            (vec!["a=../../tests/vectors/tiny-llama"; 2], "model \"a\" already has one"),
            (vec!["/no/such"], "--tokenizer must be a folder with tokenizer.json"),
            (vec!["a=/no/such"], "got \"/no/such\""),
            (vec!["a=no-org/no-name"], "hf download no-org/no-name"),
            (vec![&broken], &format!("--tokenizer {broken}: {broken}/tokenizer.json: ")),
        ] {
            let error = open(&named).unwrap_err().to_string();
            assert!(error.contains(wanted), "{named:?}: {error}");
        }
        fs::remove_dir_all(&folder).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn whoever_asks_for_the_loaded_ones_waits_for_none() {
        let folder = std::env::temp_dir().join(format!("kvflash-slow-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        // Reading it takes until the other end is closed.
        let slow = folder.join("tokenizer.json");
        let made = std::process::Command::new("mkfifo").arg(&slow).status().unwrap();
        assert!(made.success());
        let tokenizers = Arc::new(Tokenizers::default());
        let tiny = tokenizers.open(Path::new(TINY), 1 << 20).unwrap();
        let (loading, at) = (Arc::clone(&tokenizers), folder.clone());
        let loading = std::thread::spawn(move || loading.open(&at, 1 << 20).map(drop));
        let end = fs::File::options().write(true).open(&slow).unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        let asking = std::thread::spawn(move || {
            let again = tokenizers.open(Path::new(TINY), 1 << 20).unwrap();
            let _gone = sender.send((tokenizers.loaded().len(), again));
        });
        let told = receiver.recv_timeout(std::time::Duration::from_secs(30));
        drop(end);
        assert!(loading.join().unwrap().is_err(), "it is empty");
        asking.join().unwrap();
        fs::remove_dir_all(&folder).unwrap();
        let (count, again) = told.unwrap();
        assert!(count == 1 && Arc::ptr_eq(&again, &tiny));
    }

    #[test]
    fn a_template_that_fails_at_a_plain_chat_is_warned_of() {
        let tiny = Path::new("../../tests/vectors/tiny-llama");
        let folder = std::env::temp_dir().join(format!("kvflash-template-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::copy(tiny.join("tokenizer.json"), folder.join("tokenizer.json")).unwrap();
        let warning = || ModelText::load(&folder, 1 << 20).unwrap().warning();
        assert_eq!(warning(), None, "a model without a template has no chats");
        for (template, wanted) in [
            (
                "{{ nothing.at.all }}",
                Some("does not render a plain chat (chat template: undefined"),
            ),
            ("{{ raise_exception('no') }}", Some("no")),
            ("{{ messages[0].content }}", None),
            (
                "{% for i in range(99999) %}{% for j in range(99999) %}a{% endfor %}{% endfor %}",
                None,
            ),
        ] {
            fs::write(folder.join("chat_template.jinja"), template).unwrap();
            let warning = warning();
            let is_right = match (&warning, wanted) {
                (Some(warning), Some(wanted)) => warning.contains(wanted),
                (warning, wanted) => warning.is_none() && wanted.is_none(),
            };
            assert!(is_right, "{template}: {warning:?}");
        }
        fs::remove_dir_all(&folder).unwrap();
    }

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
