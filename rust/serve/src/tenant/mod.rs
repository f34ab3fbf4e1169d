//! Rights of a client key's owner: limits, a share of the engines' caches, and which fields and
//! headers of a request reach an engine.

pub(crate) mod limit;
pub(crate) mod pass;
mod salt;

pub(crate) use salt::SaltSecret;

#[cfg(test)]
pub(crate) mod tests {
    use crate::{Key, Role};

    /// A client's key without limits.
    pub fn key(id: &str) -> Key {
        Key::new(id, Role::Client)
    }
}
