//! What an index must do to be measured.

use crate::corpus::EventView;

/// A block index behind its own types.
///
/// Workers are numbered from 0; a backend names them as it likes. Events and prompts are made in the
/// backend's own types before the clock starts.
pub trait Backend: Sized + Send + Sync + 'static {
    /// An event as the index takes it: owned.
    type Event: Send;
    /// A prompt as the index takes it.
    type Prompt: Send + Sync;
    /// Room for answers that a caller keeps, where the index has such.
    type Out: Default;
    /// Whether [`Backend::apply`] returns before the event took effect.
    const QUEUED: bool;
    /// Whether [`Backend::sweep`] does anything.
    const SWEEPS: bool = false;
    /// Whether answers are right: false for the one that only shows what the harness costs.
    const ANSWERS: bool = true;

    /// An empty index for up to `workers`.
    fn new(workers: u32) -> Self;

    /// Makes an owned event.
    fn event(&self, view: EventView<'_>) -> Self::Event;

    /// Makes a prompt.
    fn prompt(&self, locals: &[u64]) -> Self::Prompt;

    /// Hands over an event.
    fn apply(&self, event: Self::Event);

    /// Waits until all events handed over took effect.
    fn drain(&self);

    /// Does now what the index does some time or other: for the sizes of those that put it off.
    fn sweep(&self) {}

    /// Asks in the way that is cheapest for the index; the answer's [`fold`] over all workers.
    fn ask(&self, prompt: &Self::Prompt, out: &mut Self::Out) -> u64;

    /// Asks for a hash map of worker and depth, made for this answer; its [`fold`].
    fn ask_map(&self, prompt: &Self::Prompt, out: &mut Self::Out) -> u64;

    /// The answer itself, ascending by worker.
    fn answer(&self, prompt: &Self::Prompt) -> Vec<(u32, u32)>;
}

/// A worker's part of an answer's checksum; parts are added up, in any order.
#[inline]
pub fn fold(worker: u64, depth: u32) -> u64 {
    (worker + 1).wrapping_mul(u64::from(depth))
}
