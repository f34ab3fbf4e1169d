//! Secrets are read from files, because command lines are visible to others.

use std::fmt;
use std::path::Path;

use hmac::{Hmac, KeyInit, Mac};
use kvflash_core::error::Result;
use sha2::Sha256;

use crate::reread::{bytes_of, fault};

/// Shortest and longest secret, bytes.
const SECRET_BYTES: std::ops::RangeInclusive<usize> = 16..=4_096;

/// A secret that values are hashed with.
#[derive(Clone)]
pub(crate) struct Secret(Hmac<Sha256>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("..")
    }
}

impl Secret {
    /// The secret in the file that `flag` names, without surrounding white space.
    ///
    /// # Errors
    /// `Config`, naming the flag, the file and the limit; never the secret.
    pub fn read(flag: &str, path: &Path) -> Result<Self> {
        let bytes = bytes_of(flag, path)?;
        let secret = bytes.trim_ascii();
        if SECRET_BYTES.contains(&secret.len()) {
            return Ok(Self::of(secret));
        }
        let (least, most) = (SECRET_BYTES.start(), SECRET_BYTES.end());
        let what = format!(
            "the secret must have {least} to {most} bytes, got {}; `openssl rand -hex 32` makes one",
            secret.len()
        );
        Err(fault(flag, path, what))
    }

    pub fn of(secret: &[u8]) -> Self {
        Self(Hmac::new_from_slice(secret).expect("a key of any length is legal"))
    }

    /// The HMAC of these parts, one after the other.
    pub fn hmac(&self, parts: &[&[u8]]) -> [u8; 32] {
        let mut mac = self.0.clone();
        parts.iter().for_each(|part| mac.update(part));
        mac.finalize().into_bytes().into()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_that_is_none_is_refused_and_not_told() {
        let path = std::env::temp_dir().join(format!("kvflash-secret-{}", std::process::id()));
        assert!(Secret::read("--x", &path).unwrap_err().to_string().contains("No such file"));
        std::fs::write(&path, "  short\n").unwrap();
        let error = Secret::read("--x", &path).unwrap_err().to_string();
        assert!(error.contains("16 to 4096 bytes, got 5") && !error.contains("short"), "{error}");
        std::fs::write(&path, "0123456789abcdef\n").unwrap();
        let secret = Secret::read("--x", &path).unwrap();
        assert_eq!(secret.hmac(&[b"a"]), Secret::of(b"0123456789abcdef").hmac(&[b"a"]));
        assert_eq!(format!("{secret:?}"), "..");
    }
}
