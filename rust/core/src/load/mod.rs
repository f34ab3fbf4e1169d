//! What every worker of one model is busy with: active requests, their prompt tokens still to be
//! prefilled and the distinct blocks they hold.
//!
//! [`ActiveSequences`] keeps the requests and the counters derived from them in one structure, so
//! that a counter cannot outlive its request. Time comes in as an argument and never from the
//! system; there is no lock and no randomness in this room.

mod active;
mod blocks;
mod config;
mod decay;
mod holders;
pub(crate) mod recency;
mod slots;

pub use active::{ActiveSequences, Assignment, Expired, LoadTotals, RequestId, WorkerChange};
pub use config::{BlockUse, LoadConfig, PrefillSpeed};
pub use slots::{MAX_WORKERS, WorkerLoad};

#[cfg(test)]
mod tests;
