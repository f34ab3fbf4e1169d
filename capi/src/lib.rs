//! libkvflash: an engine written in any language that can call C tells routers what its KV cache
//! holds. The manual of the functions is `include/kvflash.h`.
//!
//! | module | what |
//! |---|---|
//! | `ffi`, `older` | the functions: pointers in, result codes out; no panic gets past them |
//! | `handle` | numbers that stand for publishers and are never given twice |
//! | `publisher` | checks, and from calls to encoded events |
//! | `stream` | numbers batches, publishes them, keeps them for replay; a thread of its own |
//! | `wire` | events as bytes |
//! | `announce` | a key in the discovery folder of the machine |
//! | `zmq` | the functions of libzmq that are called |
//!
//! `unsafe` is in `ffi` and `older` (the callers' pointers), `announce` (two system calls) and `zmq`.

#![warn(missing_docs, clippy::all)]
#![deny(unsafe_op_in_unsafe_fn)]

mod announce;
mod fault;
mod ffi;
mod handle;
mod older;
mod publisher;
mod stream;
mod wire;
mod zmq;
