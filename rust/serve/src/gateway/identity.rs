//! Which client is charged for a request.

use std::hash::BuildHasher;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;
use std::sync::OnceLock;

use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, HeaderName};
use kvflash_core::error::{Error, Result};
use kvflash_core::fair::ClientName;

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
    /// The client of a request that calls itself `user`.
    pub(crate) fn client(
        &self,
        user: Option<&str>,
        headers: &HeaderMap,
        address: Option<IpAddr>,
    ) -> Client {
        // Each process draws its own seed, so that a client cannot choose a key that shares another's turns.
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
        if let Some(name) = first {
            return Client { group: None, name };
        }
        let said = headers.get(AUTHORIZATION).map(|value| hashed(value.as_bytes())).or_else(own);
        let name = said.or_else(|| address.map(|address| address.to_string()));
        Client { group: address.map(network), name: name.unwrap_or_default() }
    }
}

/// Whose turn is charged for a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Client {
    /// Where it comes from, if that is all that is certain: names that a client may choose share the turns of one
    /// client.
    group: Option<String>,
    name: String,
}

impl Client {
    /// The owner of a key of this server.
    pub fn known(id: &str) -> Self {
        Self { group: None, name: id.to_owned() }
    }

    pub fn as_name(&self) -> ClientName<'_> {
        ClientName { group: self.group.as_deref(), client: &self.name }
    }
}

/// The network that one client has the addresses of: with IPv6 the first 64 bits.
fn network(address: IpAddr) -> String {
    match address.to_canonical() {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(address) => {
            let bits = address.to_bits() & !u128::from(u64::MAX);
            format!("{}/64", Ipv6Addr::from_bits(bits))
        }
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
        identity.client(user, &headers.collect(), Some("10.0.0.1".parse().unwrap())).name
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
    fn names_that_a_client_chooses_are_in_the_group_of_its_network() {
        let group = |identity: &str, headers: &[(&'static str, &str)], address: &str| {
            let headers =
                headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
            let identity: Identity = identity.parse().unwrap();
            let address = Some(address.parse().unwrap());
            identity.client(Some("u"), &headers.collect(), address).group
        };
        let of = |text: &str| Some(text.to_owned());
        for headers in [&[][..], &[("authorization", "Bearer a")]] {
            assert_eq!(group("authorization", headers, "10.0.0.1"), of("10.0.0.1"));
            assert_eq!(group("authorization", headers, "::ffff:10.0.0.1"), of("10.0.0.1"));
            let v6 = ["2001:db8:0:1::7", "2001:db8:0:1:ffff::"];
            let networks = v6.map(|address| group("authorization", headers, address));
            assert_eq!(networks, [of("2001:db8:0:1::/64"), of("2001:db8:0:1::/64")]);
            assert_eq!(group("header:x-tenant", headers, "10.0.0.1"), of("10.0.0.1"));
            // What a gateway says is certain.
            assert_eq!(group("user", headers, "10.0.0.1"), None);
        }
        assert_eq!(group("header:x-tenant", &[("x-tenant", "t")], "10.0.0.1"), None);
        assert_eq!(Identity::default().client(None, &HeaderMap::new(), None).group, None);
    }

    #[test]
    fn what_is_no_identity_is_named() {
        for text in ["", "key", "header", "header:", "header:a b", "user:x"] {
            let error = text.parse::<Identity>().unwrap_err().to_string();
            assert!(error.contains("authorization, user or header:NAME, got"), "{error}");
        }
    }
}
