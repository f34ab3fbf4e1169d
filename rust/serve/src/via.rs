//! Marks requests to engines, so that one that comes back is known.

use std::sync::LazyLock;

use axum::http::{HeaderMap, HeaderValue, header};

/// What this process adds to the `Via` of each request that it sends to an engine (RFC 9110, 7.6.3).
pub(crate) static VIA: LazyLock<HeaderValue> = LazyLock::new(|| {
    let name = format!("1.1 kvflash-{:016x}", rand::random::<u64>());
    HeaderValue::try_from(name).unwrap_or(HeaderValue::from_static("1.1 kvflash"))
});

/// Whether this process has sent the request itself: it is one of its own workers, or one of those leads back to it.
pub(crate) fn is_from_here(headers: &HeaderMap) -> bool {
    headers.get_all(header::VIA).iter().any(|via| {
        via.as_bytes().split(|byte| *byte == b',').any(|hop| hop.trim_ascii() == VIA.as_bytes())
    })
}
