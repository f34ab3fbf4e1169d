//! The load of every worker of one model: active requests, their prompt tokens still to be
//! prefilled and the distinct blocks they hold.
//!
//! [`ActiveSequences`] keeps the requests and the derived counters in one structure, so that a
//! counter can't outlive its request. Time is an argument and never read from the system; this room
//! has no lock and no randomness.

mod active;
mod blocks;
mod config;
mod decay;
mod holders;
pub(crate) mod recency;
mod slots;

pub use active::{ActiveSequences, Assignment, LoadTotals, RequestId};
pub use config::{BlockUse, LoadConfig, PrefillSpeed};
pub use slots::{ActiveLoad, MAX_WORKERS, WorkerLoad};

#[cfg(test)]
mod tests;
