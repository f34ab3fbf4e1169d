//! Which client is charged for a request.

use std::hash::BuildHasher;
use std::str::FromStr;
use std::sync::OnceLock;

use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, HeaderName};
use kvflash_core::error::{Error, Result};

/// Longest name in a header, in bytes; a longer one is truncated.
const MAX_NAME_BYTES: usize = 256;

/// Identity of clients without a key of this server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Identity {
    /// Its `Authorization`, which is secret; without one its `user`, else its address.
    #[default]
    Authorization,
    /// The header or field `user`, else as above: for servers behind a gateway that sets it.
    User,
    /// A header that a gateway sets, else as the first.
    Header(HeaderName),
}

impl FromStr for Identity {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || {
            Error::Config(format!(
                "--fairness-identity must be authorization, user or header:NAME, got {text:?}"
            ))
        };
        match text.split_once(':') {
            None if text == "authorization" => Ok(Self::Authorization),
            None if text == "user" => Ok(Self::User),
            Some(("header", name)) => name.parse().map(Self::Header).map_err(|_| wrong()),
            _ => Err(wrong()),
        }
    }
}

impl Identity {
    /// The name of the client of a request with this `user`.
    pub fn name(&self, user: Option<&str>, headers: &HeaderMap, address: Option<&str>) -> String {
        // Random per process, so that clients can't construct a key that shares another client's
        // turns.
        static KEYS: OnceLock<std::hash::RandomState> = OnceLock::new();
        let hashed = |bytes: &[u8]| {
            let hash = KEYS.get_or_init(std::hash::RandomState::new).hash_one(bytes);
            format!("key-{hash:016x}")
        };
        let own = || user.map(str::to_owned);
        let first = match self {
            Self::Authorization => None,
            Self::User => own(),
            Self::Header(name) => headers.get(name).map(|value| {
                let text = String::from_utf8_lossy(value.as_bytes());
                let fits = |at: &usize| text.is_char_boundary(*at);
                let end = (0..=text.len().min(MAX_NAME_BYTES)).rev().find(fits).unwrap_or(0);
                text[..end].to_owned()
            }),
        };
        first
            .or_else(|| headers.get(AUTHORIZATION).map(|value| hashed(value.as_bytes())))
            .or_else(own)
            .unwrap_or_else(|| address.unwrap_or_default().to_owned())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn name(identity: &str, headers: &[(&'static str, &str)], user: Option<&str>) -> String {
        let headers =
            headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
        let identity: Identity = identity.parse().unwrap();
        identity.name(user, &headers.collect(), Some("10.0.0.1"))
    }

    #[test]
    fn a_client_with_a_key_is_one_client_whatever_it_calls_itself() {
        let key = [("authorization", "Bearer a")];
        let own = name("authorization", &key, None);
        assert!(own.starts_with("key-") && !own.contains("Bearer"));
        for user in ["victim", "fresh-1", "fresh-2"] {
            assert_eq!(name("authorization", &key, Some(user)), own);
            assert_ne!(name("authorization", &[("authorization", "Bearer b")], Some(user)), own);
        }
        assert_eq!(name("authorization", &[], Some("u")), "u");
        assert_eq!(name("authorization", &[], None), "10.0.0.1");
        assert_eq!(name("user", &key, Some("u")), "u");
        assert_eq!(name("user", &key, None), own);
        let said = [("authorization", "Bearer a"), ("x-tenant", "t")];
        assert_eq!(name("header:X-Tenant", &said, Some("u")), "t");
        assert_eq!(name("header:x-tenant", &key, Some("u")), own);
        let long = "ü".repeat(200);
        assert_eq!(name("header:x-tenant", &[("x-tenant", &long)], None), "ü".repeat(128));
    }

    #[test]
    fn what_is_no_identity_is_named() {
        for text in ["", "key", "header", "header:", "header:a b", "user:x"] {
            let error = text.parse::<Identity>().unwrap_err().to_string();
            assert!(error.contains("authorization, user or header:NAME, got"), "{error}");
        }
    }
}
