//! Secrets are read from files, because command lines are visible to others.

use std::path::Path;

use kvflash_core::error::{Error, Result};

/// Shortest and longest secret, bytes.
const SECRET_BYTES: std::ops::RangeInclusive<usize> = 16..=4_096;

/// The secret in the file that `flag` names, without surrounding white space.
///
/// # Errors
/// `Config`, naming the flag, the file and the limit; never the secret.
pub(crate) fn read(flag: &str, path: &Path) -> Result<Vec<u8>> {
    let wrong = |why: String| Error::Config(format!("{flag} {}: {why}", path.display()));
    let bytes = std::fs::read(path).map_err(|error| wrong(error.to_string()))?;
    let secret = bytes.trim_ascii();
    if SECRET_BYTES.contains(&secret.len()) {
        return Ok(secret.to_vec());
    }
    let (least, most) = (SECRET_BYTES.start(), SECRET_BYTES.end());
    Err(wrong(format!(
        "the secret must have {least} to {most} bytes, got {}; `openssl rand -hex 32` makes one",
        secret.len()
    )))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_that_is_none_is_refused_and_not_told() {
        let path = std::env::temp_dir().join(format!("kvflash-secret-{}", std::process::id()));
        assert!(read("--x", &path).unwrap_err().to_string().contains("No such file"));
        std::fs::write(&path, "  short\n").unwrap();
        let error = read("--x", &path).unwrap_err().to_string();
        assert!(error.contains("16 to 4096 bytes, got 5") && !error.contains("short"), "{error}");
        std::fs::write(&path, "0123456789abcdef\n").unwrap();
        assert_eq!(read("--x", &path).unwrap(), b"0123456789abcdef");
    }
}
