//! Values as Python writes them: templates are written for `str()` and `json.dumps()`.

use std::fmt::{Arguments, Write};

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

/// Templates nest a few levels; a request that nests deeper than this is an attack.
const DEPTH_MAX: usize = 128;

/// `str(value)`.
pub(super) fn display(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None => {
            let mut out = String::new();
            write_repr(&mut out, value, 0);
            out
        }
    }
}

/// `repr(value)`, but an undefined value writes nothing.
fn write_repr(out: &mut String, value: &Value, depth: usize) {
    if depth > DEPTH_MAX {
        out.push_str("...");
        return;
    }
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => write_number(out, value, "inf", "nan"),
        ValueKind::String => write_string_repr(out, value.as_str().unwrap_or_default()),
        // A sum of lists is one, and is no list of the template engine's.
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (at, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if at > 0 { ", " } else { "" });
                write_repr(out, &item, depth + 1);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (at, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if at > 0 { ", " } else { "" });
                write_repr(out, &key, depth + 1);
                out.push_str(": ");
                write_repr(out, &value.get_item(&key).unwrap_or_default(), depth + 1);
            }
            out.push('}');
        }
        _ => put(out, format_args!("{value}")),
    }
}

/// Append formatted text.
pub(super) fn put(out: &mut String, text: Arguments<'_>) {
    out.write_fmt(text).expect("writing to a string cannot fail");
}

fn write_number(out: &mut String, value: &Value, infinity: &str, nan: &str) {
    if value.is_integer() {
        put(out, format_args!("{value}"));
        return;
    }
    match f64::try_from(value.clone()) {
        Ok(number) if number.is_nan() => out.push_str(nan),
        Ok(number) if number.is_infinite() => {
            out.push_str(if number < 0.0 { "-" } else { "" });
            out.push_str(infinity);
        }
        Ok(number) => write_float(out, number),
        Err(_) => put(out, format_args!("{value}")),
    }
}

/// `repr(float)`: the shortest digits, with an exponent below 1e-4 and from 1e16 on.
fn write_float(out: &mut String, number: f64) {
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or_default();
    if number != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        put(out, format_args!("{digits}e{sign}{:02}", exponent.abs()));
    } else {
        // Debug keeps the ".0" of whole numbers but has an exponent of its own from 1e16 on.
        put(out, format_args!("{number:?}"));
    }
}

fn write_string_repr(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for character in text.chars() {
        match character {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            _ if character == quote => {
                out.push('\\');
                out.push(quote);
            }
            _ if is_printable(character) => out.push(character),
            _ => match character as u32 {
                code @ ..0x100 => put(out, format_args!("\\x{code:02x}")),
                code @ 0x100..0x10000 => put(out, format_args!("\\u{code:04x}")),
                code => put(out, format_args!("\\U{code:08x}")),
            },
        }
    }
    out.push(quote);
}

/// `str.isprintable()`: everything but separators other than the space, and what no glyph stands for.
fn is_printable(character: char) -> bool {
    if character.is_ascii() {
        return !character.is_ascii_control();
    }
    // The same categories as the standard library's. Behind a first character, marks that combine with
    // one before them are not escaped for their own sake.
    let mut text = [0; 8];
    text[0] = b'a';
    let length = 1 + character.encode_utf8(&mut text[1..]).len();
    let text = std::str::from_utf8(&text[..length]).expect("a letter and a character");
    text.escape_debug().count() == 2
}

/// How `json.dumps` writes.
#[derive(Debug)]
pub(super) struct Dump {
    /// One level of indentation; `None` writes one line.
    pub(super) indent: Option<String>,
    /// Between items.
    pub(super) item_separator: String,
    /// Between key and value.
    pub(super) key_separator: String,
    /// Write anything beyond ASCII as escapes.
    pub(super) is_ascii: bool,
    /// Sort the keys of objects.
    pub(super) sorts_keys: bool,
}

impl Dump {
    /// `json.dumps(value)`.
    pub(super) fn write(&self, value: &Value) -> Result<String, Error> {
        let mut out = String::new();
        self.write_value(&mut out, value, 0)?;
        Ok(out)
    }

    fn write_value(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(refused("tojson: nested too deep"));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => write_number(out, value, "Infinity", "NaN"),
            ValueKind::String => self.write_string(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_items(out, ['[', ']'], depth, items.len(), |out, at| {
                    self.write_value(out, &items[at], depth + 1)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorts_keys {
                    keys.sort();
                }
                self.write_items(out, ['{', '}'], depth, keys.len(), |out, at| {
                    self.write_key(out, &keys[at])?;
                    out.push_str(&self.key_separator);
                    self.write_value(out, &value.get_item(&keys[at])?, depth + 1)
                })?;
            }
            kind => return Err(refused(&format!("tojson: {kind} is not JSON serializable"))),
        }
        Ok(())
    }

    fn write_items(
        &self,
        out: &mut String,
        brackets: [char; 2],
        depth: usize,
        count: usize,
        mut write_item: impl FnMut(&mut String, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(brackets[0]);
        for at in 0..count {
            if at > 0 {
                out.push_str(&self.item_separator);
            }
            self.write_break(out, depth + 1);
            write_item(out, at)?;
        }
        if count > 0 {
            self.write_break(out, depth);
        }
        out.push(brackets[1]);
        Ok(())
    }

    fn write_break(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    }

    fn write_key(&self, out: &mut String, key: &Value) -> Result<(), Error> {
        if let Some(text) = key.as_str() {
            self.write_string(out, text);
            return Ok(());
        }
        out.push('"');
        self.write_value(out, key, DEPTH_MAX)?;
        out.push('"');
        Ok(())
    }

    fn write_string(&self, out: &mut String, text: &str) {
        out.push('"');
        for character in text.chars() {
            match character {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                '\0'..='\u{1f}' => put(out, format_args!("\\u{:04x}", character as u32)),
                '\u{7f}'.. if self.is_ascii => {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        put(out, format_args!("\\u{unit:04x}"));
                    }
                }
                _ => out.push(character),
            }
        }
        out.push('"');
    }
}

fn refused(message: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_written_as_python_does() {
        let cases = [
            ("it's", "\"it's\""),
            (
                "a\u{e9}\u{301}\u{1f469}\u{4f60}\u{fe0f}",
                "'a\u{e9}\u{301}\u{1f469}\u{4f60}\u{fe0f}'",
            ),
            ("\u{200d}\u{2028}\u{200b}\u{feff}", r"'\u200d\u2028\u200b\ufeff'"),
            ("\u{7f}\u{85}\u{a0}\u{ad}\u{3000}\u{e000}", r"'\x7f\x85\xa0\xad\u3000\ue000'"),
            ("\u{e0001}\u{10ffff}", r"'\U000e0001\U0010ffff'"),
        ];
        for (text, expected) in cases {
            let mut out = String::new();
            write_string_repr(&mut out, text);
            assert_eq!(out, expected);
        }
    }

    #[test]
    fn floats_are_written_as_python_does() {
        let cases = [
            (0.0, "0.0"),
            (1.0, "1.0"),
            (-2.5, "-2.5"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
        ];
        for (number, expected) in cases {
            let mut out = String::new();
            write_float(&mut out, number);
            assert_eq!(out, expected);
        }
    }
}
