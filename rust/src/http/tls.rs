//! Encryption of a service's own HTTP.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig};
use tokio_rustls::server::TlsStream;

use crate::error::{Error, Result};

const CERT_FLAG: &str = "--tls-cert-path";
const KEY_FLAG: &str = "--tls-key-path";

/// Largest file that is read: a chain of some hundred certificates.
const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// A certificate and its key, ready for connections: TLS 1.2 and 1.3, HTTP/1.1.
#[derive(Clone)]
pub struct Tls {
    acceptor: TlsAcceptor,
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
        let chain = CertificateDer::pem_slice_iter(&bytes_of(CERT_FLAG, cert)?)
            .collect::<std::result::Result<Vec<_>, _>>()
            .map_err(|error| fault(CERT_FLAG, cert, format!("is not PEM: {error}")))?;
        if chain.is_empty() {
            return Err(fault(CERT_FLAG, cert, "holds no certificate in PEM"));
        }
        let secret =
            PrivateKeyDer::from_pem_slice(&bytes_of(KEY_FLAG, key)?).map_err(
                |error| match error {
                    pem::Error::NoItemsFound => fault(KEY_FLAG, key, "holds no private key in PEM"),
                    error => fault(KEY_FLAG, key, format!("is not PEM: {error}")),
                },
            )?;
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
        Ok(Self { acceptor: TlsAcceptor::from(Arc::new(config)) })
    }

    /// The handshake of a new connection; as long as the other side takes.
    pub(super) async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        self.acceptor.accept(stream).await
    }
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
