//! Who sent a request, to which side of a service, and who changed what: one line of the log for
//! each change that an operator makes.

use std::convert::Infallible;
use std::fmt::Display;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{Method, Request, Response};

use super::keys::{Key, Role};
use crate::gateway::api::{MAX_PATH_CHARS, Row};

/// Who sent a request: every request that came over a listener has one among its extensions.
///
/// Handlers that are called without a listener find none, which means [`Caller::Anonymous`].
#[derive(Debug, Clone, Default)]
pub enum Caller {
    /// Somebody without a key, where none is needed: the keys file, if there is one, has no key of the side that
    /// was asked.
    #[default]
    Anonymous,
    /// The owner of a key, or of a certificate. The header that carried a key is not among the request's headers any
    /// more.
    Known(Arc<Key>),
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(parts.extensions.get().cloned().unwrap_or_default())
    }
}

impl Caller {
    /// The key, where there is one.
    pub fn key(&self) -> Option<&Key> {
        match self {
            Self::Anonymous => None,
            Self::Known(key) => Some(key),
        }
    }

    /// The key of a client; operators' requests are not filtered.
    pub(crate) fn client(&self) -> Option<&Key> {
        self.key().filter(|key| key.role == Role::Client)
    }

    /// Its name for the log.
    pub fn name(&self) -> &str {
        self.key().map_or("anonymous", |key| &key.id)
    }
}

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

/// Questions and bookings of gateways, which change no worker and no setting, and come by the thousand.
const TRAFFIC: [&str; 11] = [
    "/",
    "/select",
    "/reserve",
    "/prefill_complete",
    "/touch",
    "/free",
    "/potential_loads",
    "/report_load",
    "/explain",
    "/query",
    "/query_by_hash",
];

/// Whether a request may change something.
pub(super) fn is_write(method: &Method) -> bool {
    !matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS | Method::TRACE)
}

/// What a change was about, for the log: a handler leaves it among its answer's extensions.
#[derive(Debug, Clone)]
pub(crate) struct Subject(String);

impl Subject {
    /// Say of an answer that it is about this worker, and where that is.
    pub fn mark<B>(mut response: Response<B>, worker: impl Display, place: &str) -> Response<B> {
        response.extensions_mut().insert(Self(format!("worker {worker} at {place}")));
        response
    }
}

/// A change that is to be told of.
#[derive(Debug)]
pub(crate) struct Audit {
    caller: String,
    peer: SocketAddr,
    method: Method,
    path: String,
}

impl Audit {
    /// Of a request that changes a worker or a setting.
    pub fn of<B>(
        request: &Request<B>,
        side: Side,
        caller: &Caller,
        peer: SocketAddr,
    ) -> Option<Self> {
        let path = request.uri().path();
        if side != Side::Admin || !is_write(request.method()) || TRAFFIC.contains(&path) {
            return None;
        }
        let path = path.chars().take(MAX_PATH_CHARS).collect();
        let (caller, method) = (caller.name().to_owned(), request.method().clone());
        Some(Self { caller, peer, method, path })
    }

    /// Tell of it, now that its outcome is known.
    pub fn tell<B>(self, response: &Response<B>) {
        let Self { caller, peer, method, path } = self;
        let subject = response.extensions().get::<Subject>().map_or("", |Subject(text)| text);
        let status = response.status().as_u16();
        tracing::info!(caller, %peer, %method, path, subject, status, "audit");
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
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

    #[test]
    fn changes_are_told_and_traffic_is_not() {
        let told = |method: &str, path: &str| {
            let request = Request::builder().method(method).uri(path).body(()).unwrap();
            let peer = ([127, 0, 0, 1], 4_711).into();
            Audit::of(&request, Side::of(path), &Caller::Anonymous, peer).is_some()
        };
        for (method, path) in [
            ("POST", "/workers"),
            ("DELETE", "/workers/7"),
            ("PATCH", "/workers/7"),
            ("POST", "/busy_threshold"),
            ("POST", "/register"),
            ("POST", "/anything-new"),
        ] {
            assert!(told(method, path), "{method} {path}");
        }
        for (method, path) in
            [("GET", "/workers"), ("POST", "/query"), ("POST", "/free"), ("POST", "/v1/messages")]
        {
            assert!(!told(method, path), "{method} {path}");
        }
    }
}
