//! Whether a request is let in.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::http::header::{AUTHORIZATION, FORWARDED, VIA, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use bytes::Bytes;
use futures_util::future::OptionFuture;
use kvflash_core::error::{Error, Result};
use kvflash_core::log_limit::LogLimit;
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use tokio::sync::Semaphore;

use super::caller::{Audit, Caller, Side};
use super::credential::Credential;
use super::jwt::{Tokens, is_token, now_s};
use super::keys::{Found, KEYS_FLAG, Key, Keys, KeysFile, Role};
use super::rules::{Face, Rules, allowed_origin, check_host_count, check_page, preflight, share};
use crate::gateway::api::Form;
use crate::metrics::CauseLabel;
use crate::reread::Reread;
use crate::tls::CLIENT_CA_FLAG;
use crate::via::is_from_here;
use crate::{HttpSettings, Reject};

static API_KEY: HeaderName = HeaderName::from_static("x-api-key");
static REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Headers that a request has which came through a proxy.
static OF_PROXIES: [HeaderName; 4] = [
    FORWARDED,
    VIA,
    HeaderName::from_static("x-forwarded-for"),
    HeaderName::from_static("x-real-ip"),
];

/// Slow comparisons at once: each takes a core and some MiB.
const COMPARISONS_AT_ONCE: usize = 1;
/// Slow comparisons that may wait; more are refused with 429.
const COMPARISONS_WAITING: usize = 64;

/// Lets requests in, or not: by their keys, by where they come from, and by the page that sent them. Clones are
/// the same. The default one lets all in.
#[derive(Debug, Clone, Default)]
pub struct Lock {
    shared: Arc<Shared>,
    reach: Reach,
}

/// The listener that a lock is of.
#[derive(Debug, Clone, Copy, Default)]
struct Reach {
    /// Only this machine reaches it.
    is_loopback: bool,
    /// It is the admin side's own.
    is_admin: bool,
}

#[derive(Debug)]
struct Shared {
    rules: Option<Rules>,
    keys: Option<Arc<KeysFile>>,
    tokens: Option<Tokens>,
    credential: Credential,
    comparing: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
    refused: Family<CauseLabel, Counter>,
    /// Lines about changes that were refused.
    log: Mutex<LogLimit>,
    begun: Instant,
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            rules: None,
            keys: None,
            tokens: None,
            credential: Credential::default(),
            comparing: Arc::new(Semaphore::new(COMPARISONS_AT_ONCE)),
            waiting: Arc::new(Semaphore::new(COMPARISONS_WAITING)),
            refused: Family::default(),
            log: Mutex::default(),
            begun: Instant::now(),
        }
    }
}

/// What becomes of a request.
pub(crate) enum Verdict {
    /// It goes on.
    Open(Admitted),
    Refused(Refusal),
    /// It needs no app.
    Answered(Response<Body>),
    /// Only [`Lock::compare`] can tell.
    Slow(Bytes),
}

/// A request that was let in.
#[derive(Debug)]
pub(crate) struct Admitted {
    caller: Caller,
    /// The page that may read the answer.
    origin: Option<HeaderValue>,
    audit: Option<Audit>,
}

impl Admitted {
    /// Mark the request as that of its caller, whose key goes no further.
    pub fn enter<B>(&self, request: &mut Request<B>) {
        let headers = request.headers_mut();
        if self.caller.key().is_some() {
            headers.remove(AUTHORIZATION);
            headers.remove(&API_KEY);
        }
        // Of two, parts of the service and the engine could each take another one.
        if headers.get_all(&REQUEST_ID).iter().nth(1).is_some() {
            headers.remove(&REQUEST_ID);
        }
        request.extensions_mut().insert(self.caller.clone());
    }

    /// Do with the answer what is to be done.
    pub fn leave<B>(self, response: &mut Response<B>) {
        if let Some(origin) = self.origin {
            share(response.headers_mut(), origin);
        }
        if let Some(audit) = self.audit {
            audit.tell(response);
        }
    }
}

/// The cause of a refusal, for programs: a header, because each API has its own form of body.
const REFUSED: HeaderName = HeaderName::from_static("x-kvflash-refused");

/// Why a request is not let in.
#[derive(Debug)]
pub(crate) struct Refusal {
    cause: &'static str,
    reject: Reject,
}

impl Refusal {
    pub(super) fn new(cause: &'static str, status: StatusCode, what: impl Into<String>) -> Self {
        Self { cause, reject: Reject::new(status, what) }
    }
}

/// A key or token that a request carries, or what its connection's certificate stands for.
enum Presented {
    Nothing,
    Unknown,
    /// A token, and what is wrong with it.
    Invalid(String),
    Known(Arc<Key>),
    Certified(Arc<Key>),
}

impl Lock {
    /// The lock of a service with these settings.
    ///
    /// # Errors
    /// `Config`, naming the flag, or file, line and field; what came and what is legal.
    pub fn new(settings: &HttpSettings, face: Face) -> Result<Self> {
        let rules = Some(Rules::of(settings, face)?);
        let keys = settings.keys_file.as_deref().map(Keys::open).transpose()?.map(Arc::new);
        let tokens = Tokens::open(settings)?;
        let credential = Credential::open(settings.service_key_file.as_deref())?;
        let shared = Arc::new(Shared { rules, keys, tokens, credential, ..Shared::default() });
        Ok(Self { shared, reach: Reach::default() })
    }

    /// The same for the listener at this address.
    pub(crate) fn at(mut self, address: SocketAddr) -> Self {
        self.reach.is_loopback = address.ip().to_canonical().is_loopback();
        self
    }

    /// The same for a listener that is the admin side's own.
    pub fn for_admin(mut self) -> Self {
        self.reach.is_admin = true;
        self
    }

    /// Where the admin side has a listener of its own: host and port.
    pub fn admin_address(&self) -> Option<(&str, u16)> {
        let (host, port) = self.shared.rules.as_ref()?.admin_address.as_ref()?;
        Some((host, *port))
    }

    /// Whether the side of this role is closed: the file of keys has one of the role now, or tokens may have it.
    pub fn has(&self, role: Role) -> bool {
        self.shared.tokens.is_some()
            || self.shared.keys.as_ref().is_some_and(|keys| keys.current().has(role))
    }

    /// # Errors
    /// `Config`: the file of keys has a line for a certificate, and nothing checks certificates.
    pub(crate) fn check_certificates(&self, are_checked: bool) -> Result<()> {
        let wants = |keys: &Arc<KeysFile>| keys.current().has_certified();
        if are_checked || !self.shared.keys.as_ref().is_some_and(wants) {
            return Ok(());
        }
        Err(Error::Config(format!(
            "{KEYS_FLAG} has a line for a client's certificate, but {CLIENT_CA_FLAG} is not set: set it to the file \
             of the CA that signs clients' certificates, or give the line a key (`kvflash keys add`)"
        )))
    }

    /// Whether the file of keys has one now of a tenant that shares no cache with others.
    pub fn has_isolated(&self) -> bool {
        self.shared.keys.as_ref().is_some_and(|keys| keys.current().has_isolated())
    }

    /// Log what is open at this address, and which flag closes it.
    pub fn announce(&self, address: SocketAddr) {
        let lock = self.clone().at(address);
        let Some(rules) = &self.shared.rules else { return };
        if lock.reach.is_admin {
            return;
        }
        let needs_local =
            !rules.is_admin_open && !self.has(Role::Admin) && rules.admin_address.is_none();
        let is_closed = needs_local && rules.trusts(Ipv4Addr::LOCALHOST.into());
        if is_closed {
            tracing::warn!(
                %address,
                "workers and settings are closed to all clients: --trusted-proxies names this machine, so a client \
                 on it looks like one behind the proxy. Add an admin key to --keys-file, or set --admin-port"
            );
        }
        if lock.reach.is_loopback {
            return;
        }
        let mut open = Vec::new();
        if rules.face == Face::Api && !self.has(Role::Client) {
            open.push("the API, to everybody (closed by a client key in --keys-file)");
        }
        if !self.has(Role::Metrics) {
            open.push(
                "/health and /metrics, to everybody (closed by a metrics key in --keys-file)",
            );
        }
        if rules.is_admin_open && !self.has(Role::Admin) {
            tracing::warn!(
                %address,
                "--open-admin: every client that reaches this address can add and remove workers, and read what \
                 others send; an admin key in --keys-file, or --admin-port, closes that"
            );
        } else if needs_local && !is_closed {
            open.push(
                "workers and settings, to this machine only (from elsewhere: an admin key in --keys-file, \
                 --admin-port or --open-admin)",
            );
        }
        if !open.is_empty() {
            tracing::info!(%address, "open without a key: {}", open.join("; "));
        }
    }

    /// Whether a trusted proxy is at this address: its connections carry requests of others.
    pub(crate) fn trusts(&self, address: IpAddr) -> bool {
        self.shared.rules.as_ref().is_some_and(|rules| rules.trusts(address))
    }

    /// The key that this service shows at others.
    pub(crate) fn credential(&self) -> &Credential {
        &self.shared.credential
    }

    /// Files of keys that were changed and can't be used.
    pub(crate) fn troubles(&self) -> Vec<String> {
        let Shared { keys, credential, tokens, .. } = &*self.shared;
        let keys = keys.as_ref().and_then(|keys| keys.trouble());
        let credential = credential.0.as_ref().and_then(|credential| credential.trouble());
        let tokens = tokens.as_ref().and_then(Tokens::trouble);
        [keys, credential, tokens].into_iter().flatten().collect()
    }

    /// Look for changes of the files of keys, for ever.
    pub(crate) async fn keep_renewing(self) {
        let Shared { keys, credential, tokens, .. } = &*self.shared;
        let keys = OptionFuture::from(keys.clone().map(Reread::keep_renewing));
        let credential = OptionFuture::from(credential.0.clone().map(Reread::keep_renewing));
        let jwks = tokens.as_ref().map(|tokens| Arc::clone(&tokens.jwks));
        let tokens = OptionFuture::from(jwks.map(Reread::keep_renewing));
        tokio::join!(keys, credential, tokens);
    }

    /// Have refusals and changes of keys counted in `registry`.
    pub(crate) fn register(&self, registry: &mut Registry) {
        let help = "Requests refused for their key or origin: no key, unknown key, key of another role, from \
                     another machine, from a foreign web page, from this service itself";
        registry.register("lock_refused", help, self.shared.refused.clone());
        if let Some(keys) = &self.shared.keys {
            let help = "Reloads of --keys-file, by outcome; the log has the reasons";
            keys.register(registry, "keys_renewals", help);
        }
        if let Some(tokens) = &self.shared.tokens {
            tokens.register(registry);
        }
    }

    /// What becomes of a request from `peer`, by its path and headers, and by the DNS names of the certificate that its
    /// connection has shown. A key counts before a certificate.
    ///
    /// # Cost
    /// Without a file of keys a look at path and headers; else a hash for each salt of the file, too. A token that is
    /// not known yet costs a signature.
    pub(crate) fn look<B>(
        &self,
        request: &Request<B>,
        peer: SocketAddr,
        certified: &[String],
    ) -> Verdict {
        if let Err(refusal) = check_host_count(request) {
            return Verdict::Refused(refusal);
        }
        let side = Side::of(request.uri().path());
        if let Some(rules) = &self.shared.rules
            && let Some(answer) = preflight(request, side, rules)
        {
            return Verdict::Answered(answer);
        }
        let (keys, tokens) = (self.shared.keys.as_ref(), self.shared.tokens.as_ref());
        let is_open = side == Side::Probe || (keys.is_none() && tokens.is_none());
        let shown = if is_open { Ok(None) } else { key_of(request.headers()) };
        let presented = match shown {
            Err(refusal) => return Verdict::Refused(refusal),
            Ok(None) => keys
                .filter(|_| !is_open)
                .and_then(|keys| keys.current().find_certified(certified))
                .map_or(Presented::Nothing, Presented::Certified),
            Ok(Some(key)) => match tokens.filter(|_| is_token(key)) {
                Some(tokens) => {
                    tokens.check(key, now_s()).map_or_else(Presented::Invalid, Presented::Known)
                }
                None => match keys.map_or(Found::Nothing, |keys| keys.current().find(key)) {
                    Found::Key(key) => Presented::Known(key),
                    Found::Slow => return Verdict::Slow(Bytes::copy_from_slice(key)),
                    Found::Nothing => Presented::Unknown,
                },
            },
        };
        match self.judge(request, peer, presented) {
            Ok(admitted) => Verdict::Open(admitted),
            Err(refusal) => Verdict::Refused(refusal),
        }
    }

    /// What [`look`](Self::look) could not tell without a slow comparison.
    ///
    /// # Errors
    /// Why it is not let in.
    pub(crate) async fn compare<B>(
        &self,
        request: &Request<B>,
        peer: SocketAddr,
        key: Bytes,
    ) -> std::result::Result<Admitted, Refusal> {
        let busy = || {
            let what = "too many keys are being checked; try again";
            let reject = Reject::momentary(StatusCode::TOO_MANY_REQUESTS, what);
            Refusal { cause: "busy", reject }
        };
        let found = match &self.shared.keys {
            None => None,
            Some(keys) => {
                let keys = keys.current();
                let Shared { waiting, comparing, .. } = &*self.shared;
                let place = Arc::clone(waiting).try_acquire_owned().map_err(|_| busy())?;
                let turn = Arc::clone(comparing).acquire_owned().await.map_err(|_| busy())?;
                let compare = move || {
                    // A client that hangs up does not end the comparison, which keeps its place.
                    let _held = (place, turn);
                    keys.compare(&key)
                };
                tokio::task::spawn_blocking(compare).await.ok().flatten()
            }
        };
        self.judge(request, peer, found.map_or(Presented::Unknown, Presented::Known))
    }

    /// Whether somebody with this key may ask this, from there.
    fn judge<B>(
        &self,
        request: &Request<B>,
        peer: SocketAddr,
        presented: Presented,
    ) -> std::result::Result<Admitted, Refusal> {
        if is_from_here(request.headers()) {
            let what = "this service received a request that it sent itself: correct the URL of the worker that is \
                        this service, or that forwards to it";
            return Err(Refusal::new("loop", StatusCode::LOOP_DETECTED, what));
        }
        let side = Side::of(request.uri().path());
        let wrong = match &presented {
            Presented::Unknown => Some(("unknown_key", self.unknown())),
            Presented::Invalid(why) => Some(("token", format!("{why}; send another one"))),
            _ => None,
        };
        // Browsers send no key by themselves, so that whoever sent one knew it; certificates they do send.
        let is_deliberate = matches!(presented, Presented::Known(_));
        let caller = match presented {
            Presented::Known(key) | Presented::Certified(key) => Caller::Known(key),
            Presented::Nothing | Presented::Unknown | Presented::Invalid(_) => Caller::Anonymous,
        };
        self.check_role(side, &caller, wrong)?;
        let Some(rules) = &self.shared.rules else {
            return Ok(Admitted { caller, origin: None, audit: None });
        };
        let is_operator = caller.key().is_some_and(|key| key.role == Role::Admin);
        let mut is_local = self.reach.is_loopback;
        if side == Side::Admin {
            if rules.admin_address.is_some() && !self.reach.is_admin {
                let what = "this port does not serve the admin side: send the request to the service's --admin-port";
                return Err(Refusal::new("admin", StatusCode::FORBIDDEN, what));
            }
            if !is_operator && !self.reach.is_admin && !rules.is_admin_open {
                check_is_local(request.headers(), peer, rules)?;
                is_local = true;
            }
        }
        if !is_deliberate && side != Side::Probe {
            check_page(request, side, is_local, rules)?;
        }
        let audit = Audit::of(request, side, &caller, peer);
        Ok(Admitted { caller, origin: page_of(request, rules).cloned(), audit })
    }

    /// # Errors
    /// 401 or 403 where the file of keys has some of the role that this side wants, and the caller has none.
    fn check_role(
        &self,
        side: Side,
        caller: &Caller,
        wrong: Option<(&'static str, String)>,
    ) -> std::result::Result<(), Refusal> {
        let wanted = match side {
            Side::Probe => return Ok(()),
            Side::Public => Role::Client,
            Side::Metrics => Role::Metrics,
            Side::Admin => Role::Admin,
        };
        match caller.key() {
            _ if !self.has(wanted) => Ok(()),
            Some(key) if key.role == Role::Admin || key.role == wanted => Ok(()),
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
            None => {
                let (cause, why) =
                    wrong.unwrap_or_else(|| ("no_key", format!("send {}", self.wanted())));
                let how = match self.shared.keys {
                    Some(_) => "Authorization: Bearer KEY or x-api-key: KEY",
                    None => "Authorization: Bearer TOKEN",
                };
                let what = format!("{why}, of the role {}, as {how}", wanted.name());
                Err(Refusal::new(cause, StatusCode::UNAUTHORIZED, what))
            }
        }
    }

    /// What is wrong with a key that is not known.
    fn unknown(&self) -> String {
        match self.shared.keys {
            Some(_) => format!("the key is not in this server's {KEYS_FLAG}: send another one"),
            None => format!("the key is not a token (JWT): send {}", self.wanted()),
        }
    }

    /// What a request may show.
    fn wanted(&self) -> String {
        let token = self.shared.tokens.as_ref().map(|one| format!("a token of {}", one.issuer()));
        let key = format!("a key of this server's {KEYS_FLAG}");
        match token {
            None => key,
            Some(token) if self.shared.keys.is_none() => token,
            Some(token) => format!("{key} or {token}"),
        }
    }

    /// Let the page that sent a request read its refusal, where it may use the API.
    pub(crate) fn show<B>(&self, request: &Request<B>, response: &mut Response<Body>) {
        let origin = self.shared.rules.as_ref().and_then(|rules| page_of(request, rules));
        if let Some(origin) = origin {
            share(response.headers_mut(), origin.clone());
        }
    }

    /// The answer to a request that is not let in, in the form of its API.
    pub(crate) fn refuse<B>(
        &self,
        request: &Request<B>,
        peer: SocketAddr,
        refusal: Refusal,
    ) -> Response<Body> {
        let Refusal { cause, reject } = refusal;
        self.shared.refused.get_or_create(&CauseLabel { cause }).inc();
        let path = request.uri().path();
        let status = reject.status;
        let is_change = Audit::of(request, Side::of(path), &Caller::Anonymous, peer).is_some();
        let now_ms = self.shared.begun.elapsed().as_millis() as u64;
        if is_change && let Some(held_back) = self.shared.log.lock().pass(now_ms) {
            let (path, status) = (path.get(..100).unwrap_or(path), status.as_u16());
            tracing::warn!(%peer, method = %request.method(), path, status, cause, held_back, "refused a change");
        }
        let is_control =
            self.shared.rules.as_ref().is_some_and(|rules| rules.face == Face::Control);
        let mut response = if is_control { reject.plain() } else { Form::of(path).refuse(reject) };
        self.show(request, &mut response);
        response.headers_mut().insert(REFUSED, HeaderValue::from_static(cause));
        if status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// The origin of the page that may read the answer.
fn page_of<'a, B>(request: &'a Request<B>, rules: &Rules) -> Option<&'a HeaderValue> {
    let is_public = Side::of(request.uri().path()) == Side::Public;
    allowed_origin(request.headers(), rules).filter(|_| is_public)
}

/// # Errors
/// 403, naming the flags, for one that is not on this machine, or that somebody on this machine passed on.
fn check_is_local(
    headers: &HeaderMap,
    peer: SocketAddr,
    rules: &Rules,
) -> std::result::Result<(), Refusal> {
    let address = peer.ip().to_canonical();
    let is_proxy = rules.trusts(address);
    let passed_on = OF_PROXIES.iter().find(|name| headers.contains_key(*name));
    let came = match passed_on {
        None if address.is_loopback() && !is_proxy => return Ok(()),
        Some(name) if address.is_loopback() => {
            format!("; this request came through a proxy ({name})")
        }
        None if is_proxy => {
            format!(
                "; --trusted-proxies names {address}, so the request may come from any client behind that proxy"
            )
        }
        _ => String::new(),
    };
    let what = format!(
        "this path needs an admin key, or a client on the same machine{came}. Add a key of the role admin to \
         --keys-file (kvflash keys add ID --role admin), serve these paths on a port of their own (--admin-port), or \
         open them to everybody (--open-admin)"
    );
    Err(Refusal::new("elsewhere", StatusCode::FORBIDDEN, what))
}

/// The key that a request carries.
///
/// # Errors
/// 400 for two of them: which one counts would be anybody's guess.
fn key_of(headers: &HeaderMap) -> std::result::Result<Option<&[u8]>, Refusal> {
    for name in [&AUTHORIZATION, &API_KEY] {
        let mut values = headers.get_all(name).iter();
        let Some(value) = values.next() else { continue };
        if values.next().is_some() {
            let what = format!("header {name} appears more than once; send it once");
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
pub(super) mod tests;
