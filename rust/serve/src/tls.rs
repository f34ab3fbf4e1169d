//! TLS of a service's own HTTP.

use std::io;
use std::path::Path;
use std::sync::Arc;

use kvflash_core::error::{Error, Result};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{self, RootCertStore, ServerConfig};
use tokio_rustls::server::TlsStream;

use super::reread::{Reread, bytes_of, fault};
use super::settings::TlsSettings;
use crate::metrics::OutcomeLabel;

const CERT_FLAG: &str = "--tls-cert-path";
const KEY_FLAG: &str = "--tls-key-path";
pub(super) const CLIENT_CA_FLAG: &str = "--tls-client-ca-path";

/// Maximum names read from a client's certificate.
const MAX_NAMES: usize = 16;

/// A certificate and its key, ready for connections: TLS 1.2 and 1.3, HTTP/1.1. Changed files are
/// reloaded; clones share the state.
#[derive(Debug, Clone)]
pub struct Tls {
    acceptor: Arc<Reread<TlsAcceptor>>,
    handshakes: Family<OutcomeLabel, Counter>,
    checks_clients: bool,
}

/// Outcomes of handshakes.
pub(super) const DONE: &str = "done";
/// The client speaks no TLS or does not trust the certificate, or it is a port scan.
pub(super) const FAILED: &str = "failed";
pub(super) const SLOW: &str = "timeout";

impl Tls {
    /// Reads the PEM files, `None` without any: the server's certificate followed by intermediate
    /// ones, its private key, and the authorities of clients.
    ///
    /// # Errors
    /// [`Error::Config`] with flag and file: a required one is missing, unreadable, without a
    /// certificate or key, or they do not match.
    pub fn read(settings: &TlsSettings) -> Result<Option<Self>> {
        let client_ca = settings.tls_client_ca_path.as_deref();
        match (settings.tls_cert_path.as_deref(), settings.tls_key_path.as_deref()) {
            (None, None) if client_ca.is_some() => Err(Error::Config(format!(
                "{CLIENT_CA_FLAG} needs {CERT_FLAG}, which is not given"
            ))),
            (None, None) => Ok(None),
            (Some(cert), Some(key)) => Self::of_files(cert, key, client_ca).map(Some),
            (cert, _) => {
                let (given, missing) =
                    if cert.is_some() { (CERT_FLAG, KEY_FLAG) } else { (KEY_FLAG, CERT_FLAG) };
                Err(Error::Config(format!("{given} needs {missing}, which is missing")))
            }
        }
    }

    fn of_files(cert: &Path, key: &Path, client_ca: Option<&Path>) -> Result<Self> {
        let files = [Some(cert), Some(key), client_ca].into_iter().flatten().map(Path::to_owned);
        let (of_cert, of_key) = (cert.to_owned(), key.to_owned());
        let of_clients = client_ca.map(Path::to_owned);
        let read = move || acceptor(&of_cert, &of_key, of_clients.as_deref());
        let acceptor = Arc::new(Reread::new(files.collect(), read)?);
        let checks_clients = client_ca.is_some();
        Ok(Self { acceptor, handshakes: Family::default(), checks_clients })
    }

    /// Whether clients' certificates are checked.
    pub(super) fn checks_clients(&self) -> bool {
        self.checks_clients
    }

    /// Checks for a new certificate every second, forever.
    pub(super) async fn keep_renewing(self) {
        Arc::clone(&self.acceptor).keep_renewing().await;
    }

    /// A warning while the files were changed and can't be used.
    pub(super) fn trouble(&self) -> Option<String> {
        self.acceptor.trouble()
    }

    /// Registers the counters of handshakes and reloads in `registry`.
    pub(super) fn register(&self, registry: &mut Registry) {
        // Rates need zeros from the start.
        for outcome in [DONE, FAILED, SLOW] {
            drop(self.handshakes.get_or_create(&OutcomeLabel { outcome }));
        }
        let help = "TLS handshakes of clients, by outcome";
        registry.register("tls_handshakes", help, self.handshakes.clone());
        let help = "Reloads of --tls-cert-path, --tls-key-path and --tls-client-ca-path, by outcome; the log has the reasons";
        self.acceptor.register(registry, "tls_renewals", help);
    }

    /// Counts a handshake.
    pub(super) fn count(&self, outcome: &'static str) {
        self.handshakes.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// The handshake of a new connection; without a time limit.
    pub(super) async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let acceptor = self.acceptor.current();
        acceptor.accept(stream).await
    }
}

/// The DNS names in the client's certificate, if an authority of `--tls-client-ca-path` signed it.
/// Empty without one.
pub(super) fn names_of_client(stream: &TlsStream<TcpStream>) -> Vec<String> {
    let (_, connection) = stream.get_ref();
    let shown = connection.peer_certificates().and_then(<[_]>::first);
    let parsed = shown.and_then(|der| webpki::EndEntityCert::try_from(der).ok());
    parsed.map_or_else(Vec::new, |certificate| {
        certificate.valid_dns_names().take(MAX_NAMES).map(str::to_owned).collect()
    })
}

/// The certificates of a file that `flag` names.
///
/// # Errors
/// `Config`, naming flag and file.
pub(super) fn certificates(flag: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let chain = CertificateDer::pem_slice_iter(&bytes_of(flag, path)?)
        .collect::<std::result::Result<Vec<_>, _>>()
        .map_err(|error| fault(flag, path, format!("is not PEM: {error}")))?;
    if chain.is_empty() {
        return Err(fault(flag, path, "holds no certificate in PEM"));
    }
    Ok(chain)
}

/// The private key of a file that `flag` names.
///
/// # Errors
/// `Config`, naming flag and file.
pub(super) fn private_key(flag: &str, path: &Path) -> Result<PrivateKeyDer<'static>> {
    PrivateKeyDer::from_pem_slice(&bytes_of(flag, path)?).map_err(|error| match error {
        pem::Error::NoItemsFound => {
            fault(flag, path, "holds no private key in PEM without a passphrase")
        }
        error => fault(flag, path, format!("is not PEM: {error}")),
    })
}

/// Clients' certificates are checked if presented; clients with a key present none.
fn client_verifier(
    path: &Path,
    provider: &Arc<rustls::crypto::CryptoProvider>,
) -> Result<Arc<dyn rustls::server::danger::ClientCertVerifier>> {
    let mut roots = RootCertStore::empty();
    let unusable = |error: String| fault(CLIENT_CA_FLAG, path, format!("can't be used: {error}"));
    for authority in certificates(CLIENT_CA_FLAG, path)? {
        roots.add(authority).map_err(|error| unusable(error.to_string()))?;
    }
    let verifier =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider));
    verifier
        .allow_unauthenticated()
        .build()
        .map_err(|error| unusable(error.to_string()))
        .map(|verifier| verifier as _)
}

fn acceptor(cert: &Path, key: &Path, client_ca: Option<&Path>) -> Result<TlsAcceptor> {
    let chain = certificates(CERT_FLAG, cert)?;
    let secret = private_key(KEY_FLAG, key)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::Config(format!("TLS: {error}")))?;
    let config = match client_ca {
        Some(path) => config.with_client_cert_verifier(client_verifier(path, &provider)?),
        None => config.with_no_client_auth(),
    };
    let mut config = config.with_single_cert(chain, secret).map_err(|error| match error {
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
