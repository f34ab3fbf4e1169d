//! Who sent a request.

use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;

use super::keys::{Key, Pass, Role};

/// Who sent a request: every request that came over a listener has one among its extensions.
///
/// Handlers that are called without a listener find none, which means [`Caller::Anonymous`].
#[derive(Debug, Clone, Default)]
pub enum Caller {
    /// Somebody without a key, where none is needed: the keys file, if there is one, has no key of the side that
    /// was asked.
    #[default]
    Anonymous,
    /// The owner of a key, or of a certificate. The header that carried a key is not among the request's headers any
    /// more.
    Known(Arc<Key>),
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(parts.extensions.get().cloned().unwrap_or_default())
    }
}

impl Caller {
    /// The key, where there is one.
    pub fn key(&self) -> Option<&Key> {
        match self {
            Self::Anonymous => None,
            Self::Known(key) => Some(key),
        }
    }

    /// Whether a field or header that controls an engine passes through to it: always without a key, and for
    /// operators.
    pub fn may_pass(&self, pass: Pass) -> bool {
        self.key().is_none_or(|key| key.role == Role::Admin || key.allow.contains(&pass))
    }

    /// Its name for the log.
    pub fn name(&self) -> &str {
        self.key().map_or("anonymous", |key| &key.id)
    }
}
