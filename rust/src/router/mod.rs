//! The router: overlaps and active load in, a booked worker out.
//!
//! [`Router::route`] selects and books in one step under one lock, so that no two requests decide
//! on the same picture of the load. What it returns is a guard: the load is given back when the
//! [`Booking`] is dropped, whatever became of the request.

mod booking;
mod config;
mod route;

pub use booking::Booking;
pub use config::{RouteOverride, RouterConfig};
pub use route::{Gate, RouteRequest, Router};

#[cfg(test)]
mod speed;
#[cfg(test)]
mod tests;
