//! A model's tokenizer behind the segment cache.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use tokenizers::{AddedToken, Tokenizer as Inner};

use super::cache::{CacheOptions, CacheStats, Context, Key, PieceCache};
use super::config::FolderConfig;
use super::cut::{CutMode, Cutter, Layout, Segment, words};
use crate::error::{Error, Result};

/// Token ids of one prompt.
pub type Tokens = Vec<u32>;

/// English text has about four bytes a token; a little less saves a second allocation.
const BYTES_PER_TOKEN: usize = 3;

/// How many added tokens the self-test tries: the first ones are the ones templates use.
const PROBED_TOKENS_MAX: usize = 48;

/// Longer words are not kept: they seldom come again.
const WORD_BYTES_MAX: usize = 48;

/// So many words of a piece are learned. One by one they cost twice what they cost together, and
/// words that nobody says again push out others.
const NEW_WORDS_MAX: usize = 16;

/// The words' part of the cache's memory: one in so many bytes.
const WORDS_SHARE: usize = 8;

/// What special tokens go around a text.
#[derive(Debug, PartialEq, Eq)]
enum Wrapping {
    /// These ids before and after, whatever the text.
    Fixed { prefix: Vec<u32>, suffix: Vec<u32> },
    /// Something else: such texts are tokenized and cached whole.
    Opaque,
}

/// Text to token ids and back, as the engine's own tokenizer does it.
///
/// # Consistency
/// Ids are the same with and without the cache, bit for bit: cuts are made only where
/// [`CutMode`] says they are safe, and a self-test at load refuses what it can refute.
///
/// # Source
/// Loading follows transformers' fast tokenizers: tokens of `tokenizer_config.json` are added,
/// its `add_bos_token` and `add_eos_token` outrank the post-processor, truncation and padding in
/// `tokenizer.json` are ignored (engines do not ask for them).
#[derive(Debug)]
pub struct Tokenizer {
    inner: Inner,
    cutter: Cutter,
    wrapping: Wrapping,
    cache: PieceCache,
    /// Of pieces that are new, most words are not.
    words: PieceCache,
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
    pub fn from_folder(folder: impl AsRef<Path>, options: CacheOptions) -> Result<Self> {
        let folder = folder.as_ref();
        Self::load(folder, &FolderConfig::read(folder)?, options)
    }

    /// Load with the folder's configuration already read.
    pub(super) fn load(
        folder: &Path,
        config: &FolderConfig,
        options: CacheOptions,
    ) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        let invalid =
            |error: &dyn std::fmt::Display| Error::Config(format!("{}: {error}", path.display()));
        let bytes = fs::read(&path).map_err(|error| invalid(&error))?;
        let layout = serde_json::from_slice(&bytes).map_err(|error| invalid(&error))?;
        let inner = Inner::from_bytes(&bytes).map_err(|error| invalid(&error))?;
        Self::build(inner, &layout, config, options).map_err(|error| invalid(&error))
    }

    fn build(
        mut inner: Inner,
        layout: &Layout,
        config: &FolderConfig,
        options: CacheOptions,
    ) -> Result<Self> {
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| failed(&error))?;
        let has_conflict = add_tokens(&mut inner, config);
        let mut added: Vec<_> = inner.get_added_tokens_decoder().into_iter().collect();
        added.sort_unstable_by_key(|(id, _)| *id);
        // A token known with two sets of flags is matched by rules of its own: no cuts then.
        let cutter = if has_conflict { Cutter::whole() } else { Cutter::plan(layout, &added) };
        let off = || PieceCache::new(CacheOptions { capacity_bytes: 0 });
        let (wrapping, cache, words) = (Wrapping::Opaque, off(), off());
        let mut tokenizer = Self { inner, cutter, wrapping, cache, words };
        tokenizer.wrapping = tokenizer.probe_wrapping(config)?;
        let probes = probe_texts(&added);
        while tokenizer.cutter.mode() > CutMode::Whole && !tokenizer.agrees_on(&probes)? {
            let refuted = std::mem::replace(&mut tokenizer.cutter, Cutter::whole());
            tokenizer.cutter = refuted.coarser();
        }
        let of_words = match tokenizer.cutter.mode() {
            CutMode::AtWords => options.capacity_bytes / WORDS_SHARE,
            _ => 0,
        };
        let rest = options.capacity_bytes - of_words;
        tokenizer.cache = PieceCache::new(CacheOptions { capacity_bytes: rest });
        tokenizer.words = PieceCache::new(CacheOptions { capacity_bytes: of_words });
        Ok(tokenizer)
    }

    /// Token ids of `text`; with `add_special_tokens`, those around it (BOS, EOS) too.
    ///
    /// # Errors
    /// `Error::InvalidArgument` if the tokenizer refuses the text.
    ///
    /// # Cost
    /// Known pieces: a hash and a copy, some 0.1 us each. New ones: the same for each known word;
    /// for new words what the tokenizer takes, in the order of a microsecond per token.
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
            Wrapping::Fixed { prefix, suffix } if add_special_tokens => {
                work.ids.extend_from_slice(prefix);
                let done = self.append(text, &mut work);
                work.ids.extend_from_slice(suffix);
                done
            }
            Wrapping::Opaque if add_special_tokens => {
                self.append_cached(text, Context::Wrapped, &mut work)
            }
            _ => self.append(text, &mut work),
        };
        match done {
            Ok(()) => Ok(Some(work.ids)),
            Err(Stop::Costly) => Ok(None),
            Err(Stop::Failed(error)) => Err(error),
        }
    }

    /// Token ids of `text` without the cache and without cuts: what [`encode`](Self::encode) is
    /// measured against.
    ///
    /// # Errors
    /// `Error::InvalidArgument` if the tokenizer refuses the text.
    pub fn encode_uncached(&self, text: &str, add_special_tokens: bool) -> Result<Tokens> {
        match &self.wrapping {
            Wrapping::Fixed { prefix, suffix } if add_special_tokens => {
                let ids = self.plain(text, false)?;
                Ok([prefix.as_slice(), &ids, suffix].concat())
            }
            _ => self.plain(text, add_special_tokens),
        }
    }

    /// The text of `ids`; unknown ids are left out, as the engines do.
    ///
    /// # Errors
    /// `Error::InvalidArgument` if the tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
        self.inner.decode(ids, skip_special_tokens).map_err(|error| failed(&error))
    }

    /// The id of a token given by its text in the vocabulary.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Number of tokens, added ones included.
    pub fn vocabulary_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// How finely texts are cut for the cache.
    pub fn cut_mode(&self) -> CutMode {
        self.cutter.mode()
    }

    /// What the cache has done so far: pieces found and not found; bytes with those of words.
    pub fn cache_stats(&self) -> CacheStats {
        let (pieces, words) = (self.cache.stats(), self.words.stats());
        CacheStats {
            evictions_total: pieces.evictions_total + words.evictions_total,
            held_bytes: pieces.held_bytes + words.held_bytes,
            capacity_bytes: pieces.capacity_bytes + words.capacity_bytes,
            ..pieces
        }
    }

    fn append(&self, text: &str, work: &mut Work) -> Result<(), Stop> {
        if text.is_empty() || self.cache.is_off() {
            work.spend(text)?;
            work.ids.extend_from_slice(&self.plain(text, false)?);
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
        let key = Key::new(piece, context);
        if !self.cache.is_off() && self.cache.append(key, &mut work.ids) {
            return Ok(());
        }
        let before = work.ids.len();
        if context == Context::First && !self.words.is_off() {
            self.append_words(piece, work)?;
        } else {
            work.spend(piece)?;
            work.ids.extend_from_slice(&self.encode_piece(piece, context)?);
        }
        if !self.cache.is_off() {
            self.cache.insert(key, &work.ids[before..]);
        }
        Ok(())
    }

    /// Tokenize a new piece word by word, for most words are known. Beyond [`NEW_WORDS_MAX`], those
    /// that are not go through the tokenizer together.
    fn append_words(&self, piece: &str, work: &mut Work) -> Result<(), Stop> {
        let (mut known, mut learned) = (Tokens::new(), 0);
        // What is not tokenized yet, and how far the words have come.
        let (mut from, mut to) = (0, 0);
        for word in words(piece) {
            let start = to;
            to += word.len();
            if word.len() > WORD_BYTES_MAX {
                continue;
            }
            let key = Key::new(word, Context::First);
            known.clear();
            if !self.words.append(key, &mut known) {
                if learned == NEW_WORDS_MAX {
                    continue;
                }
                learned += 1;
                work.spend(word)?;
                known = self.plain(word, false)?;
                self.words.insert(key, &known);
            }
            if from < start {
                work.spend(&piece[from..start])?;
                work.ids.extend_from_slice(&self.plain(&piece[from..start], false)?);
            }
            work.ids.extend_from_slice(&known);
            from = to;
        }
        if from < to {
            work.spend(&piece[from..])?;
            work.ids.extend_from_slice(&self.plain(&piece[from..], false)?);
        }
        Ok(())
    }

    fn encode_piece(&self, piece: &str, context: Context) -> Result<Tokens> {
        match (context, self.cutter.guard()) {
            (Context::Later, Some((guard, id))) => {
                let mut ids = self.plain(&[guard, piece].concat(), false)?;
                debug_assert_eq!(ids.first(), Some(&id), "the guard must stay a token of its own");
                ids.remove(0);
                Ok(ids)
            }
            (context, _) => self.plain(piece, context == Context::Wrapped),
        }
    }

    fn plain(&self, text: &str, add_special_tokens: bool) -> Result<Tokens> {
        // A pattern that backtracks too long panics in its engine; nothing of the tokenizer changes meanwhile.
        let encode = AssertUnwindSafe(|| self.inner.encode_fast(text, add_special_tokens));
        let encoding = catch_unwind(encode)
            .map_err(|_| Error::invalid("tokenizer: it panicked at this text; see the log"))?;
        Ok(encoding.map_err(|error| failed(&error))?.get_ids().to_vec())
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
            pairs.push((self.plain(text, false)?, self.plain(text, true)?));
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

    fn agrees_on(&self, probes: &[String]) -> Result<bool> {
        for text in probes {
            let mut ids = Vec::new();
            self.cutter.visit(text, |segment| {
                match segment {
                    Segment::Token(id) => ids.push(id),
                    Segment::Piece { text, .. } if self.cutter.mode() == CutMode::AtWords => {
                        for word in words(text) {
                            ids.extend(self.plain(word, false)?);
                        }
                    }
                    Segment::Piece { text, is_first } => {
                        let context = if is_first { Context::First } else { Context::Later };
                        ids.extend(self.encode_piece(text, context)?);
                    }
                }
                Ok::<(), Error>(())
            })?;
            if ids != self.plain(text, false)? {
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

/// Texts that a wrong cut would show on: tokens among words, whitespace and each other.
fn probe_texts(added: &[(u32, AddedToken)]) -> Vec<String> {
    let sentence = "It's 12,345 o'clock, don't you know?\n\n\tCafé  naïve \u{4f60}\u{597d} (x_y) = \
                    f(2);\r\n  THEY'LL go -- now... \u{1f600} e\u{301}tude\u{a0}and so\n";
    let mut texts = vec![sentence.repeat(24), format!(" {sentence}"), "  \n".to_owned()];
    let flagged = |token: &AddedToken| token.lstrip || token.rstrip || token.normalized;
    let few = added.iter().take(PROBED_TOKENS_MAX);
    let odd = added.iter().skip(PROBED_TOKENS_MAX).filter(|(_, token)| flagged(token));
    for (_, token) in few.chain(odd.take(PROBED_TOKENS_MAX)) {
        let token = &token.content;
        texts.push(format!("{token}user\nHi there {token} {token}{token}\n\nyes{token}"));
        texts.push(format!(" a {token}\u{4f60} b\n{token}\n"));
    }
    texts
}
