//! A client's request on its way to a worker, and the answer's way back, stage by stage:
//!
//! `send` (takes a slot among the requests in flight) -> `call` (parses the request) -> `plan`
//! (model, tokens, routing input) -> `turn` (fairness between clients) -> `book` (a worker and its
//! load) -> `send` (to it, or to another one if that fails) -> `relay` and `answer` (back to the
//! client).
//!
//! `backend::worker` hides the differences between engines over HTTP and workers of the runtime.

mod answer;
pub(crate) mod api;
pub(crate) mod as_chat;
pub(crate) mod attempts;
pub(crate) mod backend;
pub(crate) mod body;
pub(crate) mod book;
pub(crate) mod call;
mod client;
mod foreign;
pub(crate) mod generation;
pub(crate) mod ids;
mod lesson;
pub(crate) mod plan;
mod relay;
pub(crate) mod send;
mod stored;
mod tokens;
pub(crate) mod turn;
pub(crate) mod usage;
