//! Which worker holds which blocks: for a prompt, the number of leading blocks that each worker
//! holds.
//!
//! Content is a tree of local block hashes: a block *is* its local hash together with the path that
//! leads to it. An engine's block hash is only a name; a worker's name stands for one content at a
//! time, and engines need not agree on names. Identity (LoRA adapter, cache salt) is mixed into the
//! local hashes by a seed, so prompts of different identities never match and the index needs no
//! namespaces.
//!
//! A worker *holds* a set of blocks, which may have holes: evicting the middle of a chain leaves
//! the rest held. A prompt *scores* only the leading contiguous part, so a block after a hole does
//! not count until the hole is stored again.

mod arena;
mod check;
pub mod groups;
mod matches;
pub mod snapshot;
mod trie;
mod types;

pub use matches::{Depth, Depths, ManyMatches, Match, Matches, frequencies};
pub use trie::RadixIndex;
pub use types::{
    Block, CopyOutcome, CountMode, DEFAULT_SEED, DumpEvent, IndexStats, Limits, MAX_COPIES,
    MAX_WORKERS, Membership, Options, Rejection, RemoveOutcome, StoreOutcome,
};
