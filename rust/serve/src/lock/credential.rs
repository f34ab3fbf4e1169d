//! The key that this service shows at other services of ours.

use std::path::Path;
use std::sync::Arc;

use axum::http::HeaderMap;
use axum::http::HeaderValue;
use axum::http::header::AUTHORIZATION;
use kvflash_core::error::Result;

use crate::reread::{Reread, bytes_of, fault};

const FLAG: &str = "--service-key-file";

/// A key in a file, read again when it changes; nothing without one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Credential(pub(super) Option<Arc<Reread<HeaderValue>>>);

impl Credential {
    /// # Errors
    /// `Config`, naming the file: it can't be read, it is empty, or no header may have what it holds.
    pub fn open(path: Option<&Path>) -> Result<Self> {
        let Some(path) = path.map(Path::to_owned) else { return Ok(Self::default()) };
        let of = path.clone();
        let read = move || {
            let bytes = bytes_of(FLAG, &of)?;
            let key = bytes.trim_ascii();
            if key.is_empty() {
                return Err(fault(FLAG, &of, "is empty"));
            }
            let mut value = HeaderValue::from_bytes(&[b"Bearer ", key].concat())
                .map_err(|_| fault(FLAG, &of, "has characters that are not allowed in a header"))?;
            value.set_sensitive(true);
            Ok(value)
        };
        Ok(Self(Some(Arc::new(Reread::new(vec![path], read)?))))
    }

    /// Put it into the headers of a request.
    pub fn show(&self, headers: &mut HeaderMap) {
        if let Some(key) = &self.0 {
            headers.insert(AUTHORIZATION, HeaderValue::clone(&key.current()));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_key_is_read_from_its_file_and_never_shown() {
        let path = std::env::temp_dir().join(format!("kvflash-credential-{}", std::process::id()));
        std::fs::write(&path, "the secret\n").unwrap();
        let credential = Credential::open(Some(&path)).unwrap();
        let mut headers = HeaderMap::new();
        credential.show(&mut headers);
        assert_eq!(headers[AUTHORIZATION], "Bearer the secret");
        assert!(!format!("{credential:?} {headers:?}").contains("the secret"));
        std::fs::write(&path, " \n").unwrap();
        let error = Credential::open(Some(&path)).unwrap_err().to_string();
        assert!(error.contains("--service-key-file") && error.contains("is empty"), "{error}");
    }
}
