//! The part of an answer that is reasoning, by the crate `reasoning-parser`.

use std::sync::LazyLock;

use reasoning_parser::{ParserFactory, ParserResult, ReasoningParser};

/// Longest tag, bytes; what is longer is text.
const MAX_TAG_BYTES: usize = 64;

static FACTORY: LazyLock<ParserFactory> = LazyLock::new(ParserFactory::new);

/// How a model marks its reasoning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReasoningFormat(String);

impl ReasoningFormat {
    /// All names, in alphabetical order.
    pub fn names() -> Vec<String> {
        FACTORY.list_parsers()
    }

    pub fn named(name: &str) -> Option<Self> {
        FACTORY.registry().has_parser(name).then(|| Self(name.to_owned()))
    }

    /// Whether its tags are special tokens, which texts are without otherwise.
    pub fn needs_special_tokens(&self) -> bool {
        self.parser().requires_special_tokens()
    }

    fn parser(&self) -> Box<dyn ReasoningParser> {
        FACTORY.registry().create_parser(&self.0).expect("its name was looked up")
    }

    /// A parser that knows how the prompt ends: a template may have opened or closed the reasoning there.
    fn parser_behind(&self, prompt_end: &str) -> Box<dyn ReasoningParser> {
        let fresh = self.parser();
        let prompt_end = prompt_end.trim_end();
        let Some(at) = prompt_end.rfind(opens) else { return fresh };
        let mut primed = self.parser();
        let parsed = primed.parse_reasoning_streaming_incremental(&prompt_end[at..]);
        let is_tag = parsed.is_ok_and(|parsed| parsed.is_empty())
            && primed.is_in_reasoning() != fresh.is_in_reasoning();
        if is_tag { primed } else { fresh }
    }
}

/// Text of which it is known what it is.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Split {
    pub reasoning: String,
    pub content: String,
}

impl Split {
    fn add(&mut self, parsed: ParserResult) {
        self.reasoning.push_str(&parsed.reasoning_text);
        self.content.push_str(&parsed.normal_text);
    }
}

/// Tells the reasoning of one answer from the rest.
///
/// # Consistency
/// However the text is cut, the same comes out: the crate's parsers miss tags that are cut, so they get each
/// tag whole and by itself. Only tags are left out.
pub(super) struct Reasoning {
    parser: Box<dyn ReasoningParser>,
    /// The begin of what may be a tag, at most [`MAX_TAG_BYTES`] and a character.
    held: String,
}

impl Reasoning {
    /// For an answer to a prompt that ends so.
    pub fn new(format: &ReasoningFormat, prompt_end: &str) -> Self {
        Self { parser: format.parser_behind(prompt_end), held: String::new() }
    }

    /// Take a piece of the text.
    pub fn push(&mut self, piece: &str) -> Split {
        let mut split = Split::default();
        self.held.push_str(piece);
        let held = std::mem::take(&mut self.held);
        let mut rest = held.as_str();
        while let Some(len) = unit(rest) {
            self.feed(&rest[..len], &mut split);
            rest = &rest[len..];
        }
        rest.clone_into(&mut self.held);
        split
    }

    /// The text is over: what was held back.
    pub fn finish(&mut self) -> Split {
        let mut split = Split::default();
        let held = std::mem::take(&mut self.held);
        self.feed(&held, &mut split);
        split.add(self.parser.flush().unwrap_or_default());
        split
    }

    fn feed(&mut self, text: &str, split: &mut Split) {
        if let Ok(parsed) = self.parser.parse_reasoning_streaming_incremental(text) {
            return split.add(parsed);
        }
        // It holds back too much and has not taken this piece: both go out as what they seem to be.
        split.add(self.parser.flush().unwrap_or_default());
        let is_reasoning = self.parser.is_in_reasoning();
        let part = if is_reasoning { &mut split.reasoning } else { &mut split.content };
        part.push_str(text);
    }
}

impl std::fmt::Debug for Reasoning {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reasoning").field("held", &self.held).finish_non_exhaustive()
    }
}

/// Whether a tag of any model begins so.
fn opens(c: char) -> bool {
    matches!(c, '<' | '\u{25c1}')
}

fn closes(c: char) -> bool {
    matches!(c, '>' | '\u{25b7}')
}

/// Bytes of the first part of a text: up to a tag, or a tag. `None` while more must come to know its end.
fn unit(text: &str) -> Option<usize> {
    let first = text.chars().next()?;
    if !opens(first) {
        return Some(text.find(opens).unwrap_or(text.len()));
    }
    text.char_indices().skip(1).find_map(|(at, c)| {
        let is_over = opens(c) || c.is_whitespace() || at >= MAX_TAG_BYTES;
        if closes(c) && at < MAX_TAG_BYTES {
            Some(at + c.len_utf8())
        } else {
            is_over.then_some(at)
        }
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn split(name: &str, prompt_end: &str, pieces: &[&str]) -> Split {
        let mut reasoning = Reasoning::new(&ReasoningFormat::named(name).unwrap(), prompt_end);
        let mut all = Split::default();
        let mut add = |split: Split| {
            all.reasoning.push_str(&split.reasoning);
            all.content.push_str(&split.content);
        };
        pieces.iter().for_each(|piece| add(reasoning.push(piece)));
        add(reasoning.finish());
        all
    }

    fn of(reasoning: &str, content: &str) -> Split {
        Split { reasoning: reasoning.to_owned(), content: content.to_owned() }
    }

    #[test]
    fn reasoning_is_told_from_content() {
        let open = "<|im_start|>assistant\n<think>\n";
        let closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n";
        for (name, prompt_end, text, wanted) in [
            ("qwen3", "", "<think>a < b</think>\nc", of("a < b", "\nc")),
            ("qwen3", "", "a <b> </think> <thinking>", of("", "a <b> </think> <thinking>")),
            ("qwen3", "", "<think>a", of("a", "")),
            ("qwen3", "", "<<think>a<</think>b", of("<a<", "b")),
            ("qwen3", open, "a</think>b", of("a", "b")),
            ("qwen3", closed, "a", of("", "a")),
            ("qwen3", "<think> is a tag", "a", of("", "a")),
            ("deepseek_r1", "", "a</think>b", of("a", "b")),
            ("deepseek_r1", "", "<think>a</think>b", of("a", "b")),
            ("deepseek_r1", open, "a</think>b", of("a", "b")),
            ("qwen3_thinking", closed, "a", of("", "a")),
            ("kimi", "", "\u{25c1}think\u{25b7}a\u{25c1}/think\u{25b7}b", of("a", "b")),
            ("minimax_m3", "", "<mm:think>a</mm:think>b", of("a", "b")),
            ("passthrough", "", "<think>a</think>b", of("", "<think>a</think>b")),
        ] {
            assert_eq!(split(name, prompt_end, &[text]), wanted, "{name} {text}");
        }
    }

    #[test]
    fn names_are_those_of_the_crate() {
        let names = ReasoningFormat::names();
        assert!(names.len() > 15 && names.is_sorted(), "{names:?}");
        assert!(ReasoningFormat::named("qwen").is_none());
        let special: Vec<_> = names
            .iter()
            .filter(|name| ReasoningFormat::named(name).unwrap().needs_special_tokens())
            .collect();
        assert_eq!(special, ["gemma4", "hy_v4", "inkling", "kimi_k3"]);
    }

    #[test]
    fn what_begins_as_a_tag_is_held_for_some_bytes_only() {
        let mut reasoning = Reasoning::new(&ReasoningFormat::named("qwen3").unwrap(), "");
        assert_eq!(reasoning.push("<think>a </thi"), of("a ", ""));
        assert_eq!(reasoning.push("s"), of("", ""));
        assert_eq!(reasoning.push(" b"), of("</this b", ""));
        let long = format!("<{}", "x".repeat(MAX_TAG_BYTES - 1));
        assert_eq!(reasoning.push(&long), of("", ""));
        assert_eq!(reasoning.push("y"), of(&format!("{long}y"), ""));
    }

    /// Texts of tags, their pieces and others.
    fn texts() -> impl Strategy<Value = String> {
        let part = prop_oneof![
            prop::sample::select(vec![
                "<think>",
                "</think>",
                "<",
                ">",
                "</",
                "think",
                "\n",
                " ",
                "\u{25c1}think\u{25b7}",
                "\u{25c1}/think\u{25b7}",
                "<mm:think>",
                "</mm:think>",
                "<|START_THINKING|>",
                "<|END_THINKING|>",
                "<tool_call>",
                "\u{1f600}",
            ])
            .prop_map(str::to_owned),
            "[a-z\u{e4} ]{0,5}",
        ];
        prop::collection::vec(part, 0..12).prop_map(|parts| parts.concat())
    }

    proptest! {
        #[test]
        fn any_cut_gives_the_same(
            name in prop::sample::select(ReasoningFormat::names()),
            text in texts(),
            size in 1_usize..9,
        ) {
            let chars: Vec<char> = text.chars().collect();
            let pieces: Vec<String> = chars.chunks(size).map(|c| c.iter().collect()).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            prop_assert_eq!(split(&name, "", &pieces), split(&name, "", &[&text]), "{}", name);
        }
    }
}
