//! From a worker's tokens to the text that a client may see, and the end of it.

use std::sync::Arc;

use kvflash_core::error::Result;
use kvflash_core::text::{Detokenizer, Tokenizer};

use super::item::{Finish, Item};
use super::stop::StopStrings;
use super::texts::ModelText;
use crate::gateway::generation::{Generation, Limits};

/// A tokenizer that lives as long as somebody writes with it.
#[derive(Debug)]
struct Shared(Arc<ModelText>);

impl AsRef<Tokenizer> for Shared {
    fn as_ref(&self) -> &Tokenizer {
        &self.0.model.tokenizer
    }
}

/// Why the text is over, in OpenAI's words.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Ending {
    pub reason: String,
    /// The stop string or token that ended it.
    pub stop_reason: Option<serde_json::Value>,
}

impl Ending {
    /// No string or token ended it.
    pub fn plain(reason: &str) -> Self {
        Self { reason: reason.to_owned(), stop_reason: None }
    }
}

/// Writes one answer.
///
/// # Consistency
/// What is given out is never taken back: no half character, nothing of a stop string, nothing behind
/// the end. All pieces together are the text of all tokens before the end, decoded at once.
#[derive(Debug)]
pub(crate) struct Writing {
    detokenizer: Detokenizer<Shared>,
    stop: StopStrings,
    limits: Limits,
    text: Arc<ModelText>,
    /// Special tokens that are in the text all the same.
    shown: Vec<(u32, &'static str)>,
    /// Tokens generated so far.
    pub tokens: u64,
    pub ending: Option<Ending>,
}

impl Writing {
    pub fn new(text: Arc<ModelText>, generation: &Generation) -> Self {
        let limits = generation.limits.clone();
        Self {
            detokenizer: Detokenizer::new(
                Shared(Arc::clone(&text)),
                !generation.keeps_special_tokens,
            ),
            stop: StopStrings::new(limits.stop.clone(), limits.is_stop_included),
            limits,
            text,
            shown: Vec::new(),
            tokens: 0,
            ending: None,
        }
    }

    /// The same, with these tags in the text even where they are special tokens.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn showing(mut self, tags: &[&'static str]) -> Result<Self> {
        let tokenizer = &self.text.model.tokenizer;
        for tag in tags {
            if let Some(id) = tokenizer.token_to_id(tag)
                && tokenizer.decode(&[id], true)?.is_empty()
            {
                self.shown.push((id, tag));
            }
        }
        Ok(self)
    }

    /// Take an item; the text that may be given out with it.
    ///
    /// # Errors
    /// `InvalidArgument` if the tokenizer's decoder fails.
    pub fn take(&mut self, item: &Item) -> Result<String> {
        let mut out = String::new();
        if item.token_ids().is_empty()
            && let Some(text) = &item.text
        {
            self.scan(text.clone(), &mut out);
        }
        for id in item.token_ids() {
            if self.ending.is_some() {
                break;
            }
            self.token(*id, &mut out)?;
        }
        if self.ending.is_none()
            && let Some(finish) = item.finish()
        {
            let mut ending = Ending::plain(match &finish {
                Finish::Stop => "stop",
                Finish::Length => "length",
                Finish::Other(word) => word,
            });
            ending.stop_reason.clone_from(&item.stop_reason);
            self.finish(ending, &mut out)?;
        }
        Ok(out)
    }

    /// The worker has nothing more: the rest of the text.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn end(&mut self) -> Result<String> {
        let mut out = String::new();
        if self.ending.is_none() {
            self.finish(Ending::plain("stop"), &mut out)?;
        }
        Ok(out)
    }

    fn token(&mut self, id: u32, out: &mut String) -> Result<()> {
        self.tokens += 1;
        let may_stop = self.tokens > self.limits.min_tokens;
        if may_stop && self.limits.stop_token_ids.contains(&id) {
            let stop_reason = Some(id.into());
            return self.finish(Ending { stop_reason, ..Ending::plain("stop") }, out);
        }
        if may_stop && !self.limits.ignore_eos && self.text.eos_token_ids.contains(&id) {
            return self.finish(Ending::plain("stop"), out);
        }
        let piece = match self.shown.iter().find(|(shown, _)| *shown == id) {
            Some((_, tag)) => self.detokenizer.finish()? + tag,
            None => self.detokenizer.push(id)?,
        };
        if may_stop {
            self.scan(piece, out);
        } else {
            out.push_str(&self.stop.pass(&piece));
        }
        if self.ending.is_none() && self.limits.max_tokens == Some(self.tokens) {
            self.finish(Ending::plain("length"), out)?;
        }
        Ok(())
    }

    fn scan(&mut self, piece: String, out: &mut String) {
        let scanned = self.stop.scan(piece);
        out.push_str(&scanned.text);
        if let Some(found) = scanned.found {
            self.ending = Some(Ending { stop_reason: Some(found.into()), ..Ending::plain("stop") });
        }
    }

    /// The text is over, unless what was held back ends it in another way.
    fn finish(&mut self, ending: Ending, out: &mut String) -> Result<()> {
        let rest = self.detokenizer.finish()?;
        if self.tokens > self.limits.min_tokens {
            self.scan(rest, out);
        } else {
            out.push_str(&self.stop.pass(&rest));
        }
        if self.ending.is_none() {
            out.push_str(&self.stop.finish());
            self.ending = Some(ending);
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;
    use std::sync::LazyLock;

    use serde_json::json;

    use super::*;

    static TINY: LazyLock<Arc<ModelText>> = LazyLock::new(|| {
        Arc::new(ModelText::load(Path::new("../../tests/vectors/tiny-llama"), 1 << 20).unwrap())
    });

    fn model() -> Arc<ModelText> {
        Arc::clone(&TINY)
    }

    fn item(item: serde_json::Value) -> Item {
        Item::parse(&rmp_serde::to_vec_named(&item).unwrap()).unwrap()
    }

    /// The pieces of an answer whose tokens come `at_once` an item, and its end.
    fn write(ids: &[u32], at_once: usize, limits: Limits) -> (Vec<String>, Ending, u64) {
        let generation = Generation { limits, ..Generation::default() };
        let mut writing = Writing::new(model(), &generation);
        let mut pieces = Vec::new();
        for ids in ids.chunks(at_once) {
            pieces.push(writing.take(&item(json!({ "token_ids": ids }))).unwrap());
            if writing.ending.is_some() {
                break;
            }
        }
        pieces.push(writing.end().unwrap());
        (pieces, writing.ending.unwrap(), writing.tokens)
    }

    #[test]
    fn text_comes_in_whole_characters_however_the_tokens_are_cut() {
        let model = model();
        let text = "Grüße, \u{4f60}\u{597d} \u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467} and so on";
        let ids = model.model.tokenizer.encode(text, false).unwrap();
        let wanted = model.model.tokenizer.decode(&ids, true).unwrap();
        assert!(ids.len() > 12, "the text must be cut within characters: {}", ids.len());
        for at_once in 1..=ids.len() {
            let (pieces, ending, tokens) = write(&ids, at_once, Limits::default());
            assert_eq!(pieces.concat(), wanted, "{at_once} at once");
            assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')), "{pieces:?}");
            assert_eq!((ending.reason.as_str(), tokens), ("stop", ids.len() as u64));
        }
    }

    #[test]
    fn a_stop_string_over_several_tokens_ends_the_text_before_it() {
        let ids = model().model.tokenizer.encode("one two three four five", false).unwrap();
        for at_once in 1..=ids.len() {
            let limits = Limits { stop: vec!["hree fo".into()], ..Limits::default() };
            let (pieces, ending, _) = write(&ids, at_once, limits);
            assert_eq!(pieces.concat(), "one two t", "{at_once} at once");
            assert_eq!(ending.stop_reason, Some(json!("hree fo")));
        }
        let limits = Limits { stop: vec!["one".into()], min_tokens: 1_000, ..Limits::default() };
        assert_eq!(write(&ids, 1, limits).0.concat(), "one two three four five");
    }

    #[test]
    fn the_limit_of_tokens_holds_whatever_the_worker_sends() {
        let ids = model().model.tokenizer.encode("one two three four five", false).unwrap();
        for at_once in 1..=ids.len() {
            let limits = Limits { max_tokens: Some(3), ..Limits::default() };
            let (_, ending, tokens) = write(&ids, at_once, limits);
            assert_eq!((ending.reason.as_str(), tokens), ("length", 3));
        }
    }

    #[test]
    fn tags_are_in_the_text_where_they_are_special_tokens() {
        let tiny = Path::new("../../tests/vectors/tiny-llama");
        let folder = std::env::temp_dir().join(format!("kvflash-writing-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let file = std::fs::read(tiny.join("tokenizer.json")).unwrap();
        let mut tokenizer: serde_json::Value = serde_json::from_slice(&file).unwrap();
        let id = model().model.tokenizer.vocabulary_size();
        for (at, tag) in ["[TOOL_CALLS]", "[ARGS]"].into_iter().enumerate() {
            let token = json!({
                "id": id + at, "content": tag, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true,
            });
            tokenizer["added_tokens"].as_array_mut().unwrap().push(token);
        }
        std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let text = Arc::new(ModelText::load(&folder, 1 << 20).unwrap());
        std::fs::remove_dir_all(&folder).unwrap();
        let ids = text.model.tokenizer.encode("Say[TOOL_CALLS]one[ARGS]{}", false).unwrap();
        for (tags, wanted) in [
            (&[][..], "Sayone{}"),
            (&["[TOOL_CALLS]", "Say", "[MISSING]"], "Say[TOOL_CALLS]one{}"),
            (&["[TOOL_CALLS]", "[ARGS]"], "Say[TOOL_CALLS]one[ARGS]{}"),
        ] {
            let writing = Writing::new(Arc::clone(&text), &Generation::default());
            let mut writing = writing.showing(tags).unwrap();
            let mut said = writing.take(&item(json!({ "token_ids": ids }))).unwrap();
            said.push_str(&writing.end().unwrap());
            assert_eq!(said, wanted);
        }
    }

    #[test]
    fn tokens_that_end_an_answer_leave_no_text() {
        let model = model();
        let eos = *model.eos_token_ids.first().unwrap();
        let mut ids = model.model.tokenizer.encode("one two", false).unwrap();
        let (tail, before) = (ids.clone(), ids.len() as u64);
        ids.push(eos);
        ids.extend(&tail);
        let (pieces, ending, tokens) = write(&ids, 1, Limits::default());
        assert_eq!((pieces.concat().as_str(), tokens), ("one two", before + 1));
        assert_eq!(ending, Ending::plain("stop"));
        let limits = Limits { ignore_eos: true, ..Limits::default() };
        assert!(write(&ids, 1, limits).0.concat().len() > "one two".len());
        let limits = Limits { min_tokens: before + 1, ..Limits::default() };
        assert!(write(&ids, 1, limits).0.concat().len() > "one two".len());
        let limits = Limits { stop_token_ids: vec![tail[1]], ..Limits::default() };
        let (_, ending, tokens) = write(&tail, 1, limits);
        assert_eq!((ending.stop_reason, tokens), (Some(json!(tail[1])), 2));
    }
}
