//! Publishes an engine's KV cache events, up to the socket: the caller brings the socket and the
//! thread. `capi/` is the first user.
//!
//! | module | what |
//! |---|---|
//! | [`blocks`] | checks the blocks of a call and cuts them into events |
//! | [`wire`] | encodes events and batches |
//! | [`pending`] | holds events until they fill a batch |
//! | [`ring`] | numbers batches and keeps the latest for replay |
//! | [`replay`] | answers clients that ask for batches they missed |
//! | [`announce`] | writes a key into the discovery folder of the machine |
//!
//! `unsafe` is in [`announce`] only, for two system calls.

pub mod announce;
pub mod blocks;
mod error;
pub mod pending;
pub mod replay;
pub mod ring;
pub mod wire;

pub use error::{Error, Result};
