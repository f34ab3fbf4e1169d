//! The atomics of this room: the standard library's, or loom's in the models.

#[cfg(loom)]
pub use loom::sync::atomic;
#[cfg(not(loom))]
pub use std::sync::atomic;

/// Padded to two cache lines, because processors fetch lines in pairs.
#[repr(align(128))]
pub struct Padded<T>(pub T);
