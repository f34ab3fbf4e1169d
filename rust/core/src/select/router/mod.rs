//! The router: overlaps and active load in, a booked worker out.
//!
//! [`Router::route`] selects and books in one step under one lock, so that no two requests decide
//! on the same picture of the load. What it returns is a guard: the load is given back when the
//! [`Reservation`](super::Reservation) is dropped, whatever became of the request.
//!
//! Policies that remember are asked in three steps: they prepare without the lock, choose under it,
//! and learn without it what was chosen and what became of it.

mod affinity;
mod config;
mod decide;
mod gate;
mod policies;
mod route;

pub use config::{RouteOverride, RouterConfig, TierWeights};
pub use gate::Gate;
pub(super) use policies::Tail;
pub use policies::{Considered, Policies, Usage};
pub use route::{RoomWatch, Router};

#[cfg(test)]
mod tests;
