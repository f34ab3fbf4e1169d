//! Chooses the worker for a request: functions of the request, the overlaps and the loads.
//!
//! [`select`] reads no clock and keeps no state; randomness comes from the generator that it is
//! given. Equal inputs and an equal generator state give an equal [`Decision`], which includes the
//! cost of every candidate and so can be explained afterwards.
//!
//! [`RoutePolicy`] extends this to stateful policies: one file each, listed in [`registry`] with
//! one line. Time and randomness are arguments there, too.

mod affinity;
mod built_in;
mod by_metric;
mod contract;
mod cost;
mod decision;
pub mod desk;
mod engine;
mod multi;
mod outside;
mod prefix;
mod price;
mod question;
pub mod registry;
mod select;
pub mod session;
pub mod settings;
mod shadow;
mod tuned;
mod vtc_basic;

pub use affinity::{Affinity, Seat};
pub(crate) use contract::model_of;
pub use contract::{
    Candidates, Context, Finished, Memo, Polarity, RoutePolicy, Sample, Session, Ticket, pool_of,
};
pub use cost::{Candidate, CandidateCost, KvScale, Policy, Price, RequestTerms, Stage, Terms};
pub use decision::{Choice, Decision, Formula, Reason};
pub use desk::Desk;
pub use engine::EngineMetrics;
pub use outside::Outside;
pub use price::AUTO;
pub use price::marks::Marks;
pub use question::{Advice, Ended, News, OutsideCandidate, OutsideRequest, Question};
pub use select::select;
pub use settings::{Profile, Settings, VARIABLES};
pub use shadow::{MAX_SHADOWS, Shadow, ShadowStats};
pub use tuned::Counted;

#[cfg(test)]
mod tests;
