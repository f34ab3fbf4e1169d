//! What an index holds, in a file: saved while it serves, loaded after a restart.
//!
//! A head, then one section a worker. Each has a checksum of its own, so what is damaged costs one
//! worker. `format` has the bytes, `save` writes them, `load` reads, doubts and applies them, `source`
//! finds the next section behind a damaged one. `docs/snapshot.md` is the manual of the format.

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

/// What a snapshot says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Meta {
    /// Tokens in a block.
    pub block_size: u32,
    /// When it was made, in milliseconds since 1970, by the caller's clock.
    pub created_ms: u64,
    /// What the index is of, such as a model's name; opaque, at most [`MAX_KEY_BYTES`].
    pub key: Vec<u8>,
}

/// Where a worker's stream of events stood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor {
    /// Last batch that was applied.
    pub sequence: u64,
    /// Hash of that batch's bytes, to tell one life of the engine from the next.
    pub fingerprint: Option<u64>,
}

/// What was saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Saved {
    /// Sections.
    pub workers: usize,
    /// Blocks in stored steps of the dumps.
    pub blocks: u64,
    /// Bytes written.
    pub bytes: u64,
}

/// What a snapshot must be to be loaded; `None` means anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Expected<'a> {
    /// Tokens in a block.
    pub block_size: Option<u32>,
    /// What the index is of.
    pub key: Option<&'a [u8]>,
}

/// What came of a snapshot whose head was good.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loaded {
    /// What it says of itself.
    pub meta: Meta,
    /// Workers whose section was applied, in the order of the file.
    pub workers: Vec<Restored>,
    /// Workers whose section was not: of these the index holds nothing from the snapshot.
    pub lost: Vec<Lost>,
    /// Whether the snapshot ended too early.
    pub cut: bool,
}

/// A worker that was loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Restored {
    /// Who.
    pub worker: Worker,
    /// Where its events go on.
    pub cursor: Option<Cursor>,
    /// Memberships it has now.
    pub blocks: usize,
}

/// A worker that was not loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lost {
    /// Who.
    pub worker: Worker,
    /// Why.
    pub cause: Cause,
}

/// Why a worker was not loaded.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Cause {
    /// The header of the section is not what was written.
    #[error("the section's header is damaged")]
    Header,
    /// The checksum of the section does not fit its bytes.
    #[error("the section is damaged: its checksum is {found:#018x}, expected {expected:#018x}")]
    Checksum {
        /// What the header says.
        expected: u64,
        /// What the bytes have.
        found: u64,
    },
    /// The snapshot ends before the section does.
    #[error("the snapshot is truncated")]
    Cut,
    /// The bytes could not be read.
    #[error("the snapshot cannot be read: {0}")]
    Unreadable(io::ErrorKind),
    /// The checksum fits, but the content is none that an index writes.
    #[error("the section is invalid: {0}")]
    Invalid(&'static str),
    /// The index did not take all of it, because of its limits for example; what it took is taken back.
    #[error("the index refused: {0}")]
    Refused(&'static str),
    /// The worker holds blocks already: what it said itself is newer.
    #[error("the worker holds {0} blocks already")]
    Held(usize),
}

/// Why nothing of a snapshot was loaded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The head could not be read.
    #[error("the snapshot cannot be read: {0}")]
    Io(#[from] io::Error),
    /// It is shorter than its head.
    #[error("the snapshot is truncated within its header")]
    Cut,
    /// A field of the head is not what it must be.
    #[error("snapshot's {field}: expected {expected}, found {found}")]
    Field {
        /// Which.
        field: &'static str,
        /// What would be accepted.
        expected: String,
        /// What is there.
        found: String,
    },
}
