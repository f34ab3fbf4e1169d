//! kvflash: the pure core that decides, the doors that carry bytes, the fence to Python.
//!
//! Floors, lowest first; a room imports from its own or lower floors only (`rust/tests/doors.rs`
//! checks it):
//!
//! - floor 0, words: [`error`], [`ids`], [`clock`], [`event`]; and `cache`, a bounded map
//! - floor 1, pure: [`hash`], [`codec`], [`stream`], [`index`], [`load`], [`policy`], [`fair`],
//!   [`text`], [`router`], [`catalog`], [`select`]
//! - floor 2, doors: [`http`] (tokio lives here)
//! - floor 3, the fence: `py` (feature `python`)
#![deny(unsafe_op_in_unsafe_fn)]
#![warn(missing_docs, rust_2018_idioms, clippy::unwrap_used, clippy::dbg_macro)]

mod cache;
pub mod clock;
pub mod error;
pub mod event;
pub mod ids;

pub mod catalog;
pub mod codec;
pub mod fair;
pub mod hash;
pub mod index;
pub mod load;
pub mod policy;
pub mod router;
pub mod select;
pub mod stream;
pub mod text;

pub mod http;

#[cfg(feature = "python")]
mod py;
