//! libzmq sockets for publishing and replaying.

#![allow(unsafe_code, reason = "libzmq is a C library")]

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_short, c_void};
use std::io::{self, ErrorKind};
use std::os::fd::RawFd;
use std::ptr;

use crate::fault::{Code, Result, fault, invalid};

const PUB: c_int = 1;
const ROUTER: c_int = 6;
const LINGER: c_int = 17;
const RCVMORE: c_int = 13;
const SNDHWM: c_int = 23;
const RCVHWM: c_int = 24;
const LAST_ENDPOINT: c_int = 32;
const IPV6: c_int = 42;
const MAXMSGSIZE: c_int = 22;
const DONTWAIT: c_int = 1;
const SNDMORE: c_int = 2;
const POLLIN: c_short = 1;
/// ZMQ's error for the name of an interface that does not exist.
const ENODEV: c_int = 19;
/// Longest frame that is read completely; requests and identities are shorter.
const FRAME_BYTES_MAX: usize = 256;
/// Maximum frames of a request.
const FRAMES_MAX: usize = 8;

#[repr(C)]
struct PollItem {
    socket: *mut c_void,
    fd: RawFd,
    events: c_short,
    revents: c_short,
}

// Declared as in `zmq.h` of libzmq 4.3.5, which build.rs compiles in.
unsafe extern "C" {
    fn zmq_ctx_new() -> *mut c_void;
    fn zmq_ctx_term(context: *mut c_void) -> c_int;
    fn zmq_socket(context: *mut c_void, kind: c_int) -> *mut c_void;
    fn zmq_close(socket: *mut c_void) -> c_int;
    fn zmq_setsockopt(s: *mut c_void, option: c_int, value: *const c_void, size: usize) -> c_int;
    fn zmq_getsockopt(s: *mut c_void, option: c_int, value: *mut c_void, size: *mut usize)
    -> c_int;
    fn zmq_bind(socket: *mut c_void, endpoint: *const c_char) -> c_int;
    fn zmq_send(socket: *mut c_void, bytes: *const c_void, size: usize, flags: c_int) -> c_int;
    fn zmq_recv(socket: *mut c_void, bytes: *mut c_void, size: usize, flags: c_int) -> c_int;
    fn zmq_poll(items: *mut PollItem, count: c_int, timeout_ms: c_long) -> c_int;
    fn zmq_errno() -> c_int;
    fn zmq_strerror(number: c_int) -> *const c_char;
}

fn last_error() -> String {
    // SAFETY: libzmq returns a string of its own that is never freed, for any number.
    unsafe { CStr::from_ptr(zmq_strerror(zmq_errno())) }.to_string_lossy().into_owned()
}

/// A PUB and a ROUTER socket with their context. Used by one thread at a time.
#[derive(Debug)]
pub struct Sockets {
    context: *mut c_void,
    publish: *mut c_void,
    replay: *mut c_void,
}

// SAFETY: libzmq lets a socket move to another thread, with a full fence between, which a spawned
// thread's start is. It is not `Sync`.
unsafe impl Send for Sockets {}

impl Sockets {
    /// Creates the sockets; [`Sockets::bind`] binds them.
    pub fn new(publish_queue: usize, replay_queue: usize, linger_ms: i32) -> Result<Self> {
        // SAFETY: no arguments; null is checked below.
        let context = unsafe { zmq_ctx_new() };
        let mut sockets = Self { context, publish: ptr::null_mut(), replay: ptr::null_mut() };
        if context.is_null() {
            return Err(fault(Code::Io, format!("no ZMQ context: {}", last_error())));
        }
        // SAFETY: the context was made above and lives until `drop`.
        sockets.publish = unsafe { zmq_socket(context, PUB) };
        // SAFETY: the same.
        sockets.replay = unsafe { zmq_socket(context, ROUTER) };
        if sockets.publish.is_null() || sockets.replay.is_null() {
            return Err(fault(Code::Io, format!("no ZMQ socket: {}", last_error())));
        }
        let clamp = |queue: usize| i32::try_from(queue).unwrap_or(i32::MAX);
        for (socket, queue) in [(sockets.publish, publish_queue), (sockets.replay, replay_queue)] {
            set(socket, SNDHWM, clamp(queue))?;
            set(socket, RCVHWM, clamp(replay_queue))?;
            set(socket, LINGER, linger_ms)?;
        }
        // A client that sends more than a request is disconnected.
        set(sockets.replay, MAXMSGSIZE, FRAME_BYTES_MAX as i64)?;
        Ok(sockets)
    }

    /// Binds both; returns the addresses to connect to.
    pub fn bind(&self, host: &str, port: u16, replay_port: u16) -> Result<(String, String)> {
        let endpoint = bind(self.publish, host, port, "port")?;
        Ok((endpoint, bind(self.replay, host, replay_port, "replay_port")?))
    }

    /// Waits for a request, or for a descriptor to be readable; -1 waits forever. Returns whether a
    /// request arrived.
    pub fn wait(&self, wake: RawFd, timeout_ms: i64) -> bool {
        let mut items = [
            PollItem { socket: ptr::null_mut(), fd: wake, events: POLLIN, revents: 0 },
            PollItem { socket: self.replay, fd: -1, events: POLLIN, revents: 0 },
        ];
        // SAFETY: two items, as the count says; the socket is open until `drop`.
        let count = unsafe { zmq_poll(items.as_mut_ptr(), 2, timeout_ms as c_long) };
        // Negative: a signal; the caller's loop will call this again.
        count > 0 && items[1].revents != 0
    }

    /// Publishes a message. Never waits: ZMQ drops messages for slow subscribers.
    pub fn publish(&self, frames: &[&[u8]]) {
        send(self.publish, frames, 0);
    }

    /// Answers a client; no effect if it disconnected or does not read.
    pub fn answer(&self, frames: &[&[u8]]) {
        send(self.replay, frames, DONTWAIT);
    }

    /// The next request's frames, or None. Frames beyond the eighth are omitted.
    pub fn request(&self) -> Option<Vec<Vec<u8>>> {
        let mut frames = Vec::new();
        loop {
            let mut buffer = [0_u8; FRAME_BYTES_MAX];
            // SAFETY: the buffer has that many bytes; ZMQ writes no more and says the whole length.
            let size = unsafe {
                zmq_recv(self.replay, buffer.as_mut_ptr().cast(), buffer.len(), DONTWAIT)
            };
            let size = usize::try_from(size).ok()?;
            if frames.len() < FRAMES_MAX {
                frames.push(buffer[..size.min(buffer.len())].to_vec());
            }
            let mut more: c_int = 0;
            let mut length = size_of::<c_int>();
            // SAFETY: RCVMORE is an int, and the length says so.
            let status = unsafe {
                zmq_getsockopt(self.replay, RCVMORE, (&raw mut more).cast(), &raw mut length)
            };
            if status != 0 || more == 0 {
                return Some(frames);
            }
        }
    }
}

impl Drop for Sockets {
    fn drop(&mut self) {
        for socket in [self.publish, self.replay] {
            if !socket.is_null() {
                // SAFETY: made by `zmq_socket`, closed here only.
                unsafe { zmq_close(socket) };
            }
        }
        if !self.context.is_null() {
            // SAFETY: made by `zmq_ctx_new`; its sockets are closed, so this waits for the linger
            // time at most.
            unsafe { zmq_ctx_term(self.context) };
        }
    }
}

/// Sets an option, an `int` or an `int64_t`.
fn set<T: Into<i64>>(socket: *mut c_void, option: c_int, value: T) -> Result<()> {
    // SAFETY: the size says how many bytes of the value to read; ZMQ refuses another than its own.
    let status =
        unsafe { zmq_setsockopt(socket, option, (&raw const value).cast(), size_of::<T>()) };
    check(status, option)
}

fn check(status: c_int, option: c_int) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    Err(fault(Code::Internal, format!("ZMQ option {option}: {}", last_error())))
}

/// Binds a socket; returns the address to connect to. Errors name the port as `field`, or the host.
fn bind(socket: *mut c_void, host: &str, port: u16, field: &str) -> Result<String> {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let is_ipv6 = host.contains(':');
    set(socket, IPV6, i32::from(is_ipv6))?;
    let netloc = if is_ipv6 { format!("[{host}]") } else { host.to_owned() };
    let endpoint = CString::new(format!("tcp://{netloc}:{port}"))
        .map_err(|_| invalid("host must not contain NUL"))?;
    // SAFETY: a NUL-terminated string that lives through the call.
    if unsafe { zmq_bind(socket, endpoint.as_ptr()) } != 0 {
        // SAFETY: no arguments; the number is this thread's.
        let number = unsafe { zmq_errno() };
        let kind = io::Error::from_raw_os_error(number).kind();
        let is_host = matches!(kind, ErrorKind::AddrNotAvailable | ErrorKind::InvalidInput);
        let field = if is_host || number == ENODEV { "host" } else { field };
        let text = format!("{field}: can't bind {port} on {host}: {}", last_error());
        return Err(fault(Code::Io, text));
    }
    let mut buffer = [0_u8; FRAME_BYTES_MAX];
    let mut length = buffer.len();
    // SAFETY: the length says how much room there is; ZMQ writes a NUL-terminated string.
    let status = unsafe {
        zmq_getsockopt(socket, LAST_ENDPOINT, buffer.as_mut_ptr().cast(), &raw mut length)
    };
    check(status, LAST_ENDPOINT)?;
    let bound = CStr::from_bytes_until_nul(&buffer).unwrap_or_default().to_string_lossy();
    let bound = bound.rsplit(':').next().unwrap_or("0").to_owned();
    // Clients can't connect to a wildcard.
    let reachable = match host {
        "0.0.0.0" | "*" => "127.0.0.1",
        "::" => "[::1]",
        _ => &netloc,
    };
    Ok(format!("tcp://{reachable}:{bound}"))
}

fn send(socket: *mut c_void, frames: &[&[u8]], flags: c_int) {
    for (index, frame) in frames.iter().enumerate() {
        let more = if index + 1 < frames.len() { SNDMORE } else { 0 };
        // SAFETY: the frame's bytes and length; ZMQ copies them.
        let status = unsafe { zmq_send(socket, frame.as_ptr().cast(), frame.len(), flags | more) };
        if status < 0 {
            // Only the first frame can be refused; then nothing of the message is sent.
            return;
        }
    }
}
