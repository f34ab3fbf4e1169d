//! Tenants with an isolated cache: a cache salt that only this server and its replicas can compute.

use std::path::Path;

use kvflash_core::error::Result;

use crate::secret_file::Secret;

const FLAG: &str = "--salt-secret-file";

/// Derives the salts of tenants.
#[derive(Debug, Clone)]
pub(crate) struct SaltSecret(Secret);

impl SaltSecret {
    /// Reads the secret from a file.
    ///
    /// # Errors
    /// `Config`, naming the flag, the file and the limit.
    pub fn open(path: &Path) -> Result<Self> {
        Secret::read(FLAG, path).map(Self)
    }

    /// The secret of a test.
    #[cfg(test)]
    pub fn of(secret: &[u8]) -> Self {
        Self(Secret::of(secret))
    }

    /// The salt of a tenant's requests, 64 characters; a client's own salt separates its requests
    /// within the tenant, and never matches another tenant's.
    pub fn salt(&self, tenant: &str, own: Option<&str>) -> String {
        // Includes the length, so that a tenant's name and salt can't be mistaken for another
        // tenant's.
        let len = (tenant.len() as u64).to_le_bytes();
        let mut parts = vec![&b"kvflash tenant salt 1\0"[..], &len, tenant.as_bytes()];
        if let Some(own) = own {
            parts.extend([&b"\0"[..], own.as_bytes()]);
        }
        self.0.hmac(&parts).iter().map(|byte| format!("{byte:02x}")).collect()
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
        let secret = SaltSecret::of(b"0123456789abcdef");
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
            let secret = SaltSecret::of(b"0123456789abcdef");
            let mut seen: HashMap<String, (String, Option<String>)> = HashMap::new();
            for (tenant, own) in all {
                let salt = secret.salt(&tenant, own.as_deref());
                let first = seen.entry(salt).or_insert_with(|| (tenant.clone(), own.clone()));
                prop_assert_eq!(&*first, &(tenant, own));
            }
        }
    }
}
