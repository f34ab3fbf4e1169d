//! Text to ids with the fastest encoder that is known to give the model's own ids.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use parking_lot::Mutex;
use serde_json::Value;
use tokenizers::{AddedToken, Tokenizer as Reference};

use super::fast::{FastEncoder, Fault};
use super::tokenizer::Tokens;
use crate::error::{Error, Result};

/// One prompt in so many is encoded again by the reference.
const SAMPLE_EVERY: u64 = 10_000;

/// A longer prompt is not encoded again: it would take a core for seconds.
const SAMPLE_BYTES_MAX: usize = 1 << 20;

/// Test texts that the fast encoder may refuse: one in so many.
const REFUSED_SHARE: usize = 4;

/// The priority of the thread that encodes a sample again: whatever else there is to do goes first.
#[cfg(target_os = "linux")]
const SAMPLE_NICENESS: i32 = 15;

/// Which encoder makes a model's ids, and what its checks found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EncoderReport {
    /// Ids come from `fastokens`; otherwise from `tokenizers`.
    pub is_fast: bool,
    /// Why ids do not come from `fastokens`.
    pub reason: Option<String>,
    /// Prompts that the reference encoded again.
    pub checks_total: u64,
    /// Those whose ids were others.
    pub mismatches_total: u64,
    /// Those that were due and not checked: too long, or another check was running.
    pub skipped_total: u64,
    /// Texts that the fast encoder left to the reference.
    pub refused_total: u64,
}

impl EncoderReport {
    /// The crate that the ids come from.
    pub fn name(&self) -> &'static str {
        if self.is_fast { "fastokens" } else { "tokenizers" }
    }
}

/// The reference, which is right by definition, and the fast encoder beside it.
#[derive(Debug)]
pub(super) struct Encoders {
    reference: Reference,
    fast: Option<FastEncoder>,
    // Relaxed everywhere: each stands for itself, and whoever sees one late uses the fast encoder once more.
    is_fast: AtomicBool,
    reason: Mutex<Option<String>>,
    prompts: AtomicU64,
    is_checking: AtomicBool,
    checks: AtomicU64,
    mismatches: AtomicU64,
    skipped: AtomicU64,
    refused: AtomicU64,
}

impl Encoders {
    /// The reference alone.
    pub(super) fn new(reference: Reference) -> Self {
        Self {
            reference,
            fast: None,
            is_fast: AtomicBool::new(false),
            reason: Mutex::default(),
            prompts: AtomicU64::new(0),
            is_checking: AtomicBool::new(false),
            checks: AtomicU64::new(0),
            mismatches: AtomicU64::new(0),
            skipped: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        }
    }

    /// Use the fast encoder if it can be built from `json` and gives the `wanted` ids of every text.
    pub(super) fn try_fast(
        &mut self,
        json: Value,
        added: &[(u32, AddedToken)],
        wanted: &[(String, Tokens)],
    ) {
        match FastEncoder::build(json, added).and_then(|fast| agree(&fast, wanted).map(|()| fast)) {
            Ok(fast) => {
                self.fast = Some(fast);
                *self.is_fast.get_mut() = true;
            }
            Err(reason) => self.stay(reason),
        }
    }

    /// Stay with the reference, and say why.
    pub(super) fn stay(&mut self, reason: impl Into<String>) {
        *self.reason.get_mut() = Some(reason.into());
    }

    /// What decodes, and knows the vocabulary.
    pub(super) fn reference(&self) -> &Reference {
        &self.reference
    }

    /// Token ids of `text`, without special tokens around it.
    ///
    /// # Errors
    /// `Error::InvalidArgument` if the tokenizer refuses the text.
    pub(super) fn encode(&self, text: &str) -> Result<Tokens> {
        if let Some(fast) = self.fast()
            && !text.is_empty()
        {
            match fast.encode(text) {
                Ok(ids) => return Ok(ids),
                Err(Fault::Refused) => {}
                Err(Fault::Panicked) => self.turn_off("fastokens panicked; see the log"),
            }
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
        self.encode_by_reference(text, false)
    }

    /// Token ids of `text` by the reference.
    ///
    /// # Errors
    /// `Error::InvalidArgument` if the tokenizer refuses the text.
    pub(super) fn encode_by_reference(&self, text: &str, adds_special: bool) -> Result<Tokens> {
        // A pattern that backtracks too long panics in its engine; nothing of the tokenizer changes meanwhile.
        let encode = AssertUnwindSafe(|| self.reference.encode_fast(text, adds_special));
        let encoding = catch_unwind(encode)
            .map_err(|_| Error::invalid("the tokenizer panicked on this text; see the log"))?;
        let encoding = encoding.map_err(|error| Error::invalid(format!("tokenizer: {error}")))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// A number that changes when ids may: what was remembered before is not to be used after.
    pub(super) fn generation(&self) -> u64 {
        u64::from(self.is_fast.load(Ordering::Relaxed))
    }

    /// Which encoder is used, and what its checks found.
    pub(super) fn report(&self) -> EncoderReport {
        EncoderReport {
            is_fast: self.fast().is_some(),
            reason: self.reason.lock().clone(),
            checks_total: self.checks.load(Ordering::Relaxed),
            mismatches_total: self.mismatches.load(Ordering::Relaxed),
            skipped_total: self.skipped.load(Ordering::Relaxed),
            refused_total: self.refused.load(Ordering::Relaxed),
        }
    }

    /// A prompt was encoded: one in [`SAMPLE_EVERY`] is encoded again, on a thread of its own.
    pub(super) fn sample(self: &Arc<Self>, text: &str, ids: &[u32]) {
        let number = self.prompts.fetch_add(1, Ordering::Relaxed);
        if number % SAMPLE_EVERY != SAMPLE_EVERY - 1 {
            return;
        }
        if text.len() > SAMPLE_BYTES_MAX || self.is_checking.swap(true, Ordering::Relaxed) {
            self.skipped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let (own, text, ids) = (Arc::clone(self), text.to_owned(), ids.to_vec());
        let check = move || {
            #[cfg(target_os = "linux")]
            let _ = rustix::process::setpriority_process(
                Some(rustix::thread::gettid()),
                SAMPLE_NICENESS,
            );
            own.check(&text, &ids);
            own.is_checking.store(false, Ordering::Relaxed);
        };
        if thread::Builder::new().name("kvflash-sample".to_owned()).spawn(check).is_err() {
            self.is_checking.store(false, Ordering::Relaxed);
            self.skipped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Compare the ids of a prompt with the reference's; other ids end the use of the fast encoder.
    pub(super) fn check(&self, text: &str, ids: &[u32]) {
        // What the reference refuses has no ids to compare with.
        let Ok(wanted) = self.encode_by_reference(text, false) else {
            self.skipped.fetch_add(1, Ordering::Relaxed);
            return;
        };
        self.checks.fetch_add(1, Ordering::Relaxed);
        if ids == wanted {
            return;
        }
        self.mismatches.fetch_add(1, Ordering::Relaxed);
        let same = ids.iter().zip(&wanted).take_while(|(one, other)| one == other).count();
        // Lengths only: the text is a client's.
        tracing::error!(
            text_bytes = text.len(),
            ids = ids.len(),
            ids_wanted = wanted.len(),
            first_difference = same,
            is_fast = self.fast().is_some(),
            "a prompt's ids differ from those of the model's own tokenizer"
        );
        self.turn_off("the ids of a prompt differed from those of tokenizers");
    }

    fn fast(&self) -> Option<&FastEncoder> {
        self.fast.as_ref().filter(|_| self.is_fast.load(Ordering::Relaxed))
    }

    fn turn_off(&self, why: &str) {
        if self.is_fast.swap(false, Ordering::Relaxed) {
            tracing::error!(why, "the fast encoder of this model is turned off");
            *self.reason.lock() = Some(why.to_owned());
        }
    }
}

/// Whether the encoder gives every text the wanted ids, but for the few that it leaves to the reference.
fn agree(fast: &FastEncoder, wanted: &[(String, Tokens)]) -> Result<(), String> {
    let (total, mut refused, mut wrong) = (wanted.len(), 0, Vec::new());
    for (text, ids) in wanted {
        match fast.encode(text) {
            Ok(found) if found == *ids => {}
            Err(Fault::Refused) => refused += 1,
            Ok(_) | Err(Fault::Panicked) => wrong.push(text),
        }
    }
    if let Some(text) = wrong.first() {
        let start: String = text.chars().take(40).collect();
        return Err(format!(
            "different ids in {} of {total} test texts, first {start:?}",
            wrong.len()
        ));
    }
    if refused * REFUSED_SHARE > total {
        return Err(format!("it refuses {refused} of {total} test texts"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TINY: &[u8] = include_bytes!("../../../../tests/vectors/tiny-llama/tokenizer.json");

    /// Encoders of a small model, with this list of ids that are wanted of "hello world".
    fn encoders(wanted: impl Fn(Tokens) -> Tokens) -> Encoders {
        let reference = Reference::from_bytes(TINY).expect("a tokenizer");
        let mut encoders = Encoders::new(reference);
        let ids = encoders.encode("hello world").expect("ids");
        let added: Vec<_> = encoders.reference().get_added_tokens_decoder().into_iter().collect();
        let json = serde_json::from_slice(TINY).expect("JSON");
        encoders.try_fast(json, &added, &[("hello world".to_owned(), wanted(ids))]);
        encoders
    }

    #[test]
    fn other_ids_at_load_leave_the_reference() {
        let report = encoders(|ids| ids).report();
        assert_eq!((report.name(), report.reason), ("fastokens", None));
        let report = encoders(|ids| [&ids[..], &[1]].concat()).report();
        assert_eq!(report.name(), "tokenizers");
        let reason = report.reason.expect("a reason");
        assert!(reason.contains("different ids in 1 of 1 test texts"), "{reason}");
    }

    #[test]
    fn unbroken_words_have_the_reference_s_ids_and_are_not_remembered() {
        let encoders = encoders(|ids| ids);
        let text = "abcdefghij".repeat(1_000);
        let ids = encoders.encode(&text).expect("ids");
        assert_eq!(ids, encoders.encode_by_reference(&text, false).expect("ids"));
        assert_eq!((encoders.report().is_fast, encoders.report().refused_total), (true, 0));
    }

    #[test]
    fn a_mismatch_in_service_turns_the_fast_encoder_off() {
        let encoders = encoders(|ids| ids);
        let ids = encoders.encode("a prompt").expect("ids");
        let before = encoders.generation();
        encoders.check("a prompt", &ids);
        assert_eq!((encoders.report().checks_total, encoders.report().is_fast), (1, true));
        encoders.check("a prompt", &ids[1..]);
        let report = encoders.report();
        assert_eq!((report.checks_total, report.mismatches_total, report.is_fast), (2, 1, false));
        assert!(report.reason.is_some() && encoders.generation() != before);
        assert_eq!(encoders.encode("a prompt").expect("ids"), ids);
    }

    #[test]
    fn one_prompt_in_ten_thousand_is_due() {
        let encoders = Arc::new(encoders(|ids| ids));
        // As if a check were running: those that are due are counted.
        encoders.is_checking.store(true, Ordering::Relaxed);
        for _ in 0..3 * SAMPLE_EVERY - 1 {
            encoders.sample("a", &[]);
        }
        assert_eq!(encoders.report().skipped_total, 2);
        encoders.sample("a", &[]);
        assert_eq!(encoders.report().skipped_total, 3);
        // Long ones are not due even where nothing runs.
        encoders.is_checking.store(false, Ordering::Relaxed);
        encoders.prompts.store(SAMPLE_EVERY - 1, Ordering::Relaxed);
        encoders.sample(&"a".repeat(SAMPLE_BYTES_MAX + 1), &[]);
        assert_eq!((encoders.report().skipped_total, encoders.report().checks_total), (4, 0));
    }
}
