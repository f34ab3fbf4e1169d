//! A model's tokenizer behind the segment cache.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::{AddedToken, Tokenizer as Inner};

use super::config::FolderConfig;
use super::cut::{CutMode, Cutter, Layout, Segment, words};
use super::encoder::{EncoderReport, Encoders};
use super::hard::hard_texts;
use crate::cache::{CacheStats, ClockCache};
use crate::error::{Error, Result};

/// Token ids of one prompt.
pub type Tokens = Vec<u32>;

/// English text has about four bytes a token; a little less saves a second allocation.
const BYTES_PER_TOKEN: usize = 3;

/// What special tokens go around a text.
#[derive(Debug, PartialEq, Eq)]
enum Wrapping {
    /// These ids before and after, whatever the text.
    Fixed { prefix: Vec<u32>, suffix: Vec<u32> },
    /// Something else: such texts are tokenized and cached whole.
    Opaque,
}

/// In which surroundings a piece was tokenized: the same text may have other ids elsewhere.
#[derive(Debug, Clone, Copy)]
#[repr(u64)]
enum Context {
    /// At the start of the text, or anywhere if the tokenizer does not care.
    First = 0,
    /// After something else, for tokenizers that treat the start of the text specially.
    Later = 1,
    /// The whole text with the special tokens around it.
    Wrapped = 2,
}

/// Text to token ids and back, as the engine's own tokenizer does it.
///
/// # Consistency
/// Ids are those of the `tokenizers` crate, bit for bit, with the cache and without, and with the fast
/// encoder. Cuts are made only where [`CutMode`] says they are safe. A self-test at load compares both on
/// hard texts and refuses what it refutes; in service one prompt in 10,000 is compared.
///
/// # Source
/// Loading follows transformers' fast tokenizers: tokens of `tokenizer_config.json` are added,
/// its `add_bos_token` and `add_eos_token` outrank the post-processor, truncation and padding in
/// `tokenizer.json` are ignored (engines do not ask for them).
#[derive(Debug)]
pub struct Tokenizer {
    encoders: Arc<Encoders>,
    cutter: Cutter,
    wrapping: Wrapping,
    /// Ids of pieces.
    cache: ClockCache<Box<[u32]>>,
}

impl AsRef<Tokenizer> for Tokenizer {
    fn as_ref(&self) -> &Tokenizer {
        self
    }
}

impl Tokenizer {
    /// Load `tokenizer.json` and, if there, `tokenizer_config.json` from a model's folder.
    ///
    /// # Errors
    /// `Error::Config` naming the file that is missing or invalid.
    pub fn from_folder(folder: impl AsRef<Path>, cache_bytes: usize) -> Result<Self> {
        let folder = folder.as_ref();
        Self::load(folder, &FolderConfig::read(folder)?, cache_bytes)
    }

    /// Load with the folder's configuration already read.
    pub(super) fn load(folder: &Path, config: &FolderConfig, cache_bytes: usize) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        let invalid =
            |error: &dyn std::fmt::Display| Error::Config(format!("{}: {error}", path.display()));
        let text = fs::read_to_string(&path).map_err(|error| invalid(&error))?;
        // `from_bytes` is generic: its deserialisation would be compiled here once more.
        let inner = text.parse::<Inner>().map_err(|error| invalid(&error))?;
        let json = serde_json::from_str(&text).map_err(|error| invalid(&error))?;
        drop(text);
        let tokenizer =
            Self::build(inner, json, config, cache_bytes).map_err(|error| invalid(&error))?;
        let report = tokenizer.encoder();
        let (encoder, reason, cuts) = (report.name(), report.reason, tokenizer.cut_mode());
        tracing::info!(folder = %folder.display(), encoder, reason, ?cuts, "tokenizer loaded");
        Ok(tokenizer)
    }

    fn build(
        mut inner: Inner,
        json: Value,
        config: &FolderConfig,
        cache_bytes: usize,
    ) -> Result<Self> {
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| failed(&error))?;
        let has_conflict = add_tokens(&mut inner, config);
        let mut added: Vec<_> = inner.get_added_tokens_decoder().into_iter().collect();
        added.sort_unstable_by_key(|(id, _)| *id);
        let mut encoders = Encoders::new(inner);
        // A text that the model's own tokenizer refuses has no ids to compare with.
        let texts = hard_texts(encoders.reference(), &added).into_iter();
        let wanted: Vec<(String, Tokens)> =
            texts.filter_map(|text| encoders.encode(&text).ok().map(|ids| (text, ids))).collect();
        // A token known with two sets of flags is matched by rules of its own: no cuts then.
        let cutter = if has_conflict {
            encoders.stay("tokenizer_config.json changes the flags of tokens in tokenizer.json");
            Cutter::whole()
        } else {
            let layout = Layout::deserialize(&json).map_err(|error| failed(&error))?;
            encoders.try_fast(json, &added, &wanted);
            Cutter::plan(&layout, &added)
        };
        let mut tokenizer = Self {
            encoders: Arc::new(encoders),
            cutter,
            wrapping: Wrapping::Opaque,
            cache: ClockCache::new(cache_bytes),
        };
        tokenizer.wrapping = tokenizer.probe_wrapping(config)?;
        while tokenizer.cutter.mode() > CutMode::Whole && !tokenizer.agrees_on(&wanted)? {
            let refuted = std::mem::replace(&mut tokenizer.cutter, Cutter::whole());
            tokenizer.cutter = refuted.coarser();
        }
        Ok(tokenizer)
    }

    /// Token ids of `text`; with `add_special_tokens`, those around it (BOS, EOS) too.
    ///
    /// # Errors
    /// `Error::InvalidArgument` if the tokenizer refuses the text.
    ///
    /// # Cost
    /// Known pieces: a hash and a copy, some 0.1 us each. New ones take what the encoder takes: some 10 ns a
    /// character with the fast one, 500 ns with the other.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Tokens> {
        self.encode_within(text, add_special_tokens, usize::MAX).map(Option::unwrap_or_default)
    }

    /// As [`encode`](Self::encode), but `None` where more than `new_bytes` of the text are in no cache and
    /// would have to be tokenized. What was tokenized until then stays known.
    ///
    /// # Errors
    /// `Error::InvalidArgument` if the tokenizer refuses the text.
    pub fn encode_within(
        &self,
        text: &str,
        add_special_tokens: bool,
        new_bytes: usize,
    ) -> Result<Option<Tokens>> {
        let ids = Vec::with_capacity(text.len() / BYTES_PER_TOKEN + 8);
        let mut work = Work { ids, new_bytes };
        let done = match &self.wrapping {
            Wrapping::Opaque if add_special_tokens => {
                self.append_cached(text, Context::Wrapped, &mut work)
            }
            Wrapping::Fixed { prefix, suffix } if add_special_tokens => {
                work.ids.extend_from_slice(prefix);
                let done = self.append_sampled(text, &mut work);
                work.ids.extend_from_slice(suffix);
                done
            }
            _ => self.append_sampled(text, &mut work),
        };
        match done {
            Ok(()) => Ok(Some(work.ids)),
            Err(Stop::Costly) => Ok(None),
            Err(Stop::Failed(error)) => Err(error),
        }
    }

    /// Token ids of `text` by the `tokenizers` crate, without the cache and without cuts: what
    /// [`encode`](Self::encode) is measured against.
    ///
    /// # Errors
    /// `Error::InvalidArgument` if the tokenizer refuses the text.
    pub fn encode_uncached(&self, text: &str, add_special_tokens: bool) -> Result<Tokens> {
        match &self.wrapping {
            Wrapping::Fixed { prefix, suffix } if add_special_tokens => {
                let ids = self.encoders.encode_by_reference(text, false)?;
                Ok([prefix.as_slice(), &ids, suffix].concat())
            }
            _ => self.encoders.encode_by_reference(text, add_special_tokens),
        }
    }

    /// The text of `ids`; unknown ids are left out, as the engines do.
    ///
    /// # Errors
    /// `Error::InvalidArgument` if the tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
        self.encoders.reference().decode(ids, skip_special_tokens).map_err(|error| failed(&error))
    }

    /// The id of a token given by its text in the vocabulary.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.encoders.reference().token_to_id(token)
    }

    /// Number of tokens, added ones included.
    pub fn vocabulary_size(&self) -> usize {
        self.encoders.reference().get_vocab_size(true)
    }

    /// How finely texts are cut for the cache.
    pub fn cut_mode(&self) -> CutMode {
        self.cutter.mode()
    }

    /// Which encoder makes the ids, and what its checks found.
    pub fn encoder(&self) -> EncoderReport {
        self.encoders.report()
    }

    /// A number that changes when a check has turned the fast encoder off: ids that were remembered before may
    /// be wrong.
    pub fn generation(&self) -> u64 {
        self.encoders.generation()
    }

    /// What the cache has done so far.
    pub fn cache_stats(&self) -> CacheStats {
        self.cache.stats()
    }

    fn append_sampled(&self, text: &str, work: &mut Work) -> Result<(), Stop> {
        let before = work.ids.len();
        self.append(text, work)?;
        self.encoders.sample(text, &work.ids[before..]);
        Ok(())
    }

    fn append(&self, text: &str, work: &mut Work) -> Result<(), Stop> {
        if text.is_empty() || self.cache.is_off() {
            work.spend(text)?;
            work.ids.extend_from_slice(&self.encoders.encode(text)?);
            return Ok(());
        }
        self.cutter.visit(text, |segment| match segment {
            Segment::Token(id) => {
                work.ids.push(id);
                Ok(())
            }
            Segment::Piece { text, is_first } => {
                let context = if is_first { Context::First } else { Context::Later };
                self.append_cached(text, context, work)
            }
        })
    }

    fn append_cached(&self, piece: &str, context: Context, work: &mut Work) -> Result<(), Stop> {
        // Ids of another encoder are not found.
        let kind = context as u64 | self.generation() << 8;
        let key = self.cache.key(piece.as_bytes(), kind);
        let mut found = || self.cache.find(key, |ids| work.ids.extend_from_slice(ids));
        if !self.cache.is_off() && found().is_some() {
            return Ok(());
        }
        work.spend(piece)?;
        let ids = self.encode_piece(piece, context)?;
        work.ids.extend_from_slice(&ids);
        self.cache.insert(key, ids.into());
        Ok(())
    }

    fn encode_piece(&self, piece: &str, context: Context) -> Result<Tokens> {
        match (context, self.cutter.guard()) {
            (Context::Wrapped, _) => self.encoders.encode_by_reference(piece, true),
            (Context::Later, Some((guard, id))) => {
                let mut ids = self.encoders.encode(&[guard, piece].concat())?;
                debug_assert_eq!(ids.first(), Some(&id), "the guard must stay a token of its own");
                ids.remove(0);
                Ok(ids)
            }
            _ => self.encoders.encode(piece),
        }
    }

    /// What stands around a text: as configured, or else found out by trying.
    fn probe_wrapping(&self, config: &FolderConfig) -> Result<Wrapping> {
        if config.add_bos_token.is_some() || config.add_eos_token.is_some() {
            let id = |is_wanted: Option<bool>, name| {
                let token = config.named_token(name).filter(|_| is_wanted == Some(true));
                token.and_then(|token| self.token_to_id(token)).into_iter().collect()
            };
            return Ok(Wrapping::Fixed {
                prefix: id(config.add_bos_token, "bos_token"),
                suffix: id(config.add_eos_token, "eos_token"),
            });
        }
        let mut pairs = Vec::new();
        for text in ["a", "Hello world", "one, two. 345!", " x\n\ny ", "é"] {
            let ids = |adds_special| self.encoders.encode_by_reference(text, adds_special);
            pairs.push((ids(false)?, ids(true)?));
        }
        let (bare, full) = &pairs[0];
        let extra = full.len().saturating_sub(bare.len());
        // The first probe may fit at several places; the true one fits all probes.
        let fixed = (0..=extra).find_map(|at| {
            let (prefix, suffix) = (full.get(..at)?, full.get(at + bare.len()..)?);
            let fits = pairs.iter().all(|(bare, full)| [prefix, bare, suffix].concat() == *full);
            fits.then(|| Wrapping::Fixed { prefix: prefix.to_vec(), suffix: suffix.to_vec() })
        });
        Ok(fixed.unwrap_or(Wrapping::Opaque))
    }

    /// Whether cut texts have the `wanted` ids of the whole ones.
    fn agrees_on(&self, wanted: &[(String, Tokens)]) -> Result<bool> {
        for (text, wanted) in wanted {
            let mut ids = Vec::new();
            self.cutter.visit(text, |segment| {
                match segment {
                    Segment::Token(id) => ids.push(id),
                    Segment::Piece { text, .. } if self.cutter.mode() == CutMode::AtWords => {
                        for word in words(text) {
                            ids.extend(self.encoders.encode(word)?);
                        }
                    }
                    Segment::Piece { text, is_first } => {
                        let context = if is_first { Context::First } else { Context::Later };
                        ids.extend(self.encode_piece(text, context)?);
                    }
                }
                Ok::<(), Error>(())
            })?;
            if ids != *wanted {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Tokens so far, and how much may still be tokenized.
struct Work {
    ids: Tokens,
    new_bytes: usize,
}

impl Work {
    /// This text is new.
    ///
    /// # Errors
    /// [`Stop::Costly`] where it is more than is left.
    fn spend(&mut self, text: &str) -> Result<(), Stop> {
        self.new_bytes = self.new_bytes.checked_sub(text.len()).ok_or(Stop::Costly)?;
        Ok(())
    }
}

/// Why a text is not tokenized.
enum Stop {
    /// It has more new text than was allowed.
    Costly,
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

fn failed(error: &dyn std::fmt::Display) -> Error {
    Error::invalid(format!("tokenizer: {error}"))
}

/// Add the tokens that only the configuration knows; says whether one contradicts the file.
fn add_tokens(inner: &mut Inner, config: &FolderConfig) -> bool {
    let known = inner.get_added_tokens_decoder();
    let find = |content: &str| known.values().find(|token| token.content == content);
    let mut has_conflict = false;
    let mut fresh: Vec<AddedToken> = Vec::new();
    for token in &config.added_tokens {
        match find(&token.content) {
            Some(other) if other == token => continue,
            Some(_) => has_conflict = true,
            None => {}
        }
        fresh.push(token.clone());
    }
    let named = config.named_tokens.iter().map(|(_, content)| content);
    for content in named.chain(&config.extra_tokens) {
        let is_new =
            find(content).is_none() && !fresh.iter().any(|token| token.content == *content);
        if is_new {
            fresh.push(AddedToken::from(content.clone(), true));
        }
    }
    if !fresh.is_empty() {
        inner.add_tokens(&fresh);
    }
    has_conflict
}
