//! Shared memory of the index: one writer changes it while any number of readers walk through it.
//!
//! The only room of the index where `unsafe` is allowed. What it promises to the safe rooms above:
//!
//! - **Readers never wait.** No lock, no retry without bound. The only line a reader writes is its own
//!   padded slot in [`epoch`].
//! - **One writer at a time.** Whoever changes something holds a `&mut` handle that exists once per
//!   table, so safe code cannot make two writers.
//! - **Nothing is freed under a reader.** What a reader can reach is replaced, never changed in shape:
//!   the new version is published by one store, the old one is retired and freed once every reader that
//!   may have seen it has left.
//!
//! Memory orders, everywhere in the room: content is written first and published by a `Release` store
//! of the one word that leads to it; readers come by an `Acquire` load of that word. `SeqCst` stands in
//! [`epoch`] only, where a store and a later load of different words must not pass each other.
//! `rust/loom` explores the interleavings of these protocols.

#![allow(unsafe_code, reason = "memory that readers share with a writer without locks")]

mod array;
// What their readers rely on is modelled in small in `rust/loom/append.rs`.
#[cfg(not(loom))]
pub mod cover;
pub mod edges;
pub mod epoch;
#[cfg(not(loom))]
pub mod runs;
mod sync;
