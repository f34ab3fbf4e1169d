//! What a service's flags say of who may ask what.

use std::net::IpAddr;

use ipnet::IpNet;
use kvflash_core::error::{Error, Result};

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
