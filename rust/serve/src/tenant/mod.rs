//! What the owner of a client's key may do.

mod bucket;
pub(crate) mod limit;
pub(crate) mod pass;

#[cfg(test)]
pub(crate) mod tests {
    use crate::{Key, Role};

    /// A client's key without limits.
    pub fn key(id: &str) -> Key {
        Key {
            id: id.to_owned(),
            role: Role::Client,
            tenant: id.to_owned(),
            rpm: None,
            tpm: None,
            concurrency: None,
            is_isolated: false,
            allow: Vec::new(),
        }
    }
}
