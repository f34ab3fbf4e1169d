//! The core's tests from outside, in one program: linking each by itself would take longer than running it.
//! `limits` and `stress` are programs of their own, as each brings an allocator that counts.

mod catalog;
mod credit;
mod engine_truth;
mod fleet;
mod frames;
mod index;
mod model;
mod names;
#[path = "../oracle/mod.rs"]
mod oracle;
mod returning;
mod rooms;
mod scenarios;
mod snapshot;
mod tenants;
mod text;
mod trace;
mod vectors;
