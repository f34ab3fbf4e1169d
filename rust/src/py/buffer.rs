//! Integers from Python: any list, or any buffer (array, numpy, memoryview), without copying if its
//! layout allows. Also writes results into the caller's buffers.

#![allow(unsafe_code, reason = "the buffer protocol is a C interface")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt::Display;
use std::marker::PhantomData;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyList, PySequence, PyString};

use super::error::{Fault, Raised, invalid};

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

    /// Whether it has aligned elements of one of these kinds, with the size of `T`.
    fn holds<T>(&self, kinds: &[u8]) -> bool {
        self.raw.itemsize as usize == size_of::<T>()
            && self.kind().is_some_and(|kind| kinds.contains(&kind))
            && self.raw.buf.cast::<T>().is_aligned()
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
    pub fn of(object: Bound<'py, PyAny>) -> Raised<Self> {
        let object = match object.cast_into::<PyBytes>() {
            Ok(bytes) => return Ok(Self::Object(bytes)),
            Err(error) => error.into_inner(),
        };
        Buffer::of(&object)
            .map(Self::Exported)
            .ok_or_else(|| invalid("a message part must be bytes or have a buffer"))
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

/// An unsigned integer that Python passes in lists and buffers.
pub(super) trait Integer: Copy + 'static {
    /// Its format in messages, and its legal values.
    const FORM: &str;
    const LEGAL: &str;
    /// Kinds of buffers of this type, and of those with the same bits.
    const KINDS: &[u8];
    const SAME_BITS: &[u8];

    fn of(value: i128) -> Option<Self>;

    /// The elements of a buffer of another type of integer.
    fn converted(_buffer: &Buffer, _name: &str) -> Option<Raised<Vec<Self>>> {
        None
    }
}

/// Token ids; anything outside u32 is refused by index and value.
impl Integer for u32 {
    const FORM: &str = "uint32";
    const LEGAL: &str = "0..=4294967295";
    const KINDS: &[u8] = b"IL";
    const SAME_BITS: &[u8] = b"IL";

    fn of(value: i128) -> Option<Self> {
        value.try_into().ok()
    }

    fn converted(buffer: &Buffer, name: &str) -> Option<Raised<Vec<Self>>> {
        match (buffer.kind()?, buffer.raw.itemsize) {
            (b'i' | b'l', 4) => converted::<i32>(buffer, name),
            (b'q' | b'l', 8) => converted::<i64>(buffer, name),
            (b'Q' | b'L', 8) => converted::<u64>(buffer, name),
            (b'H', 2) => converted::<u16>(buffer, name),
            (b'h', 2) => converted::<i16>(buffer, name),
            _ => None,
        }
    }
}

/// Block hashes; negative numbers are the same bits.
impl Integer for u64 {
    const FORM: &str = "uint64";
    const LEGAL: &str = "64 bits";
    const KINDS: &[u8] = b"QL";
    const SAME_BITS: &[u8] = b"qQlL";

    fn of(value: i128) -> Option<Self> {
        value.try_into().ok().or_else(|| i64::try_from(value).ok().map(|signed| signed as u64))
    }
}

fn converted<T: Copy + Display>(buffer: &Buffer, name: &str) -> Option<Raised<Vec<u32>>>
where
    u32: TryFrom<T>,
{
    // SAFETY: the item size is that of the type, and every bit pattern is an integer.
    let slice = unsafe { buffer.as_slice::<T>() }?;
    // Checks all values first, vectorized; the position of an error matters only on failure.
    if slice.iter().fold(true, |fit, &value| fit & u32::try_from(value).is_ok()) {
        return Some(Ok(slice.iter().map(|&v| u32::try_from(v).unwrap_or_default()).collect()));
    }
    let at = slice.iter().position(|&value| u32::try_from(value).is_err())?;
    Some(Err(out_of_range::<u32>(name, at, &slice[at].to_string())))
}

/// Integers of an argument, borrowed if possible.
pub(super) struct Integers<T> {
    /// Keeps the borrowed memory exported.
    buffer: Option<Buffer>,
    copied: Vec<T>,
}

impl<T: Integer> Integers<T> {
    pub fn as_slice(&self) -> &[T] {
        match &self.buffer {
            // SAFETY: only buffers of unsigned integers, or of the same bits, with the size of T
            // are kept (see `of`).
            Some(buffer) => unsafe { buffer.as_slice::<T>() }.unwrap_or(&[]),
            None => &self.copied,
        }
    }

    fn of(name: &str, object: &Bound<'_, PyAny>) -> Raised<Self> {
        if let Ok(list) = object.cast::<PyList>() {
            return Ok(Self { buffer: None, copied: from_list(name, list)? });
        }
        // Strings and bytes are sequences too, but never of integers, so they are refused.
        if object.is_instance_of::<PyString>()
            || object.is_instance_of::<PyBytes>()
            || object.is_instance_of::<PyByteArray>()
        {
            return Err(no_integers(name, object)?);
        }
        if let Some(buffer) = Buffer::of(object) {
            if buffer.raw.ndim != 1 {
                let got = buffer.raw.ndim;
                return Err(invalid(format!("{name} must have one dimension, got {got}")));
            }
            if buffer.holds::<T>(T::SAME_BITS) {
                return Ok(Self { buffer: Some(buffer), copied: Vec::new() });
            }
            if let Some(copied) = T::converted(&buffer, name) {
                return Ok(Self { buffer: None, copied: copied? });
            }
        }
        Ok(Self { buffer: None, copied: from_sequence(name, object)? })
    }
}

/// Token ids: u32; anything outside is refused by index and value.
pub(super) fn tokens(name: &str, object: &Bound<'_, PyAny>) -> Raised<Integers<u32>> {
    Integers::of(name, object)
}

/// Block hashes: 64 bits; negative numbers are the same bits.
pub(super) fn hashes(name: &str, object: &Bound<'_, PyAny>) -> Raised<Integers<u64>> {
    Integers::of(name, object)
}

/// The caller's memory for unsigned integers, exported as long as this lives.
pub(super) struct Room<T> {
    buffer: Buffer,
    _element: PhantomData<T>,
}

// SAFETY: threads share only the address, of memory that is exported until the room is dropped,
// which its owner does with the GIL held. A concurrent writer races, as with any buffer.
unsafe impl<T: Sync> Sync for Room<T> {}

impl<T: Integer> Room<T> {
    /// # Errors
    /// `InvalidArgumentError` for anything but a writable flat buffer of this type.
    pub fn of(name: &str, object: &Bound<'_, PyAny>) -> Raised<Self> {
        let refuse = |why: String| {
            invalid(format!("{name} must be a writable flat buffer of {}, {why}", T::FORM))
        };
        let Some(buffer) = Buffer::with_flags(object, CONTIGUOUS_WITH_FORMAT | WRITABLE) else {
            let kind = object.get_type().name()?;
            return Err(refuse(format!("got {kind} that is not writable or not contiguous")));
        };
        if buffer.raw.ndim == 1 && buffer.holds::<T>(T::KINDS) {
            return Ok(Self { buffer, _element: PhantomData });
        }
        let RawBuffer { ndim, itemsize, buf, .. } = *buffer.raw;
        let kind = buffer.kind().map_or('?', char::from);
        Err(refuse(if (buf as usize).is_multiple_of(align_of::<T>()) {
            format!("got {ndim} dimensions of format {kind:?} with {itemsize} bytes")
        } else {
            "got one that is not aligned".to_owned()
        }))
    }

    pub fn len(&self) -> usize {
        self.buffer.raw.len as usize / size_of::<T>()
    }

    /// The elements, for a writer that runs without the GIL.
    ///
    /// # Errors
    /// `InvalidArgumentError` when they lie in the same memory as `input`.
    pub fn as_mut_slice(&mut self, name: &str, input: &[u32]) -> Raised<&mut [T]> {
        let len = self.len();
        if len == 0 {
            return Ok(&mut []);
        }
        let start = self.buffer.raw.buf as usize;
        let others = input.as_ptr_range();
        if start < others.end as usize && (others.start as usize) < start + len * size_of::<T>() {
            return Err(invalid(format!("{name} must not share memory with the tokens")));
        }
        // SAFETY: `of` checked format, size and alignment; the buffer is writable, contiguous and
        // exported while `self` lives; `input`, the only other view here, is elsewhere (checked).
        // Python code that touches it meanwhile would race, as with any buffer.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.buffer.raw.buf.cast(), len) })
    }

    /// Writes an element; those beyond the end are dropped.
    pub fn write(&self, at: usize, value: T) {
        if at < self.len() {
            // SAFETY: within the buffer, which `of` found writable and aligned; no reference to
            // its elements is ever made, so that two rooms may lie in one memory.
            unsafe { self.buffer.raw.buf.cast::<T>().add(at).write(value) };
        }
    }
}

/// The error for an object that is no sequence of integers.
fn no_integers(name: &str, object: &Bound<'_, PyAny>) -> Raised<Fault> {
    let got = object.get_type().name()?;
    Ok(invalid(format!("{name} must be a list, an array or a buffer of integers, got {got}")))
}

fn out_of_range<T: Integer>(name: &str, at: usize, value: &str) -> Fault {
    invalid(format!("{name}[{at}] must be an integer in {}, got {value}", T::LEGAL))
}

fn from_list<T: Integer>(name: &str, list: &Bound<'_, PyList>) -> Raised<Vec<T>> {
    let py = list.py();
    let len = list.len();
    let mut out = Vec::with_capacity(len);
    for at in 0..len {
        // SAFETY: the GIL is held throughout, no Python code runs between the bounds check inside
        // PyList_GetItem and the use of the borrowed item, and a plain int's conversion calls none.
        let value = unsafe {
            let item = ffi::PyList_GetItem(list.as_ptr(), at as isize);
            if item.is_null() {
                return Err(PyErr::fetch(py).into());
            }
            if ffi::PyLong_CheckExact(item) != 0 {
                let value = ffi::PyLong_AsLongLong(item);
                if value == -1 && !ffi::PyErr_Occurred().is_null() {
                    let _ = PyErr::take(py);
                    None
                } else {
                    T::of(value.into())
                }
            } else {
                None
            }
        };
        // Not a plain int of 64 bits: numpy scalars, large hashes, or a mistake.
        out.push(value.map_or_else(|| slow(name, at, &list.get_item(at)?), Ok)?);
    }
    Ok(out)
}

fn slow<T: Integer>(name: &str, at: usize, item: &Bound<'_, PyAny>) -> Raised<T> {
    let value = match item.extract::<u64>() {
        _ if item.is_instance_of::<PyBool>() => None,
        Ok(value) => T::of(value.into()),
        Err(_) => item.extract::<i64>().ok().and_then(|value| T::of(value.into())),
    };
    value.ok_or_else(|| {
        let shown = item.repr().map_or_else(|_| "?".to_owned(), |text| text.to_string());
        out_of_range::<T>(name, at, &shown)
    })
}

fn from_sequence<T: Integer>(name: &str, object: &Bound<'_, PyAny>) -> Raised<Vec<T>> {
    if object.cast::<PySequence>().is_err() && object.try_iter().is_err() {
        return Err(no_integers(name, object)?);
    }
    object.try_iter()?.enumerate().map(|(at, item)| slow(name, at, &item?)).collect()
}
