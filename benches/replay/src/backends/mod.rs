//! The indexes of this repository, ready to be measured.

mod current;
mod null;
mod plain;

pub use current::{Aging, Copies, Current, Kvflash, Set};
pub use null::Null;
pub use plain::Plain;

use crate::corpus::EventView;
use kvflash_core::ids::Worker;

/// An owned event of the indexes that take slices: what a decoder would hand over.
#[derive(Debug, Clone)]
pub enum Owned<B> {
    /// Blocks became reusable.
    Stored { worker: Worker, parent: Option<u64>, blocks: Vec<B> },
    /// Blocks were evicted.
    Removed { worker: Worker, names: Vec<u64> },
    /// All were.
    Cleared { worker: Worker },
}

impl<B> Owned<B> {
    /// Copies an event; `block` makes a block of a name and a local hash.
    pub fn of(view: EventView<'_>, block: impl Fn(u64, u64) -> B) -> Self {
        match view {
            EventView::Stored { worker, parent, blocks } => Self::Stored {
                worker: name(worker),
                parent,
                blocks: blocks.iter().map(|b| block(b.name, b.local)).collect(),
            },
            EventView::Removed { worker, names } => {
                Self::Removed { worker: name(worker), names: names.to_vec() }
            }
            EventView::Cleared { worker } => Self::Cleared { worker: name(worker) },
        }
    }
}

/// What the corpus' worker `number` is called: not its number, so that nobody profits from that.
fn name(number: u32) -> Worker {
    Worker::new(u64::from(number) + 1_000, 0)
}

/// The way back.
fn number(worker: Worker) -> u32 {
    (worker.instance_id - 1_000) as u32
}
