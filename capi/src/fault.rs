//! Failures: a code for programs, a text for people.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Result codes, with the names of the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Code {
    /// An older function failed.
    Error = 1,
    /// An argument is wrong.
    InvalidArgument = 2,
    /// The publisher does not exist, or no longer.
    NoPublisher = 3,
    /// A socket or file was unavailable.
    Io = 4,
    /// A limit is reached.
    Limit = 5,
    /// An error of the library itself.
    Internal = 6,
    /// A part was dropped.
    Partial = 7,
    /// A timeout.
    Timeout = 8,
}

/// A failure.
#[derive(Debug)]
pub struct Fault {
    /// For branching.
    pub code: Code,
    /// For display.
    pub text: String,
}

/// Shorthand of the crate.
pub type Result<T> = std::result::Result<T, Fault>;

/// A fault with a text.
pub fn fault(code: Code, text: impl Into<String>) -> Fault {
    Fault { code, text: text.into() }
}

/// An invalid argument.
pub fn invalid(text: impl Into<String>) -> Fault {
    fault(Code::InvalidArgument, text)
}

impl From<kvflash_publish::Error> for Fault {
    fn from(error: kvflash_publish::Error) -> Self {
        match error {
            kvflash_publish::Error::InvalidArgument(text) => invalid(text),
            kvflash_publish::Error::Io(text) => fault(Code::Io, text),
            kvflash_publish::Error::Closed(text) => fault(Code::NoPublisher, text),
        }
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Runs the body of an exported function: keeps the text of its failure for this thread, and
/// catches panics.
pub fn guard(body: impl FnOnce() -> Result<()>) -> c_int {
    let outcome = catch_unwind(AssertUnwindSafe(body));
    let fault = match outcome {
        Ok(Ok(())) => return 0,
        Ok(Err(fault)) => fault,
        Err(_) => fault(Code::Internal, "a mistake in libkvflash; its text is on stderr"),
    };
    remember(&fault.text);
    fault.code as c_int
}

fn remember(text: &str) {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // A thread that is ending no longer has a last error.
    let _ = LAST.try_with(|last| {
        if let Ok(mut last) = last.try_borrow_mut() {
            *last = text;
        }
    });
}

/// Text of the last failure in this thread; empty if there was none. Valid until the next failure.
pub fn last_error() -> *const c_char {
    const NONE: &CStr = c"";
    let text = LAST.try_with(|last| last.try_borrow().map(|text| text.as_ptr()));
    match text {
        Ok(Ok(pointer)) => pointer,
        _ => NONE.as_ptr(),
    }
}
