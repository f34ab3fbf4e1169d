//! The fast encoder: `fastokens`, built from what the reference tokenizer knows.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::thread;

use serde_json::{Value, json};
use tokenizers::AddedToken;

use super::tokenizer::Tokens;

/// A character on which `fastokens` 0.3.5 ends contractions elsewhere (`'\u{17f}'S` under o200k's pattern): texts
/// with it are the reference's.
const REFUSED: char = '\u{17f}';

/// A run of letters and digits counts as a long word from this length on, and a text with more bytes in long words
/// than this is encoded on a thread of its own: `fastokens` remembers each word, up to 32 MiB of them and their ids
/// per thread, and prose or code repeats no word of this length.
const LONG_WORD_BYTES: usize = 64;
const LONG_WORDS_MOST: usize = 4 * 1024;

/// Why the fast encoder gave no ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fault {
    /// It refuses this text.
    Refused,
    /// It panicked; what it keeps may be wrong from now on.
    Panicked,
}

/// `fastokens` with a model's vocabulary.
///
/// # Cost
/// Memory of its own, bounded by the crate: the tables of the vocabulary, once; and for each thread that
/// encodes a table of words that starts at 32 bytes for each of up to four times the vocabulary's entries and
/// grows to 64 MiB, with up to 32 MiB of words over 15 bytes and their ids. Texts of unbroken words add nothing to
/// the table: they take a thread of their own, for one to three milliseconds more.
pub(super) struct FastEncoder {
    inner: fastokens::Tokenizer,
}

impl std::fmt::Debug for FastEncoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FastEncoder").finish_non_exhaustive()
    }
}

impl FastEncoder {
    /// Build it from `tokenizer.json`; `added` are the tokens that the reference ended up with.
    ///
    /// # Errors
    /// What `fastokens` cannot do, in words.
    pub(super) fn build(mut json: Value, added: &[(u32, AddedToken)]) -> Result<Self, String> {
        if let Some((_, token)) = added.iter().find(|(_, token)| token.single_word) {
            return Err(format!("added token {:?} is single_word", token.content));
        }
        let entries = added.iter().map(|(id, token)| {
            json!({
                "id": id,
                "content": token.content,
                "single_word": token.single_word,
                "lstrip": token.lstrip,
                "rstrip": token.rstrip,
                "normalized": token.normalized,
                "special": token.special,
            })
        });
        json["added_tokens"] = entries.collect();
        // Ids come from the encoder alone: the reference decodes, and special tokens go around elsewhere.
        for stage in ["truncation", "padding", "post_processor", "decoder"] {
            json[stage] = Value::Null;
        }
        keep_to_the_calling_thread();
        let build = AssertUnwindSafe(|| fastokens::Tokenizer::from_json(json));
        let inner = catch_unwind(build).map_err(|_| "it panicked while loading".to_owned())?;
        Ok(Self { inner: inner.map_err(|error| error.to_string())? })
    }

    /// Token ids of `text`, without those around it.
    pub(super) fn encode(&self, text: &str) -> Result<Tokens, Fault> {
        if text.contains(REFUSED) {
            return Err(Fault::Refused);
        }
        if text.len() <= LONG_WORDS_MOST || long_words_bytes(text) <= LONG_WORDS_MOST {
            return self.encode_here(text);
        }
        // The table of words ends with the thread.
        thread::scope(|scope| {
            let own = thread::Builder::new().name("kvflash-words".to_owned());
            match own.spawn_scoped(scope, || self.encode_here(text)) {
                Ok(thread) => thread.join().unwrap_or(Err(Fault::Panicked)),
                Err(_) => self.encode_here(text),
            }
        })
    }

    fn encode_here(&self, text: &str) -> Result<Tokens, Fault> {
        // Only a table of words changes meanwhile; whoever sees a panic stops using the encoder.
        let encode = AssertUnwindSafe(|| self.inner.encode(text));
        catch_unwind(encode).map_err(|_| Fault::Panicked)?.map_err(|_| Fault::Refused)
    }
}

/// Bytes of `text` in long words. Chinese, Japanese and Korean characters end a word: `fastokens` does not
/// remember words that begin with an ideograph, and these scripts have few spaces.
fn long_words_bytes(text: &str) -> usize {
    let is_in_word =
        |byte: u8| byte.is_ascii_alphanumeric() || (byte >= 0x80 && !is_east_asian(byte));
    let words = text.as_bytes().split(|&byte| !is_in_word(byte)).map(<[u8]>::len);
    words.filter(|&bytes| bytes >= LONG_WORD_BYTES).sum()
}

/// Whether `byte` begins a character between U+3000 and U+DFFF.
const fn is_east_asian(byte: u8) -> bool {
    matches!(byte, 0xe3..=0xed)
}

/// `fastokens` would spread a long text over threads of its own, which know nothing of this process's turns and
/// priorities. It asks once how many processors it may use, and a thread that is bound to one gets that answer.
fn keep_to_the_calling_thread() {
    static ASKED: Once = Once::new();
    ASKED.call_once(|| {
        let ask = || {
            #[cfg(target_os = "linux")]
            bind_to_one_processor();
            fastokens::fanout::threads()
        };
        let asked = thread::Builder::new().name("kvflash-fast".to_owned()).spawn(ask);
        let threads = asked.ok().and_then(|thread| thread.join().ok());
        if threads != Some(1) {
            tracing::debug!(?threads, "long texts are tokenized on threads of the fast encoder");
        }
    });
}

#[cfg(target_os = "linux")]
fn bind_to_one_processor() {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let Ok(allowed) = sched_getaffinity(None) else { return };
    let first = (0..CpuSet::MAX_CPU).find(|&cpu| allowed.is_set(cpu));
    let mut one = CpuSet::new();
    if let Some(cpu) = first {
        one.set(cpu);
        // Where it is refused, long texts use more threads; their ids are the same.
        let _ = sched_setaffinity(None, &one);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_prose_code_and_ideographs_are_short() {
        let prose =
            "All that is gold does not glitter, not all those who wander are lost. ".repeat(1_000);
        let code =
            "fn main() { let a_long_name_of_a_variable_that_says_what_it_is = 1; }\n".repeat(1_000);
        let ideographs = "\u{77e5}\u{8b58}\u{306f}\u{529b}".repeat(10_000);
        for text in [prose, code, ideographs] {
            assert_eq!(long_words_bytes(&text), 0, "{}", &text[..32]);
        }
        assert_eq!(long_words_bytes(&"ab".repeat(5_000)), 10_000);
        assert_eq!(long_words_bytes(&format!("{} {}", "x1".repeat(40), "\u{434}".repeat(31))), 80);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn long_texts_stay_on_the_calling_thread() {
        keep_to_the_calling_thread();
        assert_eq!(fastokens::fanout::threads(), 1);
    }
}
