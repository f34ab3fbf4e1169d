//! HTTP limits of a service: settings and the related metrics.

use std::net::{IpAddr, SocketAddr};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::http::HeaderMap;
use kvflash_core::error::{Error, Result};
use prometheus_client::registry::Registry;

use super::body::Intake;
use super::indexer::HashMask;
use super::outbound::Outbound;
use super::worker_allow::WorkerAllow;
use super::{Face, HttpSettings, Lock, ServeLimits, Shutdown, Tls, TlsSettings};

/// The limits of a service's connections and bodies.
#[derive(Debug, Clone, Default)]
pub struct Http {
    settings: HttpSettings,
    /// What its server obeys.
    limits: ServeLimits,
    pub(crate) outbound: Outbound,
    pub(crate) worker_allow: WorkerAllow,
    pub(crate) mask: Option<HashMask>,
    shutdown: Shutdown,
    /// Bytes of large bodies since they were last read.
    large: Arc<AtomicU64>,
}

impl Deref for Http {
    type Target = HttpSettings;

    fn deref(&self) -> &HttpSettings {
        &self.settings
    }
}

impl Http {
    /// For a service with this face.
    ///
    /// # Errors
    /// `Config`, naming the flag and, for a file, the line.
    pub fn of(settings: HttpSettings, face: Face) -> Result<Self> {
        for (flag, value) in [
            ("--body-timeout", settings.body_timeout),
            ("--keep-alive-timeout", settings.keep_alive_timeout),
        ] {
            if value.is_zero() {
                return Err(Error::Config(format!("{flag} must be longer than 0")));
            }
        }
        let lock = Lock::new(&settings, face)?;
        let outbound = Outbound::of(&settings)?;
        let worker_allow = WorkerAllow::parse(&settings.worker_allow)?;
        let mask = settings.hash_secret_file.as_deref().map(HashMask::open).transpose()?;
        let limits = ServeLimits {
            lock,
            max_connections: settings.max_connections,
            max_connections_per_address: settings.max_connections_per_address,
            keep_alive_timeout: settings.keep_alive_timeout,
            ..ServeLimits::default()
        };
        Ok(Self { settings, limits, outbound, worker_allow, mask, ..Self::default() })
    }

    /// The same over TLS, if that is set.
    ///
    /// # Errors
    /// As [`Tls::read`]; also if the key file has a line for a client's certificate, but TLS checks
    /// none.
    pub fn over(self, settings: &TlsSettings) -> Result<Self> {
        let tls = Tls::read(settings)?;
        self.lock().check_certificates(tls.as_ref().is_some_and(Tls::checks_clients))?;
        Ok(Self { limits: ServeLimits { tls, ..self.limits }, ..self })
    }

    /// The address of a request's client: that of its connection, or of those that `--trusted-proxies` name what the
    /// last one of them says in `X-Forwarded-For`.
    pub(crate) fn client_of(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        let peer = peer.to_canonical();
        if !self.lock().trusts(peer) {
            return peer;
        }
        // Each proxy adds the one that it was asked by: the rest is what the client says.
        let lines = headers.get_all("x-forwarded-for").iter().rev();
        let said = lines.flat_map(|line| line.to_str().unwrap_or_default().rsplit(','));
        let known = said.map_while(|text| address_in(text.trim()));
        let mut client = peer;
        for address in known {
            client = address;
            if !self.lock().trusts(address) {
                break;
            }
        }
        client
    }

    /// What its server obeys; requests get `drain_timeout` after the stop.
    pub fn limits(&self, drain_timeout: Duration) -> ServeLimits {
        ServeLimits { drain_timeout, ..self.limits.clone() }
    }

    /// The stop signal of its server, and its announcement.
    pub fn shutdown(&self) -> &Shutdown {
        &self.shutdown
    }

    /// Authorization of callers.
    pub fn lock(&self) -> &Lock {
        &self.limits.lock
    }

    /// Files of certificates and their keys that were changed and can't be used.
    pub(crate) fn tls_troubles(&self) -> impl Iterator<Item = String> {
        let own = self.limits.tls.as_ref().and_then(Tls::trouble);
        own.into_iter().chain(self.outbound.trouble())
    }

    /// Reloads changed certificates for outgoing connections; call it on a timer.
    pub fn renew(&self) {
        self.outbound.renew();
    }

    /// Bytes of bodies above 16 KiB since the last call.
    pub fn take_large_bytes(&self) -> u64 {
        // Relaxed: an independent sum.
        self.large.swap(0, Ordering::Relaxed)
    }

    /// The reader of its bodies, of up to `max_bytes` each. Registers its metrics at `registry`.
    pub(crate) fn intake(&self, max_bytes: usize, registry: &mut Registry) -> Intake {
        let help =
            "Connections closed because their address had too many (--max-connections-per-address)";
        registry.register("connections_refused", help, self.limits.refused.clone());
        let help =
            "Connections beyond --max-connections: probes are answered, other requests get 503";
        registry.register("connections_crowded_out", help, self.limits.crowded_out.clone());
        let help = "Requests answered with 500 because of a fault in kvflash";
        registry.register("panics", help, self.limits.panics.clone());
        self.lock().register(registry);
        if let Some(tls) = &self.limits.tls {
            tls.register(registry);
        }
        Intake::new(max_bytes, self.body_timeout, self.max_buffered_bytes, &self.large, registry)
    }
}

/// An address, with or without a port and brackets.
fn address_in(text: &str) -> Option<IpAddr> {
    let bare = text.trim_start_matches('[').trim_end_matches(']');
    let address = bare.parse().or_else(|_| text.parse::<SocketAddr>().map(|place| place.ip()));
    address.ok().map(|address: IpAddr| address.to_canonical())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_where_its_connection_or_a_trusted_proxy_says() {
        let settings =
            HttpSettings { trusted_proxies: "10.0.0.0/8".to_owned(), ..HttpSettings::default() };
        let http = Http::of(settings, Face::Api).unwrap();
        for (peer, lines, client) in [
            ("192.0.2.1", &[][..], "192.0.2.1"),
            // Anybody can send the header.
            ("192.0.2.1", &["198.51.100.7"], "192.0.2.1"),
            ("::ffff:192.0.2.1", &[], "192.0.2.1"),
            ("10.0.0.1", &[], "10.0.0.1"),
            ("10.0.0.1", &["198.51.100.7"], "198.51.100.7"),
            ("10.0.0.1", &["6.6.6.6, 198.51.100.7, 10.0.0.2"], "198.51.100.7"),
            ("10.0.0.1", &["6.6.6.6", "198.51.100.7:4711"], "198.51.100.7"),
            ("10.0.0.1", &["[2001:db8::1]:80"], "2001:db8::1"),
            ("10.0.0.1", &["198.51.100.7, unknown"], "10.0.0.1"),
            ("10.0.0.1", &["198.51.100.7, unknown, 10.0.0.2"], "10.0.0.2"),
        ] {
            let mut headers = HeaderMap::new();
            for line in lines {
                headers.append("x-forwarded-for", line.parse().unwrap());
            }
            let found = http.client_of(peer.parse().unwrap(), &headers);
            assert_eq!(found.to_string(), client, "{peer} {lines:?}");
        }
    }
}
