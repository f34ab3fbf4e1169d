//! The router: overlaps and active load in, a booked worker out.
//!
//! [`Router::route`] selects and books in one step under one lock, so that no two requests decide
//! on the same load. It returns a guard: the load is freed when the
//! [`Reservation`](super::Reservation) is dropped, whatever happened to the request.
//!
//! Stateful policies are called in three steps: they prepare without the lock, choose under it, and
//! are notified of the choice and its outcome without it.

mod config;
mod decide;
mod policies;
mod route;

pub use config::{RouteOverride, RouterConfig, TierWeights};
pub(super) use policies::Tail;
pub use policies::{Considered, Policies, Usage};
pub use route::{RoomWatch, Router};

#[cfg(test)]
mod tests;
