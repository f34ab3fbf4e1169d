//! Whose request is next: a queue in front of the choice of a worker, in which every client gets
//! its share of the service, whatever the others ask for.
//!
//! [`FairQueue`] is a state machine for one model: requests go in with [`push`](FairQueue::push),
//! the next one comes out of [`pop`](FairQueue::pop) when it fits, and what it uses is charged to
//! its client while it runs. [`Line`] is the other one, behind it: requests that no worker has room
//! to prefill, in the order of a [`LineOrder`]. There is no clock, no lock and no chance in this room.
//!
//! # Source
//! The Virtual Token Counter of Sheng et al., *Fairness in Serving Large Language Models*, and the
//! variants of its artifact.

mod config;
mod line;
mod order;
mod price;
mod queue;
mod ready;
mod request;
mod stats;

pub use config::{Discipline, FairConfig};
pub use line::{Line, Place};
pub use order::{LineOrder, Standing, Wish};
pub use price::{Predictor, Price};
pub use queue::FairQueue;
pub use request::{Cost, Dropped, Grant, Granted, Options, Refusal, Refused, Ticket, Used};
pub use stats::{ClientStats, FairStats};

#[cfg(test)]
mod tests;
