//! Decodes bytes to events: the batches that engines publish, and the format of dumps and replays.
//!
//! Engines encode a batch as `[ts, events, dp_rank?]` in msgpack, and its events in one of two
//! shapes: arrays with fields by position (`positional`) or maps with fields by name (`named`).
//! Unknown data is skipped and counted, because engines add fields and events with every release.
//! An invalid event is dropped, not its batch; only unreadable bytes drop the whole frame.
//! [`router`] is the JSON form.

mod cursor;
mod field;
mod named;
mod positional;
pub mod router;
#[cfg(test)]
mod tests;

use self::cursor::{Fault, Head};
use self::field::Reader;
use crate::error::{Error, Result};
use crate::event::{Batch, Event};

/// Limits of a frame. Every encoded length is compared with them, and with the remaining bytes,
/// before anything is allocated for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Size of a frame.
    pub max_payload_bytes: usize,
    /// Events in a frame; more is an error.
    pub max_events: usize,
    /// Blocks in an event; an event with more is malformed.
    pub max_blocks_per_event: usize,
    /// Tokens in an event; an event with more is malformed.
    pub max_tokens_per_event: usize,
    /// Length of each name; an event with a longer one is malformed.
    pub max_text_bytes: usize,
    /// Extra keys in a frame; an event that goes beyond is malformed.
    pub max_extra_keys: usize,
    /// Levels of arrays and maps in a skipped value; more is an error.
    pub max_depth: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_payload_bytes: 16 << 20,
            max_events: 65_536,
            max_blocks_per_event: 65_536,
            max_tokens_per_event: 4 << 20,
            max_text_bytes: 64 << 10,
            max_extra_keys: 1 << 20,
            max_depth: 16,
        }
    }
}

/// Decodes one message of an engine's publisher.
///
/// # Errors
/// [`Error::Decode`], with the offset, for a frame that is too large, is not msgpack, is truncated,
/// has bytes after the batch, is not a batch (`ts`, `events` and rank of their types), has more
/// events or nests deeper than `limits` allow, or contains a token id outside u32 (named by its
/// index).
///
/// # Cost
/// One pass over the bytes; events that are dropped are read a second time. Memory is at most a
/// small multiple of the payload.
pub fn decode_batch(payload: &[u8], limits: &Limits) -> Result<Batch> {
    if payload.len() > limits.max_payload_bytes {
        let (length, limit) = (payload.len(), limits.max_payload_bytes);
        return Err(Error::decode(limit, format!("frame of {length} bytes, at most {limit}")));
    }
    let mut reader = Reader::new(payload, *limits);
    let batch = batch(&mut reader).map_err(|fault| error(reader.cursor.at(), fault))?;
    match reader.cursor.remaining() {
        0 => Ok(batch),
        left => Err(Error::decode(reader.cursor.at(), format!("{left} bytes after the batch"))),
    }
}

fn error(at: usize, fault: Fault) -> Error {
    match fault {
        Fault::Broken(reason) | Fault::Malformed(reason) => Error::decode(at, reason),
        Fault::Unsupported => Error::decode(at, "a value of an unsupported kind"),
        Fault::TokenRange(index) => {
            Error::decode(at, format!("token_ids[{index}] is outside of 32 bits"))
        }
    }
}

fn batch(reader: &mut Reader<'_>) -> Result<Batch, Fault> {
    let mut batch = Batch::default();
    match reader.cursor.head()? {
        Head::Array(fields @ 2..) => {
            for position in 0..fields {
                match position {
                    0 => batch.ts = timestamp(reader)?,
                    1 => events(reader, &mut batch)?,
                    2 => batch.dp_rank = reader.number()?,
                    _ => reader.skip()?,
                }
            }
        }
        Head::Map(entries) => {
            let mut has_events = false;
            for _ in 0..entries {
                match reader.cursor.head()? {
                    Head::Text(b"ts") => batch.ts = timestamp(reader)?,
                    Head::Text(b"events") if !has_events => {
                        has_events = true;
                        events(reader, &mut batch)?;
                    }
                    Head::Text(b"data_parallel_rank" | b"attn_dp_rank" | b"dp_rank") => {
                        batch.dp_rank = reader.number()?.or(batch.dp_rank);
                    }
                    Head::Text(b"events") => {
                        return Err(Fault::Malformed("a batch has events twice"));
                    }
                    Head::Text(_) => reader.skip()?,
                    _ => return Err(Fault::Malformed("a batch's keys must be text")),
                }
            }
            if !has_events {
                return Err(Fault::Malformed("a batch must have events"));
            }
        }
        _ => return Err(Fault::Malformed("a batch must be [ts, events, ...] or a map")),
    }
    Ok(batch)
}

/// Seconds since 1970; 0 if it is missing or not a usable number.
fn timestamp(reader: &mut Reader<'_>) -> Result<f64, Fault> {
    match reader.cursor.head()? {
        Head::Nil => Ok(0.0),
        Head::Uint(seconds) => Ok(seconds as f64),
        Head::Int(seconds) => Ok(seconds as f64),
        Head::Float(seconds) => Ok(if seconds.is_finite() { seconds } else { 0.0 }),
        _ => Err(Fault::Malformed("ts must be a number")),
    }
}

fn events(reader: &mut Reader<'_>, batch: &mut Batch) -> Result<(), Fault> {
    let count = match reader.cursor.head()? {
        Head::Nil => 0,
        Head::Array(count) if count <= reader.limits.max_events => count,
        Head::Array(_) => return Err(Fault::Malformed("events exceed the limit")),
        _ => return Err(Fault::Malformed("events must be an array")),
    };
    // A kept event has at least 13 bytes, including its tag, and takes many times that in memory,
    // so shorter remainders reserve nothing.
    batch.events.reserve(count.min(reader.cursor.remaining() / 13));
    for _ in 0..count {
        let start = reader.cursor;
        let dropped = match event(reader) {
            Ok(event) => {
                batch.events.push(event);
                continue;
            }
            Err(fault @ Fault::TokenRange(_)) => return Err(fault),
            Err(Fault::Unsupported) => &mut batch.skipped,
            Err(Fault::Malformed(reason) | Fault::Broken(reason)) => {
                batch.malformed_reason.get_or_insert(reason);
                &mut batch.malformed
            }
        };
        *dropped += 1;
        // If the bytes are unreadable, this fails as well, and with it the frame.
        reader.cursor = start;
        reader.skip()?;
    }
    Ok(())
}

fn event(reader: &mut Reader<'_>) -> Result<Event, Fault> {
    match reader.cursor.head()? {
        Head::Array(length) => positional::event(reader, length),
        Head::Map(entries) => named::event(reader, entries),
        _ => Err(Fault::Malformed("an event must be an array or a map")),
    }
}
