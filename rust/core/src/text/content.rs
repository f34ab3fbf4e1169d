//! Which form of message content a chat template expects.

use super::source::{Kind, atoms, pieces, word};

/// The form of `message.content` that a template is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentFormat {
    /// One string; text parts are joined.
    String,
    /// A list of `{"type": "text", "text": ...}` parts.
    Parts,
}

/// vLLM's rule: a template that loops over the content of something it got by looping over
/// `messages` (or a variable set to it) wants parts.
///
/// # Source
/// vLLM `_detect_content_format`. There a loop or assignment to anything but a plain name ends the
/// search with the answer "string", so it does here.
pub(super) fn detect(template: &str) -> ContentFormat {
    search(template).unwrap_or(ContentFormat::String)
}

fn search(template: &str) -> Option<ContentFormat> {
    let statements = statements(template);
    let mut lists = vec!["messages"];
    let mut at = 0;
    while at < lists.len() {
        for statement in &statements {
            let Statement::Set { target, value } = statement else { continue };
            if access(value) == Some((lists[at], None)) {
                let name = plain_name(target)?;
                if !lists.contains(&name) {
                    lists.push(name);
                }
            }
        }
        at += 1;
    }
    let mut messages = Vec::new();
    for statement in &statements {
        let Statement::For { target, over } = statement else { continue };
        if matches!(access(over), Some((list, None)) if lists.contains(&list)) {
            messages.push(plain_name(target)?);
        }
    }
    for statement in &statements {
        let Statement::For { target, over } = statement else { continue };
        if matches!(access(over), Some((name, Some("content"))) if messages.contains(&name)) {
            return plain_name(target).map(|_| ContentFormat::Parts);
        }
    }
    None
}

#[derive(Debug, PartialEq, Eq)]
enum Statement {
    For { target: String, over: String },
    Set { target: String, value: String },
}

/// The `for` and `set` statements of a template, as text: of its code, not of comments and literals.
fn statements(template: &str) -> Vec<Statement> {
    let mut found = Vec::new();
    for piece in pieces(template).iter().filter(|piece| piece.kind == Kind::Statement) {
        let body = spaced(piece.body().trim_matches(['-', '+']).trim());
        if let Some(body) = body.strip_prefix("for ") {
            let Some((target, over)) = body.split_once(" in ") else { continue };
            let over = outside_brackets(over, " if ").trim();
            let over = over.strip_suffix(" recursive").unwrap_or(over).to_owned();
            found.push(Statement::For { target: target.trim().to_owned(), over });
        } else if let Some(body) = body.strip_prefix("set ") {
            let Some((target, value)) = body.split_once('=') else { continue };
            let (target, value) = (target.trim().to_owned(), value.trim().to_owned());
            found.push(Statement::Set { target, value });
        }
    }
    found
}

/// A statement with one space wherever it has any, but none around dots; literals stay as they are.
fn spaced(body: &str) -> String {
    let mut out = String::with_capacity(body.len());
    for (_, atom) in atoms(body) {
        if !atom.trim().is_empty() {
            if atom == "." && out.ends_with(' ') {
                out.pop();
            }
            out.push_str(atom);
        } else if !out.ends_with([' ', '.']) {
            out.push(' ');
        }
    }
    out
}

/// `text` up to the first `separator` that stands outside of brackets and quotes.
fn outside_brackets<'a>(text: &'a str, separator: &str) -> &'a str {
    let mut depth = 0_usize;
    for (at, atom) in atoms(text) {
        match atom {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 && text[at..].starts_with(separator) {
            return &text[..at];
        }
    }
    text
}

/// What an expression reads: a variable, or one key of a variable; filters, tests and slices of it
/// count as the thing itself.
fn access(expression: &str) -> Option<(&str, Option<&str>)> {
    let bare = outside_brackets(outside_brackets(expression, "|"), " is ").trim();
    let bare = match bare.strip_prefix('(').and_then(|inner| inner.strip_suffix(')')) {
        Some(inner) => return access(inner),
        None => bare,
    };
    let (name, mut rest) = bare.split_at(word(bare));
    plain_name(name)?;
    let mut key = None;
    if let Some(attribute) = rest.strip_prefix('.') {
        let end = attribute.find('[').unwrap_or(attribute.len());
        key = Some(plain_name(&attribute[..end])?);
        rest = &attribute[end..];
    } else if let Some((quoted, after)) = subscript(rest)
        && let Some(literal) = literal(quoted)
    {
        key = Some(literal);
        rest = after;
    }
    while let Some((index, after)) = subscript(rest) {
        // A slice is still the list; an element is something else.
        if !index.contains(':') {
            return None;
        }
        rest = after;
    }
    rest.trim().is_empty().then_some((name, key))
}

fn subscript(text: &str) -> Option<(&str, &str)> {
    let inner = text.trim_start().strip_prefix('[')?;
    let end = inner.find(']')?;
    Some((inner[..end].trim(), &inner[end + 1..]))
}

fn literal(text: &str) -> Option<&str> {
    let quote = text.chars().next().filter(|quote| matches!(quote, '\'' | '"'))?;
    text[1..].strip_suffix(quote)
}

fn plain_name(text: &str) -> Option<&str> {
    let is_name = !text.is_empty()
        && word(text) == text.len()
        && !text.starts_with(|character: char| character.is_ascii_digit());
    is_name.then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses() {
        assert_eq!(access("messages"), Some(("messages", None)));
        assert_eq!(access("messages[1:] | list"), Some(("messages", None)));
        assert_eq!(access("messages[::-1]"), Some(("messages", None)));
        assert_eq!(access("message['content']"), Some(("message", Some("content"))));
        assert_eq!(access("m.content | reverse"), Some(("m", Some("content"))));
        assert_eq!(access("messages[0]['content']"), None);
        assert_eq!(access("f(messages)"), None);
    }

    #[test]
    fn formats() {
        let text = "{%- for m in messages -%}{{ m.content }}{% endfor %}";
        let parts = "{% set all = messages[1:] %}{% for m in all if m.role != 'x' %}\
                     {%- for part in m['content'] -%}{{ part.text }}{% endfor %}{% endfor %}";
        let other = "{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}";
        assert_eq!(detect(text), ContentFormat::String);
        assert_eq!(detect(parts), ContentFormat::Parts);
        assert_eq!(detect(other), ContentFormat::String);
        let tuple = "{% for a, b in messages %}{% for c in a.content %}{% endfor %}{% endfor %}";
        assert_eq!(detect(tuple), ContentFormat::String);
        let inner = "{% for c in message.content %}{% endfor %}";
        let around = |inner: &str| format!("{{% for message in messages %}}{inner}{{% endfor %}}");
        for inner in [
            format!("{{# {inner} #}}"),
            format!("{{% raw %}}{inner}{{% endraw %}}"),
            format!("{{{{ '{inner}' }}}}"),
            "{% if x == '{% for c in message.content %}' %}{% endif %}".to_owned(),
            "{% set x = 'for c in message.content' %}".to_owned(),
        ] {
            assert_eq!(detect(&around(&inner)), ContentFormat::String, "{inner}");
        }
        for inner in [
            "{%\n  for\tc\n  in message.content\n%}{% endfor %}",
            "{% for c in message . content %}{% endfor %}",
            "{% for c in message\n  .content if c.type == 'text' %}{% endfor %}",
            "{% for c in message [ 'content' ] %}{% endfor %}",
            "{%- for  c  in  message.content | list -%}{% endfor %}",
            "{% for c in message.content if c.type == '%}' %}{% endfor %}",
        ] {
            assert_eq!(detect(&around(inner)), ContentFormat::Parts, "{inner}");
        }
    }
}
