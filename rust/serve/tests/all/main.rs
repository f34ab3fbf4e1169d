//! The services from outside, in one program: HTTP in, HTTP out, engines that answer when a test says so.
#![allow(clippy::unwrap_used)]

mod affinity;
mod apis;
mod bounds;
mod contract;
mod disagg;
mod drain;
mod engine;
mod ids;
mod load;
mod parity;
mod queue;
mod retry;
mod serve;
mod stage;
mod stored;
mod taught;
mod tenants;
mod uploads;
