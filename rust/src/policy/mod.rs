//! Which worker gets a request: pure functions of the request, the overlaps and the loads.
//!
//! [`select`] reads no clock and keeps no state; chance comes from the generator it is given. The
//! same inputs and the same generator state give the same [`Decision`], with the terms of every
//! candidate, so that it can be explained afterwards.

mod cost;
mod decision;
mod kind;
mod select;
mod softmax;

pub use cost::{ActiveLoad, Candidate, KvScale, RequestTerms, Terms};
pub use decision::{Decision, Formula, Reason};
pub use kind::Policy;
pub use select::select;
pub use softmax::softmax_probabilities;

#[cfg(test)]
mod tests;
