//! The sides of a listener: which paths are for clients, which for monitoring, and which for operators.

use crate::gateway::api::{Form, Row};

/// Who a path is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// Probes, which need no key.
    Probe,
    /// Clients.
    Public,
    /// Monitoring.
    Metrics,
    /// Operators, and gateways that use a router or an indexer.
    Admin,
}

/// Paths that are neither the clients' API nor for operators.
const OTHERS: [(&str, Side); 4] = [
    ("/live", Side::Probe),
    ("/ready", Side::Probe),
    ("/health", Side::Metrics),
    ("/metrics", Side::Metrics),
];

impl Side {
    /// The side of a path, of any service: a path that no row names is for operators.
    pub fn of(path: &str) -> Self {
        if path.starts_with("/v1/") || Row::meant_by(path).is_some() {
            return Self::Public;
        }
        let other = OTHERS.iter().find(|(known, _)| *known == path);
        other.map_or(Self::Admin, |(_, side)| *side)
    }
}

/// In whose form a refusal of this path comes.
pub(super) fn form_of(path: &str) -> Form {
    match Row::of(path) {
        Some(row) => row.form,
        None if path.starts_with("/v1/messages/") => Form::Anthropic,
        None => Form::OpenAi,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gateway::api::ROWS;

    #[test]
    fn a_path_that_no_row_names_is_for_operators() {
        for row in &ROWS {
            assert_eq!(Side::of(row.path), Side::Public, "{}", row.path);
        }
        // Paths that clients get wrong are answered with the right one.
        for path in ["/v1/models", "/v1/models/m", "/v1/v1/messages", "/chat/completions"] {
            assert_eq!(Side::of(path), Side::Public, "{path}");
        }
        for path in ["/live", "/ready"] {
            assert_eq!(Side::of(path), Side::Probe);
        }
        for path in ["/health", "/metrics"] {
            assert_eq!(Side::of(path), Side::Metrics);
        }
        let admin = [
            "/",
            "",
            "*",
            "/workers",
            "/workers/7",
            "/explain",
            "/why/a",
            "/busy_threshold",
            "/dump",
            "/digest",
            "/query",
            "/query_by_hash",
            "/register",
            "/unregister",
            "/register_peer",
            "/select",
            "/reserve",
            "/free",
            "/touch",
            "/report_load",
            "/openapi.json",
            "/v1",
            "/V1/x",
            "//v1/x",
            "/x/v1/models",
            "/ready/",
            "/metrics/x",
            "/live/../workers",
            "/anything-new",
        ];
        for path in admin {
            assert_eq!(Side::of(path), Side::Admin, "{path}");
        }
    }
}
