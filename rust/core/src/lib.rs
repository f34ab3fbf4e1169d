//! kvflash's pure core: it tracks the workers' blocks and decides which worker gets a request. No
//! sockets, no Python, no tokio: Cargo.toml lists none of them.
//!
//! Rooms, lowest first; a room may use only the rooms above it in this table (`tests/all/rooms.rs`
//! checks it):
//!
//! | room | what |
//! |---|---|
//! | `named` | enums whose variants have names |
//! | `cache` | a map with a limit |
//! | [`error`] | errors by cause |
//! | [`settings`] | how settings are declared |
//! | [`ids`] | workers, tiers |
//! | [`clock`] | the time, as callers give it |
//! | [`log_limit`] | a bound on what one source writes into the log |
//! | [`event`] | what engines publish |
//! | [`hash`] | blocks' hashes, engines' names of blocks |
//! | [`codec`] | bytes to events |
//! | [`stream`] | the order of a publisher's batches |
//! | [`repair`] | how a publisher's lost batches come back |
//! | [`index`] | who holds which blocks |
//! | [`load`] | what each worker has to do |
//! | [`policy`] | the choice among workers |
//! | [`fair`] | the queue in front of a choice |
//! | [`text`] | text to tokens and back |
//! | [`catalog`] | models, tenants, publishers and their indexes |
//! | [`select`] | from a request to a worker |
//! | [`fleet`] | who the workers are |

#[macro_use]
mod named;

mod cache;
pub mod clock;
pub mod error;
pub mod event;
pub mod ids;
pub mod settings;

pub mod catalog;
pub mod codec;
pub mod fair;
pub mod fleet;
pub mod hash;
pub mod index;
pub mod load;
pub mod log_limit;
pub mod policy;
pub mod repair;
pub mod select;
pub mod stream;
pub mod text;
