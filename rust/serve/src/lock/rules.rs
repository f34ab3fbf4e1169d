//! What a service's flags say of who may ask what. Requests that a web page made a browser send are
//! let in only where the page belongs to the service.

use std::net::IpAddr;

use axum::body::Body;
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, HOST, ORIGIN, VARY,
};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version};
use ipnet::IpNet;
use kvflash_core::error::{Error, Result};

use super::caller::{Side, is_write};
use super::entry::Refusal;
use crate::HttpSettings;

/// Where the admin side is served alone, unless `--admin-host` says so.
const ADMIN_HOST: &str = "127.0.0.1";

/// What a service has to show.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Face {
    /// An API for clients, beside paths for operators.
    Api,
    /// Only paths for operators and for gateways that use it.
    #[default]
    Control,
}

/// The rules of one service.
#[derive(Debug)]
pub(crate) struct Rules {
    pub face: Face,
    /// The admin side needs no key, from anywhere.
    pub is_admin_open: bool,
    /// Where the admin side is served, and nowhere else.
    pub admin_address: Option<(String, u16)>,
    /// Names that this service goes by, beside those of this machine.
    pub hosts: Vec<String>,
    /// Web pages that may use the clients' API; `*` for all.
    pub origins: Vec<String>,
    /// Connections of these carry requests of others.
    pub trusted_proxies: Vec<IpNet>,
}

impl Rules {
    /// Whether a trusted proxy is at this address.
    pub(super) fn trusts(&self, address: IpAddr) -> bool {
        self.trusted_proxies.iter().any(|net| net.contains(&address))
    }

    /// # Errors
    /// `Config`, naming the flag, what is legal and what came.
    pub fn of(settings: &HttpSettings, face: Face) -> Result<Self> {
        let admin_address = match (&settings.admin_host, settings.admin_port) {
            (None, None) => None,
            (Some(_), None) => {
                return Err(Error::Config("--admin-host needs --admin-port".to_owned()));
            }
            (host, Some(port)) => {
                Some((host.clone().unwrap_or_else(|| ADMIN_HOST.to_owned()), port))
            }
        };
        if settings.open_admin && admin_address.is_some() {
            return Err(Error::Config(
                "--open-admin with --admin-port: the admin side is either open on the main port or has \
                 its own; choose one"
                    .to_owned(),
            ));
        }
        Ok(Self {
            face,
            is_admin_open: settings.open_admin,
            admin_address,
            hosts: names(&settings.allowed_hosts).chain(own_name()).collect(),
            origins: names(&settings.cors_origin).map(check_origin).collect::<Result<_>>()?,
            trusted_proxies: nets("--trusted-proxies", &settings.trusted_proxies)?,
        })
    }
}

/// What a flag lists, in lower case.
fn names(text: &str) -> impl Iterator<Item = String> {
    text.split(',').map(str::trim).filter(|text| !text.is_empty()).map(str::to_ascii_lowercase)
}

/// The name of this machine; nothing where the system does not tell.
fn own_name() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    Some(name.trim().to_ascii_lowercase()).filter(|name| !name.is_empty())
}

fn check_origin(origin: String) -> Result<String> {
    let address = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
    let is_legal = address.is_some_and(|address| !address.is_empty() && !address.contains('/'));
    if is_legal || origin == "*" {
        return Ok(origin);
    }
    Err(Error::Config(format!(
        "--cors-origin takes origins such as https://chat.example.com, or *, got {origin:?}"
    )))
}

/// The addresses that a flag lists.
///
/// # Errors
/// `Config`, naming the flag and what came.
pub(crate) fn nets(flag: &str, text: &str) -> Result<Vec<IpNet>> {
    let net = |text: String| {
        text.parse().or_else(|_| text.parse::<IpAddr>().map(IpNet::from)).map_err(|_| {
            Error::Config(format!(
                "{flag} takes addresses such as 10.0.0.7 or 10.0.0.0/8, got {text:?}"
            ))
        })
    };
    names(text).map(net).collect()
}

/// Seconds for which a browser need not ask again what a page may send.
const PREFLIGHT_SECONDS: &str = "600";

/// # Errors
/// 400 for a request that does not say once where it goes (RFC 9112, 3.2).
pub(super) fn check_host_count<B>(request: &Request<B>) -> Result<(), Refusal> {
    let count = request.headers().get_all(HOST).iter().count();
    if count == 1 || (count == 0 && request.version() == Version::HTTP_10) {
        return Ok(());
    }
    let what = format!("a request must have exactly one Host header, got {count}");
    Err(Refusal::new("host", StatusCode::BAD_REQUEST, what))
}

/// Whether a request that came without a key may come from a web page, if it does.
///
/// # Errors
/// 403, naming header and flag: a page of another origin that writes, or any page that knows this service by a
/// name that is not its own, which is how DNS rebinding reaches a service of this machine.
pub(super) fn check_page<B>(
    request: &Request<B>,
    side: Side,
    is_local: bool,
    rules: &Rules,
) -> Result<(), Refusal> {
    let headers = request.headers();
    let host = headers.get(HOST).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let origin = headers.get(ORIGIN);
    let is_write = is_write(request.method());
    if is_local && (side != Side::Public || (is_write && origin.is_some())) && !is_own(host, rules)
    {
        let host: String = host.chars().take(100).collect();
        return Err(Refusal::new(
            "host",
            StatusCode::FORBIDDEN,
            format!("Host {host:?} is not a name of this service: add it to --allowed-hosts"),
        ));
    }
    if side == Side::Public && allowed_origin(headers, rules).is_some() {
        return Ok(());
    }
    let is_foreign = origin.is_some_and(|origin| !is_same(origin, host));
    if is_foreign && (is_write || side == Side::Admin) {
        let hint = match side {
            Side::Public => "allow it with --cors-origin, or send a key",
            _ => "send a key of the role admin",
        };
        let origin = origin.map(HeaderValue::as_bytes).unwrap_or_default();
        let origin: String = String::from_utf8_lossy(origin).chars().take(100).collect();
        let what = format!("the request came from a web page of another origin ({origin}): {hint}");
        return Err(Refusal::new("origin", StatusCode::FORBIDDEN, what));
    }
    let site = headers.get("sec-fetch-site").map(HeaderValue::as_bytes);
    if is_write && matches!(site, Some(b"cross-site" | b"same-site")) {
        let what = "the request came from a web page of another site (Sec-Fetch-Site): send a key";
        return Err(Refusal::new("origin", StatusCode::FORBIDDEN, what));
    }
    Ok(())
}

/// The origin of the page that sent a request, where `--cors-origin` names it.
pub(super) fn allowed_origin<'a>(headers: &'a HeaderMap, rules: &Rules) -> Option<&'a HeaderValue> {
    let origin = headers.get(ORIGIN).filter(|_| !rules.origins.is_empty())?;
    let text = origin.to_str().ok()?;
    let is_listed = |listed: &String| listed == "*" || listed.eq_ignore_ascii_case(text);
    rules.origins.iter().any(is_listed).then_some(origin)
}

/// The answer to a browser that asks what a page of an allowed origin may send.
pub(super) fn preflight<B>(
    request: &Request<B>,
    side: Side,
    rules: &Rules,
) -> Option<Response<Body>> {
    let headers = request.headers();
    let asks = request.method() == Method::OPTIONS
        && headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
        && side == Side::Public;
    let origin = if asks { allowed_origin(headers, rules)? } else { return None };
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let out = response.headers_mut();
    out.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, DELETE"));
    out.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(PREFLIGHT_SECONDS));
    if let Some(asked) = headers.get(ACCESS_CONTROL_REQUEST_HEADERS) {
        out.insert(ACCESS_CONTROL_ALLOW_HEADERS, asked.clone());
    }
    share(out, origin.clone());
    Some(response)
}

/// Let a page of this origin read an answer and its headers.
pub(super) fn share(headers: &mut HeaderMap, origin: HeaderValue) {
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("*"));
    headers.append(VARY, HeaderValue::from_static("origin"));
}

/// Whether an origin is that of the service itself, as its clients call it.
fn is_same(origin: &HeaderValue, host: &str) -> bool {
    let Ok(origin) = origin.to_str() else { return false };
    let (address, port) = match (origin.strip_prefix("http://"), origin.strip_prefix("https://")) {
        (Some(address), _) => (address, ":80"),
        (_, Some(address)) => (address, ":443"),
        _ => return false,
    };
    let bare = |text: &str| text.strip_suffix(port).unwrap_or(text).to_ascii_lowercase();
    bare(address) == bare(host)
}

/// Whether a service of this machine goes by this name: nobody else can have these looked up.
fn is_own(host: &str, rules: &Rules) -> bool {
    // Requests of HTTP/1.0 have none, and browsers send others.
    if host.is_empty() {
        return true;
    }
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let name = authority.host().trim_end_matches('.').to_ascii_lowercase();
    let bare = name.trim_start_matches('[').trim_end_matches(']');
    bare.parse::<IpAddr>().is_ok()
        || name == "localhost"
        || name.ends_with(".localhost")
        || rules.hosts.contains(&name)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_of_this_machine_are_own_and_others_are_not() {
        let rules = Rules {
            face: Face::Api,
            is_admin_open: false,
            admin_address: None,
            hosts: vec!["kvflash.example".to_owned()],
            origins: Vec::new(),
            trusted_proxies: Vec::new(),
        };
        for host in [
            "localhost",
            "LOCALHOST:8000",
            "localhost.:1",
            "a.localhost",
            "127.0.0.1:8000",
            "[::1]:8000",
            "10.0.0.7",
            "kvflash.example:8000",
            "",
        ] {
            assert!(is_own(host, &rules), "{host}");
        }
        for host in ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "a b", "x"]
        {
            assert!(!is_own(host, &rules), "{host}");
        }
    }

    #[test]
    fn an_origin_is_the_service_s_own_by_name_and_port() {
        for (origin, host, wanted) in [
            ("http://a:8000", "a:8000", true),
            ("https://A", "a:443", true),
            ("http://a", "a", true),
            ("http://a", "a:8000", false),
            ("https://a", "a:80", false),
            ("null", "null", false),
            ("http://b", "a", false),
            ("http://a.b", "a", false),
        ] {
            let origin = HeaderValue::from_static(origin);
            assert_eq!(is_same(&origin, host), wanted, "{origin:?} {host}");
        }
    }
}
