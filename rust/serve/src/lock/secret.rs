//! How a key is kept in a file: as a hash that the key cannot be read from.

use std::fmt;

use argon2::password_hash::{PasswordHashString, PasswordVerifier};
use argon2::{Argon2, Params};
use kvflash_core::hash::prompt_keys::bytes_of_hex;
use sha2::{Digest, Sha256};

pub(super) type Digest256 = [u8; 32];

/// Bytes of a salt.
const SALT_BYTES: std::ops::RangeInclusive<usize> = 8..=64;

/// What checking one key may cost: memory in KiB, and passes over it.
const MAX_ARGON2_KIB: u32 = 256 * 1024;
const MAX_ARGON2_PASSES: u32 = 16;

/// What a file holds of a key.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Secret {
    /// For keys of many random bits, such as `kvflash keys add` makes: one hash, and a look-up.
    Sha256 { salt: Vec<u8>, digest: Digest256 },
    /// For keys that people chose: slow on purpose.
    Argon2(PasswordHashString),
    /// No key: a client's certificate with the id among its DNS names.
    Certificate,
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sha256 { .. } => "Sha256",
            Self::Argon2(_) => "Argon2",
            Self::Certificate => "Certificate",
        })
    }
}

impl Secret {
    /// Of `sha256$SALT$DIGEST`, both in hex, an argon2 PHC string, or the word `certificate`.
    ///
    /// # Errors
    /// What is wrong with it; never the text itself, which may be a key that was pasted there.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Some(rest) = text.strip_prefix("sha256$") {
            let wrong = || "sha256$SALT$DIGEST needs both parts in hex".to_owned();
            let (salt, digest) = rest.split_once('$').ok_or_else(wrong)?;
            let salt = bytes_of_hex(salt).ok_or_else(wrong)?;
            if !SALT_BYTES.contains(&salt.len()) {
                let (low, high) = (SALT_BYTES.start(), SALT_BYTES.end());
                return Err(format!(
                    "the salt must have {low} to {high} bytes, got {}",
                    salt.len()
                ));
            }
            let digest = bytes_of_hex(digest).ok_or_else(wrong)?;
            let digest = Digest256::try_from(digest)
                .map_err(|digest| format!("the digest must have 32 bytes, got {}", digest.len()))?;
            return Ok(Self::Sha256 { salt, digest });
        }
        if text == "certificate" {
            return Ok(Self::Certificate);
        }
        if !text.starts_with("$argon2") {
            return Err(
                "must be sha256$SALT$DIGEST, an argon2 PHC string ($argon2id$...) or the word certificate; \
                 `kvflash keys add` makes one"
                    .to_owned(),
            );
        }
        let hash = PasswordHashString::new(text).map_err(|error| format!("argon2: {error}"))?;
        let params =
            Params::try_from(&hash.password_hash()).map_err(|error| format!("argon2: {error}"))?;
        if hash.salt().is_none() || hash.hash().is_none() {
            return Err("argon2: salt or hash is missing".to_owned());
        }
        if params.m_cost() > MAX_ARGON2_KIB || params.t_cost() > MAX_ARGON2_PASSES {
            return Err(format!(
                "argon2: at most m={MAX_ARGON2_KIB} and t={MAX_ARGON2_PASSES}, got m={} and t={}",
                params.m_cost(),
                params.t_cost()
            ));
        }
        Ok(Self::Argon2(hash))
    }
}

/// The digest of a key with its salt.
pub(super) fn digest_of(salt: &[u8], key: &[u8]) -> Digest256 {
    Sha256::new().chain_update(salt).chain_update(key).finalize().into()
}

/// Whether `key` is the one that this was made of.
///
/// # Cost
/// What the hash says: some tens of milliseconds, and its memory.
pub(super) fn is_key_of(hash: &PasswordHashString, key: &[u8]) -> bool {
    Argon2::default().verify_password(key, &hash.password_hash()).is_ok()
}
