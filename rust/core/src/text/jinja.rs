//! The template language as transformers sets it up: Jinja2 with Python's values behind it.

use std::sync::Arc;

use chrono::DateTime;
use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, UndefinedBehavior, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::python::{Dump, display, put};
use super::template::WallClock;

/// Most spaces of `indent`: a template is not trusted with memory.
const INDENT_MAX: usize = 64;

/// An environment in which chat templates behave as under transformers.
///
/// # Source
/// transformers `_cached_compile_jinja_template`: `trim_blocks`, `lstrip_blocks`, loop controls, `raise_exception`, `strftime_now` and a `tojson` that is plain `json.dumps`.
pub(super) fn environment(clock: WallClock) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(call_method);
    environment.set_formatter(|out, _, value| {
        match value.as_str() {
            Some(text) => out.write_str(text)?,
            None => out.write_str(&display(value))?,
        }
        Ok(())
    });
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", |value: &Value| display(value));
    environment.add_filter("join", join);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_iterable);
    environment.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
        Err(refused(display(&message)))
    });
    environment.add_function("strftime_now", move |format: &str| strftime(format, clock.now()));
    environment
}

fn refused(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

fn tojson(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    // Positional order of transformers' filter: ensure_ascii, indent, separators, sort_keys.
    let option = |at: usize, name: &str| -> Result<Option<Value>, Error> {
        let value = match args.get(at) {
            Some(value) => Some(value.clone()),
            None => kwargs.get::<Option<Value>>(name)?,
        };
        Ok(value.filter(|value| !value.is_none() && !value.is_undefined()))
    };
    let is_set = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let is_ascii = is_set(option(0, "ensure_ascii")?);
    let indent = option(1, "indent")?.map(|indent| match indent.as_str() {
        Some(text) => text.to_owned(),
        None => " ".repeat(usize::try_from(indent).unwrap_or_default().min(INDENT_MAX)),
    });
    let default_item = if indent.is_some() { "," } else { ", " };
    let (mut item_separator, mut key_separator) = (default_item.to_owned(), ": ".to_owned());
    if let Some(separators) = option(2, "separators")? {
        item_separator = display(&separators.get_item_by_index(0)?);
        key_separator = display(&separators.get_item_by_index(1)?);
    }
    let sorts_keys = is_set(option(3, "sort_keys")?);
    kwargs.assert_all_used()?;
    let dump = Dump { indent, item_separator, key_separator, is_ascii, sorts_keys };
    dump.write(value).map(Value::from)
}

fn join(value: Value, separator: Option<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let separator = match separator {
        Some(separator) => Some(separator),
        None => kwargs.get::<Option<Value>>("d")?,
    };
    let attribute = kwargs.get::<Option<Value>>("attribute")?;
    kwargs.assert_all_used()?;
    let separator = separator.map(|separator| display(&separator)).unwrap_or_default();
    let mut out = String::new();
    for (at, item) in value.try_iter()?.enumerate() {
        if at > 0 {
            out.push_str(&separator);
        }
        match &attribute {
            Some(name) => out.push_str(&display(&item.get_item(name)?)),
            None => out.push_str(&display(&item)),
        }
    }
    Ok(out)
}

fn length(value: &Value) -> Result<usize, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(0),
        ValueKind::Iterable => Ok(value.try_iter()?.count()),
        kind => value.len().ok_or_else(|| refused(format!("a {kind} has no length"))),
    }
}

/// Strings are iterable sequences in Python, and so are undefined values to Jinja2.
fn is_iterable(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::Undefined
            | ValueKind::String
            | ValueKind::Seq
            | ValueKind::Map
            | ValueKind::Iterable
    )
}

/// Methods of Python's strings that the compatibility layer lacks or counts in bytes.
fn call_method(
    state: &State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if value.as_str().is_none() && value.kind() == ValueKind::Map && method == "copy" {
        return Ok(value.clone());
    }
    let Some(text) = value.as_str() else {
        return unknown_method_callback(state, value, method, args);
    };
    let first = args.first().and_then(Value::as_str);
    let char_index = |at: Option<usize>| match at {
        Some(at) => Value::from(text[..at].chars().count()),
        None => Value::from(-1),
    };
    match (method, first) {
        ("find", Some(part)) if args.len() == 1 => Ok(char_index(text.find(part))),
        ("rfind", Some(part)) if args.len() == 1 => Ok(char_index(text.rfind(part))),
        ("index", Some(part)) if args.len() == 1 => match text.find(part) {
            Some(at) => Ok(char_index(Some(at))),
            None => Err(refused("substring not found")),
        },
        ("title", None) => Ok(title(text).into()),
        ("removeprefix", Some(part)) => Ok(text.strip_prefix(part).unwrap_or(text).into()),
        ("removesuffix", Some(part)) => Ok(text.strip_suffix(part).unwrap_or(text).into()),
        ("partition", Some(part)) => Ok(triple(match text.split_once(part) {
            Some((before, after)) => [before, part, after],
            None => [text, "", ""],
        })),
        ("rpartition", Some(part)) => Ok(triple(match text.rsplit_once(part) {
            Some((before, after)) => [before, part, after],
            None => ["", "", text],
        })),
        ("split", Some(part)) if !part.is_empty() => {
            let limit = limit(args)?;
            Ok(text.splitn(limit, part).map(Value::from).collect())
        }
        ("rsplit", Some(part)) if !part.is_empty() => {
            let mut parts: Vec<Value> = text.rsplitn(limit(args)?, part).map(Value::from).collect();
            parts.reverse();
            Ok(parts.into())
        }
        ("split" | "rsplit", None) if args.is_empty() => {
            Ok(text.split_whitespace().map(Value::from).collect())
        }
        _ => unknown_method_callback(state, value, method, args),
    }
}

/// `str.title()`: a letter is upper case unless a letter stands before it.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut is_inside = false;
    for character in text.chars() {
        if is_inside {
            out.extend(character.to_lowercase());
        } else {
            out.extend(character.to_uppercase());
        }
        is_inside = character.is_alphabetic();
    }
    out
}

fn triple(parts: [&str; 3]) -> Value {
    parts.into_iter().map(Value::from).collect()
}

/// How many parts `maxsplit` allows.
fn limit(args: &[Value]) -> Result<usize, Error> {
    match args.get(1) {
        None => Ok(usize::MAX),
        Some(count) => {
            let count = i64::try_from(count.clone())?;
            Ok(usize::try_from(count).map_or(usize::MAX, |count| count.saturating_add(1)))
        }
    }
}

/// `datetime.fromtimestamp(seconds, UTC).strftime(format)` of a date without a time zone, as glibc writes it
/// in the C locale.
///
/// # Errors
/// For what can't be known here: parts of a second, the machine's own epoch, other locales' forms.
fn strftime(format: &str, seconds: u64) -> Result<String, Error> {
    let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
    let date = DateTime::from_timestamp(seconds, 0).ok_or_else(|| refused("a time too late"))?;
    let date = date.naive_utc();
    let mut out = String::with_capacity(format.len() + 16);
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let mut directive = characters.next().unwrap_or('%');
        let flag = matches!(directive, '-' | '_' | '0' | '^').then_some(directive);
        if flag.is_some() {
            directive = characters.next().unwrap_or('%');
        }
        let padding = flag.filter(|flag| *flag != '^').map(String::from).unwrap_or_default();
        match directive {
            'd' | 'e' | 'm' | 'y' | 'Y' | 'C' | 'G' | 'g' | 'V' | 'U' | 'W' | 'u' | 'w' | 'H'
            | 'k' | 'I' | 'l' | 'M' | 'S' | 'j' => {
                put(&mut out, format_args!("{}", date.format(&format!("%{padding}{directive}"))));
            }
            'a' | 'A' | 'b' | 'h' | 'B' | 'p' | 'P' | 'c' | 'D' | 'x' | 'F' | 'R' | 'T' | 'X'
            | 'r' | 'n' | 't' | '%' => {
                let text = date.format(&format!("%{directive}")).to_string();
                out.push_str(&if flag == Some('^') { text.to_uppercase() } else { text });
            }
            // Such a date has no zone.
            'z' | 'Z' => {}
            'f' | 's' | 'E' | 'O' | '#' | '+' | ':' | '1'..='9' => {
                return Err(refused(format!("strftime_now: %{directive} is not known")));
            }
            // As it stands, like any other text.
            other => {
                out.push('%');
                out.extend(flag);
                out.push(other);
            }
        }
    }
    Ok(out)
}

impl WallClock {
    /// A clock that stands still: for tests.
    pub fn fixed(unix_seconds: u64) -> Self {
        Self(Arc::new(move || unix_seconds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_written_as_python_does() {
        // 2024-02-29 13:05:09 UTC, a Thursday.
        let at = 1_709_211_909;
        let strftime = |format: &str, at| strftime(format, at).expect("a known form");
        assert_eq!(strftime("%d %b %Y", at), "29 Feb 2024");
        assert_eq!(
            strftime("%A, %-d %B %y %I:%M:%S %p %j %% %q", at),
            "Thursday, 29 February 24 01:05:09 PM 060 % %q"
        );
        assert_eq!(strftime("%Y-%m-%d %a", 0), "1970-01-01 Thu");
        assert_eq!(strftime("%Y-%m-%d", 1_767_225_599), "2025-12-31");
        assert_eq!(
            strftime("%F %D %x %h %T %R %C %u %w %^a[%z%Z] %-I %k %l %_m %r", at),
            "2024-02-29 02/29/24 02/29/24 Feb 13:05:09 13:05 20 4 4 THU[] 1 13  1  2 01:05:09 PM"
        );
        assert_eq!(strftime("%c|%e|%-H", 3_600), "Thu Jan  1 01:00:00 1970| 1|1");
        let day = |at: u64| strftime("%F %G-W%V-%u %g %U %W", at);
        assert_eq!(day(1_609_459_200), "2021-01-01 2020-W53-5 20 00 00");
        assert_eq!(day(1_735_516_800), "2024-12-30 2025-W01-1 25 52 53");
        assert_eq!(day(1_704_585_600), "2024-01-07 2024-W01-7 24 01 01");
        for unknown in ["%f", "%s", "%Ey", "%5Y"] {
            assert!(super::strftime(unknown, at).is_err(), "{unknown}");
        }
    }
}
