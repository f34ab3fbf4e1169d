//! Publishes an engine's KV cache events, up to the socket: the caller brings the socket and the
//! thread. Used by C (`capi/`), Python and the mocker (`rust/src/py/event_outbox.rs`).
//!
//! | module | what |
//! |---|---|
//! | [`publisher`] | one rank's publisher: checks, encodes and queues calls |
//! | [`blocks`] | checks the blocks of a call and cuts them into events |
//! | [`wire`] | encodes events and batches |
//! | [`items`] | finds where multimodal items begin that engines name block by block |
//! | [`outbox`] | the queue between callers and the thread that has the sockets |
//! | [`pending`] | holds events until they fill a batch |
//! | [`ring`] | numbers batches and keeps the latest for replay |
//! | [`replay`] | answers clients that ask for batches they missed |
//! | [`announce`] | writes a key into the discovery folder of the machine |
//!
//! `unsafe` is in [`announce`] only, for two system calls.

pub mod announce;
pub mod blocks;
mod error;
pub mod items;
pub mod outbox;
pub mod pending;
pub mod publisher;
pub mod replay;
pub mod ring;
pub mod wire;

pub use error::{Error, Result};
