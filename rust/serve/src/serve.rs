//! Serves an app on a listener until it is stopped. The caller owns socket and signal.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{Request, Response};
use futures_util::FutureExt;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use kvflash_core::log_limit::LogLimit;
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinHandle;

use super::connection::{ConnectionTimer, Guarded, RESERVED_TIME, Reserve};
use super::lock::Lock;
use super::tls::{DONE, FAILED, SLOW, Tls, names_of_client};

/// A client that vanishes silently is noticed after silence, probes and the time for their replies;
/// a client that reads nothing of its response after that time, too.
const KEEPALIVE_TIME: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
#[cfg(target_os = "linux")]
const UNACKED_TIME: Duration = Duration::from_secs(120);

/// Time to tell clients that their answers are cut off.
const CUT_TIME: Duration = Duration::from_secs(1);

/// Pause between two warnings about addresses with too many connections.
const WARNING_PAUSE: Duration = Duration::from_secs(60);

/// Limits on connections, their encryption, and the authorization of their requests.
#[derive(Debug, Clone)]
pub struct ServeLimits {
    /// TLS, with the current certificate; `None`: plain HTTP. A handshake has the time limit of a
    /// request head, and does not delay other connections.
    pub tls: Option<Tls>,
    /// Authorizes requests.
    pub lock: Lock,
    /// Maximum open connections; further ones may only send probes.
    pub max_connections: usize,
    /// Connections that arrived at that limit.
    pub crowded_out: Counter,
    /// Maximum open connections per address, with IPv6 per /64; further ones are closed. 0: no
    /// limit, as for proxies that `lock` trusts.
    pub max_connections_per_address: usize,
    /// Connections closed at that limit.
    pub refused: Counter,
    /// Requests ended by a panic.
    pub panics: Counter,
    /// Time limit for a client to send its request head.
    pub header_timeout: Duration,
    /// How long a connection may be idle between two requests.
    pub keep_alive_timeout: Duration,
    /// How long open connections may continue after the stop.
    pub drain_timeout: Duration,
}

impl Default for ServeLimits {
    fn default() -> Self {
        Self {
            tls: None,
            lock: Lock::default(),
            max_connections: 16_384,
            crowded_out: Counter::default(),
            max_connections_per_address: 2_048,
            refused: Counter::default(),
            panics: Counter::default(),
            header_timeout: Duration::from_secs(10),
            keep_alive_timeout: Duration::from_secs(75),
            drain_timeout: Duration::from_secs(30),
        }
    }
}

/// The remote address of a request's connection.
#[derive(Debug, Clone, Copy)]
pub struct Peer(pub SocketAddr);

/// The caller's stop signal; clone it for every server that must obey it.
#[derive(Debug, Clone, Default)]
pub struct Shutdown {
    stopped: Arc<watch::Sender<bool>>,
    leaving: Arc<AtomicBool>,
    cut: Arc<watch::Sender<bool>>,
}

impl Shutdown {
    /// Stops every server with this signal.
    pub fn stop(&self) {
        self.stopped.send_replace(true);
    }

    /// Announces the stop: readiness checks fail, everything else continues.
    pub fn announce(&self) {
        self.leaving.store(true, Ordering::Relaxed);
    }

    /// Whether the stop was announced or given.
    pub fn is_announced(&self) -> bool {
        self.leaving.load(Ordering::Relaxed) || self.is_stopped()
    }

    /// Whether the stop was given.
    pub fn is_stopped(&self) -> bool {
        *self.stopped.borrow()
    }

    /// Waits for the stop.
    pub async fn wait(&self) {
        raised(&self.stopped).await;
    }

    /// Cuts off the answers that did not end in the time after the stop.
    pub fn cut_off(&self) {
        self.cut.send_replace(true);
    }

    /// Waits until answers are cut off.
    pub async fn until_cut_off(self) {
        raised(&self.cut).await;
    }
}

/// Waits for a signal, whose sender the caller has: nothing else ends the wait.
async fn raised(signal: &watch::Sender<bool>) {
    let _ = signal.subscribe().wait_for(|is_raised| *is_raised).await;
}

/// An app for [`serve`]: an axum router, or a service in front of one.
pub trait App: Send + 'static {
    /// Answers the requests of a connection in order.
    type Service: Service<Request<Incoming>, Response = Response<Body>, Error = Infallible, Future: Send>
        + Send
        + Sync
        + 'static;

    /// The service for a connection; it finds the [`Peer`] in a request's extensions.
    fn service(&self) -> Self::Service;
}

impl App for axum::Router {
    type Service = TowerToHyperService<Self>;

    fn service(&self) -> Self::Service {
        TowerToHyperService::new(self.clone())
    }
}

/// Serves a connection until its end, or until the stop and the end of the open request.
async fn answer<I, S>(connection: http1::Connection<TokioIo<I>, S>, shutdown: Shutdown)
where
    I: AsyncRead + AsyncWrite + Unpin,
    S: Service<Request<Incoming>, Response = Response<Body>, Error = Infallible>,
{
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        biased;
        // An error here means that the client hung up or sent no HTTP, so there is no one to
        // respond to.
        _ = connection.as_mut() => {}
        () = shutdown.wait() => {
            connection.as_mut().graceful_shutdown();
            let _ = connection.await;
        }
    }
}

/// The addresses that count as one client: with IPv6 the first 64 bits, which a single host may
/// vary as it likes.
pub(crate) fn client_network(address: IpAddr) -> IpNet {
    match address.to_canonical() {
        IpAddr::V4(address) => Ipv4Net::from(address).into(),
        IpAddr::V6(address) => Ipv6Net::new_assert(address, 64).trunc().into(),
    }
}

/// Open connections by the network of their clients.
type OpenByNetwork = Arc<Mutex<HashMap<IpNet, usize>>>;

/// Shared by all connections of a server.
struct Door<A> {
    app: A,
    limits: ServeLimits,
    shutdown: Shutdown,
    /// Open connections, except for addresses without a limit.
    open: OpenByNetwork,
    /// Time of the last warning about an address with too many.
    warned: Mutex<Option<Instant>>,
    /// Connections beyond the limit.
    reserve: Reserve,
}

/// A connection's slot, in total and of its address; freed when dropped.
struct Place {
    /// `None` beyond the limit.
    permit: Option<OwnedSemaphorePermit>,
    counted: Option<(IpNet, OpenByNetwork)>,
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some((network, open)) = &self.counted
            && let Entry::Occupied(mut entry) = open.lock().entry(*network)
        {
            *entry.get_mut() -= 1;
            if *entry.get() == 0 {
                entry.remove();
            }
        }
    }
}

impl<A: App> Door<A> {
    /// A slot for a connection; `None` if its address has reached its limit.
    fn place(&self, peer: SocketAddr, permit: Option<OwnedSemaphorePermit>) -> Option<Place> {
        let limit = self.limits.max_connections_per_address;
        let address = peer.ip().to_canonical();
        if limit == 0 || self.limits.lock.trusts(address) {
            return Some(Place { permit, counted: None });
        }
        let network = client_network(address);
        let mut open = self.open.lock();
        let count = open.entry(network).or_default();
        if *count < limit {
            *count += 1;
            return Some(Place { permit, counted: Some((network, Arc::clone(&self.open))) });
        }
        drop(open);
        self.limits.refused.inc();
        let mut warned = self.warned.lock();
        if warned.is_none_or(|at| at.elapsed() >= WARNING_PAUSE) {
            *warned = Some(Instant::now());
            tracing::warn!(
                %network,
                limit,
                "closed a connection: the clients of its network have --max-connections-per-address open; if \
                 they are one proxy, name it in --trusted-proxies (logged once a minute)"
            );
        }
        None
    }

    /// Serves `stream` in a separate task, which holds `permit` until its end. Without a permit it
    /// is beyond the limit.
    fn let_in(&self, stream: TcpStream, peer: SocketAddr, permit: Option<OwnedSemaphorePermit>) {
        let Some(place) = self.place(peer, permit) else { return };
        // All of these are optional; a system without them still works. Small responses do not wait
        // for the client's delayed acknowledgement, and a vanished client is noticed.
        let _ = stream.set_nodelay(true);
        let socket = SockRef::from(&stream);
        let keepalive =
            TcpKeepalive::new().with_time(KEEPALIVE_TIME).with_interval(KEEPALIVE_INTERVAL);
        let _ = socket.set_tcp_keepalive(&keepalive);
        #[cfg(target_os = "linux")]
        let _ = socket.set_tcp_user_timeout(Some(UNACKED_TIME));
        let is_beyond = place.permit.is_none();
        let mut service = Guarded {
            service: Arc::new(self.app.service()),
            lock: self.limits.lock.clone(),
            peer,
            certified: Vec::new(),
            panics: self.limits.panics.clone(),
            beyond: is_beyond.then_some(self.limits.max_connections),
        };
        let limit = self.limits.header_timeout;
        let mut builder = http1::Builder::new();
        let timer = ConnectionTimer::new(self.limits.keep_alive_timeout);
        builder.header_read_timeout(limit).timer(timer.clone()).keep_alive(!is_beyond);
        let shutdown = self.shutdown.clone();
        let Some(tls) = self.limits.tls.clone() else {
            let stream = TokioIo::new(timer.watch(stream));
            let connection = builder.serve_connection(stream, service);
            return self.spawn(is_beyond, async move {
                answer(connection, shutdown).await;
                drop(place);
            });
        };
        self.spawn(is_beyond, async move {
            let encrypted = tokio::select! {
                done = tokio::time::timeout(limit, tls.accept(stream)) => done,
                () = shutdown.wait() => return,
            };
            match encrypted {
                Ok(Ok(stream)) => {
                    tls.count(DONE);
                    service.certified = names_of_client(&stream);
                    let stream = TokioIo::new(timer.watch(stream));
                    answer(builder.serve_connection(stream, service), shutdown).await;
                }
                Ok(Err(error)) => {
                    tls.count(FAILED);
                    tracing::debug!(%peer, %error, "TLS handshake failed");
                }
                Err(_) => {
                    tls.count(SLOW);
                    tracing::debug!(%peer, ?limit, "TLS handshake took too long");
                }
            }
            drop(place);
        });
    }

    /// Runs a connection; one beyond the limit only briefly, as a reserved one.
    fn spawn(&self, is_beyond: bool, connection: impl Future<Output = ()> + Send + 'static) {
        if !is_beyond {
            tokio::spawn(connection);
            return;
        }
        self.limits.crowded_out.inc();
        // Whether it ended by itself does not matter.
        let short = tokio::time::timeout(RESERVED_TIME, connection).map(drop);
        self.reserve.add(tokio::spawn(short).abort_handle());
    }
}

/// Serves until `shutdown`, then lets open requests finish for `limits.drain_timeout`. A request
/// that reached the system's accept queue before the stop is answered, too.
///
/// # Errors
/// Only those of the listener; a broken connection ends only that connection.
pub async fn serve(
    listener: TcpListener,
    app: impl App,
    limits: ServeLimits,
    shutdown: Shutdown,
) -> std::io::Result<()> {
    let limits = ServeLimits { lock: limits.lock.at(listener.local_addr()?), ..limits };
    let permits = Arc::new(Semaphore::new(limits.max_connections));
    let mut renewals = vec![tokio::spawn(limits.lock.clone().keep_renewing())];
    renewals.extend(limits.tls.clone().map(|tls| tokio::spawn(tls.keep_renewing())));
    let (open, warned) = (Arc::default(), Mutex::default());
    let (mut log, begun) = (LogLimit::default(), Instant::now());
    let reserve = Reserve::default();
    let door = Door { app, limits: limits.clone(), shutdown, open, warned, reserve };
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = door.shutdown.wait() => break,
        };
        match accepted {
            Ok((stream, peer)) => {
                let permit = Arc::clone(&permits).try_acquire_owned().ok();
                door.let_in(stream, peer, permit);
            }
            Err(error) => {
                // Out of file descriptors, or a queued client hung up: the listener continues.
                if let Some(held_back) = log.pass(begun.elapsed().as_millis() as u64) {
                    tracing::warn!(%error, held_back, "could not accept a connection");
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
    // The system has already accepted these; dropping the listener would reset them.
    let listener = listener.into_std()?;
    while let Ok(permit) = Arc::clone(&permits).try_acquire_owned() {
        let Ok((stream, peer)) = listener.accept() else { break };
        stream.set_nonblocking(true)?;
        let has_asked = stream.peek(&mut [0]).is_ok_and(|bytes| bytes > 0);
        let stream = TcpStream::from_std(stream)?;
        if has_asked {
            // Registered with tokio, so that its request is read before the stop is processed.
            stream.readable().await?;
        }
        door.let_in(stream, peer, Some(permit));
    }
    drop(listener);
    renewals.iter().for_each(JoinHandle::abort);
    let all = u32::try_from(limits.max_connections).unwrap_or(u32::MAX);
    if tokio::time::timeout(limits.drain_timeout, permits.acquire_many(all)).await.is_err() {
        tracing::warn!(
            open = limits.max_connections - permits.available_permits(),
            "stopped with connections still open: they did not finish within the drain time"
        );
        door.shutdown.cut_off();
        let _late = tokio::time::timeout(CUT_TIME, permits.acquire_many(all)).await;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_ipv6_client_has_one_limit_for_the_addresses_of_its_network() {
        let limits = ServeLimits { max_connections_per_address: 2, ..ServeLimits::default() };
        let refused = limits.refused.clone();
        let (open, warned) = (Arc::default(), Mutex::default());
        let (shutdown, reserve) = (Shutdown::default(), Reserve::default());
        let door = Door { app: axum::Router::new(), limits, shutdown, open, warned, reserve };
        let place = |peer: &str| door.place(SocketAddr::new(peer.parse().unwrap(), 1), None);
        let first = place("2001:db8:0:1::1").unwrap();
        let _second = place("2001:db8:0:1:ffff::2").unwrap();
        assert!(place("2001:db8:0:1::3").is_none());
        assert_eq!(refused.get(), 1);
        let _other = place("2001:db8:0:2::1").unwrap();
        drop(first);
        let _third = place("2001:db8:0:1::3").unwrap();
        // Addresses of IPv4 count one by one, however they are written.
        let _v4 = [place("10.0.0.1").unwrap(), place("::ffff:10.0.0.1").unwrap()];
        assert!(place("10.0.0.1").is_none());
        let _next = place("::ffff:10.0.0.2").unwrap();
    }
}
