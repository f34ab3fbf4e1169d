//! The template language as transformers sets it up: Jinja2 with Python's values behind it.

use std::sync::Arc;

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

const DAYS: [&str; 7] =
    ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const SECONDS_PER_DAY: u64 = 86_400;

/// `datetime.fromtimestamp(seconds, UTC).strftime(format)` of a date without a time zone, as glibc writes it
/// in the C locale.
///
/// # Errors
/// For what can't be known here: parts of a second, the machine's own epoch, other locales' forms.
fn strftime(format: &str, seconds: u64) -> Result<String, Error> {
    let days = seconds / SECONDS_PER_DAY;
    let (year, month, day, day_of_year) = civil(days);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let half_day_hour = if hour % 12 == 0 { 12 } else { hour % 12 };
    // The first of January 1970 was a Thursday; the weekday counts from Sunday.
    let weekday = (days + 4) % 7;
    let (day_name, month_name) = (DAYS[(days % 7) as usize], MONTHS[month as usize - 1]);
    let (iso_year, iso_week) = iso_week(year, day_of_year, weekday);
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
        let (number, pad, width) = match directive {
            'd' => (day, '0', 2),
            'e' => (day, ' ', 2),
            'm' => (month, '0', 2),
            'y' => (year % 100, '0', 2),
            'Y' => (year, '0', 4),
            'C' => (year / 100, '0', 2),
            'G' => (iso_year, '0', 4),
            'g' => (iso_year % 100, '0', 2),
            'V' => (iso_week, '0', 2),
            'U' => ((day_of_year + 6 - weekday) / 7, '0', 2),
            'W' => ((day_of_year + 6 - (weekday + 6) % 7) / 7, '0', 2),
            'u' => ((weekday + 6) % 7 + 1, '0', 1),
            'w' => (weekday, '0', 1),
            'H' => (hour, '0', 2),
            'k' => (hour, ' ', 2),
            'I' => (half_day_hour, '0', 2),
            'l' => (half_day_hour, ' ', 2),
            'M' => (minute, '0', 2),
            'S' => (second, '0', 2),
            'j' => (day_of_year, '0', 3),
            _ => {
                let text = match directive {
                    'a' => day_name[..3].to_owned(),
                    'A' => day_name.to_owned(),
                    'b' | 'h' => month_name[..3].to_owned(),
                    'B' => month_name.to_owned(),
                    'p' => ["AM", "PM"][usize::from(hour >= 12)].to_owned(),
                    'P' => ["am", "pm"][usize::from(hour >= 12)].to_owned(),
                    'c' => strftime("%a %b %e %H:%M:%S %Y", seconds)?,
                    'D' | 'x' => strftime("%m/%d/%y", seconds)?,
                    'F' => strftime("%Y-%m-%d", seconds)?,
                    'R' => strftime("%H:%M", seconds)?,
                    'T' | 'X' => strftime("%H:%M:%S", seconds)?,
                    'r' => strftime("%I:%M:%S %p", seconds)?,
                    'n' => "\n".to_owned(),
                    't' => "\t".to_owned(),
                    // Such a date has no zone.
                    'z' | 'Z' => String::new(),
                    '%' => "%".to_owned(),
                    'f' | 's' | 'E' | 'O' | '#' | '+' | ':' | '1'..='9' => {
                        return Err(refused(format!("strftime_now: %{directive} is not known")));
                    }
                    // As it stands, like any other text.
                    other => {
                        out.push('%');
                        out.extend(flag);
                        out.push(other);
                        continue;
                    }
                };
                out.push_str(&if flag == Some('^') { text.to_uppercase() } else { text });
                continue;
            }
        };
        match (flag, pad) {
            (Some('-'), _) => put(&mut out, format_args!("{number}")),
            (Some('_'), _) | (None | Some('^'), ' ') => {
                put(&mut out, format_args!("{number:width$}"));
            }
            _ => put(&mut out, format_args!("{number:0width$}")),
        }
    }
    Ok(out)
}

/// The year and the week of ISO 8601, whose weeks begin on Mondays and belong to the year of their Thursday.
fn iso_week(year: u64, day_of_year: u64, weekday: u64) -> (u64, u64) {
    let from_monday = (weekday + 6) % 7;
    // Thursday's day of this year, from 1; zero and less is the year before.
    let thursday = (day_of_year + 3) as i64 - from_monday as i64;
    let length = |year: u64| 365 + i64::from(is_leap(year));
    let (year, thursday) = match thursday {
        ..=0 => (year - 1, thursday + length(year - 1)),
        _ if thursday > length(year) => (year + 1, thursday - length(year)),
        _ => (year, thursday),
    };
    (year, (thursday as u64 - 1) / 7 + 1)
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

/// Year, month, day and day of the year of a day since 1970-01-01.
fn civil(mut days: u64) -> (u64, u64, u64, u64) {
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let day_of_year = days + 1;
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1, day_of_year)
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
