//! Connections to engines, indexers and peers: plain or over TLS, never to link-local addresses by a name, and to
//! workers that somebody added only where those may be.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::http::Uri;
use futures_util::future::BoxFuture;
use hyper_util::client::legacy::connect::dns::{GaiResolver, Name};
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use kvflash_core::error::{Error, Result};
use tokio::io::{AsyncRead, AsyncWrite};
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
use crate::worker_allow::WorkerAllow;

/// A peer that vanished without a word is noticed after about 20 s: silence of 10 s, then five
/// questions, one every 2 s.
pub(crate) const KEEPALIVE_TIME: Duration = Duration::from_secs(10);
pub(crate) const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
pub(crate) const KEEPALIVE_RETRIES: u32 = 5;

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
    config: Option<Arc<Trust>>,
}

/// Files, read when they are first needed: the system's many authorities take longer to read than
/// all else at the start.
#[derive(Debug)]
struct Trust {
    files: Files,
    read: OnceLock<Result<Reread<ClientConfig>>>,
}

#[derive(Debug, Clone)]
struct Files {
    ca: PathBuf,
    is_named: bool,
    own: Option<(PathBuf, PathBuf)>,
}

impl Trust {
    /// # Errors
    /// `Config` with flag and file: unreadable or invalid.
    fn config(&self) -> Result<&Reread<ClientConfig>> {
        let read = || {
            let files = self.files.clone();
            let own = files.own.iter().flat_map(|(cert, key)| [cert.clone(), key.clone()]);
            let paths = std::iter::once(files.ca.clone()).chain(own).collect();
            Reread::new(paths, move || config(&files))
        };
        self.read.get_or_init(read).as_ref().map_err(Clone::clone)
    }
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
        let is_named = ca.is_some();
        let Some(ca) = ca.or_else(system_authorities) else { return Ok(Self::default()) };
        let files = Files { ca, is_named, own: cert.zip(key) };
        let trust = Trust { files, read: OnceLock::new() };
        if is_named || trust.files.own.is_some() {
            trust.config()?;
        }
        Ok(Self { config: Some(Arc::new(trust)) })
    }

    /// Reloads the files if they were read and have changed.
    pub fn renew(&self) {
        if let Some(config) = self.in_use() {
            config.renew();
        }
    }

    /// A warning while the files were changed and can't be used.
    pub fn trouble(&self) -> Option<String> {
        self.in_use()?.trouble()
    }

    fn in_use(&self) -> Option<&Reread<ClientConfig>> {
        self.config.as_ref()?.read.get()?.as_ref().ok()
    }

    /// The connector of a client. With `allow` it is for workers that were added over HTTP: each
    /// connection is held to that, whatever the worker's name meant when it was added.
    pub fn connector(&self, connect_timeout: Duration, allow: Option<WorkerAllow>) -> Connector {
        let look_up = Arc::new(|name: Name| -> BoxFuture<'static, _> {
            // A lookup that is dropped leaves its queue.
            let found = GaiResolver::new().call(name);
            Box::pin(async move { Ok(found.await?.collect()) })
        });
        let names = Names { look_up, allow: allow.clone().unwrap_or_default() };
        let mut http = HttpConnector::new_with_resolver(names);
        http.enforce_http(false);
        http.set_nodelay(true);
        http.set_connect_timeout(Some(connect_timeout));
        http.set_keepalive(Some(KEEPALIVE_TIME));
        http.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
        http.set_keepalive_retries(Some(KEEPALIVE_RETRIES));
        Connector { http, literals: allow, outbound: self.clone(), connect_timeout }
    }
}

fn system_authorities() -> Option<PathBuf> {
    let named = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
    let known = SYSTEM_CA_FILES.iter().map(PathBuf::from);
    named.into_iter().chain(known).find(|path| path.is_file())
}

fn config(files: &Files) -> Result<ClientConfig> {
    let Files { ca, is_named, own } = files;
    let mut roots = RootCertStore::empty();
    let bytes = bytes_of(CA_FLAG, ca)?;
    let (_, _unusable) = roots.add_parsable_certificates(
        CertificateDer::pem_slice_iter(&bytes).filter_map(std::result::Result::ok),
    );
    if roots.is_empty() && *is_named {
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

/// Asks for the addresses of a name.
type LookUp = Arc<dyn Fn(Name) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> + Send + Sync>;

/// Looks names up; addresses where no worker may be, such as those of cloud metadata, are no answer.
#[derive(Clone)]
pub(crate) struct Names {
    look_up: LookUp,
    allow: WorkerAllow,
}

impl Service<Name> for Names {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let (found, allow) = ((self.look_up)(name.clone()), self.allow.clone());
        Box::pin(async move { allowed(&allow, &name, found.await?) })
    }
}

/// Those of a name's addresses that may be connected to.
///
/// # Errors
/// None of them may, with the reason.
fn allowed(
    allow: &WorkerAllow,
    name: &Name,
    mut addresses: Vec<SocketAddr>,
) -> io::Result<std::vec::IntoIter<SocketAddr>> {
    let mut refused = None;
    addresses.retain(|address| {
        let objection = allow.objection(address.ip());
        let is_allowed = objection.is_none();
        refused = objection.or(refused.take());
        is_allowed
    });
    match refused.filter(|_| addresses.is_empty()) {
        None => Ok(addresses.into_iter()),
        Some(why) => {
            let what =
                format!("{:?} no longer resolves to an allowed address: {why}", name.as_str());
            Err(io::Error::new(io::ErrorKind::PermissionDenied, what))
        }
    }
}

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// Connects to `http://` and `https://` addresses.
#[derive(Clone)]
pub(crate) struct Connector {
    http: HttpConnector<Names>,
    /// What addresses in URLs are held to, which no name stands for; `None` where they may be any.
    literals: Option<WorkerAllow>,
    outbound: Outbound,
    connect_timeout: Duration,
}

impl Service<Uri> for Connector {
    type Response = Stream;
    type Error = AnyError;
    type Future = Pin<Box<dyn Future<Output = std::result::Result<Stream, AnyError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<std::result::Result<(), AnyError>> {
        self.http.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        if let Some(allow) = &self.literals
            && let Ok(address) = bare_host(&uri).parse::<IpAddr>()
            && let Some(why) = allow.objection(address)
        {
            return Box::pin(async { Err(why.into()) });
        }
        let connecting = self.http.call(uri.clone());
        let opened = |io: Box<dyn Io>| Ok(TokioIo::new(io));
        if uri.scheme_str() != Some("https") {
            return Box::pin(async move { opened(Box::new(connecting.await?.into_inner())) });
        }
        let (config, limit) = (self.outbound.config.clone(), self.connect_timeout);
        Box::pin(async move {
            let config = config.ok_or(
                "https needs trusted CA certificates, and this machine has none: set --tls-ca-path",
            )?;
            let name = ServerName::try_from(bare_host(&uri).to_owned())?;
            let stream = connecting.await?.into_inner();
            let connector = TlsConnector::from(config.config()?.current());
            let encrypted = tokio::time::timeout(limit, connector.connect(name, stream)).await;
            let stream = encrypted.map_err(|_| "the TLS handshake took too long")?;
            opened(Box::new(stream.map_err(explained)?))
        })
    }
}

/// What rustls calls `Other(OtherError(CaUsedAsEndEntity))`.
const CA_ITSELF: &str = "its certificate is that of a CA (CA:TRUE, as openssl req -x509 makes them) and not of a \
                         server: make one with -addext basicConstraints=critical,CA:FALSE";

/// The error of a handshake, with its cause where rustls names none that a reader understands.
fn explained(error: io::Error) -> AnyError {
    use rustls::{CertificateError, Error, InvalidMessage};
    match error.get_ref().and_then(|inner| inner.downcast_ref()) {
        Some(Error::InvalidCertificate(CertificateError::Other(other)))
            if other.0.downcast_ref() == Some(&webpki::Error::CaUsedAsEndEntity) =>
        {
            CA_ITSELF.into()
        }
        Some(Error::InvalidMessage(InvalidMessage::InvalidContentType)) => {
            format!("{error}: the port does not speak TLS; write its URL with http://").into()
        }
        _ => error.into(),
    }
}

/// The host of a URL, an IPv6 address without its brackets.
fn bare_host(uri: &Uri) -> &str {
    uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']')
}

/// A connection, plain or over TLS.
pub(crate) type Stream = TokioIo<Box<dyn Io>>;

pub(crate) trait Io: AsyncRead + AsyncWrite + Send + Unpin {
    fn tcp(&self) -> &TcpStream;
}

impl Io for TcpStream {
    fn tcp(&self) -> &TcpStream {
        self
    }
}

impl Io for TlsStream<TcpStream> {
    fn tcp(&self) -> &TcpStream {
        self.get_ref().0
    }
}

impl Connection for Box<dyn Io> {
    fn connected(&self) -> Connected {
        self.tcp().connected()
    }
}

/// An error and what caused it: the outermost text of a client's only says "client error".
pub(crate) fn in_full(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        text = format!("{text}: {inner}");
        source = inner.source();
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use parking_lot::Mutex;
    use socket2::SockRef;
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(30);

    /// Connect, and tell what became of it: the address, or every reason.
    async fn connect(connector: &mut Connector, url: &str) -> std::result::Result<IpAddr, String> {
        match connector.call(url.parse().unwrap()).await {
            Ok(stream) => Ok(stream.inner().tcp().peer_addr().unwrap().ip().to_canonical()),
            Err(error) => Err(in_full(&*error)),
        }
    }

    #[tokio::test]
    async fn a_name_that_has_moved_is_held_to_what_is_allowed_now() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let named = format!("http://worker.test:{port}/v1");
        let at = |text: &str| SocketAddr::new(text.parse().unwrap(), 0);
        let told = Arc::new(Mutex::new(vec![at("127.0.0.1")]));
        let connector = |allow: &str| {
            let allow = WorkerAllow::parse(allow).unwrap();
            let mut connector = Outbound::default().connector(TIMEOUT, Some(allow.clone()));
            let told = Arc::clone(&told);
            let look_up = Arc::new(move |_| -> BoxFuture<'static, _> {
                Box::pin(std::future::ready(Ok(told.lock().clone())))
            });
            let names = Names { look_up, allow };
            connector.http = HttpConnector::new_with_resolver(names);
            connector
        };
        let local: IpAddr = "127.0.0.1".parse().unwrap();
        let mut added = connector("127.0.0.1");
        assert_eq!(connect(&mut added, &named).await, Ok(local));
        // The name is another one's now.
        *told.lock() = vec![at("10.0.0.7")];
        let refused = connect(&mut added, &named).await.unwrap_err();
        assert!(
            refused.contains(
                "\"worker.test\" no longer resolves to an allowed address: 10.0.0.7 is not among"
            ) && refused.contains("--worker-allow"),
            "{refused}"
        );
        // Of several, those that are allowed are tried.
        *told.lock() = vec![at("10.0.0.7"), at("::ffff:127.0.0.1"), at("169.254.169.254")];
        assert_eq!(connect(&mut added, &named).await, Ok(local));
        *told.lock() = vec![at("169.254.169.254")];
        let mut any = connector("");
        let refused = connect(&mut any, &named).await.unwrap_err();
        assert!(refused.contains("169.254.169.254 is link-local"), "{refused}");
    }

    #[tokio::test]
    async fn a_peer_that_vanishes_is_noticed_though_nothing_is_sent_to_it() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let mut connector = Outbound::default().connector(TIMEOUT, None);
        let stream = connector.call(url.parse().unwrap()).await.unwrap();
        let socket = SockRef::from(stream.inner().tcp());
        assert!(socket.keepalive().unwrap());
        let time = socket.tcp_keepalive_time().unwrap();
        let interval = socket.tcp_keepalive_interval().unwrap();
        let retries = socket.tcp_keepalive_retries().unwrap();
        assert_eq!(time + interval * retries, Duration::from_secs(20));
    }

    #[tokio::test]
    async fn a_port_without_tls_is_named_as_such() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://{}", listener.local_addr().unwrap());
        let ca = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/support/no_authorities.pem");
        let files = Files { ca: ca.into(), is_named: false, own: None };
        let trust = Trust { files, read: OnceLock::new() };
        let mut connector = Outbound { config: Some(Arc::new(trust)) }.connector(TIMEOUT, None);
        let answer = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
            stream
        };
        let (refused, _open) = tokio::join!(connect(&mut connector, &url), answer);
        let refused = refused.unwrap_err();
        assert!(refused.ends_with("does not speak TLS; write its URL with http://"), "{refused}");
    }

    #[tokio::test]
    async fn an_address_without_a_name_is_held_to_it_too() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let allow = WorkerAllow::parse("10.0.0.0/8").unwrap();
        let mut added = Outbound::default().connector(TIMEOUT, Some(allow));
        let refused = connect(&mut added, &url).await.unwrap_err();
        assert_eq!(refused, "127.0.0.1 is not among the addresses of --worker-allow");
        let refused = connect(&mut added, "http://[::1]:1").await.unwrap_err();
        assert_eq!(refused, "::1 is not among the addresses of --worker-allow");
        let mut flags = Outbound::default().connector(TIMEOUT, None);
        assert!(connect(&mut flags, &url).await.is_ok());
    }
}
