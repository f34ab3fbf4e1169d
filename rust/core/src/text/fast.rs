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
/// grows to 64 MiB, with up to 64 MiB of long words.
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
        // Only a table of words changes meanwhile; whoever sees a panic stops using the encoder.
        let encode = AssertUnwindSafe(|| self.inner.encode(text));
        catch_unwind(encode).map_err(|_| Fault::Panicked)?.map_err(|_| Fault::Refused)
    }
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

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn long_texts_stay_on_the_calling_thread() {
        keep_to_the_calling_thread();
        assert_eq!(fastokens::fanout::threads(), 1);
    }
}
