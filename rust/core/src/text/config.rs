//! What a model's folder says about its tokenizer beside `tokenizer.json`.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tokenizers::AddedToken;

use crate::error::{Error, Result};

/// Names of the special tokens that templates may use, in the order transformers adds them.
const TOKEN_NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The parts of `tokenizer_config.json` (and of `special_tokens_map.json`) that change tokens.
#[derive(Debug, Default)]
pub(super) struct FolderConfig {
    /// Named special tokens: `bos_token` to its text.
    pub(super) named_tokens: Vec<(String, String)>,
    /// Tokens the config adds to (or repeats from) `tokenizer.json`, by id.
    pub(super) added_tokens: Vec<AddedToken>,
    /// `add_bos_token`, if said.
    pub(super) add_bos_token: Option<bool>,
    /// `add_eos_token`, if said.
    pub(super) add_eos_token: Option<bool>,
    /// Special tokens without a name.
    pub(super) extra_tokens: Vec<String>,
    /// `model_type` of `config.json`: some models' chats are not rendered from a template.
    pub(super) model_type: Option<String>,
    /// Chat templates; the unnamed one is `default`.
    pub(super) templates: Vec<NamedTemplate>,
}

/// The source of a chat template.
#[derive(Debug)]
pub(super) struct NamedTemplate {
    pub(super) name: String,
    pub(super) source: String,
    /// The file that has it, if any.
    pub(super) file: Option<PathBuf>,
}

impl FolderConfig {
    /// Read the folder's configuration; a file that is not there says nothing.
    ///
    /// # Errors
    /// `Error::Config` naming the file that is unreadable or not the JSON it should be.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("tokenizer_config.json");
        let main = read_object(&path)?.unwrap_or_default();
        let map = read_object(&folder.join("special_tokens_map.json"))?.unwrap_or_default();
        let mut config = Self {
            add_bos_token: main.get("add_bos_token").and_then(Value::as_bool),
            add_eos_token: main.get("add_eos_token").and_then(Value::as_bool),
            added_tokens: added_tokens(&main, &path)?,
            ..Self::default()
        };
        for name in TOKEN_NAMES {
            // A null in the main file is an answer; only a missing key is looked up in the other.
            let value = main.get(name).or_else(|| map.get(name));
            if let Some(text) = value.and_then(token_text) {
                config.named_tokens.push((name.to_owned(), text.to_owned()));
            }
        }
        for name in ["additional_special_tokens", "extra_special_tokens"] {
            if let Some(Value::Array(tokens)) = main.get(name).or_else(|| map.get(name)) {
                config.extra_tokens.extend(tokens.iter().filter_map(token_text).map(str::to_owned));
            }
        }
        let model = read_object(&folder.join("config.json"))?.unwrap_or_default();
        config.model_type = model.get("model_type").and_then(Value::as_str).map(str::to_owned);
        config.read_templates(folder, &main, &path)?;
        Ok(config)
    }

    /// The text of the special token called `name`.
    pub(super) fn named_token(&self, name: &str) -> Option<&str> {
        self.named_tokens.iter().find(|(known, _)| known == name).map(|(_, text)| text.as_str())
    }

    /// Precedence as in transformers: files of their own first, then the tokenizer's config, then
    /// the processor's `chat_template.json`.
    fn read_templates(
        &mut self,
        folder: &Path,
        main: &Map<String, Value>,
        path: &Path,
    ) -> Result<()> {
        let mut add = |name: &str, source: &str, file: &Path| {
            let (name, source, file) = (name.to_owned(), source.to_owned(), Some(file.to_owned()));
            self.templates.push(NamedTemplate { name, source, file });
        };
        let own = folder.join("chat_template.jinja");
        if let Some(text) = read_text(&own)? {
            add("default", &text, &own);
            for file in list_jinja(&folder.join("additional_chat_templates"))? {
                let name = file.file_stem().unwrap_or_default().to_string_lossy();
                if let Some(text) = read_text(&file)? {
                    add(&name, &text, &file);
                }
            }
            return Ok(());
        }
        match main.get("chat_template") {
            Some(Value::String(text)) => add("default", text, path),
            Some(Value::Array(entries)) => {
                for entry in entries {
                    let field = |key| entry.get(key).and_then(Value::as_str);
                    let (Some(name), Some(text)) = (field("name"), field("template")) else {
                        return Err(Error::Config(format!(
                            "{}: chat_template is a list, but an entry lacks name or template",
                            path.display()
                        )));
                    };
                    add(name, text, path);
                }
            }
            None | Some(Value::Null) => {
                let file = folder.join("chat_template.json");
                let processor = read_object(&file)?;
                let text = processor.as_ref().and_then(|object| object.get("chat_template"));
                if let Some(text) = text.and_then(Value::as_str) {
                    add("default", text, &file);
                }
            }
            Some(_) => {
                return Err(Error::Config(format!(
                    "{}: chat_template must be a string or a list of {{name, template}}",
                    path.display()
                )));
            }
        }
        Ok(())
    }
}

/// A token is written as its text or as an object with `content`.
fn token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content").and_then(Value::as_str))
}

fn added_tokens(main: &Map<String, Value>, path: &Path) -> Result<Vec<AddedToken>> {
    let Some(Value::Object(entries)) = main.get("added_tokens_decoder") else {
        return Ok(Vec::new());
    };
    let mut tokens = Vec::with_capacity(entries.len());
    for (id, entry) in entries {
        let invalid = |what: &str| {
            Error::Config(format!("{}: added_tokens_decoder[{id:?}]: {what}", path.display()))
        };
        let number: u32 = id.parse().map_err(|_| invalid("the key must be a token id"))?;
        let content = token_text(entry).ok_or_else(|| invalid("content is missing"))?;
        let flag = |key, default| entry.get(key).and_then(Value::as_bool).unwrap_or(default);
        let is_special = flag("special", false);
        let token = AddedToken::from(content, is_special)
            .normalized(flag("normalized", !is_special))
            .single_word(flag("single_word", false))
            .lstrip(flag("lstrip", false))
            .rstrip(flag("rstrip", false));
        tokens.push((number, token));
    }
    tokens.sort_by_key(|(number, _)| *number);
    Ok(tokens.into_iter().map(|(_, token)| token).collect())
}

/// The text of a file; `None` if there is no such file.
///
/// # Errors
/// `Error::Config` naming the file if it is there and cannot be read as UTF-8.
fn read_text(path: &Path) -> Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::Config(format!("{}: {error}", path.display()))),
    }
}

fn read_object(path: &Path) -> Result<Option<Map<String, Value>>> {
    let Some(text) = read_text(path)? else { return Ok(None) };
    serde_json::from_str(&text)
        .map(Some)
        .map_err(|error| Error::Config(format!("{}: {error}", path.display())))
}

fn list_jinja(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::Config(format!("{}: {error}", folder.display()))),
    };
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "jinja"))
        .collect();
    // Directory order is the file system's mood.
    files.sort();
    Ok(files)
}
