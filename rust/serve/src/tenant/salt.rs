//! Tenants with an isolated cache: a cache salt that only this server and its replicas can compute.

use std::path::Path;

use hmac::{Hmac, KeyInit, Mac};
use kvflash_core::error::{Error, Result};
use sha2::Sha256;

use crate::secret_file;

const FLAG: &str = "--salt-secret-file";

/// Derives the salts of tenants.
#[derive(Clone)]
pub(crate) struct SaltSecret(Hmac<Sha256>);

impl SaltSecret {
    /// Reads the secret from a file.
    ///
    /// # Errors
    /// `Config`, naming the flag, the file and the limit.
    pub fn open(path: &Path) -> Result<Self> {
        Self::new(&secret_file::read(FLAG, path)?)
    }

    /// The secret of a test.
    #[cfg(test)]
    #[allow(clippy::unwrap_used)]
    pub fn of(secret: &[u8]) -> Self {
        Self::new(secret).unwrap()
    }

    fn new(secret: &[u8]) -> Result<Self> {
        let mac = Hmac::new_from_slice(secret);
        mac.map(Self).map_err(|error| Error::Config(format!("{FLAG}: {error}")))
    }

    /// The salt of a tenant's requests, 64 characters; a client's own salt separates its requests
    /// within the tenant, and never matches another tenant's.
    pub fn salt(&self, tenant: &str, own: Option<&str>) -> String {
        let mut mac = self.0.clone();
        mac.update(b"kvflash tenant salt 1\0");
        // Includes the length, so that a tenant's name and salt can't be mistaken for another
        // tenant's.
        mac.update(&(tenant.len() as u64).to_le_bytes());
        mac.update(tenant.as_bytes());
        if let Some(own) = own {
            mac.update(b"\0");
            mac.update(own.as_bytes());
        }
        mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl std::fmt::Debug for SaltSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SaltSecret(..)")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn salts_are_the_hmac_of_the_tenant() {
        let secret = SaltSecret::new(b"0123456789abcdef").unwrap();
        // printf 'kvflash tenant salt 1\0\1\0\0\0\0\0\0\0a' | openssl dgst -sha256 -hmac 0123456789abcdef
        let wanted = "bb2cab2c043e2a0c2e4c6dd94e076e9b6e016f4060948bcfb6dd0d4c8b0bc77e";
        assert_eq!(secret.salt("a", None), wanted);
        assert_eq!(format!("{secret:?}"), "SaltSecret(..)");
    }

    proptest! {
        /// Two requests have equal salts only if both tenant and own salt are equal.
        #[test]
        fn no_two_tenants_have_a_salt_in_common(
            all in prop::collection::vec(("[a-c]{0,3}", prop::option::of("[a-c\0]{0,3}")), 1..60)
        ) {
            let secret = SaltSecret::new(b"0123456789abcdef").unwrap();
            let mut seen: HashMap<String, (String, Option<String>)> = HashMap::new();
            for (tenant, own) in all {
                let salt = secret.salt(&tenant, own.as_deref());
                let first = seen.entry(salt).or_insert_with(|| (tenant.clone(), own.clone()));
                prop_assert_eq!(&*first, &(tenant, own));
            }
        }
    }
}
