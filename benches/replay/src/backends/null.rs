//! Takes everything, knows nothing: what the harness itself costs.

use std::hint::black_box;

use super::Owned;
use crate::backend::Backend;
use crate::corpus::{EventView, NamedBlock};

/// The harness' ceiling.
pub struct Null;

impl Backend for Null {
    type Event = Owned<NamedBlock>;
    type Prompt = Vec<u64>;
    type Out = ();
    const QUEUED: bool = false;
    const ANSWERS: bool = false;

    fn new(_: u32) -> Self {
        Self
    }

    fn event(&self, view: EventView<'_>) -> Self::Event {
        Owned::of(view, |name, local| NamedBlock { name, local })
    }

    fn prompt(&self, locals: &[u64]) -> Self::Prompt {
        locals.to_vec()
    }

    fn apply(&self, event: Self::Event) {
        drop(black_box(event));
    }

    fn drain(&self) {}

    fn ask(&self, prompt: &Self::Prompt, (): &mut ()) -> u64 {
        black_box(prompt).len() as u64
    }

    fn ask_map(&self, prompt: &Self::Prompt, (): &mut ()) -> u64 {
        black_box(prompt).len() as u64
    }

    fn answer(&self, _: &Self::Prompt) -> Vec<(u32, u32)> {
        Vec::new()
    }
}
