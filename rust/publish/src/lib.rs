//! Publishes an engine's KV cache events, except for the socket: the caller provides the socket and
//! the thread. Used by C (`capi/`), Python and the mocker (`rust/src/py/event_outbox.rs`).
//!
//! | module | what |
//! |---|---|
//! | [`publisher`] | one rank's publisher: checks, encodes and queues calls |
//! | [`blocks`] | validates the blocks of a call and splits them into events |
//! | [`wire`] | encodes events and batches |
//! | [`items`] | finds the start of multimodal items that engines describe block by block |
//! | [`outbox`] | the queue between callers and the thread with the sockets |
//! | [`pending`] | holds events until they fill a batch |
//! | [`ring`] | numbers batches and keeps the latest for replay |
//! | [`replay`] | answers clients that request missed batches |
//! | [`announce`] | writes a key into the discovery folder of the machine |

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
