//! Settings for operators, each declared once, in [`settings!`](crate::settings!): a field with its
//! default, legal values, flags and variables, and documentation. Flags, variables, files,
//! configuration classes and the tables of the manuals are generated from it.

use std::time::Duration;

use serde::Serialize;
use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// Legal values of a setting, beyond its type.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Legal {
    /// Any value of the type.
    Any,
    /// Whole numbers in this inclusive range.
    Whole(u64, u64),
    /// Finite numbers from the first to the second, if there is one.
    Number(f64, Option<f64>),
    /// One of these words.
    Words(&'static [&'static str]),
    /// One of these words; the flag alone means the second value.
    Mode(&'static [&'static str], &'static str),
    /// Any value of the type; the flag alone means this.
    Bare(&'static str),
    /// Bytes of at least this, with or without a unit; also 0 if the second is true.
    Bytes(u64, bool),
}

impl From<()> for Legal {
    fn from((): ()) -> Self {
        Self::Any
    }
}

impl From<std::ops::RangeInclusive<u64>> for Legal {
    fn from(range: std::ops::RangeInclusive<u64>) -> Self {
        Self::Whole(*range.start(), *range.end())
    }
}

impl From<std::ops::RangeInclusive<f64>> for Legal {
    fn from(range: std::ops::RangeInclusive<f64>) -> Self {
        Self::Number(*range.start(), Some(*range.end()))
    }
}

impl From<std::ops::RangeFrom<f64>> for Legal {
    fn from(range: std::ops::RangeFrom<f64>) -> Self {
        Self::Number(range.start, None)
    }
}

impl<const N: usize> From<&'static [&'static str; N]> for Legal {
    fn from(words: &'static [&'static str; N]) -> Self {
        Self::Words(words)
    }
}

/// One setting.
#[derive(Debug, Clone, Serialize)]
pub struct Setting {
    /// Its name in the core, which is the field's name.
    pub key: &'static str,
    /// Its group in the help.
    pub section: &'static str,
    /// Kind of its values: see [`Shape::KIND`].
    pub kind: &'static str,
    /// Whether it can be `None`.
    pub is_optional: bool,
    /// Its legal values.
    pub legal: Legal,
    /// Its flags, the placeholder of its value in the help, and variables besides the flags' own;
    /// the help shows the first flag. Empty without a flag.
    pub spelled: String,
    /// The default value.
    pub default: Value,
    /// One line for the help, followed by further documentation for the manual, in Markdown.
    pub help: Vec<&'static str>,
}

/// A type of settings.
pub trait Shape: Sized {
    /// `bool`, `int`, `float`, `text`, `texts` (a list), `shares` (names with weights) or `speed` (a number
    /// or the word auto).
    const KIND: &'static str;
    /// Whether `None` is one of its values.
    const IS_OPTIONAL: bool = false;

    /// # Errors
    /// `InvalidArgument` for a value of another type, `Config` for an invalid one.
    fn read(value: Value) -> Result<Self>;

    /// The value from which [`read`](Self::read) recreates the same.
    fn value(&self) -> Value;
}

fn other_type(wanted: &str, value: &Value) -> Error {
    Error::invalid(format!("must be {wanted}, got {value}"))
}

macro_rules! plain_shapes {
    ($($kind:ty: $name:literal, $wanted:literal;)*) => {
        $(impl Shape for $kind {
            const KIND: &'static str = $name;

            fn read(value: Value) -> Result<Self> {
                serde_json::from_value(value.clone()).map_err(|_| other_type($wanted, &value))
            }

            fn value(&self) -> Value {
                serde_json::json!(self)
            }
        })*
    };
}

plain_shapes! {
    bool: "bool", "true or false";
    u16: "int", "a whole number of 16 bits";
    u32: "int", "a whole number of 32 bits";
    u64: "int", "a whole number of at least 0";
    usize: "int", "a whole number of at least 0";
    f64: "float", "a number";
    String: "text", "a string";
    std::path::PathBuf: "text", "a path";
    Vec<String>: "texts", "a list of strings";
    Vec<(String, f64)>: "shares", "a list of names with weights";
}

impl<T: Shape> Shape for Option<T> {
    const KIND: &'static str = T::KIND;
    const IS_OPTIONAL: bool = true;

    fn read(value: Value) -> Result<Self> {
        if value.is_null() { Ok(None) } else { T::read(value).map(Some) }
    }

    fn value(&self) -> Value {
        self.as_ref().map_or(Value::Null, T::value)
    }
}

/// In seconds.
impl Shape for Duration {
    const KIND: &'static str = "float";

    fn read(value: Value) -> Result<Self> {
        Self::try_from_secs_f64(f64::read(value.clone())?).map_err(|_| {
            Error::Config(format!("must be a number of seconds of at least 0, got {value}"))
        })
    }

    fn value(&self) -> Value {
        self.as_secs_f64().into()
    }
}

/// Settings given by a caller, by their keys; each is taken once.
#[derive(Debug, Default)]
pub struct Given(pub Map<String, Value>);

impl Given {
    /// Stores the value for `key` in `setting`, if there is one.
    ///
    /// # Errors
    /// As [`Shape::read`]; names the key.
    pub fn take<T: Shape>(&mut self, key: &str, setting: &mut T) -> Result<()> {
        if let Some(value) = self.0.remove(key) {
            *setting = T::read(value).map_err(|error| match error {
                Error::Config(why) => Error::Config(format!("{key} {why}")),
                error => Error::invalid(format!("{key} {error}")),
            })?;
        }
        Ok(())
    }

    /// Checks that all settings were used.
    ///
    /// # Errors
    /// `InvalidArgument`, naming an unknown setting.
    pub fn finish(self) -> Result<()> {
        match self.0.keys().next() {
            Some(key) => Err(Error::invalid(format!("unknown setting {key:?}"))),
            None => Ok(()),
        }
    }
}

/// A struct of settings.
pub trait Concern: Sized {
    /// Its settings, in the order of the help.
    fn table() -> Vec<Setting>;

    /// Takes the settings from `given`, with defaults for the rest.
    ///
    /// # Errors
    /// As [`Given::take`].
    fn take(given: &mut Given) -> Result<Self>;

    /// First flags of the settings that differ from their defaults, in the order of the help; empty
    /// for one without a flag.
    fn changed(&self) -> Vec<&'static str>;
}

/// Declares a struct of settings, which is a [`Concern`] with defaults.
///
/// Sections of the help contain settings: `key: type = default, legal, "--flag --other-flag WHAT
/// DYN_VARIABLE";` after the documentation, whose first line is the line of the help.
#[macro_export]
macro_rules! settings {
    ($(#[$about:meta])* $name:ident {$($section:literal: {
        $($(#[doc = $doc:literal])+ $key:ident: $kind:ty = $default:expr, $legal:expr, $spelled:literal;)+
    })+}) => {
        $(#[$about])*
        #[derive(Debug, Clone)]
        pub struct $name {
            $($($(#[doc = $doc])+ pub $key: $kind,)+)+
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($($key: $default,)+)+ }
            }
        }

        impl $crate::settings::Concern for $name {
            fn table() -> Vec<$crate::settings::Setting> {
                let default = Self::default();
                vec![$($($crate::settings::Setting {
                    key: stringify!($key),
                    section: $section,
                    kind: <$kind as $crate::settings::Shape>::KIND,
                    is_optional: <$kind as $crate::settings::Shape>::IS_OPTIONAL,
                    legal: $legal.into(),
                    spelled: $spelled.to_owned(),
                    default: $crate::settings::Shape::value(&default.$key),
                    help: vec![$($doc.trim_ascii()),+],
                },)+)+]
            }

            fn take(given: &mut $crate::settings::Given) -> $crate::error::Result<Self> {
                let mut settings = Self::default();
                $($(given.take(stringify!($key), &mut settings.$key)?;)+)+
                Ok(settings)
            }

            fn changed(&self) -> Vec<&'static str> {
                use $crate::settings::Shape;
                let default = Self::default();
                [$($(($spelled, self.$key.value() != default.$key.value()),)+)+]
                    .into_iter()
                    .filter(|(_, is_changed)| *is_changed)
                    .filter_map(|(spelled, _)| spelled.split(' ').next())
                    .collect()
            }
        }
    };
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    settings! {
        /// Of these tests.
        Mine { "Mine": {
            /// How long
            wait: Duration = Duration::from_secs(2), 0.5..=9.0, "--wait SECONDS";
            /// How many
            limit: Option<u32> = None, 1..=9, "--limit";
        }
        "Yours": {
            /// Which
            ///
            /// It goes on.
            word: String = "a".to_owned(), &["a", "b"], "--word DYN_WORD";
        } }
    }

    fn given(json: &str) -> Given {
        Given(serde_json::from_str(json).unwrap())
    }

    #[test]
    fn what_is_given_is_taken_and_the_rest_has_its_default() {
        let mut given = given(r#"{"wait": 0.25, "limit": null, "other": 1}"#);
        let mine = Mine::take(&mut given).unwrap();
        assert_eq!((mine.wait.as_millis(), mine.limit, mine.word.as_str()), (250, None, "a"));
        assert_eq!((mine.changed(), Mine::default().changed()), (vec!["--wait"], vec![]));
        let error = given.finish().unwrap_err();
        assert_eq!(error, Error::invalid("unknown setting \"other\""));
    }

    #[test]
    fn another_type_is_refused_by_name() {
        for (json, told) in [
            (r#"{"wait": "1"}"#, "wait must be a number, got \"1\""),
            (r#"{"limit": -1}"#, "limit must be a whole number of 32 bits, got -1"),
            (r#"{"word": true}"#, "word must be a string, got true"),
        ] {
            assert_eq!(Mine::take(&mut given(json)).unwrap_err(), Error::invalid(told));
        }
        let error = Mine::take(&mut given(r#"{"wait": -1.0}"#)).unwrap_err();
        let told = "wait must be a number of seconds of at least 0, got -1.0";
        assert_eq!(error, Error::Config(told.into()));
    }

    #[test]
    fn the_table_says_what_was_declared() {
        let table = serde_json::json!(Mine::table());
        assert_eq!(table[0]["legal"], serde_json::json!({"number": [0.5, 9.0]}));
        assert_eq!((&table[0]["default"], &table[0]["kind"]), (&2.0.into(), &"float".into()));
        assert_eq!(table[1]["legal"], serde_json::json!({"whole": [1, 9]}));
        assert_eq!(table[1]["is_optional"], true);
        assert_eq!(table[2]["section"], "Yours");
        assert_eq!(table[2]["help"], serde_json::json!(["Which", "", "It goes on."]));
        assert_eq!(table[2]["spelled"], "--word DYN_WORD");
    }
}
