//! Which tokenizers `--tokenizer` names, by model.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use kvflash_core::error::{Error, Result};
use kvflash_core::text::model_folder;

use super::member::{ModelText, Tokenizers};

/// The tokenizers that the operator named.
#[derive(Debug, Default)]
pub(crate) struct ModelTexts {
    of_all: Option<Arc<ModelText>>,
    by_model: HashMap<String, Arc<ModelText>>,
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
            let text = tokenizers.open(&folder, cache_bytes)?;
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
        for (named, wanted) in [
            (vec![TINY, TINY], "all models already has one"),
            (vec!["a=../../tests/vectors/tiny-llama"; 2], "model \"a\" already has one"),
            (vec!["/no/such"], "--tokenizer must be a folder with tokenizer.json"),
            (vec!["a=/no/such"], "got \"/no/such\""),
            (vec!["a=no-org/no-name"], "hf download no-org/no-name"),
        ] {
            let error = open(&named).unwrap_err().to_string();
            assert!(error.contains(wanted), "{named:?}: {error}");
        }
    }
}
