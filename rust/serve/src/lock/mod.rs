//! What stands between a listener and the app behind it: who may ask what.

mod caller;
mod entry;
mod keys;
mod secret;
mod side;

pub use caller::Caller;
pub use entry::Lock;
pub(crate) use entry::{Refusal, Verdict, admit};
pub use keys::{Key, Pass, Role, check_keys};
