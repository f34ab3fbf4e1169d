//! The indexes of this repository, measured. `replay help` says how.

use std::process::ExitCode;

use kvflash_replay::{cli, heap};

#[global_allocator]
static HEAP: heap::Counting = heap::Counting;

fn main() -> ExitCode {
    cli::main(&cli::own_backends())
}
