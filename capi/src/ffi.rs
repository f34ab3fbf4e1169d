//! The functions of `kvflash.h`. Each checks its pointers and catches panics.

#![allow(unsafe_code, reason = "pointers of C callers")]

use std::ffi::{CStr, c_char, c_int};
use std::time::Duration;

use kvflash_publish::announce::{Place, random_id};
use kvflash_publish::blocks::{Blocks, CALL_BLOCKS_MAX, CALL_TOKENS_MAX};
use kvflash_publish::outbox::Settings;

use crate::fault::{self, Result, guard, invalid};
use crate::handle;
use crate::publisher::{self, Publisher};

/// `kvflash_publisher_options`.
#[repr(C)]
pub struct Options {
    struct_size: usize,
    kv_block_size: u32,
    dp_rank: u32,
    host: *const c_char,
    port: u16,
    replay_port: u16,
    tick_us: u32,
    topic: *const c_char,
    ring_batches: u64,
    ring_bytes: u64,
    namespace: *const c_char,
    component: *const c_char,
    worker_id: u64,
}

/// `kvflash_stored`.
#[repr(C)]
pub struct StoredBlocks {
    struct_size: usize,
    token_ids: *const u32,
    token_count: usize,
    num_block_tokens: *const usize,
    block_hashes: *const u64,
    block_count: usize,
    parent_hash: *const u64,
    lora_id: u64,
    lora_name: *const c_char,
    cache_salt: *const c_char,
    medium: *const c_char,
}

/// `kvflash_publisher_stats`.
#[repr(C)]
pub struct PublisherStats {
    struct_size: usize,
    stored_blocks_total: u64,
    removed_blocks_total: u64,
    dropped_blocks_total: u64,
    events_total: u64,
    pending_events: u64,
    batches_total: u64,
    replays_total: u64,
    replays_refused_total: u64,
}

/// Text of this thread's last failure.
#[unsafe(no_mangle)]
pub extern "C" fn kvflash_last_error() -> *const c_char {
    fault::last_error()
}

/// Creates a publisher.
///
/// # Safety
/// Both pointers are NULL or point to what the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvflash_publisher_create(
    options: *const Options,
    publisher: *mut u64,
) -> c_int {
    guard(|| {
        check_pointer("publisher", publisher.cast_const())?;
        // SAFETY: as the caller promises; null and size are checked.
        let options = unsafe { sized("options", options) }?;
        // SAFETY: strings of the caller's, NULL or terminated, for each of the four.
        let (host, topic, place) = unsafe {
            let place = place(options.namespace, options.component, options.worker_id)?;
            (text("host", options.host)?, text("topic", options.topic)?, place)
        };
        // SAFETY: the same.
        if place.is_none() && unsafe { text("component", options.component) }?.is_some() {
            return Err(invalid("component is given and namespace is NULL"));
        }
        let settings = publisher::Options {
            host: host.unwrap_or("127.0.0.1").to_owned(),
            port: options.port,
            replay_port: options.replay_port,
            topic: topic.unwrap_or("kv-events").to_owned(),
            settings: Settings {
                dp_rank: Some(options.dp_rank),
                tick: Duration::from_micros(u64::from(options.tick_us)),
                ring_batches: limit("ring_batches", options.ring_batches, 10_000, 1, 1 << 24)?,
                ring_bytes: limit("ring_bytes", options.ring_bytes, 64 << 20, 1 << 20, 1 << 40)?,
                ..Settings::default()
            },
        };
        if options.tick_us > 1_000_000 {
            return Err(invalid(format!(
                "tick_us must be in 0..=1000000, got {}",
                options.tick_us
            )));
        }
        let handle = handle::add(Publisher::start(options.kv_block_size, settings, place)?)?;
        // SAFETY: checked above; the caller lets it be written.
        unsafe { publisher.write(handle) };
        Ok(())
    })
}

/// Publishes stored blocks.
///
/// # Safety
/// As the header says of `kvflash_stored`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvflash_publish_stored(
    publisher: u64,
    stored: *const StoredBlocks,
) -> c_int {
    guard(|| {
        let publisher = handle::find(publisher)?;
        // SAFETY: as the caller promises; null and size are checked.
        let stored = unsafe { sized("stored", stored) }?;
        // SAFETY: as the caller promises of each pointer and the count that goes with it.
        let blocks = unsafe {
            Blocks {
                token_ids: list(
                    "token_ids",
                    stored.token_ids,
                    "token_count",
                    stored.token_count,
                    CALL_TOKENS_MAX,
                )?,
                sizes: match stored.num_block_tokens.is_null() {
                    true => None,
                    false => Some(block_list(
                        "num_block_tokens",
                        stored.num_block_tokens,
                        stored.block_count,
                    )?),
                },
                block_hashes: block_list("block_hashes", stored.block_hashes, stored.block_count)?,
                parent_hash: optional("parent_hash", stored.parent_hash)?,
                lora_id: stored.lora_id,
                lora_name: text("lora_name", stored.lora_name)?,
                cache_salt: text("cache_salt", stored.cache_salt)?,
                medium: text("medium", stored.medium)?,
                items: None,
            }
        };
        publisher.store(&blocks)
    })
}

/// Publishes removed blocks.
///
/// # Safety
/// `block_hashes` points to `block_count` numbers, `medium` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvflash_publish_removed(
    publisher: u64,
    block_hashes: *const u64,
    block_count: usize,
    medium: *const c_char,
) -> c_int {
    guard(|| {
        let publisher = handle::find(publisher)?;
        // SAFETY: as the caller promises.
        let (hashes, medium) = unsafe {
            (block_list("block_hashes", block_hashes, block_count)?, text("medium", medium)?)
        };
        Ok(publisher.events.remove(hashes, medium)?)
    })
}

/// Publishes that the cache is empty.
#[unsafe(no_mangle)]
pub extern "C" fn kvflash_publish_cleared(publisher: u64) -> c_int {
    guard(|| Ok(handle::find(publisher)?.events.clear()?))
}

/// Waits until everything published is handed to the socket.
#[unsafe(no_mangle)]
pub extern "C" fn kvflash_publisher_flush(publisher: u64, timeout_ms: u32) -> c_int {
    guard(|| handle::find(publisher)?.flush(Duration::from_millis(u64::from(timeout_ms))))
}

/// Copies the endpoint of the events.
///
/// # Safety
/// `buffer` has room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvflash_publisher_endpoint(
    publisher: u64,
    buffer: *mut c_char,
    size: usize,
) -> c_int {
    // SAFETY: as the caller promises.
    guard(|| unsafe { give(&handle::find(publisher)?.endpoint, buffer, size) })
}

/// Copies the endpoint of the replay.
///
/// # Safety
/// `buffer` has room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvflash_publisher_replay_endpoint(
    publisher: u64,
    buffer: *mut c_char,
    size: usize,
) -> c_int {
    // SAFETY: as the caller promises.
    guard(|| unsafe { give(&handle::find(publisher)?.replay_endpoint, buffer, size) })
}

/// Counters and gauges of a publisher.
///
/// # Safety
/// `stats` is NULL or points to a `kvflash_publisher_stats`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvflash_publisher_get_stats(
    publisher: u64,
    stats: *mut PublisherStats,
) -> c_int {
    guard(|| {
        // SAFETY: as the caller promises; null and size are checked.
        let struct_size = unsafe { sized("stats", stats.cast_const()) }?.struct_size;
        let now = handle::find(publisher)?.events.stats();
        let answer = PublisherStats {
            struct_size,
            stored_blocks_total: now.stored_blocks,
            removed_blocks_total: now.removed_blocks,
            dropped_blocks_total: now.dropped_blocks,
            events_total: now.outbox.events,
            pending_events: now.outbox.pending_events,
            batches_total: now.outbox.batches,
            replays_total: now.outbox.replays,
            replays_refused_total: now.outbox.replays_refused,
        };
        // SAFETY: checked above; the caller lets it be written.
        unsafe { stats.write(answer) };
        Ok(())
    })
}

/// Destroys a publisher.
#[unsafe(no_mangle)]
pub extern "C" fn kvflash_publisher_destroy(publisher: u64) -> c_int {
    guard(|| handle::take(publisher)?.close())
}

/// The structure behind a pointer, if its size is the one that this library knows.
///
/// # Safety
/// NULL, or readable, and begins with its own size.
unsafe fn sized<'a, T>(field: &str, pointer: *const T) -> Result<&'a T> {
    check_pointer(field, pointer)?;
    // SAFETY: every structure of the header begins with its size.
    let size = unsafe { pointer.cast::<usize>().read() };
    if size < size_of::<T>() {
        return Err(invalid(format!(
            "{field}->struct_size must be at least {}, got {size}: set it to sizeof",
            size_of::<T>()
        )));
    }
    // SAFETY: not null, aligned, and as large as it says.
    Ok(unsafe { &*pointer })
}

fn check_pointer<T>(field: &str, pointer: *const T) -> Result<()> {
    if pointer.is_null() {
        return Err(invalid(format!("{field} is NULL")));
    }
    if !pointer.is_aligned() {
        return Err(invalid(format!("{field} is not aligned to {} bytes", align_of::<T>())));
    }
    Ok(())
}

/// Where a publisher is announced; nowhere without a namespace. A worker number of 0 means random.
///
/// # Safety
/// Both strings are NULL or terminated by NUL.
pub unsafe fn place(
    namespace: *const c_char,
    component: *const c_char,
    worker_id: u64,
) -> Result<Option<Place>> {
    // SAFETY: as the caller promises.
    let (namespace, component) =
        unsafe { (text("namespace", namespace)?, text("component", component)?) };
    let Some(namespace) = namespace else { return Ok(None) };
    Ok(Some(Place {
        namespace: namespace.to_owned(),
        component: component.unwrap_or("backend").to_owned(),
        worker_id: if worker_id == 0 { random_id()? } else { worker_id },
    }))
}

/// One list of a call's blocks.
///
/// # Safety
/// NULL, or points to as many elements.
pub unsafe fn block_list<'a, T>(field: &str, pointer: *const T, count: usize) -> Result<&'a [T]> {
    // SAFETY: as the caller promises.
    unsafe { list(field, pointer, "block_count", count, CALL_BLOCKS_MAX) }
}

/// A list of the caller; may be NULL if it is empty.
///
/// # Safety
/// NULL, or points to as many elements.
pub unsafe fn list<'a, T>(
    field: &str,
    pointer: *const T,
    count_field: &str,
    count: usize,
    most: usize,
) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    check_pointer(field, pointer)?;
    if count > most {
        return Err(invalid(format!("{count_field} must be at most {most}, got {count}")));
    }
    // SAFETY: not null, aligned, small enough; as many elements as the caller promises.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
}

/// An optional number.
///
/// # Safety
/// NULL, or points to one.
pub unsafe fn optional(field: &str, pointer: *const u64) -> Result<Option<u64>> {
    if pointer.is_null() {
        return Ok(None);
    }
    check_pointer(field, pointer)?;
    // SAFETY: not null, aligned.
    Ok(Some(unsafe { pointer.read() }))
}

/// A string of the caller; NULL and "" mean none.
///
/// # Safety
/// NULL, or terminated by NUL.
pub unsafe fn text<'a>(field: &str, pointer: *const c_char) -> Result<Option<&'a str>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: terminated, as the caller promises.
    let text = unsafe { CStr::from_ptr(pointer) };
    let text = text.to_str().map_err(|_| invalid(format!("{field} is not UTF-8")))?;
    Ok(Some(text).filter(|text| !text.is_empty()))
}

fn limit(field: &str, value: u64, default: usize, least: u64, most: u64) -> Result<usize> {
    if value == 0 {
        return Ok(default);
    }
    if !(least..=most).contains(&value) {
        return Err(invalid(format!("{field} must be in {least}..={most}, got {value}")));
    }
    usize::try_from(value).map_err(|_| invalid(format!("{field} is too large: {value}")))
}

/// Copies a string to the caller.
///
/// # Safety
/// `buffer` has room for `size` bytes.
unsafe fn give(text: &str, buffer: *mut c_char, size: usize) -> Result<()> {
    check_pointer("buffer", buffer.cast_const())?;
    let needed = text.len() + 1;
    if size < needed {
        return Err(invalid(format!("size must be at least {needed}, got {size}")));
    }
    // SAFETY: room for the text and its NUL, which is checked; the buffer is the caller's own.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast(), text.len());
        buffer.add(text.len()).write(0);
    }
    Ok(())
}
