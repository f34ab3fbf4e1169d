//! Who changed what: one line of the log for each change that an operator makes.

use std::fmt::Display;
use std::net::SocketAddr;

use axum::http::{Method, Request, Response};

use super::caller::Caller;
use super::side::Side;
use super::web::is_write;

/// Longest path in a line.
const MAX_PATH_CHARS: usize = 200;

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
