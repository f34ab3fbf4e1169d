//! Encryption of a service's own HTTP.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kvflash_core::error::{Error, Result};
use parking_lot::{Mutex, RwLock};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig};
use tokio_rustls::server::TlsStream;

const CERT_FLAG: &str = "--tls-cert-path";
const KEY_FLAG: &str = "--tls-key-path";

/// Largest file that is read: a chain of some hundred certificates.
const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// How often the files are looked at for a new certificate.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A certificate and its key, ready for connections: TLS 1.2 and 1.3, HTTP/1.1. Files that change are
/// read again; clones are the same.
#[derive(Clone)]
pub struct Tls {
    shared: Arc<Shared>,
}

struct Shared {
    cert: PathBuf,
    key: PathBuf,
    acceptor: RwLock<TlsAcceptor>,
    /// What the files looked like when they were read last, whatever came of it.
    seen: Mutex<Looks>,
    handshakes: Family<Outcome, Counter>,
    renewals: Family<Outcome, Counter>,
}

/// Of both files: when they were written, and how long they are. Nothing for one that is not there.
type Looks = [Option<(SystemTime, u64)>; 2];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

/// How a handshake ended.
#[derive(Debug, Clone, Copy)]
pub(super) enum Handshake {
    Done,
    /// Somebody who speaks no TLS or does not trust the certificate, or a port scan.
    Failed,
    /// Out of time.
    Slow,
}

impl Tls {
    /// What two files in PEM hold, or nothing without them: the server's certificate with those
    /// between it and its authority's behind it, and its private key.
    ///
    /// # Errors
    /// [`Error::Config`] with flag and file: only one is given, it can't be read, it holds no
    /// certificate or key, or they do not belong together.
    pub fn read(cert: Option<&Path>, key: Option<&Path>) -> Result<Option<Self>> {
        match (cert, key) {
            (None, None) => Ok(None),
            (Some(cert), Some(key)) => Self::of_files(cert, key).map(Some),
            (cert, _) => {
                let (given, missing) =
                    if cert.is_some() { (CERT_FLAG, KEY_FLAG) } else { (KEY_FLAG, CERT_FLAG) };
                Err(Error::Config(format!("{given} needs {missing}, which is not given")))
            }
        }
    }

    fn of_files(cert: &Path, key: &Path) -> Result<Self> {
        let seen = Mutex::new(looks(cert, key));
        let acceptor = RwLock::new(acceptor(cert, key)?);
        let (handshakes, renewals) = (Family::default(), Family::default());
        let (cert, key) = (cert.to_owned(), key.to_owned());
        Ok(Self { shared: Arc::new(Shared { cert, key, acceptor, seen, handshakes, renewals }) })
    }

    /// Read the files again if they have changed since. What can't be used is logged, and the
    /// certificate that there was stays.
    ///
    /// Cost: two calls of the system where nothing has changed.
    pub fn renew(&self) {
        let Shared { cert, key, renewals, .. } = &*self.shared;
        let found = looks(cert, key);
        if std::mem::replace(&mut *self.shared.seen.lock(), found) == found {
            return;
        }
        let outcome = match acceptor(cert, key) {
            Ok(renewed) => {
                *self.shared.acceptor.write() = renewed;
                tracing::info!(cert = %cert.display(), "new certificate: connections from now on get it");
                "renewed"
            }
            // Perhaps only one of the two is new yet.
            Err(error) => {
                tracing::warn!(%error, "files changed, but can't be used: the certificate read before stays");
                "refused"
            }
        };
        renewals.get_or_create(&Outcome { outcome }).inc();
    }

    /// Look for a new certificate every second, for ever.
    pub(super) async fn keep_renewing(self) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let tls = self.clone();
            // A file system may take its time. A panic was printed, and the next look comes.
            let _ = tokio::task::spawn_blocking(move || tls.renew()).await;
        }
    }

    /// Have handshakes and renewals counted in `registry`.
    pub(super) fn register(&self, registry: &mut Registry) {
        for outcome in [Handshake::Done, Handshake::Failed, Handshake::Slow] {
            // Rates want zeros from the start.
            let _ = self.handshakes_of(outcome);
        }
        registry.register(
            "tls_handshakes",
            "TLS handshakes of clients, by how they ended",
            self.shared.handshakes.clone(),
        );
        registry.register(
            "tls_renewals",
            "Changes of --tls-cert-path or --tls-key-path: taken, or refused (the log says why)",
            self.shared.renewals.clone(),
        );
    }

    pub(super) fn count(&self, handshake: Handshake) {
        self.handshakes_of(handshake).inc();
    }

    fn handshakes_of(&self, handshake: Handshake) -> Counter {
        let outcome = match handshake {
            Handshake::Done => "done",
            Handshake::Failed => "failed",
            Handshake::Slow => "timeout",
        };
        self.shared.handshakes.get_or_create_owned(&Outcome { outcome })
    }

    /// The handshake of a new connection; as long as the other side takes.
    pub(super) async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let acceptor = self.shared.acceptor.read().clone();
        acceptor.accept(stream).await
    }
}

fn looks(cert: &Path, key: &Path) -> Looks {
    [cert, key].map(|path| {
        let metadata = std::fs::metadata(path).ok()?;
        Some((metadata.modified().ok()?, metadata.len()))
    })
}

fn acceptor(cert: &Path, key: &Path) -> Result<TlsAcceptor> {
    let chain = CertificateDer::pem_slice_iter(&bytes_of(CERT_FLAG, cert)?)
        .collect::<std::result::Result<Vec<_>, _>>()
        .map_err(|error| fault(CERT_FLAG, cert, format!("is not PEM: {error}")))?;
    if chain.is_empty() {
        return Err(fault(CERT_FLAG, cert, "holds no certificate in PEM"));
    }
    let secret =
        PrivateKeyDer::from_pem_slice(&bytes_of(KEY_FLAG, key)?).map_err(|error| match error {
            pem::Error::NoItemsFound => fault(KEY_FLAG, key, "holds no private key in PEM"),
            error => fault(KEY_FLAG, key, format!("is not PEM: {error}")),
        })?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::Config(format!("TLS: {error}")))?
        .with_no_client_auth()
        .with_single_cert(chain, secret)
        .map_err(|error| match error {
            rustls::Error::InconsistentKeys(_) => {
                let cert = cert.display();
                fault(KEY_FLAG, key, format!("is not the key of {CERT_FLAG} {cert}"))
            }
            rustls::Error::InvalidCertificate(_) => {
                fault(CERT_FLAG, cert, format!("can't be used: {error}"))
            }
            error => fault(KEY_FLAG, key, format!("can't be used: {error}")),
        })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").finish_non_exhaustive()
    }
}

fn bytes_of(flag: &str, path: &Path) -> Result<Vec<u8>> {
    use std::io::Read;
    let mut bytes = Vec::new();
    let read = std::fs::File::open(path)
        .and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes));
    read.map_err(|error| fault(flag, path, format!("can't be read: {error}")))?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(fault(flag, path, format!("is larger than {MAX_FILE_BYTES} bytes, the limit")));
    }
    Ok(bytes)
}

fn fault(flag: &str, path: &Path, what: impl fmt::Display) -> Error {
    Error::Config(format!("{flag} {}: {what}", path.display()))
}
