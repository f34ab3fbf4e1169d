//! A service in the background of a Python process: a tokio runtime, a listener, a stop.

use std::cell::Cell;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use kvflash_core::error::{Error, Result};
use kvflash_core::log_limit::LogLimit;
use kvflash_serve::{App, Http, Lock, ServeLimits, Shutdown, serve};
use parking_lot::Mutex;
use tokio::net::{TcpSocket, TcpStream, lookup_host};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

/// Bytes read since memory was last returned to the system, and the minimum time between two
/// returns: a return takes some milliseconds, in which other threads may wait for memory.
const TRIM_BYTES: u64 = 16 * 1024 * 1024;
const TRIM_SECONDS: u32 = 10;

/// Bursts of large requests that have ended; see [`give_back_memory`].
static BURSTS: AtomicU64 = AtomicU64::new(0);

/// Give the free memory of this thread back to the system, once after each burst: the allocator does
/// it by itself only for threads that go on allocating.
#[allow(unsafe_code, reason = "the allocator's interface is in C")]
fn give_back_memory() {
    thread_local!(static DONE: Cell<u64> = const { Cell::new(0) });
    let bursts = BURSTS.load(Ordering::Relaxed);
    if DONE.replace(bursts) != bursts {
        // SAFETY: it may be called at any time, from any thread.
        unsafe { libmimalloc_sys::mi_collect(true) }
    }
}

/// Log a panic in one line, rate-limited because a client may be able to repeat it.
fn log_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let (lines, begun) = (Mutex::new(LogLimit::default()), Instant::now());
        std::panic::set_hook(Box::new(move |panic| {
            let Some(held_back) = lines.lock().pass(begun.elapsed().as_millis() as u64) else {
                return;
            };
            let place = panic.location().map(ToString::to_string).unwrap_or_default();
            let payload = panic.payload();
            let text = payload.downcast_ref::<&str>().copied();
            let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
            let what: String = text.unwrap_or_default().chars().take(200).collect();
            tracing::error!(place, held_back, "a fault in kvflash, please report it: {what}");
        }));
    });
}

/// A runtime with one HTTP server on it.
pub(super) struct Service {
    pub shutdown: Shutdown,
    runtime: Mutex<Option<Runtime>>,
    servers: Mutex<Vec<JoinHandle<std::io::Result<()>>>>,
    /// False while another process at the same port takes the requests.
    is_listening: Arc<AtomicBool>,
    handle: tokio::runtime::Handle,
    http: Http,
    limits: ServeLimits,
}

impl Service {
    /// # Errors
    /// `Config` if the system provides no threads.
    pub fn new(threads: usize, http: &Http, drain: Duration) -> Result<Self> {
        if !(1..=1_024).contains(&threads) {
            return Err(Error::Config(format!("--threads must be in 1..=1024, got {threads}")));
        }
        log_panics();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(threads)
            .thread_name("kvflash-http")
            .on_thread_park(give_back_memory)
            .enable_all()
            .build()
            .map_err(|error| Error::Config(format!("could not start threads: {error}")))?;
        Ok(Self {
            shutdown: http.shutdown().clone(),
            handle: runtime.handle().clone(),
            runtime: Mutex::new(Some(runtime)),
            servers: Mutex::default(),
            is_listening: Arc::new(AtomicBool::new(true)),
            http: http.clone(),
            limits: http.limits(drain),
        })
    }

    /// Bind and serve, including the admin side if it has its own address. Returns the bound port.
    /// With `--reuse-port`, at a port where another process serves, clients are left to it until
    /// `is_ready`.
    ///
    /// # Errors
    /// `Config` naming the address when it can't be bound.
    pub fn start(
        &self,
        host: &str,
        port: u16,
        app: impl App + Clone,
        is_ready: impl Fn() -> bool + Send + 'static,
    ) -> Result<u16> {
        let lock = self.http.lock();
        if let Some((admin_host, admin_port)) = lock.admin_address()
            && (admin_port, port != 0) == (port, true)
            && (admin_host == host || ["0.0.0.0", "::"].contains(&host))
        {
            return Err(Error::Config(format!(
                "--admin-port {admin_port} is the value of --port, too: give the admin side another port"
            )));
        }
        if let Some((host, port)) = lock.admin_address() {
            let flags = "--admin-host, --admin-port";
            let lock = lock.clone().for_admin();
            let address = self.listen(flags, host, port, lock, app.clone(), || true)?;
            tracing::info!(%address, "the admin side is served here");
        }
        let address = self.listen("--host, --port", host, port, lock.clone(), app, is_ready)?;
        lock.announce(address);
        if cfg!(debug_assertions) {
            tracing::info!(
                "this build is not optimised: requests take several times as long as with make dev or pip install ."
            );
        }
        let (http, mut large, mut seconds) = (self.http.clone(), 0, 0);
        let threads = self.handle.metrics().num_workers();
        self.every_second(move || {
            (large, seconds) = (large + http.take_large_bytes(), seconds + 1);
            http.renew();
            if large >= TRIM_BYTES && seconds >= TRIM_SECONDS {
                (large, seconds) = (0, 0);
                BURSTS.fetch_add(1, Ordering::Relaxed);
                // Idle threads are woken, so that they park again.
                for _ in 0..4 * threads {
                    tokio::spawn(tokio::task::yield_now());
                }
            }
        });
        Ok(address.port())
    }

    fn listen(
        &self,
        flags: &str,
        host: &str,
        port: u16,
        lock: Lock,
        app: impl App,
        is_ready: impl Fn() -> bool + Send + 'static,
    ) -> Result<SocketAddr> {
        let reuse_port = self.http.reuse_port;
        let cannot = |error: std::io::Error| {
            let hint = match error.kind() {
                ErrorKind::AddrInUse if reuse_port => {
                    ": the process there was started without --reuse-port: stop it, or choose another port"
                }
                ErrorKind::AddrInUse => ": choose another port, or --reuse-port to share it",
                ErrorKind::AddrNotAvailable => {
                    ": name an address of this machine, or 0.0.0.0 for all of them"
                }
                _ => "",
            };
            Error::Config(format!("can't listen on {host}:{port} ({flags}): {error}{hint}"))
        };
        let socket = self.handle.block_on(bind(host, port, reuse_port)).map_err(cannot)?;
        let address = socket.local_addr().map_err(cannot)?;
        let (limits, shutdown) =
            (ServeLimits { lock, ..self.limits.clone() }, self.shutdown.clone());
        let is_taken = reuse_port && !is_ready() && self.handle.block_on(is_served(address));
        let server = if is_taken {
            tracing::info!(
                %address,
                "another process serves this address (--reuse-port): it takes all requests until this one is ready"
            );
            self.is_listening.store(false, Ordering::Relaxed);
            let is_listening = Arc::clone(&self.is_listening);
            self.handle.spawn(async move {
                let mut periods = 0_u32;
                while !is_ready() && (periods % 8 != 7 || is_served(address).await) {
                    periods = periods.wrapping_add(1);
                    tokio::select! {
                        () = tokio::time::sleep(TAKE_OVER_PERIOD) => {}
                        () = shutdown.wait() => return Ok(()),
                    }
                }
                let listener = socket.listen(BACKLOG).inspect_err(|error| {
                    tracing::error!(%address, %error, "can't listen: restart this process");
                })?;
                is_listening.store(true, Ordering::Relaxed);
                tracing::info!(%address, "requests are taken here, too");
                serve(listener, app, limits, shutdown).await
            })
        } else {
            let _context = self.handle.enter();
            let listener = socket.listen(BACKLOG).map_err(cannot)?;
            self.handle.spawn(serve(listener, app, limits, shutdown))
        };
        self.servers.lock().push(server);
        Ok(address)
    }

    /// Whether clients reach it, or are left to another process at its port.
    pub fn is_listening(&self) -> bool {
        self.is_listening.load(Ordering::Relaxed)
    }

    /// Call `tick`, which may block, every second until the stop.
    pub fn every_second(&self, mut tick: impl FnMut() + Send + 'static) {
        let shutdown = self.shutdown.clone();
        self.handle.spawn(async move {
            loop {
                tokio::select! {
                    () = tokio::time::sleep(Duration::from_secs(1)) => {
                        tokio::task::block_in_place(&mut tick);
                    }
                    () = shutdown.wait() => break,
                }
            }
        });
    }

    /// Run `call` in a context that can spawn tokio tasks.
    pub fn enter<T>(&self, call: impl FnOnce() -> T) -> T {
        let _guard = self.handle.enter();
        call()
    }

    /// Run `task` to its end, in the caller's thread.
    pub fn block_on<T>(&self, task: impl Future<Output = T>) -> T {
        self.handle.block_on(task)
    }

    /// Stop: no new connections, open requests get the drain time, then everything ends.
    pub fn stop(&self) {
        self.shutdown.stop();
        let servers = std::mem::take(&mut *self.servers.lock());
        for server in servers {
            // The server limits its own drain and has logged the outcome.
            let _ = self.handle.block_on(server);
        }
        if let Some(runtime) = self.runtime.lock().take() {
            runtime.shutdown_timeout(Duration::from_secs(1));
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.shutdown.stop();
        if let Some(runtime) = self.runtime.lock().take() {
            // Dropping a runtime may block, and the garbage collector may run this anywhere.
            runtime.shutdown_background();
        }
    }
}

/// Connections that may wait to be accepted; the system may allow fewer. A client over the limit
/// loses a second before it retries.
const BACKLOG: u32 = 16_384;

/// Time between two looks whether this process is ready; every eighth time, it also looks whether another still serves
/// the address.
const TAKE_OVER_PERIOD: Duration = Duration::from_millis(200);

/// Whether another process accepts connections at `address`.
async fn is_served(mut address: SocketAddr) -> bool {
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    let connected = tokio::time::timeout(Duration::from_secs(1), TcpStream::connect(address)).await;
    matches!(connected, Ok(Ok(_)))
}

/// A socket at the address, which does not listen yet: the system gives it no connections.
async fn bind(host: &str, port: u16, is_shared: bool) -> std::io::Result<TcpSocket> {
    let mut last = std::io::Error::new(std::io::ErrorKind::NotFound, "no such address");
    for address in lookup_host((host, port)).await? {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        // Allows a port to be reused immediately.
        socket.set_reuseaddr(true)?;
        socket.set_reuseport(is_shared)?;
        match socket.bind(address) {
            Ok(()) => return Ok(socket),
            Err(error) => last = error,
        }
    }
    Err(last)
}
