//! Template sources, rewritten where the two template engines differ in what they can be told.
//!
//! - Lines end with a line feed, whatever they ended with in the file: Jinja reads text and string
//!   literals so.
//! - `{% generation %}` only marks what an assistant said: to the text it is a scope, so it becomes
//!   `{% with %}`.
//! - `a ~ b` joins what Python's `str()` makes of both sides. The engine used here writes values
//!   its own way (`true`, `none`) and cannot be told otherwise, but filters can: the operands get
//!   a `|string`.
//! - String literals have Python's escapes: `'\U0001F469'` is a character, and `'\/'` has a backslash.

/// Words that stand between operands.
const KEYWORDS: [&str; 17] = [
    "and",
    "or",
    "not",
    "in",
    "is",
    "if",
    "elif",
    "else",
    "for",
    "set",
    "do",
    "call",
    "filter",
    "recursive",
    "with",
    "macro",
    "block",
];

/// What a piece of a template is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Copied to the prompt; what is raw as well.
    Text,
    Comment,
    Statement,
    Expression,
}

/// A piece of a template.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece<'a> {
    pub(super) kind: Kind,
    text: &'a str,
}

impl<'a> Piece<'a> {
    /// What stands between the delimiters; all of a text.
    pub(super) fn body(&self) -> &'a str {
        let close = match self.kind {
            Kind::Text => return self.text,
            Kind::Comment => "#}",
            Kind::Statement => "%}",
            Kind::Expression => "}}",
        };
        self.text[2..].strip_suffix(close).unwrap_or(&self.text[2..])
    }
}

/// The pieces of a template, in order: together they are the template.
pub(super) fn pieces(source: &str) -> Vec<Piece<'_>> {
    let mut pieces = Vec::new();
    let mut rest = source;
    while let Some(start) =
        rest.find("{%").into_iter().chain(rest.find("{{")).chain(rest.find("{#")).min()
    {
        let (text, block) = rest.split_at(start);
        let (kind, end) = match &block[..2] {
            "{%" => (Kind::Statement, 2 + closing(&block[2..], "%}")),
            "{{" => (Kind::Expression, 2 + closing(&block[2..], "}}")),
            _ => (Kind::Comment, block.find("#}").map_or(block.len(), |at| at + 2)),
        };
        let piece = Piece { kind, text: &block[..end] };
        rest = &block[end..];
        pieces.extend([Piece { kind: Kind::Text, text }, piece]);
        // What is raw is text: up to its end nothing is looked at.
        if kind == Kind::Statement && piece.body().trim_matches(['-', '+']).trim() == "raw" {
            let (raw, after) = rest.split_at(rest.find("endraw").unwrap_or(rest.len()));
            pieces.push(Piece { kind: Kind::Text, text: raw });
            rest = after;
        }
    }
    pieces.push(Piece { kind: Kind::Text, text: rest });
    pieces
}

/// The template with line feeds only.
pub(super) fn unix_lines(source: &str) -> String {
    source.replace("\r\n", "\n").replace('\r', "\n")
}

/// The template to compile for `source`.
pub(super) fn rewrite(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    for piece in pieces(source) {
        let body = piece.body();
        match (piece.kind, body.trim_matches(['-', '+']).trim()) {
            (Kind::Statement, word @ ("generation" | "endgeneration")) => {
                let with = word.replace("generation", "with");
                out.push_str(&piece.text.replacen(word, &with, 1));
            }
            (Kind::Statement | Kind::Expression, _) if body.contains(['~', '\\']) => {
                let plain = plain_escapes(body);
                let joined = if body.contains('~') { join_as_strings(&plain) } else { plain };
                out.extend([&piece.text[..2], &joined, &piece.text[2 + body.len()..]]);
            }
            _ => out.push_str(piece.text),
        }
    }
    out
}

/// Where `text` ends with `close` outside of quotes, that included.
fn closing(text: &str, close: &str) -> usize {
    let mut starts = atoms(text).map(|(at, _)| at);
    starts.find(|at| text[*at..].starts_with(close)).map_or(text.len(), |at| at + close.len())
}

/// The string literals of a piece of code, whole, and its other characters, each with its place.
pub(super) fn atoms(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut next = 0;
    std::iter::from_fn(move || {
        let (at, rest) = (next, &text[next..]);
        let length = match rest.as_bytes().first()? {
            b'\'' | b'"' => quoted(rest),
            _ => width(rest),
        };
        next += length;
        Some((at, &rest[..length]))
    })
}

/// Length of the string literal that `text` starts with.
fn quoted(text: &str) -> usize {
    let quote = text.as_bytes()[0];
    let mut is_escaped = false;
    for (at, &byte) in text.as_bytes().iter().enumerate().skip(1) {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            _ if byte == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// The code with its literals' escapes as both template engines read them.
fn plain_escapes(body: &str) -> String {
    let mut out = String::with_capacity(body.len());
    for (_, atom) in atoms(body) {
        let mut literal = atom;
        while let Some(start) = literal.find('\\').filter(|_| atom.starts_with(['\'', '"'])) {
            out.push_str(&literal[..start]);
            let escape = &literal[start..];
            let (length, plain) = plain_escape(escape);
            out.push_str(plain.as_deref().unwrap_or(&escape[..length]));
            literal = &escape[length..];
        }
        out.push_str(literal);
    }
    out
}

/// Length of the escape that `text` starts with, and what stands for it where the engines differ.
fn plain_escape(text: &str) -> (usize, Option<String>) {
    let mut characters = text.chars();
    match characters.nth(1) {
        None => (1, None),
        // A backslash that escapes nothing stays.
        Some('/') => (2, Some(r"\\/".to_owned())),
        Some('a') => (2, Some(r"\x07".to_owned())),
        Some('v') => (2, Some(r"\x0b".to_owned())),
        // The line goes on.
        Some('\n') => (2, Some(String::new())),
        Some('U') => {
            let code = text.get(2..10).and_then(|hex| u32::from_str_radix(hex, 16).ok());
            match code.and_then(char::from_u32) {
                // Quotes and delimiters among them stay escapes.
                Some(character) if character.is_ascii() => {
                    (10, Some(format!("\\x{:02x}", character as u32)))
                }
                Some(character) => (10, Some(character.to_string())),
                None => (2, None),
            }
        }
        Some(character) => (1 + character.len_utf8(), None),
    }
}

/// Length of the bracketed group that `text` starts with.
fn bracketed(text: &str) -> usize {
    let mut depth = 0_usize;
    for (at, atom) in atoms(text) {
        match atom {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at + atom.len();
        }
    }
    text.len()
}

/// Length of the first character.
fn width(text: &str) -> usize {
    text.chars().next().map_or(1, char::len_utf8)
}

/// Length of the name or number that `text` starts with.
pub(super) fn word(text: &str) -> usize {
    text.find(|character: char| !(character.is_alphanumeric() || character == '_'))
        .unwrap_or(text.len())
}

/// The expression or statement with `|string` behind the operands of `~`.
fn join_as_strings(body: &str) -> String {
    // Operands, each with the operator text before it.
    let mut operands: Vec<(&str, String, bool)> = Vec::new();
    let (mut at, mut operator_start) = (0, 0);
    while at < body.len() {
        let rest = &body[at..];
        let length = match rest.as_bytes()[0] {
            b'\'' | b'"' => quoted(rest),
            b'(' | b'[' | b'{' => bracketed(rest),
            _ => word(rest),
        };
        let is_operand = length > 0 && !KEYWORDS.contains(&&rest[..length]);
        if !is_operand {
            at += length.max(width(rest));
            continue;
        }
        let operator = &body[operator_start..at];
        let mut operand = inner(&rest[..length]);
        let mut is_literal = matches!(rest.as_bytes()[0], b'\'' | b'"');
        at += length;
        while let Some(postfix) = postfix(&body[at..]) {
            operand.push_str(&inner(&body[at..at + postfix]));
            at += postfix;
            is_literal = false;
        }
        operands.push((operator, operand, is_literal));
        operator_start = at;
    }
    let tail = &body[operator_start..];
    let mut out = String::with_capacity(body.len() + 32);
    for (index, (before, operand, is_literal)) in operands.iter().enumerate() {
        let after = operands.get(index + 1).map_or(tail, |(operator, ..)| operator);
        let (before_word, after_word) = (before.trim(), after.trim());
        let joins = before_word.ends_with('~') || after_word == "~";
        // A product binds tighter than the join: its factors stay as they are.
        let is_factor = [before_word, after_word]
            .iter()
            .any(|operator| operator.starts_with(['*', '/', '%']) && *operator != "%}");
        out.extend([before, operand.as_str()]);
        if joins && !is_literal && !is_factor {
            out.push_str("|string");
        }
    }
    out.push_str(tail);
    out
}

/// Length of the attribute, subscript, call or filter that `text` starts with.
fn postfix(text: &str) -> Option<usize> {
    let trimmed = text.trim_start();
    let skipped = text.len() - trimmed.len();
    let length = match trimmed.as_bytes().first()? {
        b'[' | b'(' => bracketed(trimmed),
        b'.' | b'|' => {
            let name = trimmed[1..].trim_start();
            let name_at = trimmed.len() - name.len();
            let length = word(name);
            (length > 0).then_some(name_at + length)?
        }
        _ => return None,
    };
    Some(skipped + length)
}

/// A bracketed group or postfix with what it holds rewritten too.
fn inner(text: &str) -> String {
    match text.find(['(', '[', '{']) {
        // Without its closing bracket it does not compile anyway.
        Some(open)
            if text.contains('~')
                && text[open..].ends_with([')', ']', '}'])
                && !text.starts_with(['\'', '"']) =>
        {
            let close = text.len() - 1;
            [&text[..=open], &join_as_strings(&text[open + 1..close]), &text[close..]].concat()
        }
        _ => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_text_is_survived(text in "([{}%#~|()\\[\\]'\"\\\\é. a]|raw|endraw){0,40}") {
            let rewritten = rewrite(&text);
            prop_assert!(text.contains(['~', '\\']) || rewritten == text);
            if !text.contains('\\') {
                prop_assert_eq!(rewritten.replace("|string", ""), text.replace("|string", ""));
            }
        }
    }

    #[test]
    fn lines_end_with_a_line_feed() {
        assert_eq!(unix_lines("a\r\n{{ 'b\r' }}\r\r\nc\n"), "a\n{{ 'b\n' }}\n\nc\n");
    }

    #[test]
    fn generation_blocks_become_scopes() {
        let source = "a{%- generation -%} b {% endgeneration %}{% if x %}";
        assert_eq!(rewrite(source), "a{%- with -%} b {% endwith %}{% if x %}");
    }

    #[test]
    fn escapes_are_pythons() {
        let cases = [
            (r"{{ '\U0001F469\U00000027' }}", r"{{ '\u{1f469}\x27' }}"),
            (r#"{{ "a\/b\\/c\"" ~ x }}"#, r#"{{ "a\\/b\\/c\"" ~ x|string }}"#),
            (r"{% if x == '\a\v\n\u00e9\x41\d' %}", r"{% if x == '\x07\x0b\n\u00e9\x41\d' %}"),
            ("{{ 'a\\\nb' }}", "{{ 'ab' }}"),
            (r"{{ '\U0001' }}\U0001F469{# '\/' #}", r"{{ '\U0001' }}\U0001F469{# '\/' #}"),
            (r"{{ '\", r"{{ '\"),
        ];
        for (source, expected) in cases {
            let expected = expected.replace(r"\u{1f469}", "\u{1f469}");
            assert_eq!(rewrite(source), expected);
        }
    }

    #[test]
    fn operands_of_a_join_become_strings() {
        let cases = [
            ("{{ a ~ b.c }}", "{{ a|string ~ b.c|string }}"),
            (
                "{{- 'x' ~ f(a ~ 1)[0] ~ '~' -}}",
                "{{- 'x' ~ f(a|string ~ 1|string)[0]|string ~ '~' -}}",
            ),
            (
                "{% set x = (a ~ b) | trim ~ c %}",
                "{% set x = (a|string ~ b|string) | trim|string ~ c|string %}",
            ),
            ("{{ '  ' * n ~ a + b }}", "{{ '  ' * n ~ a|string + b }}"),
            ("{{ a ~ b if c else d }}", "{{ a|string ~ b|string if c else d }}"),
            ("{{ {'k': a ~ b} }} ~ {# a ~ b #}", "{{ {'k': a|string ~ b|string} }} ~ {# a ~ b #}"),
            ("{% raw %}{{ a ~ b }}{% endraw %}", "{% raw %}{{ a ~ b }}{% endraw %}"),
            ("{{ '}}' ~ é }}", "{{ '}}' ~ é|string }}"),
            ("{{ unclosed ~", "{{ unclosed|string ~"),
        ];
        for (source, expected) in cases {
            assert_eq!(rewrite(source), expected);
        }
    }
}
