//! GET /openapi.json: the API for machines.

use axum::http::header;
use axum::response::{IntoResponse, Response};

/// Written by hand beside the routes; tests compare it with them and with what they answer.
const DOCUMENT: &str = include_str!("openapi.json");

pub(super) async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], DOCUMENT).into_response()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_document_has_the_version_of_the_crate() {
        let document: serde_json::Value = serde_json::from_str(DOCUMENT).unwrap();
        assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
        assert!(document["paths"].as_object().unwrap().len() > 8);
    }
}
