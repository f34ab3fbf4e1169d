//! The fence between kvflash and Python: the extension module `kvflash._core`.
//!
//! Without the feature `python` there is nothing in here. It calls `kvflash-core`, which decides,
//! and `kvflash-serve`, which listens.

#[cfg(feature = "python")]
mod py;

#[cfg(feature = "python")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;
