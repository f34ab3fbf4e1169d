//! GET /openapi.json of each service: its API as an OpenAPI 3.1 document.
//!
//! The documents are maintained by hand beside the routes. Tests compare them with the routes and
//! with the responses
//! (`test_frontend_openapi.py`, `test_router_openapi.py`, `test_indexer_openapi.py`).

use axum::http::header;
use axum::response::{IntoResponse, Response};

const FRONTEND: &str = include_str!("frontend/openapi.json");
const INDEXER: &str = include_str!("indexer/openapi.json");
const ROUTER: &str = include_str!("router/openapi.json");

pub(crate) async fn frontend() -> Response {
    answer(FRONTEND)
}

pub(crate) async fn indexer() -> Response {
    answer(INDEXER)
}

pub(crate) async fn router() -> Response {
    answer(ROUTER)
}

fn answer(document: &'static str) -> Response {
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
