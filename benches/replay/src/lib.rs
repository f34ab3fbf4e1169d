//! Replays the same engine events and prompts against several block indexes, and measures them.
//!
//! - what is replayed: [`trace`] (requests), [`engine`] (what engines make of them), [`corpus`] with
//!   [`file`] (events, prompts and right answers, in one file that every index gets), [`scenes`] (small
//!   made-up loads)
//! - who is measured: [`backend`] (the contract), [`backends`] (of them [`backends::Plain`] is the yardstick of the gates)
//! - how: [`modes`], [`figures`] (percentiles, ratios), [`heap`] (bytes asked of the allocator), [`cli`]
//!
//! Rules of the house: one process per trial; events are made in the index's own owned type before the
//! clock starts, for all alike; a time of events includes the wait until all of them took effect; every
//! answer goes into a checksum, so that none is optimized away.

pub mod backend;
pub mod backends;
pub mod cli;
pub mod corpus;
pub mod engine;
pub mod figures;
pub mod file;
pub mod heap;
pub mod modes;
pub mod scenes;
pub mod trace;
