//! Whose requests are a client's.

use crate::{Caller, Key, Role};

/// The key of a client; operators' requests go on as they are.
pub(crate) fn client(caller: &Caller) -> Option<&Key> {
    caller.key().filter(|key| key.role == Role::Client)
}
