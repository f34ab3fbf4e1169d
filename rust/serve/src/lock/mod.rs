//! What stands between a listener and the app behind it: who may ask what.

mod caller;
mod credential;
mod entry;
mod jwt;
mod keys;
mod rules;
mod secret;

pub use caller::Caller;
pub(crate) use caller::{Side, Subject};
pub(crate) use credential::Credential;
pub use entry::Lock;
pub(crate) use entry::Verdict;
pub use keys::{Key, Pass, Role, check_key, check_keys};
pub use rules::Face;
pub(crate) use rules::nets;
