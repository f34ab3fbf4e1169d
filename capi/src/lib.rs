//! libkvflash: an engine written in any language that can call C tells routers what its KV cache
//! holds. The manual of the functions is `include/kvflash.h`.
//!
//! | module | what |
//! |---|---|
//! | `ffi`, `older` | the functions: pointers in, result codes out; no panic gets past them |
//! | `handle` | numbers that stand for publishers and are never given twice |
//! | `publisher` | one rank of an engine: its stream, its announcement, its counters |
//! | `stream` | a thread that publishes and replays batches |
//! | `zmq` | the functions of libzmq that are called |
//!
//! What needs neither C nor sockets (checks, encoding, numbers, replay, the announcement) is the crate
//! `kvflash-publish`. `unsafe` is in `ffi` and `older` (the callers' pointers) and `zmq`.

mod fault;
mod ffi;
mod handle;
mod older;
mod publisher;
mod stream;
mod zmq;
