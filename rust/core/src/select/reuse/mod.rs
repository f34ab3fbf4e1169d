//! Whether engines reuse what their events promise: evidence from answers, and the credit that follows from it.

mod compare;
mod finding;
mod removals;
mod table;
mod trust;

pub use finding::{EventSource, ReuseFinding, WorkerReason};
pub use removals::Removals;
pub use table::ReuseTable;
pub use trust::{ReuseChange, ReuseSample, ReuseTrust, ReuseView};

#[cfg(test)]
mod tests;
