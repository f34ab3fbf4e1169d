//! Recovers a peer's state, before this replica's own events are read.

use std::io::{self, BufReader, Read};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::{Request, StatusCode, header};
use bytes::{Buf, Bytes};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use kvflash_core::catalog::{
    Catalog, DEFAULT_MAX_BLOCKS, ListenerStatus, Progress, TransferError, restore, restore_json,
};
use serde::Deserialize;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use super::dump::DUMP_TYPE;
use super::startup::{Phase, Startup};
use crate::Http;
use crate::lock::Credential;
use crate::outbound::Connector;

/// Time for listeners to connect before the dump is requested, so that no event falls between the
/// two.
const LISTENERS_WAIT: Duration = Duration::from_secs(1);

/// How long peers that do not answer yet, or have no state either, are retried.
const PEERS_WAIT: Duration = Duration::from_secs(1);

/// How long to wait for a peer that is loading.
const LOADING_PEER_WAIT: Duration = Duration::from_secs(30);

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// A dump without data for this long is given up; also the longest wait for a response head.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum duration of a dump. Ten million blocks take four seconds.
const DUMP_TIME_MAX: Duration = Duration::from_secs(600);

/// Maximum bytes of a dump per block that an index may hold; JSON needs 80.
const DUMP_BYTES_A_BLOCK: u64 = 256;

/// A worker known from a peer must register within this time, or is forgotten.
const RECOVERED_WAIT: Duration = Duration::from_secs(600);

/// The response of GET /ready is small.
const READY_BYTES_MAX: usize = 1024 * 1024;

/// HTTP client for peers.
struct HttpClient {
    client: Client<Connector, Empty<Bytes>>,
    credential: Credential,
    /// Peers named by flags; only these receive the key.
    trusted: Vec<String>,
}

/// A peer's usefulness for recovery.
enum Peer {
    /// Its dump is usable.
    Healthy,
    /// It is loading a dump and will have one soon.
    Loading,
    /// It has no more data than we have.
    Looking,
}

/// Recovers from the first healthy peer, then lets the publishers read. It always ends.
pub(super) async fn recover(
    catalog: Arc<Catalog>,
    startup: Arc<Startup>,
    http: Http,
    trusted: Vec<String>,
) {
    wait_for_listeners(&catalog).await;
    let connector = http.outbound.connector(CONNECT_TIMEOUT, None);
    let client = Client::builder(TokioExecutor::new()).build(connector);
    let credential = http.lock().credential().clone();
    let client = HttpClient { client, credential, trusted };
    let peer = first_healthy(&client, &catalog, &startup).await;
    match peer {
        Some((peer, progress)) => tracing::info!(
            peer,
            publishers = progress.publishers,
            workers = progress.workers,
            blocks = progress.blocks,
            skipped = progress.skipped_count,
            "recovered"
        ),
        None => tracing::warn!(
            "no peer could be used (see above): the index starts empty and fills from replays and new events"
        ),
    }
    startup.update(|recovery| recovery.phase = Phase::Done);
    catalog.release();
    sleep(RECOVERED_WAIT).await;
    let count = catalog.drop_recovered();
    if count > 0 {
        let seconds = RECOVERED_WAIT.as_secs();
        tracing::warn!(
            count,
            "workers known from a peer did not register within {seconds} s: dropped"
        );
    }
}

/// The peer used for recovery. Peers with an unusable dump are tried once, the others until the
/// time is up.
async fn first_healthy(
    client: &HttpClient,
    catalog: &Arc<Catalog>,
    startup: &Arc<Startup>,
) -> Option<(String, Progress)> {
    let began = Instant::now();
    let mut broken: Vec<(String, String)> = Vec::new();
    loop {
        let mut waits = PEERS_WAIT;
        let mut errors = Vec::new();
        for peer in startup.peers() {
            if broken.iter().any(|(known, _)| *known == peer) {
                continue;
            }
            match look_at(client, &peer).await {
                Ok(Peer::Healthy) => match load(client, &peer, catalog, startup).await {
                    Ok(progress) => {
                        broken.iter().chain(&errors).for_each(|(p, why)| startup.failed(p, why));
                        return Some((peer, progress));
                    }
                    Err(error) => {
                        startup.update(|recovery| {
                            (recovery.phase, recovery.peer) = (Phase::Looking, None);
                        });
                        broken.push((peer, error));
                    }
                },
                Ok(Peer::Loading) => {
                    waits = LOADING_PEER_WAIT;
                    errors.push((peer, "the peer is loading a dump itself".to_owned()));
                }
                Ok(Peer::Looking) => {
                    errors.push((peer, "the peer is looking for a peer itself".to_owned()));
                }
                Err(error) => errors.push((peer, error)),
            }
        }
        if errors.is_empty() || began.elapsed() > waits {
            broken.iter().chain(&errors).for_each(|(peer, why)| startup.failed(peer, why));
            return None;
        }
        sleep(Duration::from_millis(100)).await;
    }
}

async fn wait_for_listeners(catalog: &Catalog) {
    let deadline = Instant::now() + LISTENERS_WAIT;
    let is_pending = || {
        catalog
            .publishers()
            .iter()
            .any(|publisher| publisher.view().status == ListenerStatus::Pending)
    };
    while is_pending() && Instant::now() < deadline {
        sleep(Duration::from_millis(10)).await;
    }
}

async fn get(
    client: &HttpClient,
    peer: &str,
    path: &str,
) -> Result<hyper::Response<Incoming>, String> {
    let mut request = Request::get(format!("{peer}{path}"))
        .header(header::ACCEPT, format!("{DUMP_TYPE}, application/json"))
        .body(Empty::new())
        .map_err(|error| error.to_string())?;
    if client.trusted.iter().any(|trusted| trusted == peer) {
        client.credential.show(request.headers_mut());
    }
    match timeout(IDLE_TIMEOUT, client.client.request(request)).await {
        Err(_) => Err(format!("no answer within {} s", IDLE_TIMEOUT.as_secs())),
        Ok(Err(error)) if error.is_connect() => Err("no connection".to_owned()),
        Ok(Err(error)) => Err(error.to_string()),
        Ok(Ok(response)) => Ok(response),
    }
}

async fn look_at(client: &HttpClient, peer: &str) -> Result<Peer, String> {
    #[derive(Deserialize)]
    struct Recovery {
        phase: String,
    }
    #[derive(Deserialize)]
    struct Ready {
        recovery: Recovery,
    }
    let response = get(client, peer, "/ready").await?;
    match response.status() {
        StatusCode::SERVICE_UNAVAILABLE => {}
        // Indexers without this path are ready when they answer.
        status if status.is_success() || status == StatusCode::NOT_FOUND => {
            return Ok(Peer::Healthy);
        }
        status => return Err(format!("GET /ready answered {status}")),
    }
    let body = Limited::new(response.into_body(), READY_BYTES_MAX);
    let body = timeout(IDLE_TIMEOUT, body.collect()).await;
    let body = body.map_err(|_| "GET /ready did not end".to_owned())?;
    let bytes = body.map_err(|error| error.to_string())?.to_bytes();
    match serde_json::from_slice::<Ready>(&bytes).map(|ready| ready.recovery.phase).as_deref() {
        Ok("looking") => Ok(Peer::Looking),
        Ok("loading") => Ok(Peer::Loading),
        // It only waits for workers.
        Ok(_) => Ok(Peer::Healthy),
        Err(error) => Err(format!("GET /ready is not an indexer's answer: {error}")),
    }
}

async fn load(
    client: &HttpClient,
    peer: &str,
    catalog: &Arc<Catalog>,
    startup: &Arc<Startup>,
) -> Result<Progress, String> {
    let mut response = get(client, peer, "/dump?format=snapshot").await?;
    if matches!(response.status(), StatusCode::BAD_REQUEST | StatusCode::NOT_FOUND) {
        // Another system's indexer may refuse the query.
        response = get(client, peer, "/dump").await?;
    }
    if response.status() != StatusCode::OK {
        let hint = match response.status() {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                ": set --service-key-file to a file with one of its admin keys"
            }
            _ => "",
        };
        return Err(format!("GET /dump answered {}{hint}", response.status()));
    }
    let kind = response.headers().get(header::CONTENT_TYPE);
    let is_binary = kind.is_some_and(|kind| kind.as_bytes() == DUMP_TYPE.as_bytes());
    startup.update(|recovery| {
        recovery.phase = Phase::Loading;
        recovery.peer = Some(peer.to_owned());
        recovery.bytes = 0;
    });
    let (pieces, received) = mpsc::channel(16);
    let reader = {
        let (catalog, startup) = (Arc::clone(catalog), Arc::clone(startup));
        tokio::task::spawn_blocking(move || {
            let mut tell = |progress: &Progress| {
                startup.update(|recovery| recovery.progress = progress.clone());
            };
            let mut from = Pieces { received, piece: Bytes::new() };
            if is_binary {
                restore(&catalog, &mut from, &mut tell)
            } else {
                let mut from = BufReader::with_capacity(64 * 1024, from);
                restore_json(&catalog, &mut from, &mut tell)
            }
        })
    };
    let blocks = Some(catalog.options().max_blocks).filter(|blocks| *blocks > 0);
    let most = blocks.unwrap_or(DEFAULT_MAX_BLOCKS) as u64 * DUMP_BYTES_A_BLOCK;
    let pumped = pump(response.into_body(), &pieces, startup, most);
    if timeout(DUMP_TIME_MAX, pumped).await.is_err() {
        let why = format!("the dump did not end within {} s", DUMP_TIME_MAX.as_secs());
        let _ = pieces.send(Err(io::Error::new(io::ErrorKind::TimedOut, why))).await;
    }
    drop(pieces);
    let outcome: Result<Progress, TransferError> =
        reader.await.map_err(|error| format!("the recovery failed: {error}"))?;
    let progress = outcome.map_err(|error| error.to_string())?;
    startup.update(|recovery| recovery.progress = progress.clone());
    Ok(progress)
}

/// Passes the body on piece by piece, until it ends, the receiver is gone, or it exceeds `most`
/// bytes.
async fn pump(
    mut body: Incoming,
    pieces: &mpsc::Sender<io::Result<Bytes>>,
    startup: &Startup,
    most: u64,
) {
    let mut received = 0;
    loop {
        let piece = match timeout(IDLE_TIMEOUT, body.frame()).await {
            Ok(None) => return,
            Ok(Some(Ok(frame))) => match frame.into_data() {
                Ok(data) if received + data.len() as u64 > most => Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("the dump has more than {most} bytes"),
                )),
                Ok(data) => {
                    received += data.len() as u64;
                    Ok(data)
                }
                // Trailers.
                Err(_) => continue,
            },
            Ok(Some(Err(error))) => Err(io::Error::other(error)),
            Err(_) => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("nothing came for {} s", IDLE_TIMEOUT.as_secs()),
            )),
        };
        let is_last = piece.is_err();
        if let Ok(data) = &piece {
            startup.update(|recovery| recovery.bytes += data.len() as u64);
        }
        if pieces.send(piece).await.is_err() || is_last {
            return;
        }
    }
}

/// Pieces of a body, as a reader for another thread.
struct Pieces {
    received: mpsc::Receiver<io::Result<Bytes>>,
    piece: Bytes,
}

impl Read for Pieces {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.received.blocking_recv() {
                None => return Ok(0),
                Some(piece) => self.piece = piece?,
            }
        }
        let len = into.len().min(self.piece.len());
        self.piece.copy_to_slice(&mut into[..len]);
        Ok(len)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;
    use crate::{Face, HttpSettings};

    /// The request that a peer receives from an indexer that trusts these.
    async fn sent(trusts_it: bool) -> String {
        let path = std::env::temp_dir().join(format!("kvflash-peer-key-{}", std::process::id()));
        std::fs::write(&path, "the secret").unwrap();
        let settings = HttpSettings { service_key_file: Some(path), ..HttpSettings::default() };
        let http = Http::of(settings, Face::Control).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let peer = format!("http://{}", listener.local_addr().unwrap());
        let client = Client::builder(TokioExecutor::new())
            .build(http.outbound.connector(CONNECT_TIMEOUT, None));
        let credential = http.lock().credential().clone();
        let trusted = if trusts_it { vec![peer.clone()] } else { vec!["http://other".to_owned()] };
        let client = HttpClient { client, credential, trusted };
        let answering = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = vec![0; 4_096];
            let read = stream.read(&mut head).await.unwrap();
            stream.write_all(b"HTTP/1.1 404 x\r\ncontent-length: 0\r\n\r\n").await.unwrap();
            String::from_utf8_lossy(&head[..read]).into_owned()
        });
        get(&client, &peer, "/ready").await.unwrap();
        answering.await.unwrap()
    }

    #[tokio::test]
    async fn only_peers_that_flags_name_are_shown_the_service_key() {
        assert!(sent(true).await.contains("authorization: Bearer the secret"));
        let other = sent(false).await;
        assert!(other.starts_with("GET /ready ") && !other.contains("secret"), "{other}");
    }
}
