//! Where a text may be cut so that its pieces, tokenized one by one, give the ids of the whole.
//!
//! Two kinds of places are safe:
//!
//! - **At added tokens that match the raw text** (`normalized: false`, which special tokens are).
//!   The `tokenizers` crate splits them out before anything else and treats what lies between them
//!   independently, but for one thing: whether a piece stands at the very start of the text. Where
//!   a pre-tokenizer may ask that, a later piece is tokenized behind a *guard* token whose id is
//!   then taken off again.
//! - **Between an ASCII letter and a following space or line feed**, and between any other visible
//!   ASCII character and a following space, if every stage of the pre-tokenizer is known never to let
//!   a match run over such a place nor to look across it, and one of them is known to end a pre-token
//!   there. Models see one pre-token at a time.
//!
//! Whatever is not known to be safe is not done: the whole text is then one piece.

use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::Value;
use tokenizers::AddedToken;

/// A piece is cut at the first safe word boundary after this many bytes. Long enough that looking a
/// piece up costs far less than tokenizing it, short enough that texts that part ways share most.
const PIECE_BYTES: usize = 512;

/// The same so far into a text, where the pieces before it are most of what there is to share: each that is looked
/// up is some misses of the processor's caches.
const LONG_TEXT_BYTES: usize = 8 * PIECE_BYTES;
const LONG_PIECE_BYTES: usize = 4_096;

/// How finely text is cut for the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CutMode {
    /// Not at all: only whole texts that come again are found.
    Whole,
    /// At added tokens.
    AtTokens,
    /// At added tokens, and at word boundaries of long pieces between them.
    AtWords,
}

/// What the cutter needs to know from `tokenizer.json`.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(default)]
pub(super) struct Layout {
    normalizer: Value,
    pre_tokenizer: Value,
}

#[derive(Debug)]
struct CutToken {
    id: u32,
    eats_left: bool,
    eats_right: bool,
}

/// One stretch of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Segment<'a> {
    /// An added token, by its id.
    Token(u32),
    /// Text between added tokens.
    Piece {
        /// The text, never empty.
        text: &'a str,
        /// Whether to tokenize it as a text of its own; otherwise behind the guard.
        is_first: bool,
    },
}

/// The plan by which texts of one tokenizer are cut.
#[derive(Debug)]
pub(super) struct Cutter {
    mode: CutMode,
    matcher: Option<AhoCorasick>,
    tokens: Vec<CutToken>,
    guard: Option<(String, u32)>,
}

impl Cutter {
    /// One that does not cut.
    pub(super) fn whole() -> Self {
        Self { mode: CutMode::Whole, matcher: None, tokens: Vec::new(), guard: None }
    }

    /// Decide how the texts of this tokenizer may be cut.
    pub(super) fn plan(layout: &Layout, added: &[(u32, AddedToken)]) -> Self {
        Self::at_tokens(layout, added).unwrap_or_else(Self::whole)
    }

    /// `None` where cutting at tokens is not known to be safe.
    fn at_tokens(layout: &Layout, added: &[(u32, AddedToken)]) -> Option<Self> {
        let raw: Vec<_> = added.iter().filter(|(_, token)| !token.normalized).collect();
        let has_flags = raw.iter().any(|(_, token)| token.lstrip || token.rstrip);
        let has_space = raw.iter().any(|(_, token)| token.content.contains(char::is_whitespace));
        // Whether a single word ends here is a question to the neighbours; and a token that eats
        // whitespace may eat another token made of it.
        if raw.iter().any(|(_, token)| token.single_word) || (has_flags && has_space) {
            return None;
        }
        let guard = if may_ask_position(&layout.pre_tokenizer) {
            // With no token to cut at there is no second piece, and no need of a guard.
            (!raw.is_empty()).then(|| find_guard(&raw).ok_or(())).transpose().ok()?
        } else {
            None
        };
        let matcher = if raw.is_empty() {
            None
        } else {
            let patterns = raw.iter().map(|(_, token)| token.content.as_bytes());
            let mut builder = AhoCorasick::builder();
            builder.match_kind(MatchKind::LeftmostLongest);
            Some(builder.build(patterns).ok()?)
        };
        let tokens = raw
            .iter()
            .map(|(id, token)| CutToken {
                id: *id,
                eats_left: token.lstrip,
                eats_right: token.rstrip,
            })
            .collect();
        let at_words = guard.is_none() && words_are_safe(layout, added);
        let mode = match (at_words, matcher.is_some()) {
            (true, _) => CutMode::AtWords,
            (false, true) => CutMode::AtTokens,
            (false, false) => CutMode::Whole,
        };
        Some(Self { mode, matcher, tokens, guard })
    }

    /// The same plan without cuts at words; then without any.
    pub(super) fn coarser(mut self) -> Self {
        if self.mode == CutMode::AtWords && self.matcher.is_some() {
            self.mode = CutMode::AtTokens;
            return self;
        }
        Self::whole()
    }

    /// How finely this cuts.
    pub(super) fn mode(&self) -> CutMode {
        self.mode
    }

    /// The token to put before a piece that is not at the start of its text, with its id.
    pub(super) fn guard(&self) -> Option<(&str, u32)> {
        self.guard.as_ref().map(|(text, id)| (text.as_str(), *id))
    }

    /// Call `visit` with every segment of `text`, in order; stops at the first error.
    pub(super) fn visit<'a, E>(
        &self,
        text: &'a str,
        mut visit: impl FnMut(Segment<'a>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut done = 0;
        if self.mode >= CutMode::AtTokens
            && let Some(matcher) = &self.matcher
        {
            for found in matcher.find_iter(text) {
                let token = &self.tokens[found.pattern().as_usize()];
                let (mut start, mut end) = (found.start(), found.end());
                if token.eats_left {
                    start = done + text[done..start].trim_end().len();
                }
                if token.eats_right {
                    end = text.len() - text[end..].trim_start().len();
                }
                self.visit_words(&text[done..start], done == 0, &mut visit)?;
                visit(Segment::Token(token.id))?;
                done = end;
            }
        }
        self.visit_words(&text[done..], done == 0, &mut visit)
    }

    fn visit_words<'a, E>(
        &self,
        mut text: &'a str,
        is_first: bool,
        visit: &mut impl FnMut(Segment<'a>) -> Result<(), E>,
    ) -> Result<(), E> {
        // Only with a guard does it matter whether a piece is the first.
        let is_first = is_first || self.guard.is_none();
        if self.mode == CutMode::AtWords {
            let bytes = text.len();
            let size = |left: usize| match bytes - left < LONG_TEXT_BYTES {
                true => PIECE_BYTES,
                false => LONG_PIECE_BYTES,
            };
            while let Some(at) = word_end(text, size(text.len())) {
                let (piece, rest) = text.split_at(at);
                visit(Segment::Piece { text: piece, is_first })?;
                text = rest;
            }
        }
        if text.is_empty() { Ok(()) } else { visit(Segment::Piece { text, is_first }) }
    }
}

/// The first safe place at `from` or after it.
fn word_end(text: &str, from: usize) -> Option<usize> {
    let bytes = text.as_bytes();
    (from..bytes.len()).find(|&at| is_word_end(bytes[at - 1], bytes[at]))
}

fn is_word_end(last: u8, next: u8) -> bool {
    match next {
        b' ' => last.is_ascii_graphic(),
        b'\n' => last.is_ascii_alphabetic(),
        _ => false,
    }
}

/// The words of a piece that a cutter at words has cut, each with the whitespace before it.
pub(super) fn words(mut piece: &str) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        if piece.is_empty() {
            return None;
        }
        let (word, rest) = piece.split_at(word_end(piece, 1).unwrap_or(piece.len()));
        piece = rest;
        Some(word)
    })
}

/// A plain token that no longer token starts with, so that nothing after it changes its match.
fn find_guard(raw: &[&(u32, AddedToken)]) -> Option<(String, u32)> {
    let is_alone = |content: &str| {
        !raw.iter().any(|(_, other)| {
            other.content.len() > content.len() && other.content.starts_with(content)
        })
    };
    raw.iter()
        .find(|(_, token)| !token.lstrip && !token.rstrip && is_alone(&token.content))
        .map(|(id, token)| (token.content.clone(), *id))
}

/// Whether this pre-tokenizer may ask if a piece is at the start of the text. Only those known not
/// to are trusted; Metaspace with `prepend_scheme: first` does.
fn may_ask_position(pre_tokenizer: &Value) -> bool {
    match kind(pre_tokenizer) {
        None => !pre_tokenizer.is_null(),
        Some("Sequence") => stages(pre_tokenizer).iter().any(may_ask_position),
        Some(
            "ByteLevel" | "Split" | "Digits" | "Punctuation" | "Whitespace" | "WhitespaceSplit"
            | "BertPreTokenizer" | "CharDelimiterSplit" | "UnicodeScripts",
        ) => false,
        Some(_) => true,
    }
}

fn kind(stage: &Value) -> Option<&str> {
    stage.get("type").and_then(Value::as_str)
}

fn stages(sequence: &Value) -> &[Value] {
    sequence.get("pretokenizers").and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// Whether text may be cut at the ends of words, as [`is_word_end`] has them.
fn words_are_safe(layout: &Layout, added: &[(u32, AddedToken)]) -> bool {
    let is_normalizer_safe = keeps_words(&layout.normalizer);
    // Tokens matched after normalization must neither span such a place nor eat whitespace at it.
    let are_tokens_safe = added.iter().filter(|(_, token)| token.normalized).all(|(_, token)| {
        let mut pairs = token.content.as_bytes().windows(2);
        let spans = pairs.any(|p| is_word_end(p[0], p[1]));
        !(token.lstrip || token.rstrip || token.single_word || spans)
    });
    // Raw tokens that eat whitespace are replayed by `visit` before words are looked at.
    is_normalizer_safe
        && are_tokens_safe
        && match kind(&layout.pre_tokenizer) {
            Some("Sequence") => {
                let all: Vec<_> = stages(&layout.pre_tokenizer).iter().map(judge).collect();
                all.iter().all(|judged| *judged != Stage::Unknown)
                    && all.contains(&Stage::EndsWords)
            }
            Some(_) => judge(&layout.pre_tokenizer) == Stage::EndsWords,
            None => false,
        }
}

/// Whether a normalizer leaves the ends of words alone, and what stands around them. NFC leaves a space, a line
/// feed and what precedes them alone; DeepSeek's sequence has no stage at all.
fn keeps_words(normalizer: &Value) -> bool {
    match kind(normalizer) {
        None => normalizer.is_null(),
        Some("Sequence") => {
            let stages = normalizer.get("normalizers").and_then(Value::as_array);
            stages.is_some_and(|stages| stages.iter().all(keeps_words))
        }
        Some(kind) => kind == "NFC",
    }
}

/// What a stage of a pre-tokenizer does at the end of a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Always ends a pre-token there.
    EndsWords,
    /// Matches nothing that holds such a place, and looks across none.
    Indifferent,
    Unknown,
}

fn judge(stage: &Value) -> Stage {
    let flag = |key| stage.get(key).and_then(Value::as_bool);
    match kind(stage) {
        // With a prefix space, the piece after a cut would get one too.
        Some("ByteLevel") => match (flag("add_prefix_space"), flag("use_regex")) {
            (Some(false), Some(false)) => Stage::Indifferent,
            (Some(false), _) => Stage::EndsWords,
            _ => Stage::Unknown,
        },
        Some("Digits") => Stage::Indifferent,
        Some("Split") => {
            let behavior = stage.get("behavior").and_then(Value::as_str);
            let pattern = stage.get("pattern").and_then(|pattern| pattern.get("Regex"));
            match (behavior, flag("invert"), pattern.and_then(Value::as_str)) {
                (Some("Isolated"), Some(false), Some(pattern)) => judge_pattern(pattern),
                _ => Stage::Unknown,
            }
        }
        _ => Stage::Unknown,
    }
}

/// Alternatives of published pre-tokenizer patterns. Each was checked to match no ASCII letter
/// followed by whitespace and no other visible character followed by a space (line feeds behind
/// punctuation some do match), and to look at nothing but what follows a run of whitespace.
///
/// An ordered choice of such alternatives has the same property: what matches at a place depends on
/// the text from there on only, and no match holds the cut. If `\s+` is among them the whitespace
/// after the cut always starts a match, so that a pre-token ends before it.
const KNOWN_ALTERNATIVES: &[&str] = &[
    // contractions
    r"'s",
    r"'t",
    r"'re",
    r"'ve",
    r"'m",
    r"'ll",
    r"'d",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"(?i:[sdmt]|ll|ve|re)",
    r"'(?i:[sdmt]|ll|ve|re)",
    // letters
    r" ?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?+\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"##,
    "[一-龥\u{3040}-ゟ゠-ヿ]+",
    // numbers
    r" ?\p{N}+",
    r"\p{N}",
    r"\p{N}+",
    r"\p{N}{1,3}",
    // the rest
    r" ?[^\s\p{L}\p{N}]+",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r" ?[\p{P}\p{S}]+[\r\n]*",
    // whitespace
    r"\s*[\r\n]+",
    r"\s*[\r\n]",
    r"\s+(?!\S)",
    r"\s+",
];

fn judge_pattern(pattern: &str) -> Stage {
    // DeepSeek's file has the characters themselves.
    let pattern = &pattern.replace('\r', r"\r").replace('\n', r"\n");
    let parts = alternatives(pattern);
    if !parts.iter().all(|part| KNOWN_ALTERNATIVES.contains(part)) {
        return Stage::Unknown;
    }
    if parts.contains(&r"\s+") { Stage::EndsWords } else { Stage::Indifferent }
}

/// The top-level alternatives of a regular expression.
fn alternatives(pattern: &str) -> Vec<&str> {
    let (mut parts, mut start) = (Vec::new(), 0);
    let (mut depth, mut is_class, mut is_escaped) = (0usize, false, false);
    for (at, character) in pattern.char_indices() {
        match character {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            ']' => is_class = false,
            _ if is_class => {}
            '[' => is_class = true,
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            '|' if depth == 0 => {
                parts.push(&pattern[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&pattern[start..]);
    parts
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

    fn segments(cutter: &Cutter, text: &str) -> Vec<String> {
        let mut seen = Vec::new();
        cutter
            .visit(text, |segment| {
                seen.push(match segment {
                    Segment::Token(id) => format!("#{id}"),
                    Segment::Piece { text, is_first: true } => text.to_owned(),
                    Segment::Piece { text, is_first: false } => format!("..{text}"),
                });
                Ok::<(), ()>(())
            })
            .expect("the visitor never fails");
        seen
    }

    #[test]
    fn knows_published_patterns_and_no_others() {
        assert_eq!(judge_pattern(LLAMA_3), Stage::EndsWords);
        assert_eq!(judge_pattern(r"\p{N}{1,3}"), Stage::Indifferent);
        assert_eq!(judge_pattern(r"\w+\s?|\s+"), Stage::Unknown);
        let literal = LLAMA_3.replace(r"\r", "\r").replace(r"\n", "\n");
        assert_eq!(judge_pattern(&literal), Stage::EndsWords);
        assert_eq!(alternatives(r"a|[|]|(b|c)\||d").len(), 4);
    }

    #[test]
    fn sequences_of_normalizers_are_as_safe_as_their_stages() {
        let sequence = |stages: Value| json!({"type": "Sequence", "normalizers": stages});
        let nfc = || json!({"type": "NFC"});
        for (normalizer, is_safe) in [
            (Value::Null, true),
            (nfc(), true),
            (sequence(json!([])), true),
            (sequence(json!([nfc(), sequence(json!([nfc()]))])), true),
            (sequence(json!([nfc(), {"type": "NFKC"}])), false),
            (json!({"type": "Sequence"}), false),
            (json!({"type": "Lowercase"}), false),
        ] {
            assert_eq!(keeps_words(&normalizer), is_safe, "{normalizer}");
        }
    }

    #[test]
    fn cuts_long_text_behind_words() {
        let split = json!({"type": "Split", "pattern": {"Regex": LLAMA_3},
                           "behavior": "Isolated", "invert": false});
        let byte_level =
            json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false});
        let pre_tokenizer = json!({"type": "Sequence", "pretokenizers": [split, byte_level]});
        let layout = Layout { pre_tokenizer, ..Layout::default() };
        let cutter = Cutter::plan(&layout, &[(9, AddedToken::from("<s>", true))]);
        assert_eq!(cutter.mode(), CutMode::AtWords);
        let text = format!("{}ab.\ncd <s> e", "x".repeat(PIECE_BYTES));
        let expected = [format!("{}ab.\ncd", "x".repeat(PIECE_BYTES)), " ".into()];
        assert_eq!(segments(&cutter, &text)[..2], expected);
        assert_eq!(segments(&cutter, &text)[2..], ["#9", " e"]);
        assert_eq!(cutter.coarser().mode(), CutMode::AtTokens);
        let spaced = AddedToken::from("ab cd", false);
        assert_eq!(Cutter::plan(&layout, &[(9, spaced)]).mode(), CutMode::Whole);
    }

    #[test]
    fn pieces_of_long_texts_are_longer_and_stay_where_they_are() {
        let split = json!({"type": "Split", "pattern": {"Regex": LLAMA_3},
                           "behavior": "Isolated", "invert": false});
        let layout = Layout { pre_tokenizer: split, ..Layout::default() };
        let cutter = Cutter::plan(&layout, &[]);
        let long = segments(&cutter, &"word ".repeat(4_000));
        assert!(long[..8].iter().all(|piece| piece.len() < PIECE_BYTES + 8));
        assert!(long[8..].iter().all(|piece| piece.len() <= LONG_PIECE_BYTES + 8));
        assert!(long.len() < 13, "{}", long.len());
        let longer = segments(&cutter, &"word ".repeat(6_000));
        assert_eq!(longer[..long.len() - 1], long[..long.len() - 1]);
    }

    #[test]
    fn words_end_where_every_known_pattern_ends_them() {
        let text = "It's 12,5 (so),\n x  y\u{a0}\u{e9} z;\nyes\n\nno";
        let expected = ["It's", " 12,5", " (so),\n x", "  y\u{a0}\u{e9} z;\nyes", "\n\nno"];
        assert_eq!(words(text).collect::<Vec<_>>(), expected);
        assert_eq!(words("").count(), 0);
    }

    #[test]
    fn guards_later_pieces_where_the_start_matters() {
        let pre_tokenizer = json!({"type": "Metaspace", "prepend_scheme": "first"});
        let layout = Layout { pre_tokenizer, ..Layout::default() };
        let tokens = [(1, AddedToken::from("<s>", true)), (2, AddedToken::from("<s>x", true))];
        let cutter = Cutter::plan(&layout, &tokens);
        assert_eq!(cutter.guard(), Some(("<s>x", 2)));
        assert_eq!(segments(&cutter, "a<s>b<s>xc"), ["a", "#1", "..b", "#2", "..c"]);
        let single = [(1, AddedToken::from("<s>", true).single_word(true))];
        assert_eq!(Cutter::plan(&layout, &single).mode(), CutMode::Whole);
    }

    #[test]
    fn tokens_that_eat_whitespace_are_replayed() {
        let token = AddedToken::from("<m>", true).lstrip(true).rstrip(true);
        let cutter = Cutter::plan(&Layout::default(), &[(3, token)]);
        assert_eq!(segments(&cutter, "a \n<m>  b  <m><m> "), ["a", "#3", "b", "#3", "#3"]);
    }
}
