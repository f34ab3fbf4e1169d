//! The content of an index in a file: saved during operation, loaded after a restart.
//!
//! A header is followed by one section per worker. Each has its own checksum, so damage loses one
//! worker at most. `format` defines the bytes, `save` writes them, `load` reads, checks and applies
//! them, `source` finds the next section after a damaged one. `docs/snapshot.md` documents the
//! format.

use std::io;

use thiserror::Error;

use crate::ids::Worker;

mod format;
mod load;
mod save;
mod source;

pub use format::{MAX_KEY_BYTES, VERSION};
pub use load::{Reader, load};
pub use save::{save, save_to_path, save_workers};

/// Description of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Meta {
    /// Tokens in a block.
    pub block_size: u32,
    /// When it was created, in milliseconds since 1970, by the caller's clock.
    pub created_ms: u64,
    /// Identifies the content of the index, such as a model's name; opaque, at most
    /// [`MAX_KEY_BYTES`].
    pub key: Vec<u8>,
}

/// Position in a worker's event stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor {
    /// The last applied batch.
    pub sequence: u64,
    /// Hash of that batch's bytes, to detect a restart of the engine.
    pub fingerprint: Option<u64>,
}

/// Result of a save.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Saved {
    /// Sections.
    pub workers: usize,
    /// Blocks in stored steps of the dumps.
    pub blocks: u64,
    /// Bytes written.
    pub bytes: u64,
}

/// Result of loading a snapshot with a valid header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loaded {
    /// Description of the snapshot.
    pub meta: Meta,
    /// Workers whose section was applied, in the order of the file.
    pub workers: Vec<Restored>,
    /// Workers without an applied section: the index holds nothing of them from the snapshot.
    pub lost: Vec<Lost>,
    /// Whether the snapshot ended too early.
    pub cut: bool,
}

/// A worker that was loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Restored {
    /// The worker.
    pub worker: Worker,
    /// Position where its events continue.
    pub cursor: Option<Cursor>,
    /// Its number of memberships now.
    pub blocks: usize,
}

/// A worker that was not loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lost {
    /// The worker.
    pub worker: Worker,
    /// The cause.
    pub cause: Cause,
}

/// Why a worker was not loaded.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Cause {
    /// The section's header does not match what was written.
    #[error("the section's header is damaged")]
    Header,
    /// The section's checksum does not match its bytes.
    #[error("the section is damaged: its checksum is {found:#018x}, expected {expected:#018x}")]
    Checksum {
        /// Checksum in the header.
        expected: u64,
        /// Checksum of the bytes.
        found: u64,
    },
    /// The snapshot ends before the section does.
    #[error("the snapshot is truncated")]
    Cut,
    /// The bytes could not be read.
    #[error("the snapshot cannot be read: {0}")]
    Unreadable(io::ErrorKind),
    /// The checksum matches, but no index writes such content.
    #[error("the section is invalid: {0}")]
    Invalid(&'static str),
    /// The index did not accept all of it, for example because of its limits; everything was
    /// undone.
    #[error("the index refused: {0}")]
    Refused(&'static str),
    /// The worker already holds blocks: its own events are newer.
    #[error("the worker already holds {0} blocks")]
    Held(usize),
}

/// Why nothing of a snapshot was loaded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The header could not be read.
    #[error("the snapshot cannot be read: {0}")]
    Io(#[from] io::Error),
    /// It does not begin as a snapshot does.
    #[error(
        "is not a snapshot: it begins with {found}, not with {expected}; name a file that kvflash saved"
    )]
    Alien {
        /// The first bytes of every snapshot.
        expected: String,
        /// The first bytes found.
        found: String,
    },
    /// It is shorter than its header.
    #[error("the snapshot is truncated within its header")]
    Cut,
    /// A field of the header has an invalid value.
    #[error("snapshot's {field}: expected {expected}, found {found}")]
    Field {
        /// The field.
        field: &'static str,
        /// The accepted values.
        expected: String,
        /// The value found.
        found: String,
    },
}
