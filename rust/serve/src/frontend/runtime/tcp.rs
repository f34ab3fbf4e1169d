//! The request plane over TCP: one connection per request in flight, kept and reused.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use parking_lot::Mutex;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::plane::{
    Cause, Frame, Kind, PING_TIME, PlaneError, encode_frame, is_complete, take_frame,
};
use crate::outbound::{KEEPALIVE_INTERVAL, KEEPALIVE_RETRIES, KEEPALIVE_TIME};

/// Connections kept for a worker while they have nothing to do, and for how long.
const MAX_IDLE: usize = 1_024;
const IDLE_TIME: Duration = Duration::from_secs(30);

/// A peer that does not acknowledge what it was sent is given up after this time, as one that does
/// not answer keepalives is.
const UNACKED_TIME: Duration = Duration::from_secs(20);

/// Bytes asked of a socket at once.
const READ_BYTES: usize = 16 * 1024;

/// The connections to one worker.
#[derive(Debug)]
pub(crate) struct TcpPlane {
    address: String,
    connect_timeout: Duration,
    /// With the moment since when each is idle, longest first.
    idle: Mutex<Vec<(Instant, Connection)>>,
}

#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    /// What has come and is not read yet.
    received: BytesMut,
}

impl TcpPlane {
    pub fn new(address: String, connect_timeout: Duration) -> Self {
        Self { address, connect_timeout, idle: Mutex::default() }
    }

    /// Send a request frame over an idle connection or a new one.
    pub async fn call(self: &Arc<Self>, request: &[u8]) -> Result<TcpItems, PlaneError> {
        let frame = encode_frame(Kind::Request, request)
            .map_err(|why| PlaneError::new(Cause::TooLarge, why))?;
        // The worker may close an idle connection in the moment when it is used again: another one then,
        // for a request of which no byte could be sent.
        while let Some(mut connection) = self.take_idle() {
            if connection.stream.write_all(&frame).await.is_ok() {
                return Ok(TcpItems {
                    plane: Arc::clone(self),
                    connection: Some(connection),
                    again: Some(frame),
                });
            }
        }
        let mut connection = self.connect().await?;
        connection
            .stream
            .write_all(&frame)
            .await
            .map_err(|error| self.broken(&error.to_string()))?;
        Ok(TcpItems { plane: Arc::clone(self), connection: Some(connection), again: None })
    }

    /// Ask over a connection of its own whether somebody answers. `whom` is of use to a bridge, which
    /// answers for those behind it.
    pub async fn ping(&self, whom: &[u8]) -> Result<(), PlaneError> {
        let asked = async {
            let mut connection = self.connect().await?;
            let frame = encode_frame(Kind::Ping, whom)
                .map_err(|why| PlaneError::new(Cause::Protocol, why))?;
            let sent = connection.stream.write_all(&frame).await;
            sent.map_err(|error| self.broken(&error.to_string()))?;
            match connection.frame(&self.address).await?.kind {
                Kind::Pong => Ok(connection),
                other => Err(PlaneError::new(
                    Cause::Protocol,
                    format!("worker at {} answered a ping with {other:?}", self.address),
                )),
            }
        };
        match tokio::time::timeout(PING_TIME, asked).await {
            Ok(Ok(connection)) => {
                self.put_idle(connection);
                Ok(())
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(PlaneError::new(
                Cause::Silent,
                format!("worker at {} did not answer a ping within {PING_TIME:?}", self.address),
            )),
        }
    }

    async fn connect(&self) -> Result<Connection, PlaneError> {
        let cannot = |why: String| {
            PlaneError::new(Cause::Connect, format!("can't connect to {}: {why}", self.address))
        };
        let connecting = TcpStream::connect(&self.address);
        let stream = match tokio::time::timeout(self.connect_timeout, connecting).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return Err(cannot(error.to_string())),
            Err(_) => {
                let seconds = self.connect_timeout.as_secs_f64();
                return Err(cannot(format!("no answer within {seconds} s (--connect-timeout)")));
            }
        };
        // All of these only make things better; a system without them still works.
        let _ = stream.set_nodelay(true);
        let socket = SockRef::from(&stream);
        let keepalive = TcpKeepalive::new()
            .with_time(KEEPALIVE_TIME)
            .with_interval(KEEPALIVE_INTERVAL)
            .with_retries(KEEPALIVE_RETRIES);
        let _ = socket.set_tcp_keepalive(&keepalive);
        #[cfg(target_os = "linux")]
        let _ = socket.set_tcp_user_timeout(Some(UNACKED_TIME));
        Ok(Connection { stream, received: BytesMut::new() })
    }

    fn broken(&self, why: &str) -> PlaneError {
        PlaneError::new(Cause::Broken, format!("connection to {} broke: {why}", self.address))
    }

    /// An idle connection that is still open as far as the system knows.
    fn take_idle(&self) -> Option<Connection> {
        let mut idle = self.idle.lock();
        while let Some((since, connection)) = idle.pop() {
            if since.elapsed() > IDLE_TIME {
                // The others have been idle for longer still.
                idle.clear();
                return None;
            }
            if connection.is_quiet() {
                return Some(connection);
            }
        }
        None
    }

    fn put_idle(&self, connection: Connection) {
        let mut idle = self.idle.lock();
        let stale = idle.iter().take_while(|(since, _)| since.elapsed() > IDLE_TIME).count();
        idle.drain(..stale);
        if idle.len() < MAX_IDLE && connection.received.is_empty() {
            idle.push((Instant::now(), connection));
        }
    }
}

impl Connection {
    /// Nothing has come on it since its last answer, neither bytes nor its end.
    fn is_quiet(&self) -> bool {
        let mut byte = [0];
        let read = self.stream.try_read(&mut byte);
        matches!(read, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
    }

    /// The next frame. May be dropped while it waits: what came is kept.
    async fn frame(&mut self, address: &str) -> Result<Frame, PlaneError> {
        loop {
            let taken = take_frame(&mut self.received, format_args!("worker at {address}"))?;
            if let Some(frame) = taken {
                return Ok(frame);
            }
            self.received.reserve(READ_BYTES);
            let broke = |why: &str| {
                PlaneError::new(Cause::Broken, format!("connection to {address} broke: {why}"))
            };
            match self.stream.read_buf(&mut self.received).await {
                Ok(0) => return Err(broke("closed by the worker")),
                Ok(_) => {}
                Err(error) => return Err(broke(&error.to_string())),
            }
        }
    }
}

/// The frames of one answer.
#[derive(Debug)]
pub(crate) struct TcpItems {
    plane: Arc<TcpPlane>,
    /// Gone once it was given back or broke.
    connection: Option<Connection>,
    /// The request, while it may have met a connection that was just closing.
    again: Option<bytes::Bytes>,
}

impl TcpItems {
    pub(super) async fn frame(&mut self) -> Result<Frame, PlaneError> {
        loop {
            let Some(connection) = &mut self.connection else {
                return Err(self.plane.broken("the stream has ended"));
            };
            let outcome = connection.frame(&self.plane.address).await;
            match (outcome, &self.again) {
                (Ok(frame), _) => {
                    self.again = None;
                    return Ok(frame);
                }
                // Closed without a byte: the worker may have given up the idle connection. Or the
                // request, which was written in full, ended the worker: then it was received.
                (Err(error), Some(request))
                    if error.cause == Cause::Broken && connection.received.is_empty() =>
                {
                    let request = request.clone();
                    self.connection = None;
                    self.again = None;
                    let fresh = self.plane.connect().await;
                    let mut fresh = fresh.map_err(|again| {
                        let message = format!("{}, and then: {}", error.message, again.message);
                        PlaneError::new(Cause::Broken, message)
                    })?;
                    let sent = fresh.stream.write_all(&request).await;
                    sent.map_err(|error| self.plane.broken(&error.to_string()))?;
                    self.connection = Some(fresh);
                }
                (Err(error), _) => {
                    self.connection = None;
                    return Err(error);
                }
            }
        }
    }

    /// Has a whole frame come already?
    pub fn is_ready(&self) -> bool {
        self.connection.as_ref().is_some_and(|open| is_complete(&open.received))
    }

    /// The answer is complete: the connection may serve the next request.
    pub fn give_back(&mut self) {
        if let Some(connection) = self.connection.take() {
            self.plane.put_idle(connection);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    async fn receive(stream: &mut TcpStream) {
        let mut received = BytesMut::new();
        while !is_complete(&received) {
            assert_ne!(stream.read_buf(&mut received).await.unwrap(), 0);
        }
    }

    /// A plane with one idle connection; its worker's listener and its end of the connection.
    async fn idle_plane() -> (Arc<TcpPlane>, TcpListener, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let plane = Arc::new(TcpPlane::new(address, Duration::from_secs(5)));
        let mut items = plane.call(b"first").await.unwrap();
        let (mut worker, _) = listener.accept().await.unwrap();
        receive(&mut worker).await;
        worker.write_all(&encode_frame(Kind::End, b"").unwrap()).await.unwrap();
        assert_eq!(items.frame().await.unwrap().kind, Kind::End);
        items.give_back();
        (plane, listener, worker)
    }

    #[tokio::test]
    async fn a_request_that_ends_its_worker_on_an_idle_connection_was_received() {
        let (plane, listener, mut worker) = idle_plane().await;
        let mut items = plane.call(b"poison").await.unwrap();
        receive(&mut worker).await;
        drop((listener, worker));
        let error = items.frame().await.unwrap_err();
        assert_eq!(error.cause, Cause::Broken, "{error:?}");
        assert!(error.message.contains("can't connect to"), "{error:?}");
    }

    #[tokio::test]
    async fn a_request_that_meets_the_close_of_an_idle_connection_is_sent_again() {
        let (plane, listener, worker) = idle_plane().await;
        let mut items = plane.call(b"second").await.unwrap();
        drop(worker);
        let answer = async {
            let (mut worker, _) = listener.accept().await.unwrap();
            receive(&mut worker).await;
            worker.write_all(&encode_frame(Kind::End, b"").unwrap()).await.unwrap();
            worker
        };
        let (frame, _worker) = tokio::join!(items.frame(), answer);
        assert_eq!(frame.unwrap().kind, Kind::End);
    }
}
