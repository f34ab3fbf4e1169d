//! Integers from Python: any list, or any buffer (array, numpy, memoryview), without copying if its
//! layout allows. Also writes results into the caller's buffers.

#![allow(unsafe_code, reason = "the buffer protocol is a C interface")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::marker::PhantomData;

use kvflash_core::error::Error;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList, PySequence, PyString};

use super::error::raise;

/// C layout of `Py_buffer`.
///
/// The limited API has it from 3.11 on, frozen as it had been since 3.0; Python 3.10 has the same
/// functions with the same layout, so one wheel for 3.10 and later declares them itself.
#[repr(C)]
struct RawBuffer {
    buf: *mut c_void,
    obj: *mut ffi::PyObject,
    len: isize,
    itemsize: isize,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut isize,
    strides: *mut isize,
    suboffsets: *mut isize,
    internal: *mut c_void,
}

const CONTIGUOUS_WITH_FORMAT: c_int = 0x0008 | 0x0010 | 0x0020 | 0x0004;
const WRITABLE: c_int = 0x0001;

unsafe extern "C" {
    fn PyObject_GetBuffer(obj: *mut ffi::PyObject, view: *mut RawBuffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut RawBuffer);
}

/// A contiguous buffer of integers, held as long as this lives.
pub(super) struct Buffer {
    raw: Box<RawBuffer>,
}

impl Buffer {
    /// `None` when the object has no contiguous buffer.
    fn of(object: &Bound<'_, PyAny>) -> Option<Self> {
        Self::with_flags(object, CONTIGUOUS_WITH_FORMAT)
    }

    fn with_flags(object: &Bound<'_, PyAny>, flags: c_int) -> Option<Self> {
        // SAFETY: all-zero is a valid RawBuffer (pointers and integers), which the call overwrites.
        let mut raw: Box<RawBuffer> = Box::new(unsafe { std::mem::zeroed() });
        // SAFETY: the GIL is held (Bound), `object` lives, and `raw` has the layout the call fills.
        let status = unsafe { PyObject_GetBuffer(object.as_ptr(), &mut *raw, flags) };
        if status != 0 {
            let _ = PyErr::take(object.py());
            return None;
        }
        Some(Self { raw })
    }

    fn check_flat(&self, name: &str, py: Python<'_>) -> PyResult<()> {
        if self.raw.ndim == 1 {
            return Ok(());
        }
        let message = format!("{name} must have one dimension, got {}", self.raw.ndim);
        Err(raise(py, &Error::invalid(message)))
    }

    /// The native type code, without an explicit native byte order; `None` for anything else.
    fn kind(&self) -> Option<u8> {
        if self.raw.format.is_null() {
            return Some(b'B');
        }
        // SAFETY: a non-null format is a NUL-terminated string that lives as long as the buffer.
        let format = unsafe { CStr::from_ptr(self.raw.format) }.to_bytes();
        match format {
            [code] | [b'@' | b'=', code] => Some(*code),
            [b'<', code] if cfg!(target_endian = "little") => Some(*code),
            _ => None,
        }
    }

    /// The elements as `T`.
    ///
    /// # Safety
    /// Every bit pattern is a valid `T`, and `T` has the buffer's item size (asserted).
    unsafe fn as_slice<T>(&self) -> Option<&[T]> {
        debug_assert_eq!(self.raw.itemsize as usize, size_of::<T>());
        let pointer = self.raw.buf.cast::<T>();
        if self.raw.len == 0 {
            return Some(&[]);
        }
        if !pointer.is_aligned() {
            return None;
        }
        // SAFETY: the buffer is contiguous, `len` bytes long, aligned (checked) and exported until release;
        // the caller vouches for T. Python code that writes to it meanwhile would race, as with any buffer.
        Some(unsafe { std::slice::from_raw_parts(pointer, self.raw.len as usize / size_of::<T>()) })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: filled by PyObject_GetBuffer, released once; the fence drops it with the GIL held.
        unsafe { PyBuffer_Release(&mut *self.raw) }
    }
}

/// Bytes argument: `bytes`, or any object with a contiguous buffer; not copied.
pub(super) enum Bytes<'py> {
    Object(Bound<'py, PyBytes>),
    Exported(Buffer),
}

impl<'py> Bytes<'py> {
    /// # Errors
    /// `InvalidArgumentError` for an object without a contiguous buffer.
    pub fn of(object: Bound<'py, PyAny>) -> PyResult<Self> {
        let object = match object.cast_into::<PyBytes>() {
            Ok(bytes) => return Ok(Self::Object(bytes)),
            Err(error) => error.into_inner(),
        };
        Buffer::of(&object).map(Self::Exported).ok_or_else(|| {
            raise(object.py(), &Error::invalid("a message part must be bytes or have a buffer"))
        })
    }

    pub fn as_slice(&self) -> &[u8] {
        match self {
            Self::Object(bytes) => bytes.as_bytes(),
            Self::Exported(buffer) if buffer.raw.len == 0 => &[],
            // SAFETY: the buffer is contiguous and `len` bytes long, and exported until this is dropped.
            Self::Exported(buffer) => unsafe {
                std::slice::from_raw_parts(buffer.raw.buf.cast(), buffer.raw.len as usize)
            },
        }
    }
}

/// Integers of an argument, borrowed if possible.
pub(super) struct Integers<T: Copy + 'static> {
    /// Keeps the borrowed memory exported.
    buffer: Option<Buffer>,
    copied: Vec<T>,
}

impl<T: Copy + 'static> Integers<T> {
    pub fn as_slice(&self) -> &[T] {
        match &self.buffer {
            // SAFETY: only buffers of unsigned integers, or of the same bits, with the size of T
            // are kept (see `tokens` and `hashes`).
            Some(buffer) => unsafe { buffer.as_slice::<T>() }.unwrap_or(&[]),
            None => &self.copied,
        }
    }
}

/// The caller's memory for unsigned integers, exported as long as this lives.
pub(super) struct Room<T> {
    buffer: Buffer,
    _element: PhantomData<T>,
}

// SAFETY: threads share only the address, of memory that is exported until the room is dropped,
// which its owner does with the GIL held. A concurrent writer races, as with any buffer.
unsafe impl<T: Sync> Sync for Room<T> {}

impl Room<u32> {
    /// # Errors
    /// `InvalidArgumentError` for anything but a writable flat buffer of unsigned 32-bit integers.
    pub fn of(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        room(name, object, "uint32", b"IL")
    }
}

impl Room<u64> {
    /// # Errors
    /// `InvalidArgumentError` for anything but a writable flat buffer of unsigned 64-bit integers.
    pub fn of(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        room(name, object, "uint64", b"QL")
    }

    /// The elements, for a writer that runs without the GIL.
    ///
    /// # Errors
    /// `InvalidArgumentError` when they lie in the same memory as `input`.
    pub fn as_mut_slice(
        &mut self,
        name: &str,
        input: &[u32],
        py: Python<'_>,
    ) -> PyResult<&mut [u64]> {
        let len = self.len();
        if len == 0 {
            return Ok(&mut []);
        }
        let start = self.buffer.raw.buf as usize;
        let others = input.as_ptr_range();
        if start < others.end as usize && (others.start as usize) < start + len * 8 {
            let message = format!("{name} must not share memory with the tokens");
            return Err(raise(py, &Error::invalid(message)));
        }
        // SAFETY: `room` checked format, size and alignment; the buffer is writable, contiguous and
        // exported while `self` lives; `input`, the only other view here, is elsewhere (checked).
        // Python code that touches it meanwhile would race, as with any buffer.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.buffer.raw.buf.cast(), len) })
    }
}

impl<T: Copy> Room<T> {
    pub fn len(&self) -> usize {
        self.buffer.raw.len as usize / size_of::<T>()
    }

    /// Writes an element; those beyond the end are dropped.
    pub fn write(&self, at: usize, value: T) {
        if at < self.len() {
            // SAFETY: within the buffer, which `room` found writable and aligned; no reference to
            // its elements is ever made, so that two rooms may lie in one memory.
            unsafe { self.buffer.raw.buf.cast::<T>().add(at).write(value) };
        }
    }
}

fn room<T>(name: &str, object: &Bound<'_, PyAny>, form: &str, kinds: &[u8]) -> PyResult<Room<T>> {
    let refuse = |why: String| {
        let message = format!("{name} must be a writable flat buffer of {form}, {why}");
        raise(object.py(), &Error::invalid(message))
    };
    let Some(buffer) = Buffer::with_flags(object, CONTIGUOUS_WITH_FORMAT | WRITABLE) else {
        let kind = object.get_type().name()?;
        return Err(refuse(format!("got {kind} that is not writable or not contiguous")));
    };
    let size = buffer.raw.itemsize as usize;
    if buffer.raw.ndim != 1
        || size != size_of::<T>()
        || !buffer.kind().is_some_and(|kind| kinds.contains(&kind))
    {
        let kind = buffer.kind().map_or('?', char::from);
        return Err(refuse(format!(
            "got {} dimensions of format {kind:?} with {size} bytes",
            buffer.raw.ndim
        )));
    }
    if !(buffer.raw.buf as usize).is_multiple_of(align_of::<T>()) {
        return Err(refuse("got one that is not aligned".to_owned()));
    }
    Ok(Room { buffer, _element: PhantomData })
}

/// Token ids: u32; anything outside is refused by index and value.
pub(super) fn tokens(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Integers<u32>> {
    if let Ok(list) = object.cast::<PyList>() {
        let copied = from_list(name, list, |value| u32::try_from(value).ok())?;
        return Ok(Integers { buffer: None, copied });
    }
    refuse_other_shapes(name, object)?;
    if let Some(buffer) = Buffer::of(object) {
        buffer.check_flat(name, object.py())?;
        let size = buffer.raw.itemsize as usize;
        let refuse = |at: usize, value: String| out_of_range(object.py(), name, at, &value);
        macro_rules! converted {
            ($type:ty) => {{
                // SAFETY: the item size is that of the type, and every bit pattern is an integer.
                let slice = unsafe { buffer.as_slice::<$type>() };
                match slice {
                    Some(slice) => {
                        // Checks all values first, vectorized; the position of an error matters
                        // only on failure.
                        if slice.iter().fold(true, |fit, &value| fit & u32::try_from(value).is_ok())
                        {
                            let copied = slice.iter().map(|&value| value as u32).collect();
                            return Ok(Integers { buffer: None, copied });
                        }
                        let mut copied = Vec::with_capacity(slice.len());
                        for (at, value) in slice.iter().enumerate() {
                            let token = u32::try_from(*value);
                            copied.push(token.map_err(|_| refuse(at, value.to_string()))?);
                        }
                        return Ok(Integers { buffer: None, copied });
                    }
                    None => {}
                }
            }};
        }
        let is_aligned = |align: usize| (buffer.raw.buf as usize).is_multiple_of(align);
        match (buffer.kind(), size) {
            (Some(b'I' | b'L'), 4) if is_aligned(4) => {
                return Ok(Integers { buffer: Some(buffer), copied: Vec::new() });
            }
            (Some(b'i' | b'l'), 4) => converted!(i32),
            (Some(b'q' | b'l'), 8) => converted!(i64),
            (Some(b'Q' | b'L'), 8) => converted!(u64),
            (Some(b'H'), 2) => converted!(u16),
            (Some(b'h'), 2) => converted!(i16),
            _ => {}
        }
    }
    let copied = from_sequence(name, object, |value| u32::try_from(value).ok())?;
    Ok(Integers { buffer: None, copied })
}

/// Block hashes: 64 bits; negative numbers are the same bits.
pub(super) fn hashes(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Integers<u64>> {
    let bits = |value: i128| {
        u64::try_from(value).ok().or_else(|| i64::try_from(value).ok().map(|signed| signed as u64))
    };
    if let Ok(list) = object.cast::<PyList>() {
        let copied = from_list(name, list, bits)?;
        return Ok(Integers { buffer: None, copied });
    }
    refuse_other_shapes(name, object)?;
    if let Some(buffer) = Buffer::of(object) {
        buffer.check_flat(name, object.py())?;
        let is_aligned = (buffer.raw.buf as usize).is_multiple_of(8);
        if matches!(buffer.kind(), Some(b'q' | b'Q' | b'l' | b'L'))
            && buffer.raw.itemsize == 8
            && is_aligned
        {
            return Ok(Integers { buffer: Some(buffer), copied: Vec::new() });
        }
    }
    Ok(Integers { buffer: None, copied: from_sequence(name, object, bits)? })
}

/// Strings and bytes are sequences too, but never of token ids, so they are refused.
fn refuse_other_shapes(name: &str, object: &Bound<'_, PyAny>) -> PyResult<()> {
    if object.is_instance_of::<PyString>()
        || object.is_instance_of::<PyBytes>()
        || object.is_instance_of::<PyByteArray>()
    {
        let message = format!(
            "{name} must be a list, an array or a buffer of integers, got {}",
            object.get_type().name()?
        );
        return Err(raise(object.py(), &Error::invalid(message)));
    }
    Ok(())
}

fn out_of_range(py: Python<'_>, name: &str, at: usize, value: &str) -> PyErr {
    let limit = if name.contains("hash") { "64 bits" } else { "0..=4294967295" };
    raise(py, &Error::invalid(format!("{name}[{at}] must be an integer in {limit}, got {value}")))
}

fn refused(name: &str, at: usize, item: &Bound<'_, PyAny>) -> PyErr {
    let shown = item.repr().map_or_else(|_| "?".to_owned(), |text| text.to_string());
    out_of_range(item.py(), name, at, &shown)
}

fn from_list<T>(
    name: &str,
    list: &Bound<'_, PyList>,
    convert: impl Fn(i128) -> Option<T>,
) -> PyResult<Vec<T>> {
    let py = list.py();
    let len = list.len();
    let mut out = Vec::with_capacity(len);
    for at in 0..len {
        // SAFETY: the GIL is held throughout, no Python code runs between the bounds check inside
        // PyList_GetItem and the use of the borrowed item, and a plain int's conversion calls none.
        let value = unsafe {
            let item = ffi::PyList_GetItem(list.as_ptr(), at as isize);
            if item.is_null() {
                return Err(PyErr::fetch(py));
            }
            if ffi::PyLong_CheckExact(item) != 0 {
                let value = ffi::PyLong_AsLongLong(item);
                if value == -1 && !ffi::PyErr_Occurred().is_null() {
                    let _ = PyErr::take(py);
                    None
                } else {
                    convert(i128::from(value))
                }
            } else {
                None
            }
        };
        match value {
            Some(value) => out.push(value),
            // Not a plain int of 64 bits: numpy scalars, large hashes, or a mistake.
            None => {
                let item = list.get_item(at)?;
                out.push(slow(&item, &convert).ok_or_else(|| refused(name, at, &item))?);
            }
        }
    }
    Ok(out)
}

fn slow<T>(item: &Bound<'_, PyAny>, convert: &impl Fn(i128) -> Option<T>) -> Option<T> {
    if item.is_instance_of::<pyo3::types::PyBool>() {
        return None;
    }
    let value: i128 = match item.extract::<u64>() {
        Ok(value) => value.into(),
        Err(_) => item.extract::<i64>().ok()?.into(),
    };
    convert(value)
}

fn from_sequence<T>(
    name: &str,
    object: &Bound<'_, PyAny>,
    convert: impl Fn(i128) -> Option<T>,
) -> PyResult<Vec<T>> {
    if object.cast::<PySequence>().is_err() && object.try_iter().is_err() {
        let message = format!(
            "{name} must be a list, an array or a buffer of integers, got {}",
            object.get_type().name()?
        );
        return Err(raise(object.py(), &Error::invalid(message)));
    }
    let mut out = Vec::new();
    for (at, item) in object.try_iter()?.enumerate() {
        let item = item?;
        out.push(slow(&item, &convert).ok_or_else(|| refused(name, at, &item))?);
    }
    Ok(out)
}
