//! Reads whole messages from a pyzmq socket without Python code per message.
//!
//! pyzmq opens, configures, polls and closes the sockets. This code calls libzmq's receive function
//! on them, in a loop without the GIL. The functions are looked up by name in the library that
//! pyzmq has loaded. If they can't be found, the transport receives in Python.
//!
//! Source: `zmq_msg_recv(3)` and the other manual pages of libzmq 4.x.

#![allow(unsafe_code, reason = "libzmq is a C library")]

use std::ffi::{CStr, CString, c_int, c_void};
use std::mem::MaybeUninit;

use kvflash_core::catalog::FrameOutcome;
use kvflash_core::error::Error;
use kvflash_core::repair::{Answer, Feed};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::catalog::Catalog;
use super::error::{Fault, Raised};
use super::repair::{Repair, Told};

const DONT_WAIT: c_int = 1;

/// C layout of `zmq_msg_t`: 64 opaque bytes, aligned as a pointer is.
#[repr(C, align(8))]
struct RawMessage([u8; 64]);

const _: () = assert!(align_of::<RawMessage>() >= align_of::<*const c_void>());

/// libzmq's functions as its header declares them.
#[derive(Clone, Copy)]
struct Functions {
    init: unsafe extern "C" fn(*mut RawMessage) -> c_int,
    close: unsafe extern "C" fn(*mut RawMessage) -> c_int,
    recv: unsafe extern "C" fn(*mut RawMessage, *mut c_void, c_int) -> c_int,
    data: unsafe extern "C" fn(*mut RawMessage) -> *mut c_void,
    size: unsafe extern "C" fn(*const RawMessage) -> usize,
    more: unsafe extern "C" fn(*const RawMessage) -> c_int,
    errno: unsafe extern "C" fn() -> c_int,
}

type Version = unsafe extern "C" fn(*mut c_int, *mut c_int, *mut c_int);

impl Functions {
    /// The functions of a library that this process has loaded, directly or as a dependency.
    fn of(library: &CStr) -> Result<Self, String> {
        // SAFETY: the path is NUL-terminated; NOLOAD runs nothing: it finds what is loaded, or nothing.
        let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        let library = library.to_string_lossy();
        if handle.is_null() {
            return Err(format!("{library} is not loaded"));
        }
        // The handle is never closed, so that the symbols stay valid.
        let find = |name: &CStr| {
            // SAFETY: the handle is open, the name NUL-terminated.
            let symbol = unsafe { libc::dlsym(handle, name.as_ptr()) };
            if symbol.is_null() {
                return Err(format!("{library} has no {}", name.to_string_lossy()));
            }
            Ok(symbol)
        };
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY: a symbol of this name has this signature in every libzmq; it writes three integers.
        unsafe { function::<Version>(find(c"zmq_version")?)(&mut major, &mut minor, &mut patch) };
        // Since 4.1 a message has 64 bytes, and no release of 4 may change that.
        if major != 4 || minor < 1 {
            return Err(format!("libzmq must be 4.1 or a later 4.x, got {major}.{minor}.{patch}"));
        }
        // SAFETY: it is libzmq 4.x (checked above), whose symbols of these names have these signatures.
        unsafe {
            Ok(Self {
                init: function(find(c"zmq_msg_init")?),
                close: function(find(c"zmq_msg_close")?),
                recv: function(find(c"zmq_msg_recv")?),
                data: function(find(c"zmq_msg_data")?),
                size: function(find(c"zmq_msg_size")?),
                more: function(find(c"zmq_msg_more")?),
                errno: function(find(c"zmq_errno")?),
            })
        }
    }
}

/// A symbol as a function.
///
/// # Safety
/// `F` is the type of a pointer to that function.
unsafe fn function<F: Copy>(symbol: *mut c_void) -> F {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: of one size (asserted), and that function by the caller's promise.
    unsafe { std::mem::transmute_copy(&symbol) }
}

/// A part of a message, in libzmq's memory. Boxed, because libzmq's messages must not be moved.
struct Part {
    raw: Box<RawMessage>,
    functions: Functions,
}

impl Part {
    fn new(functions: Functions) -> Self {
        let mut raw: Box<MaybeUninit<RawMessage>> = Box::new_uninit();
        // SAFETY: init writes a valid empty message to memory of that size and alignment; it can't fail.
        let raw = unsafe {
            (functions.init)(raw.as_mut_ptr());
            raw.assume_init()
        };
        Self { raw, functions }
    }

    /// Receives the next part, replacing the previous one; errno if there is none.
    ///
    /// # Safety
    /// `socket` is an open libzmq socket that no other thread uses meanwhile.
    unsafe fn receive(&mut self, socket: *mut c_void) -> Result<(), c_int> {
        // SAFETY: the message is valid (init), the socket the caller's promise.
        unsafe {
            if (self.functions.recv)(&mut *self.raw, socket, DONT_WAIT) >= 0 {
                return Ok(());
            }
            Err((self.functions.errno)())
        }
    }

    fn has_more(&self) -> bool {
        // SAFETY: the message is valid (init).
        unsafe { (self.functions.more)(&*self.raw) != 0 }
    }

    fn bytes(&mut self) -> &[u8] {
        // SAFETY: the message is valid (init); its data are `size` bytes that live as long as it is not
        // received into or closed, both of which need `&mut self`. Empty ones may have no address.
        unsafe {
            match (self.functions.size)(&*self.raw) {
                0 => &[],
                size => {
                    let data = (self.functions.data)(&mut *self.raw);
                    std::slice::from_raw_parts(data.cast::<u8>(), size)
                }
            }
        }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // SAFETY: the message is valid (init) and closed once. It fails for invalid messages only.
        unsafe { (self.functions.close)(&mut *self.raw) };
    }
}

/// The last two parts of a message: sequence and payload. Engines differ in the parts before.
struct Message {
    parts: [Part; 2],
    /// Which of the two is the last one.
    last: usize,
    count: usize,
}

impl Message {
    fn new(functions: Functions) -> Self {
        Self { parts: [Part::new(functions), Part::new(functions)], last: 0, count: 0 }
    }

    /// Receives the next message; false if there is none.
    ///
    /// # Errors
    /// libzmq's errno.
    ///
    /// # Safety
    /// As [`Part::receive`].
    unsafe fn receive(&mut self, socket: *mut c_void) -> Result<bool, c_int> {
        self.count = 0;
        loop {
            // SAFETY: the caller's promise.
            match unsafe { self.parts[1 - self.last].receive(socket) } {
                Ok(()) => {}
                // Parts arrive all or none, so this never waits within a message.
                Err(libc::EINTR) if self.count > 0 => continue,
                Err(libc::EAGAIN | libc::EINTR) => return Ok(false),
                Err(errno) => return Err(errno),
            }
            self.last = 1 - self.last;
            self.count += 1;
            if !self.parts[self.last].has_more() {
                return Ok(true);
            }
        }
    }

    /// The last part.
    fn payload(&mut self) -> &[u8] {
        self.parts[self.last].bytes()
    }

    /// The sequence number in the part before it; `None` without one.
    fn sequence(&mut self) -> Option<u64> {
        if self.count < 2 {
            return None;
        }
        self.parts[1 - self.last].bytes().try_into().ok().map(u64::from_be_bytes)
    }

    /// Sequence number and payload; `None` for a message without these two parts.
    fn frame(&mut self) -> Option<(u64, &[u8])> {
        Some((self.sequence()?, self.payload()))
    }
}

/// Sequence number, 8 bytes, and payload.
type Frame = (Py<PyBytes>, Py<PyBytes>);

/// Reads publishers' messages from pyzmq's sockets into the index, without Python code per message.
///
/// pyzmq opens, polls and closes the sockets; this class calls libzmq's own functions on them, from
/// the library that pyzmq has loaded.
///
/// Args:
///     library: Path of a loaded library that is, or is linked with, libzmq 4.1 or a later 4.x.
///
/// Raises:
///     TransportError: It is not loaded, or its functions can't be found.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct ZmqDrain {
    functions: Functions,
}

#[pymethods]
impl ZmqDrain {
    #[new]
    fn new(library: &str) -> Raised<Self> {
        let functions = CString::new(library)
            .map_err(|_| "the path of a library must not contain zero bytes".to_owned())
            .and_then(|library| Functions::of(&library));
        match functions {
            Ok(functions) => Ok(Self { functions }),
            Err(why) => Err(Fault::from(Error::Transport(format!("can't call libzmq: {why}")))),
        }
    }

    /// Receive waiting messages and apply them as live messages, like Catalog.take.
    ///
    /// It stops at a message that shows a gap: this message is returned, and the rest stays in the
    /// socket. Messages of an unregistered publisher are read and dropped.
    ///
    /// Args:
    ///     catalog: Receives the messages.
    ///     publisher: Number of the publisher.
    ///     socket: A ``zmq.Socket``; no other thread may use or close it meanwhile.
    ///     limit: Maximum number of messages.
    ///
    /// Returns:
    ///     ``(taken, unread)``: the number of applied messages, and the ``(sequence, payload)``
    ///     that shows a gap: pass it to ``Catalog.take``, which reports the gap.
    ///
    /// Raises:
    ///     ClosedError: The socket is closed.
    ///     TransportError: libzmq can't receive.
    ///
    /// Cost: one GIL release for all messages; nothing is copied or allocated per message.
    fn take(
        &self,
        py: Python<'_>,
        catalog: &Bound<'_, Catalog>,
        publisher: u64,
        socket: &Bound<'_, PyAny>,
        limit: usize,
    ) -> Raised<(usize, Option<Frame>)> {
        let address = address(socket)?;
        let publisher = catalog.get().inner.publisher(publisher);
        let mut message = Message::new(self.functions);
        let message_ref = &mut message;
        let drained = py.detach(|| {
            let mut publisher = publisher;
            for taken in 0..limit {
                let socket = address as *mut c_void;
                // SAFETY: pyzmq's own address of the socket, which `socket` keeps from being collected; its
                // owner calls this on the one thread that uses the socket (`_core.pyi` demands it).
                if !unsafe { message_ref.receive(socket) }? {
                    return Ok((taken, false));
                }
                // Messages of an unregistered publisher are discarded until the order to close the
                // socket.
                let Some(known) = &publisher else { continue };
                let outcome = match message_ref.frame() {
                    Some((sequence, payload)) => known.live(sequence, payload),
                    None => {
                        known.count_malformed_messages(1);
                        continue;
                    }
                };
                match outcome {
                    FrameOutcome::Applied => {}
                    FrameOutcome::Gap { .. } => return Ok((taken, true)),
                    FrameOutcome::Closed => publisher = None,
                }
            }
            Ok((limit, false))
        });
        let (taken, is_gap) = drained.map_err(cant_receive)?;
        let unread = message.frame().filter(|_| is_gap).map(|(sequence, payload)| {
            let sequence = PyBytes::new(py, &sequence.to_be_bytes()).unbind();
            (sequence, PyBytes::new(py, payload).unbind())
        });
        Ok((taken, unread))
    }

    /// Receive waiting messages of a replay and pass them to its repair, like Repair.answered.
    ///
    /// Args:
    ///     repair: Receives the messages.
    ///     socket: A ``zmq.Socket``; no other thread may use or close it meanwhile.
    ///     limit: Maximum number of messages.
    ///
    /// Returns:
    ///     The repair's effects.
    ///
    /// Raises:
    ///     ClosedError: The socket is closed.
    ///     TransportError: libzmq can't receive.
    ///
    /// Cost: two GIL releases for all messages, and a copy of each payload.
    fn answer(
        &self,
        py: Python<'_>,
        repair: &Bound<'_, Repair>,
        socket: &Bound<'_, PyAny>,
        limit: usize,
    ) -> Raised<Vec<Told>> {
        let address = address(socket)?;
        let received = py.detach(|| {
            let (mut message, mut answer) = (Message::new(self.functions), Answer::default());
            for _ in 0..limit {
                let socket = address as *mut c_void;
                // SAFETY: as in `take`.
                if !unsafe { message.receive(socket) }? {
                    break;
                }
                answer.add(message.count, message.sequence(), message.payload());
            }
            Ok(answer)
        });
        Ok(repair.get().follow(py, received.map_err(cant_receive)?))
    }
}

/// libzmq's address of a pyzmq socket.
fn address(socket: &Bound<'_, PyAny>) -> Raised<usize> {
    match socket.getattr("underlying")?.extract()? {
        0 => Err(Fault::from(Error::Closed("the socket is closed".to_owned()))),
        address => Ok(address),
    }
}

fn cant_receive(errno: c_int) -> Fault {
    let error = std::io::Error::from_raw_os_error(errno);
    Fault::from(Error::Transport(format!("can't receive from a socket: {error}")))
}
