//! The atomics of this room: the standard library's, or loom's where the models explore them.

#[cfg(loom)]
pub use loom::sync::atomic;
#[cfg(not(loom))]
pub use std::sync::atomic;

/// On lines of its own: two of them, because processors fetch lines in pairs.
#[repr(align(128))]
pub struct Padded<T>(pub T);
