//! The atomics of this room: the standard library's, or loom's where the models explore them.

#[cfg(loom)]
pub use loom::sync::atomic;
#[cfg(not(loom))]
pub use std::sync::atomic;
