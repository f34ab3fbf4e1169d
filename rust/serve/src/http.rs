//! What bounds the HTTP of a service: its settings, and the figures that go with them.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ipnet::IpNet;
use kvflash_core::error::{Error, Result};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;

use super::body::Intake;
use super::indexer::HashMask;
use super::lock::nets;
use super::outbound::Outbound;
use super::worker_allow::WorkerAllow;
use super::{Face, HttpSettings, Lock, ServeLimits, Shutdown, Tls, TlsSettings};

/// The bounds of one service's connections and bodies.
#[derive(Debug, Clone, Default)]
pub struct Http {
    settings: HttpSettings,
    lock: Lock,
    tls: Option<Tls>,
    outbound: Outbound,
    worker_allow: WorkerAllow,
    mask: Option<HashMask>,
    trusted_proxies: Vec<IpNet>,
    refused_connections: Counter,
    crowded_out: Counter,
    panics: Counter,
    shutdown: Shutdown,
    /// Bytes of large bodies since they were last taken.
    large: Arc<AtomicU64>,
}

impl Deref for Http {
    type Target = HttpSettings;

    fn deref(&self) -> &HttpSettings {
        &self.settings
    }
}

impl Http {
    /// For a service that shows this.
    ///
    /// # Errors
    /// `Config`, naming the flag, and the line of a file.
    pub fn of(settings: HttpSettings, face: Face) -> Result<Self> {
        for (flag, value) in [
            ("--body-timeout", settings.body_timeout),
            ("--keep-alive-timeout", settings.keep_alive_timeout),
        ] {
            if value.is_zero() {
                return Err(Error::Config(format!("{flag} must be longer than 0")));
            }
        }
        let trusted_proxies = nets("--trusted-proxies", &settings.trusted_proxies)?;
        let lock = Lock::new(&settings, face)?;
        let outbound = Outbound::of(&settings)?;
        let worker_allow = WorkerAllow::parse(&settings.worker_allow)?;
        let mask = settings.hash_secret_file.as_deref().map(HashMask::open).transpose()?;
        let http = Self { settings, lock, outbound, worker_allow, mask, ..Self::default() };
        Ok(Self { trusted_proxies, ..http })
    }

    /// The same over TLS, where that is set.
    ///
    /// # Errors
    /// As [`Tls::read`]; or the file of keys has a line for a client's certificate, and TLS checks none.
    pub fn over(self, settings: &TlsSettings) -> Result<Self> {
        let tls = Tls::read(settings)?;
        self.lock.check_certificates(tls.as_ref().is_some_and(Tls::checks_clients))?;
        Ok(Self { tls, ..self })
    }

    /// Encryption of its listeners.
    pub fn tls(&self) -> Option<&Tls> {
        self.tls.as_ref()
    }

    /// What its server obeys; requests get `drain_timeout` after the stop.
    pub fn limits(&self, drain_timeout: Duration) -> ServeLimits {
        ServeLimits {
            lock: self.lock.clone(),
            max_connections: self.max_connections,
            max_connections_per_address: self.max_connections_per_address,
            trusted_proxies: self.trusted_proxies.clone(),
            keep_alive_timeout: self.keep_alive_timeout,
            refused: self.refused_connections.clone(),
            crowded_out: self.crowded_out.clone(),
            panics: self.panics.clone(),
            drain_timeout,
            ..ServeLimits::default()
        }
    }

    /// The stop of its server, and the word that it is about to come.
    pub fn shutdown(&self) -> &Shutdown {
        &self.shutdown
    }

    /// What stands for block hashes in what it tells of them.
    pub(crate) fn mask(&self) -> Option<HashMask> {
        self.mask.clone()
    }

    /// Who may ask what.
    pub fn lock(&self) -> &Lock {
        &self.lock
    }

    /// Connections to others.
    pub(crate) fn outbound(&self) -> &Outbound {
        &self.outbound
    }

    /// Where workers may be that are added over HTTP.
    pub(crate) fn worker_allow(&self) -> &WorkerAllow {
        &self.worker_allow
    }

    /// Read the certificates for connections to others again if they have changed; call it on a timer.
    pub fn renew(&self) {
        self.outbound.renew();
    }

    /// Bytes of bodies above 16 KiB that were read since this was last called.
    pub fn take_large_bytes(&self) -> u64 {
        // Relaxed: a sum that nothing else hangs on.
        self.large.swap(0, Ordering::Relaxed)
    }

    /// What reads its bodies, up to `max_bytes` each. Tells `registry` of both.
    pub(crate) fn intake(&self, max_bytes: usize, registry: &mut Registry) -> Intake {
        registry.register(
            "connections_refused",
            "Connections closed because their address had too many (--max-connections-per-address)",
            Counter::clone(&self.refused_connections),
        );
        registry.register(
            "connections_crowded_out",
            "Connections beyond --max-connections: probes are answered, other requests get 503",
            Counter::clone(&self.crowded_out),
        );
        registry.register(
            "panics",
            "Requests answered with 500 because of a fault in kvflash",
            Counter::clone(&self.panics),
        );
        self.lock.register(registry);
        if let Some(tls) = &self.tls {
            tls.register(registry);
        }
        Intake::new(max_bytes, self.body_timeout, self.max_buffered_bytes, &self.large, registry)
    }
}
