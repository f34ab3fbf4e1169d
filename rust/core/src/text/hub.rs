//! Model folders by path, or by the id of a model that lies in the local cache of the Hugging Face Hub.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// The file that a model's folder must have.
const TOKENIZER_FILE: &str = "tokenizer.json";

/// The folder that `named` stands for: a path, or a Hub id (`ORG/NAME`) whose snapshot of `main` is in the local
/// cache. Nothing is downloaded.
///
/// # Errors
/// `Error::Config` saying what was looked for, where, and how to download it.
///
/// # Source
/// The cache's layout and variables as in `huggingface_hub`: `HF_HUB_CACHE`, else `hub` in `HF_HOME`, else in
/// `huggingface` in `XDG_CACHE_HOME` or `~/.cache`.
pub fn model_folder(named: &str) -> Result<PathBuf> {
    let path = Path::new(named);
    if path.join(TOKENIZER_FILE).is_file() {
        return Ok(path.to_owned());
    }
    if path.exists() || !is_id(named) {
        return Err(Error::Config(format!(
            "must be a folder with {TOKENIZER_FILE}, got {named:?}"
        )));
    }
    let cache = hub_cache(|name| env::var_os(name).map(PathBuf::from));
    snapshot(&cache, named).ok_or_else(|| {
        Error::Config(format!(
            "must be a folder with {TOKENIZER_FILE}, got {named:?}. As a model's id it has no {TOKENIZER_FILE} in the \
             local Hub cache ({}); download it with: hf download {named} --include \"tokenizer*\" \
             \"special_tokens_map.json\" \"*config.json\" \"chat_template*\"",
            cache.display()
        ))
    })
}

/// `NAME` or `ORG/NAME`, as the Hub allows them.
fn is_id(named: &str) -> bool {
    let is_part = |part: &str| {
        !part.is_empty()
            && !part.starts_with(['.', '-'])
            && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'))
    };
    let mut parts = named.split('/');
    parts.clone().count() <= 2 && parts.all(is_part)
}

fn hub_cache(variable: impl Fn(&str) -> Option<PathBuf>) -> PathBuf {
    let set = |name| variable(name).filter(|path| !path.as_os_str().is_empty());
    if let Some(cache) = set("HF_HUB_CACHE").or_else(|| set("HUGGINGFACE_HUB_CACHE")) {
        return cache;
    }
    let home = set("HF_HOME").or_else(|| Some(set("XDG_CACHE_HOME")?.join("huggingface")));
    let home = home.or_else(|| Some(set("HOME")?.join(".cache/huggingface")));
    home.unwrap_or_default().join("hub")
}

/// The folder of the `main` revision, if its tokenizer is there.
fn snapshot(cache: &Path, id: &str) -> Option<PathBuf> {
    let model = cache.join(format!("models--{}", id.replace('/', "--")));
    let revision = fs::read_to_string(model.join("refs/main")).ok()?;
    let folder = model.join("snapshots").join(revision.trim());
    folder.join(TOKENIZER_FILE).is_file().then_some(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_name_the_cache_in_their_order() {
        let cache = |set: &[(&str, &str)]| {
            hub_cache(|name| {
                let found = set.iter().find(|entry| entry.0 == name);
                found.map(|entry| PathBuf::from(entry.1))
            })
        };
        let all =
            [("HOME", "/h"), ("XDG_CACHE_HOME", "/x"), ("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")];
        assert_eq!(cache(&all), Path::new("/c"));
        assert_eq!(cache(&all[..3]), Path::new("/f/hub"));
        assert_eq!(cache(&all[..2]), Path::new("/x/huggingface/hub"));
        assert_eq!(cache(&all[..1]), Path::new("/h/.cache/huggingface/hub"));
        assert_eq!(cache(&[("HF_HUB_CACHE", ""), ("HF_HOME", "/f")]), Path::new("/f/hub"));
    }

    #[test]
    fn a_snapshot_of_main_is_found() {
        let cache = env::temp_dir().join(format!("kvflash-hub-{}", std::process::id()));
        let model = cache.join("models--org--name");
        fs::create_dir_all(model.join("refs")).expect("a folder");
        fs::create_dir_all(model.join("snapshots/abc")).expect("a folder");
        fs::write(model.join("refs/main"), "abc\n").expect("a file");
        assert_eq!(snapshot(&cache, "org/name"), None);
        fs::write(model.join("snapshots/abc/tokenizer.json"), "{}").expect("a file");
        assert_eq!(snapshot(&cache, "org/name"), Some(model.join("snapshots/abc")));
        assert_eq!(snapshot(&cache, "org/other"), None);
        fs::remove_dir_all(&cache).expect("the folder goes");
    }

    #[test]
    fn an_id_that_is_not_there_is_answered_with_the_command() {
        let error =
            model_folder("no-such-org/no-such-name").expect_err("it is not there").to_string();
        assert!(error.contains("hf download no-such-org/no-such-name --include"), "{error}");
        for named in ["/no/such", "", "a/b/c", "../x", "-a/b"] {
            let error = model_folder(named).expect_err("no model").to_string();
            assert!(
                error.contains("must be a folder with tokenizer.json")
                    && !error.contains("hf download"),
                "{error}"
            );
        }
    }
}
