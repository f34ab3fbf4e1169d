//! The order of requests: a queue before the choice of a worker, in which every client gets its
//! share of the service, whatever the others request.
//!
//! [`FairQueue`] is a state machine for one model: requests enter with [`push`](FairQueue::push),
//! the next one is returned by [`pop`](FairQueue::pop) if it fits, and its usage is charged to its
//! client while it runs. [`Line`] is the second queue, after it: requests that no worker has room
//! to prefill, in the order of a [`LineOrder`]. This room has no clock, no lock and no randomness.
//!
//! # Source
//! The Virtual Token Counter of Sheng et al., *Fairness in Serving Large Language Models*, and the
//! variants of its artifact.

mod config;
mod line;
mod order;
mod queue;
mod ready;
mod request;

pub use config::{Discipline, FairConfig, price};
pub use line::{Line, Place};
pub use order::{LineOrder, Standing, Wish};
pub use queue::FairQueue;
pub use request::{ClientName, Cost, FairStats, Grant, Granted, Refusal, Refused, Ticket, Used};

#[cfg(test)]
mod tests;
