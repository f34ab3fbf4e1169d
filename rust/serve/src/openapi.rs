//! GET /openapi.json of each service: its API as an OpenAPI 3.1 document.
//!
//! The documents are maintained by hand beside the routes. Tests compare them with the routes and
//! with the responses
//! (`test_frontend_openapi.py`, `test_router_openapi.py`, `test_indexer_openapi.py`).

use axum::Router;
use axum::body::Body;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::Reject;
use super::body::discard;

pub(crate) const FRONTEND: &str = include_str!("frontend/openapi.json");
pub(crate) const INDEXER: &str = include_str!("indexer/openapi.json");
pub(crate) const ROUTER: &str = include_str!("router/openapi.json");

/// All routes of a router or an indexer: they serve this document and refuse what is not in it.
pub(crate) fn complete<S: Clone + Send + Sync + 'static>(
    routes: Router<S>,
    document: &'static str,
) -> Router<S> {
    let refuse = |reject: Reject| {
        async move |mut body: Body| {
            discard(&mut body).await;
            reject.plain()
        }
    };
    let absent = "no such path; GET /openapi.json lists all paths";
    let method = "method not allowed; GET /openapi.json lists the methods of this path";
    routes
        .route("/openapi.json", get(async move || answer(document)))
        .fallback(refuse(Reject::no_path(absent)))
        .method_not_allowed_fallback(refuse(Reject::new(StatusCode::METHOD_NOT_ALLOWED, method)))
}

pub(crate) fn answer(document: &'static str) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], document).into_response()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;
    use crate::gateway::api::{RESPONSES, ROWS};
    use crate::lock::Side;

    fn parse(document: &str) -> Value {
        serde_json::from_str(document).unwrap()
    }

    #[test]
    fn the_documents_have_the_version_of_the_crate() {
        for document in [FRONTEND, INDEXER, ROUTER] {
            let document = parse(document);
            assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
            assert!(document["paths"].as_object().unwrap().len() > 8);
        }
    }

    /// The rows are all paths that a worker answers; those with a body can be explained.
    #[test]
    fn the_frontends_document_has_every_row_as_inference_and_nothing_else() {
        let document = parse(FRONTEND);
        let is_inference = |item: &Value| {
            let mut operations = item.as_object().unwrap().values();
            operations.any(|operation| operation["tags"][0] == "inference")
        };
        let paths = document["paths"].as_object().unwrap();
        let inference = paths.iter().filter(|(_, item)| is_inference(item));
        let documented: BTreeSet<&str> = inference.map(|(path, _)| path.as_str()).collect();
        let of_workers = ROWS.iter().chain(&RESPONSES).map(|row| row.path);
        assert_eq!(documented, of_workers.collect());
        let rows: BTreeSet<&str> = ROWS.iter().map(|row| row.path).collect();
        let explained = paths["/explain"]["post"]["parameters"][0]["schema"]["enum"].as_array();
        assert_eq!(
            explained.unwrap().iter().filter_map(Value::as_str).collect::<BTreeSet<_>>(),
            rows
        );
    }

    /// The tag of a path's operations is the side for which keys are checked.
    #[test]
    fn operations_are_tagged_with_their_side_and_say_which_need_no_key() {
        let document = parse(FRONTEND);
        for (path, item) in document["paths"].as_object().unwrap() {
            let side = Side::of(path);
            for (method, operation) in item.as_object().unwrap() {
                let tag = operation["tags"][0].as_str().unwrap();
                let wanted = match tag {
                    "inference" | "models" => Side::Public,
                    "probes" => Side::Probe,
                    "monitoring" => Side::Metrics,
                    "operators" => Side::Admin,
                    other => panic!("{method} {path}: {other}"),
                };
                assert_eq!(side, wanted, "{method} {path}");
                let is_open = operation["security"].as_array().is_some_and(Vec::is_empty);
                assert_eq!(is_open, side == Side::Probe, "{method} {path}");
            }
        }
    }
}
