//! Shared memory of the index: one writer changes it while any number of readers walk through it.
//!
//! The only room of the index with `unsafe` code. Its guarantees to the safe rooms above:
//!
//! - **Readers never wait.** No locks, no unbounded retries. A reader writes only to its own padded
//!   slot in [`epoch`].
//! - **One writer at a time.** Changes need a `&mut` handle that exists once per table, so safe
//!   code can't have two writers.
//! - **Nothing is freed under a reader.** Structures that readers can reach are replaced, never
//!   modified in shape: one store publishes the new version, and the old one is retired and freed
//!   once every reader that may have seen it has left.
//!
//! Memory order in the whole room: content is written first, then published by a `Release` store of
//! the one word that leads to it; readers begin with an `Acquire` load of that word. `SeqCst` is
//! used only in [`epoch`], where a store and a later load of different words must not be reordered.
//! `rust/loom` explores the interleavings of these protocols.

#![allow(unsafe_code, reason = "memory that readers share with a writer without locks")]

mod array;
// `rust/loom/append.rs` models what its readers rely on.
#[cfg(not(loom))]
pub mod cover;
pub mod edges;
pub mod epoch;
#[cfg(not(loom))]
pub mod runs;
mod sync;
