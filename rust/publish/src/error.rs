//! Errors of publishing and announcing.

/// A failure by cause, with a text for people.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// An argument is wrong.
    #[error("{0}")]
    InvalidArgument(String),
    /// A file or folder could not be read or written.
    #[error("{0}")]
    Io(String),
    /// The publisher is shut down, or belongs to another process.
    #[error("{0}")]
    Closed(&'static str),
}

/// Shorthand of the crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An invalid argument.
pub(crate) fn invalid(text: impl Into<String>) -> Error {
    Error::InvalidArgument(text.into())
}
