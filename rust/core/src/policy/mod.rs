//! Which worker gets a request: functions of the request, the overlaps and the loads.
//!
//! [`select`] reads no clock and keeps no state; chance comes from the generator it is given. The
//! same inputs and the same generator state give the same [`Decision`], with what every candidate
//! costs, so that it can be explained afterwards.
//!
//! [`RoutePolicy`] is the same for policies that remember: one file each, entered in
//! [`registry`] with one line. Time and chance come in as arguments there too.

mod affinity;
mod built_in;
mod by_metric;
mod contract;
mod cost;
mod decision;
pub mod desk;
mod engine;
mod kind;
mod lowest;
mod metrics;
pub mod multi;
mod outside;
pub mod prefix;
mod price;
mod question;
pub mod registry;
mod sample;
mod select;
pub mod session;
pub mod settings;
mod shadow;
mod softmax;
mod tuned;
pub mod vtc_basic;

pub use affinity::{Affinity, Seat};
pub use contract::{Candidates, Context, Finished, Memo, Polarity, RoutePolicy, Session};
pub use cost::{ActiveLoad, Candidate, CandidateCost, KvScale, RequestTerms, Stage, Terms};
pub use decision::{Choice, Decision, Formula, Reason};
pub use desk::Desk;
pub use engine::EngineMetrics;
pub use kind::Policy;
pub use outside::Outside;
pub use price::AUTO;
pub use price::marks::Marks;
pub use price::parts::Price;
pub use price::ticket::Ticket;
pub use question::{Advice, Ended, News, OutsideCandidate, OutsideRequest, Question};
pub use sample::Sample;
pub use select::select;
pub use settings::{Profile, Settings, VARIABLES};
pub use shadow::{MAX_SHADOWS, Shadow, ShadowStats};
pub use tuned::Counted;

#[cfg(test)]
mod tests;
