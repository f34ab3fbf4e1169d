//! Whether a request is let in.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, HeaderName, Request, StatusCode};
use axum::response::Response;
use bytes::Bytes;
use kvflash_core::error::Result;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use tokio::sync::Semaphore;

use super::caller::Caller;
use super::keys::{Found, KEYS_FLAG, Key, Keys, KeysFile, Role};
use super::side::{Side, form_of};
use crate::Reject;
use crate::metrics::CauseLabel;

static API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Slow comparisons at once: each takes a core and some MiB.
const COMPARISONS_AT_ONCE: usize = 1;
/// Slow comparisons that may wait; more are refused with 429.
const COMPARISONS_WAITING: usize = 64;

/// Lets requests in, or not: by their keys. Clones are the same.
#[derive(Debug, Clone, Default)]
pub struct Lock {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    keys: Option<Arc<KeysFile>>,
    comparing: Semaphore,
    waiting: Semaphore,
    refused: Family<CauseLabel, Counter>,
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            keys: None,
            comparing: Semaphore::new(COMPARISONS_AT_ONCE),
            waiting: Semaphore::new(COMPARISONS_WAITING),
            refused: Family::default(),
        }
    }
}

/// What becomes of a request.
pub(crate) enum Verdict {
    /// It goes on.
    Open(Caller),
    Refused(Refusal),
    /// Only [`Lock::compare`] can tell.
    Slow(Bytes),
}

impl From<std::result::Result<Caller, Refusal>> for Verdict {
    fn from(judged: std::result::Result<Caller, Refusal>) -> Self {
        judged.map_or_else(Self::Refused, Self::Open)
    }
}

/// Why a request is not let in.
#[derive(Debug)]
pub(crate) struct Refusal {
    cause: &'static str,
    reject: Reject,
}

impl Refusal {
    fn new(cause: &'static str, status: StatusCode, what: impl Into<String>) -> Self {
        Self { cause, reject: Reject::new(status, what) }
    }
}

impl Lock {
    /// A lock with the keys of a file.
    ///
    /// # Errors
    /// `Config`, naming file, line, field, what came and what is legal.
    pub fn new(keys_file: Option<&Path>) -> Result<Self> {
        let keys = keys_file.map(Keys::open).transpose()?.map(Arc::new);
        Ok(Self { shared: Arc::new(Shared { keys, ..Shared::default() }) })
    }

    /// Whether the file of keys has one of this role now: that closes the side of the role.
    pub fn has(&self, role: Role) -> bool {
        self.shared.keys.as_ref().is_some_and(|keys| keys.current().has(role))
    }

    /// Whether the file of keys has one now of a tenant that shares no cache with others.
    pub fn has_isolated(&self) -> bool {
        self.shared.keys.as_ref().is_some_and(|keys| keys.current().has_isolated())
    }

    /// Look for changes of the file of keys, for ever.
    pub(crate) async fn keep_renewing(self) {
        match &self.shared.keys {
            Some(keys) => Arc::clone(keys).keep_renewing().await,
            None => std::future::pending().await,
        }
    }

    /// Have refusals and changes of keys counted in `registry`.
    pub(crate) fn register(&self, registry: &mut Registry) {
        registry.register(
            "lock_refused",
            "Requests that were not let in: no key, an unknown key, a key of another role",
            Family::clone(&self.shared.refused),
        );
        if let Some(keys) = &self.shared.keys {
            keys.register(
                registry,
                "keys_renewals",
                "Changes of --keys-file: taken, or refused (the log says why)",
            );
        }
    }

    /// Whether a request goes on, by its path and headers.
    ///
    /// # Cost
    /// Without a file of keys a look at the path; else a hash for each salt of the file.
    pub(crate) fn look<B>(&self, request: &Request<B>, _peer: SocketAddr) -> Verdict {
        let side = Side::of(request.uri().path());
        let Some(keys) = self.shared.keys.as_ref().filter(|_| side != Side::Probe) else {
            return Verdict::Open(Caller::Anonymous);
        };
        let keys = keys.current();
        let presented = match presented(request.headers()) {
            Ok(presented) => presented,
            Err(refusal) => return Verdict::Refused(refusal),
        };
        let found = match presented.map(|key| (key, keys.find(key))) {
            None => None,
            Some((_, Found::Key(key))) => Some(key),
            Some((key, Found::Slow)) => return Verdict::Slow(Bytes::copy_from_slice(key)),
            Some((_, Found::Nothing)) => {
                return judge(&keys, side, None, true).into();
            }
        };
        judge(&keys, side, found, false).into()
    }

    /// What [`look`](Self::look) could not tell without a slow comparison.
    ///
    /// # Errors
    /// Why it is not let in.
    pub(crate) async fn compare<B>(
        &self,
        request: &Request<B>,
        presented: Bytes,
    ) -> std::result::Result<Caller, Refusal> {
        let Some(keys) = &self.shared.keys else { return Ok(Caller::Anonymous) };
        let keys = keys.current();
        let busy = || {
            let what = "too many keys are being checked: try again";
            let mut refusal = Refusal::new("busy", StatusCode::TOO_MANY_REQUESTS, what);
            refusal.reject.retry_after_s = Some(1);
            Err(refusal)
        };
        let Ok(_place) = self.shared.waiting.try_acquire() else { return busy() };
        let Ok(_turn) = self.shared.comparing.acquire().await else { return busy() };
        let of_key = Arc::clone(&keys);
        let compared = tokio::task::spawn_blocking(move || of_key.compare(&presented)).await;
        let found = compared.ok().flatten();
        let is_unknown = found.is_none();
        judge(&keys, Side::of(request.uri().path()), found, is_unknown)
    }

    /// The answer to a request that is not let in, in the form of its API.
    pub(crate) fn refuse(&self, path: &str, refusal: Refusal) -> Response {
        let Refusal { cause, reject } = refusal;
        self.shared.refused.get_or_create(&CauseLabel { cause }).inc();
        let is_unauthorized = reject.status == StatusCode::UNAUTHORIZED;
        let mut response = form_of(path).refuse(reject);
        if is_unauthorized {
            let bearer = axum::http::HeaderValue::from_static("Bearer");
            response.headers_mut().insert(axum::http::header::WWW_AUTHENTICATE, bearer);
        }
        response
    }
}

/// Mark a request as that of `caller`, whose key goes no further.
pub(crate) fn admit<B>(request: &mut Request<B>, caller: Caller) {
    if caller.key().is_some() {
        request.headers_mut().remove(AUTHORIZATION);
        request.headers_mut().remove(&API_KEY);
    }
    request.extensions_mut().insert(caller);
}

/// Whether somebody with this key, or without one, may ask this side.
fn judge(
    keys: &Keys,
    side: Side,
    key: Option<Arc<Key>>,
    is_unknown: bool,
) -> std::result::Result<Caller, Refusal> {
    let wanted = match side {
        Side::Probe => return Ok(key.map_or(Caller::Anonymous, Caller::Known)),
        Side::Public => Role::Client,
        Side::Metrics => Role::Metrics,
        Side::Admin => Role::Admin,
    };
    match key {
        Some(key) if key.role == Role::Admin || key.role == wanted || !keys.has(wanted) => {
            Ok(Caller::Known(key))
        }
        Some(key) => Err(Refusal::new(
            "role",
            StatusCode::FORBIDDEN,
            format!(
                "the key {:?} has the role {}, and this path needs {}",
                key.id,
                key.role.name(),
                wanted.name()
            ),
        )),
        None if !keys.has(wanted) => Ok(Caller::Anonymous),
        None => {
            let (cause, what) = match is_unknown {
                true => ("unknown_key", "the key is not in"),
                false => ("no_key", "send a key of"),
            };
            let what = format!(
                "{what} this server's {KEYS_FLAG}: Authorization: Bearer KEY, or x-api-key: KEY, \
                 of the role {}",
                wanted.name()
            );
            Err(Refusal::new(cause, StatusCode::UNAUTHORIZED, what))
        }
    }
}

/// The key that a request carries.
///
/// # Errors
/// 400 for two of them: which one counts would be anybody's guess.
fn presented(headers: &HeaderMap) -> std::result::Result<Option<&[u8]>, Refusal> {
    for name in [&AUTHORIZATION, &API_KEY] {
        let mut values = headers.get_all(name).iter();
        let Some(value) = values.next() else { continue };
        if values.next().is_some() {
            let what = format!("header {name} is there twice: send it once");
            return Err(Refusal::new("twice", StatusCode::BAD_REQUEST, what));
        }
        let bytes = value.as_bytes();
        if *name == API_KEY {
            return Ok(Some(bytes));
        }
        if let Some((scheme, key)) = bytes.split_at_checked(7)
            && scheme.eq_ignore_ascii_case(b"bearer ")
        {
            return Ok(Some(key.trim_ascii()));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests;
