//! Connections to engines, indexers and peers: plain or over TLS; link-local addresses are excluded
//! for names.

use std::fmt;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::http::Uri;
use futures_util::future::BoxFuture;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::dns::{GaiResolver, Name};
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use kvflash_core::error::{Error, Result};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore};
use tower_service::Service;

use crate::HttpSettings;
use crate::reread::{Reread, bytes_of, fault};
use crate::tls::{certificates, private_key};
use crate::worker_allow::is_link_local;

const CA_FLAG: &str = "--tls-ca-path";
const CERT_FLAG: &str = "--tls-client-cert-path";
const KEY_FLAG: &str = "--tls-client-key-path";

/// Locations of the trusted authorities on common systems.
const SYSTEM_CA_FILES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// TLS identity and trusted authorities of this service. The files are reloaded when they change.
#[derive(Debug, Clone, Default)]
pub(crate) struct Outbound {
    config: Option<Arc<Reread<ClientConfig>>>,
}

impl Outbound {
    /// # Errors
    /// `Config` with flag and file: unreadable or invalid, or one of two files is missing.
    pub fn of(settings: &HttpSettings) -> Result<Self> {
        let given =
            [&settings.tls_ca_path, &settings.tls_client_cert_path, &settings.tls_client_key_path];
        let [ca, cert, key] = given.map(Clone::clone);
        match (&cert, &key) {
            (Some(_), None) => return Err(Error::Config(format!("{CERT_FLAG} needs {KEY_FLAG}"))),
            (None, Some(_)) => return Err(Error::Config(format!("{KEY_FLAG} needs {CERT_FLAG}"))),
            _ => {}
        }
        let named = ca.is_some();
        let Some(ca) = ca.or_else(system_authorities) else { return Ok(Self::default()) };
        let paths =
            [Some(&ca), cert.as_ref(), key.as_ref()].into_iter().flatten().cloned().collect();
        let read = move || config(&ca, named, cert.as_deref().zip(key.as_deref()));
        Ok(Self { config: Some(Arc::new(Reread::new(paths, read)?)) })
    }

    /// Reloads the files if they have changed.
    pub fn renew(&self) {
        if let Some(config) = &self.config {
            config.renew();
        }
    }

    /// The connector of a client.
    pub fn connector(&self, connect_timeout: Duration) -> Connector {
        let mut http = HttpConnector::new_with_resolver(Names(GaiResolver::new()));
        http.enforce_http(false);
        http.set_nodelay(true);
        http.set_connect_timeout(Some(connect_timeout));
        http.set_keepalive(Some(Duration::from_secs(30)));
        Connector { http, outbound: self.clone(), connect_timeout }
    }
}

fn system_authorities() -> Option<PathBuf> {
    let named = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
    let known = SYSTEM_CA_FILES.iter().map(PathBuf::from);
    named.into_iter().chain(known).find(|path| path.is_file())
}

fn config(ca: &Path, is_named: bool, own: Option<(&Path, &Path)>) -> Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    let bytes = bytes_of(CA_FLAG, ca)?;
    let (_, _unusable) = roots.add_parsable_certificates(
        CertificateDer::pem_slice_iter(&bytes).filter_map(std::result::Result::ok),
    );
    if roots.is_empty() && is_named {
        return Err(fault(CA_FLAG, ca, "holds no certificate in PEM"));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::Config(format!("TLS: {error}")))?
        .with_root_certificates(roots);
    let mut config = match own {
        None => builder.with_no_client_auth(),
        Some((cert, key)) => builder
            .with_client_auth_cert(certificates(CERT_FLAG, cert)?, private_key(KEY_FLAG, key)?)
            .map_err(|error| fault(CERT_FLAG, cert, format!("can't be used: {error}")))?,
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

/// Resolves names; link-local addresses, such as those of cloud metadata, are ignored.
#[derive(Debug, Clone)]
pub(crate) struct Names(GaiResolver);

impl Service<Name> for Names {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Self::Response>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let found = self.0.call(name);
        Box::pin(async move {
            let mut addresses: Vec<SocketAddr> = found.await?.collect();
            addresses.retain(|address| !is_link_local(address.ip()));
            if addresses.is_empty() {
                return Err(io::Error::other("the name has link-local addresses only"));
            }
            Ok(addresses.into_iter())
        })
    }
}

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// Connects to `http://` and `https://` addresses.
#[derive(Clone)]
pub(crate) struct Connector {
    http: HttpConnector<Names>,
    outbound: Outbound,
    connect_timeout: Duration,
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector").finish_non_exhaustive()
    }
}

impl Service<Uri> for Connector {
    type Response = Stream;
    type Error = AnyError;
    type Future = Pin<Box<dyn Future<Output = std::result::Result<Stream, AnyError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<std::result::Result<(), AnyError>> {
        self.http.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = self.http.call(uri.clone());
        if uri.scheme_str() != Some("https") {
            return Box::pin(async { Ok(Stream::Plain(connecting.await?)) });
        }
        let (config, limit) = (self.outbound.config.clone(), self.connect_timeout);
        Box::pin(async move {
            let config = config.ok_or(
                "https needs trusted CA certificates, and this machine has none: set --tls-ca-path",
            )?;
            let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
            let name = ServerName::try_from(host.to_owned())?;
            let stream = connecting.await?.into_inner();
            let connector = TlsConnector::from(config.current());
            let encrypted = tokio::time::timeout(limit, connector.connect(name, stream)).await;
            let stream = encrypted.map_err(|_| "the TLS handshake took too long")??;
            Ok(Stream::Encrypted(Box::new(TokioIo::new(stream))))
        })
    }
}

/// A connection.
pub(crate) enum Stream {
    Plain(TokioIo<TcpStream>),
    Encrypted(Box<TokioIo<TlsStream<TcpStream>>>),
}

impl Connection for Stream {
    fn connected(&self) -> Connected {
        match self {
            Self::Plain(stream) => stream.connected(),
            Self::Encrypted(stream) => stream.inner().get_ref().0.connected(),
        }
    }
}

impl Read for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(context, into),
            Self::Encrypted(stream) => Pin::new(stream).poll_read(context, into),
        }
    }
}

impl Write for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Encrypted(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(context),
            Self::Encrypted(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Encrypted(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Encrypted(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write_vectored(context, pieces),
            Self::Encrypted(stream) => Pin::new(stream).poll_write_vectored(context, pieces),
        }
    }
}
