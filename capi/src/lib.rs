//! libkvflash: lets an engine in any language with a C interface report its KV cache to routers.
//! `include/kvflash.h` documents the functions.
//!
//! | module | what |
//! |---|---|
//! | `ffi`, `older` | the functions: pointers in, result codes out; panics are caught |
//! | `handle` | publisher handles, which are never reused |
//! | `publisher` | one rank of an engine: a thread that publishes and replays batches, its announcement, its counters |
//! | `zmq` | bindings of the required libzmq functions |
//!
//! Code without C and sockets (checks, encoding, numbers, replay, the announcement) is in the crate
//! `kvflash-publish`. `unsafe` is in `ffi` and `older` (the callers' pointers) and `zmq`.

mod fault;
mod ffi;
mod handle;
mod older;
mod publisher;
mod zmq;
