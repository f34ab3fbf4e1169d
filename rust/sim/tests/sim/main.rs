//! The simulator against recorded engines, and policies before it.

mod auto;
mod engine_truth;
mod traces;
mod turns;
