//! Errors by cause. One enum for callers of the core; the fence maps each variant to one Python class.

use thiserror::Error;

/// Result of fallible operations of the core.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors by what the caller can do about them.
///
/// A gap, a duplicate or an unknown parent is an outcome of an event, not an error. Services
/// respond by [`kind`](Self::kind) and never by the message.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Error {
    /// The configuration is invalid: fix the flag or the file. Names the field and what is legal.
    #[error("{0}")]
    Config(String),
    /// The call's arguments are invalid: fix the call. Names the field, the limit and what came.
    /// HTTP 400.
    #[error("{0}")]
    InvalidArgument(String),
    /// The bytes do not have the expected format: drop the frame and count it.
    #[error("{reason} at byte {offset}")]
    Decode {
        /// Position in the frame, in bytes from its start.
        offset: usize,
        /// The expected and the actual content.
        reason: String,
    },
    /// No worker can take the request: none registered, none healthy or none allowed. HTTP 503.
    #[error("{0}")]
    NoWorker(String),
    /// Every eligible worker is busier than the thresholds allow. HTTP 503 with Retry-After.
    #[error("{0}")]
    AllBusy(String),
    /// Every eligible worker has as much to prefill as it may: wait until one of them has room, and
    /// try again. HTTP 429 with Retry-After for callers that can't wait.
    #[error("{0}")]
    MustWait(String),
    /// A named limit is reached; try again later. HTTP 429 with Retry-After.
    #[error("{0}")]
    Overloaded(String),
    /// The named object does not exist. HTTP 404.
    #[error("{0}")]
    NotFound(String),
    /// The named object already exists, or contradicts the existing state. HTTP 409.
    #[error("{0}")]
    Conflict(String),
    /// The other side could not be reached or hung up. HTTP 502.
    #[error("{0}")]
    Transport(String),
    /// The service is shutting down. HTTP 503.
    #[error("{0}")]
    Closed(String),
}

impl Error {
    /// A decode error at `offset` bytes from the start of the frame.
    pub fn decode(offset: usize, reason: impl Into<String>) -> Self {
        Self::Decode { offset, reason: reason.into() }
    }

    /// The HTTP status of its response, and its exception class in Python's `kvflash.errors`.
    pub fn kind(&self) -> (u16, &'static str) {
        match self {
            Self::Config(_) => (500, "ConfigError"),
            Self::InvalidArgument(_) => (400, "InvalidArgumentError"),
            Self::Decode { .. } => (400, "DecodeError"),
            Self::NoWorker(_) => (503, "NoWorkerError"),
            Self::AllBusy(_) => (503, "AllBusyError"),
            Self::Overloaded(_) | Self::MustWait(_) => (429, "OverloadedError"),
            Self::NotFound(_) => (404, "NotFoundError"),
            Self::Conflict(_) => (409, "ConflictError"),
            Self::Transport(_) => (502, "TransportError"),
            Self::Closed(_) => (503, "ClosedError"),
        }
    }

    /// An argument error; the message names the field, the limit and what came.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::InvalidArgument(message.into())
    }
}
