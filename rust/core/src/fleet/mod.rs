//! The fleet: the set of workers, as a state machine without sockets.
//!
//! Sources of workers (flags, DNS, discovery, `POST /workers`, health checks) send a [`Change`].
//! The [`Roster`] answers with [`Effect`]s, which the caller performs in order.
//!
//! A worker *joins* when a source names it, and *serves* once its [`Card`] says which model it has.

mod events;
mod name;
mod roster;

pub use events::{EventSpec, Hearing, broker_path, port_of, shifted};
pub use name::{Claim, Names};
pub use roster::{Card, Change, Effect, Roster, WorkerState};
