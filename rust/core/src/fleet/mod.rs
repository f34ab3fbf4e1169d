//! The fleet: who the workers are, as a machine without sockets.
//!
//! Whoever hears of workers (flags, DNS, discovery, `POST /workers`, health checks) makes a [`Change`] of
//! it. The [`Roster`] answers with [`Effect`]s, which the caller performs in order.
//!
//! A worker *joins* when somebody names it, and *serves* from its [`Card`] on, which says what model it has.

mod events;
mod name;
mod roster;

pub use events::{EventSpec, Hearing, broker_path, port_of, shifted};
pub use name::{Claim, Names};
pub use roster::{Card, Change, Effect, Roster, WorkerState};
