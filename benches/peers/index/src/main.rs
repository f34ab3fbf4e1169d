//! The indexes of other routers beside this repository's: the same corpus, the same modes, owned events.

mod dynamo;
mod smg;

use std::process::ExitCode;

use kvflash_replay::cli::{self, entry};
use kvflash_replay::heap;

#[global_allocator]
static HEAP: heap::Counting = heap::Counting;

fn main() -> ExitCode {
    let mut backends = cli::own_backends();
    backends.extend([
        entry::<dynamo::Compressed<1>>("dynamo-crtc-1"),
        entry::<dynamo::Compressed<2>>("dynamo-crtc-2"),
        entry::<dynamo::Positional<1>>("dynamo-positional-1"),
        entry::<dynamo::Positional<2>>("dynamo-positional-2"),
        entry::<smg::Chain>("smg-chain"),
    ]);
    cli::main(&backends)
}
