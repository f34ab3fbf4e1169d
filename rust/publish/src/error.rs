//! Errors of publishing and announcing.

use std::fmt;

/// A failure by cause, with a text for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// An argument is wrong.
    InvalidArgument(String),
    /// A file or folder could not be read or written.
    Io(String),
    /// The publisher is shut down, or belongs to another process.
    Closed(&'static str),
}

/// Shorthand of the crate.
pub type Result<T> = std::result::Result<T, Error>;

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidArgument(text) | Self::Io(text) => formatter.write_str(text),
            Self::Closed(text) => formatter.write_str(text),
        }
    }
}

impl std::error::Error for Error {}

/// An invalid argument.
pub(crate) fn invalid(text: impl Into<String>) -> Error {
    Error::InvalidArgument(text.into())
}
