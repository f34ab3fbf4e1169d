//! What stands between a listener and the app behind it: who may ask what.

mod audit;
mod caller;
mod credential;
mod entry;
mod jwt;
mod keys;
mod rules;
mod secret;
mod side;
mod web;

pub(crate) use audit::Subject;
pub use caller::Caller;
pub(crate) use credential::Credential;
pub use entry::Lock;
pub(crate) use entry::{Admitted, Refusal, Verdict};
pub use keys::{Key, Pass, Role, check_keys};
pub use rules::Face;
pub(crate) use rules::nets;
#[cfg(test)]
pub(crate) use side::Side;
