//! Compares engines' actual reuse with their events: evidence from answers, and the resulting
//! credit.

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
